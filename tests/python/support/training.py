"""Small corpora, settings and runs that the tests of the command line share."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from guild.train.interrupt import StopRequest
from guild.train.loop import Plan, Training
from guild.train.run_folder import RunFolder
from guild.train.settings import Settings
from guild.train.world import writes

_FILES = 24


def write_corpus(folder: Path) -> Path:
    """Write .py files of regular text, enough of them that some are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(_FILES):
        lines = [f"def function_{k}(a, b):\n    return a + {number * k} * b\n" for k in range(40)]
        (folder / f"module_{number}.py").write_text("\n".join(lines))
    return folder


def small_settings(**changes: Any) -> Settings:
    """A model of a few thousand weights."""
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "experts": 4, "intermediate": 16}
    schedule = {"steps": 12, "batch": 4, "context": 32, "warmup": 3}
    return Settings(**{**sizes, **schedule, **changes})


class StopAfter(StopRequest):
    """Asks to stop once the loop has looked `polls` times."""

    def __init__(self, polls: int) -> None:
        self._left = polls
        self._previous = {}

    @property
    def asked(self) -> bool:
        """Counts down."""
        self._left -= 1
        return self._left < 0


def train(
    settings: Settings, out: Path, corpus: Path, polls: int | None = None, **plan: Any
) -> tuple[Training, dict[str, Any] | None]:
    """Run `guild train` in this process; `polls` rounds at most."""
    full = Plan(
        **{
            "out": out,
            "corpus": corpus,
            "device": torch.device("cpu"),
            "dtype": torch.float32,
            "check_every": 4,
            "sample_bytes": 8,
            **plan,
        }
    )
    stop = StopRequest() if polls is None else StopAfter(polls)
    with RunFolder(out).claimed() if writes() else contextlib.nullcontext():
        training = Training(settings, full, Console(file=io.StringIO()))
        return training, training.run(stop)
