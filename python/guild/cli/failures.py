"""What the `guild` command says of an error, and the exit status that goes with it."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from guild.cli.parsing import is_another_of_node
from guild.cli.streams import drop_output
from guild.train.failures import OtherRankError, is_out_of_memory
from guild.train.interrupt import INTERRUPTED

FAILED, REFUSED = 1, 2
_PACKAGES = {"matplotlib", "numpy", "rich"}  # pyproject.toml's optional dependencies


def told(command: str, error: BaseException) -> int | None:
    """Report in one line what has gone wrong.

    Returns
    -------
    int or None
        The exit status; None, with nothing printed, if the error's traceback is wanted. Nothing is
        printed either where another process reports the error.
    """
    if isinstance(error, OtherRankError):
        return REFUSED
    status, line = FAILED, str(error)
    if isinstance(error, KeyboardInterrupt):
        status, line = INTERRUPTED, "interrupted"
    elif isinstance(error, ImportError):
        line += _remedy(error)
    elif is_out_of_memory(error):
        why = line.strip().partition("\n")[0].rpartition("DefaultCPUAllocator: ")[2]
        line = f"out of memory: {why}" if why else "out of memory"
    elif _is_of_printing(error):
        drop_output(sys.stdout)
        status, line = REFUSED, f"standard output: {_describe(error)}"
    elif isinstance(error, OSError):
        status, line = REFUSED, _describe(error)
    elif isinstance(error, ValueError):
        status = REFUSED
    elif not isinstance(error, FloatingPointError):
        return None
    print(f"guild {command}: {line}", file=sys.stderr)
    return status


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Errors of arguments, which all processes of torchrun on a node have, are the first one's.

    Raises
    ------
    OtherRankError
        On the others.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if is_another_of_node():
            raise OtherRankError("the first rank of this node says the same") from error
        raise


def _remedy(error: ImportError) -> str:
    """How to install a package that the commands need and the library does not."""
    missing = (error.name or "").partition(".")[0]
    return "; pip install 'guild[cli]' brings it" if missing in _PACKAGES else ""


def _describe(error: OSError) -> str:
    """`runs/a/checkpoint.pt: No space left on device`."""
    file = "" if error.filename is None else f"{os.fspath(error.filename)}: "
    return file + (error.strerror or str(error))


def _is_of_printing(error: BaseException) -> bool:
    """Whether it comes from a command's own print(), or one of rich."""
    if not (isinstance(error, OSError) and error.filename is None):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].startswith(("guild.cli.", "rich."))
