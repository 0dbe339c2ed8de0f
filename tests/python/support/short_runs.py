"""Short training runs on the command line, and what they print when they are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from guild.cli.main import main

SMALL = (
    "--batch 4 --context 32 --hidden 32 --layers 1 --heads 2 --experts 4 --intermediate 16 "
    "--warmup 2 --steps 10"
).split()


def call_train(corpus: Path, out: Path, *words: str) -> int:
    fixed = ["--corpus", str(corpus), "--device", "cpu", "--threads", "1", "--out", str(out)]
    return main(["train", *fixed, *words])


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(status: int, capsys: pytest.CaptureFixture) -> str:
    """The single line printed with exit status 2."""
    printed = capsys.readouterr().err
    assert status == 2, printed
    assert re.fullmatch(r"guild (train|bench): [^\n]+\n", printed), printed
    return printed
