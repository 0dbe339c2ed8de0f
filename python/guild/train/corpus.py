"""The text that `guild train` learns from: Python sources as bytes, with held-out files.

Every machine that runs Guild has the standard library's sources, so the default corpus needs no
download. A file belongs to the held-out part by a hash of its path, so the split does not move
when a release adds or drops a module, and no held-out byte is ever trained on.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

# Distributions ship these separately or not at all; without them two machines with the same Python
# see the same corpus. Tests would also be most of the bytes.
_SKIPPED_FOLDERS = frozenset(
    "__pycache__ site-packages dist-packages test tests idle_test idlelib lib2to3 distutils "
    "ensurepip tkinter turtledemo pydoc_data lib-dynload".split()
)
# Written when the interpreter is configured or customised by its packager, so they contain paths.
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")
_SKIPPED_FOLDER_PREFIX = "config-"
_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out.

    Attributes
    ----------
    train, held_out : torch.Tensor
        uint8, one dimension, on the CPU.
    files : int
        Number of files read.
    digest : str
        CRC-32 of the bytes to train on and of those held out, in hexadecimal; a run resumes only on
        the same bytes.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    files: int
    digest: str

    def batch(
        self, seed: int, step: int, batch: int, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows of the training bytes for one step.

        The windows depend on `seed` and `step` alone, so a resumed run needs no saved position.

        Returns
        -------
        inputs, targets : torch.Tensor
            int64 (batch, context); targets are the inputs one byte later.
        """
        generator = torch.Generator().manual_seed(step_seed(seed, step))
        last = self.train.numel() - context - 1
        starts = torch.randint(0, last + 1, (batch,), generator=generator)
        return _windows(self.train, starts, context)

    def held_out_windows(self, count: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` windows spread evenly over the held-out bytes: int64 (count, context) twice."""
        last = self.held_out.numel() - context - 1
        starts = torch.linspace(0, last, count, dtype=torch.float64).long()
        return _windows(self.held_out, starts, context)


def step_seed(seed: int, step: int) -> int:
    """Seed of one step's random numbers, in the 64 bits that torch takes."""
    return (seed * 1_000_003 + step) % 2**63


def _windows(
    data: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    index = starts[:, None] + torch.arange(context + 1)
    windows = data[index].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def standard_library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(folder: Path) -> list[Path]:
    """Python sources under `folder` that belong to the corpus, in the order they are read.

    All of them; of the standard library only those that every installation has.
    """
    # What `rglob` finds may be a folder, a pipe or a dangling link, as some editors leave.
    found = [path for path in folder.rglob("*.py") if path.is_file()]
    if folder == standard_library():
        found = [path for path in found if _is_everywhere(path.relative_to(folder).parts)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _is_everywhere(parts: tuple[str, ...]) -> bool:
    """Whether two machines with the same Python have this part of the standard library alike."""
    *folders, name = parts
    return not name.startswith(_SKIPPED_PREFIXES) and not any(
        folder in _SKIPPED_FOLDERS or folder.startswith(_SKIPPED_FOLDER_PREFIX)
        for folder in folders
    )


def load_corpus(folder: Path | None = None, context: int = 128) -> Corpus:
    """Read the corpus.

    Parameters
    ----------
    folder : Path, optional
        Where to look for .py files. Default: the standard library.
    context : int
        Window length in bytes; each part must hold at least one window and its target.

    Raises
    ------
    ValueError
        If the folder is missing or holds too little text to train and to validate.
    """
    folder = standard_library() if folder is None else Path(folder)
    if not folder.is_dir():
        raise ValueError(f"corpus: expected a folder of .py files, got {str(folder)!r}")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    files = source_files(folder)
    for path in files:
        name = path.relative_to(folder).as_posix()
        held_out = zlib.crc32(os.fsencode(name)) % _HELD_OUT_ONE_IN == 0
        parts[held_out].append(path.read_bytes())
    train, held_out = b"".join(parts[False]), b"".join(parts[True])
    for what, data in (("training", train), ("held-out", held_out)):
        if len(data) < context + 2:
            raise ValueError(
                f"corpus: {len(files)} .py files under {str(folder)!r} give {len(data)} {what} "
                f"bytes, expected at least {context + 2} (one window of {context} and its "
                f"target); about one file in {_HELD_OUT_ONE_IN}, by a hash of its path, is held out"
            )
    digest = "".join(f"{zlib.crc32(data):08x}" for data in (train, held_out))
    return Corpus(_as_tensor(train), _as_tensor(held_out), len(files), digest)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
