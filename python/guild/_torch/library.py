"""Finds libguild_torch.so, the compiled half of the package, and loads it into torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

NAME = "libguild_torch.so"
_OLDEST_TORCH = (2, 10)
_OUT_OF_MEMORY = "CUDA out of memory"


def candidates() -> list[Path]:
    """Where the library may lie, in order of preference.

    The file named by the environment variable GUILD_LIBRARY; the package's own folder, where a
    wheel puts it; and in a source checkout build/run and build/test, the newer one first.
    """
    named = os.environ.get("GUILD_LIBRARY")
    if named:
        return [Path(named)]
    package = Path(__file__).resolve().parents[1]
    built = [package.parents[1] / "build" / kind / NAME for kind in ("run", "test")]
    built = sorted((p for p in built if p.exists()), key=lambda p: -p.stat().st_mtime)
    return [package / NAME, *built]


def find() -> Path | None:
    """The library that `load` takes, or None where there is none."""
    return next((path for path in candidates() if path.is_file()), None)


def load() -> Path:
    """Load the library, which registers torch.ops.guild.

    Raises
    ------
    ImportError
        If torch is older than 2.10, the library is not found, it does not load, or it is not
        Guild's.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST_TORCH:
        raise ImportError(f"torch: expected 2.10 or later, got {torch.__version__}")
    path = find()
    if path is None:
        looked = ", ".join(map(str, candidates()))
        raise ImportError(
            f"Guild's compiled library {NAME} was not found (looked for {looked}). In a source "
            "checkout run `make build`; elsewhere install the wheel, or set GUILD_LIBRARY to the "
            "file."
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"{path} does not load into torch {torch.__version__}: {error}"
        ) from error
    if not hasattr(torch.ops.guild, "moe_forward"):
        raise ImportError(f"{path} is not Guild's compiled library: it registers no operators")
    _translate_errors()
    return path


def _translate_errors() -> None:
    """Turn failed allocations on a GPU into torch's own error, in compiled graphs too.

    torch's exceptions cannot cross the stable ABI, so the library raises a RuntimeError with the
    same text.
    """
    for name in torch._C._dispatch_get_all_op_names():
        space, _, op = name.partition("::")
        if space == "guild" and "." not in op:
            packet = getattr(torch.ops.guild, op)
            for call in (packet, packet.default):
                call._op = translated(call._op)


def translated(op: Callable) -> Callable:
    """The op, raising torch.OutOfMemoryError in place of the library's RuntimeError."""

    @wraps(op)
    def call(*args, **kwargs):
        try:
            return op(*args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(_OUT_OF_MEMORY) or type(error) is not RuntimeError:
                raise
            _raise_earlier_errors(args, kwargs)
            raise torch.OutOfMemoryError(str(error)) from error

    return call


def _raise_earlier_errors(*arguments: object) -> None:
    """Raise the error of a kernel that failed on the arguments' GPU: allocations then fail, too."""
    for argument in tree_leaves(arguments):
        if isinstance(argument, torch.Tensor) and argument.is_cuda:
            torch.cuda.current_stream(argument.device).query()
