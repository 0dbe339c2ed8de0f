"""Standard output and error in whatever encoding they have, if they are open at all."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import IO


def drop_output(stream: IO[str]) -> None:
    """Lose what is still to be written: Python would complain at its end that it cannot be."""
    with contextlib.suppress(io.UnsupportedOperation):  # it may be no file
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def write_out(text: str) -> None:
    """Print a command's result. Nothing is wrong if nobody reads it, as after `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop_output(sys.stdout)


def prepare_streams() -> None:
    r"""Write characters that a stream's encoding lacks, such as a table's lines, as \x..

    In a locale without UTF-8 the first of them would otherwise end the command. What goes to a
    closed stream is lost: where `sys.stderr` is None, print() would take standard output instead.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open to the end
        elif isinstance(stream, io.TextIOWrapper):  # it may be replaced
            stream.reconfigure(errors="backslashreplace")
