"""Fixtures of runs of `guild train` that take a second."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from short_runs import SMALL, call_train
from training import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Callable[..., int]:
    """`guild train` on the small corpus into tmp_path/run, unless options say otherwise."""
    return lambda *words, out=tmp_path / "run": call_train(corpus, out, *words)


@pytest.fixture(scope="module")
def ten_steps(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert call_train(corpus, folder, *SMALL) == 0
    return folder


@pytest.fixture
def finished(ten_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> Path:
    """The folder of a finished run, copied for each test."""
    capsys.readouterr()
    return shutil.copytree(ten_steps, tmp_path / "run")
