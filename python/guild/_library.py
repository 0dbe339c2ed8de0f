"""Finds libguild_torch.so, the compiled half of the package, and loads it into torch."""

from __future__ import annotations

import os
from pathlib import Path

import torch

NAME = "libguild_torch.so"
_OLDEST_TORCH = (2, 10)


def candidates() -> list[Path]:
    """Where the library may lie, most wanted first.

    The file named by the environment variable GUILD_LIBRARY; the package's own folder, where a
    wheel puts it; and in a source checkout build/run and build/test, the newer one first.
    """
    named = os.environ.get("GUILD_LIBRARY")
    if named:
        return [Path(named)]
    package = Path(__file__).resolve().parent
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
        If torch is older than 2.10, the library is nowhere to be found, or it does not load.
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
    return path
