"""The folder that a training run leaves behind: metrics, checkpoint, summary and plot.

A checkpoint appears by renaming a finished file, so a run that dies while writing keeps the
previous one. metrics.jsonl may be ahead of it; resuming cuts it back.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

_FORMAT = 1


class RunFolder:
    """Reads and writes the files of one run.

    Parameters
    ----------
    path : Path
        The folder; `start` makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.summary = self.path / "summary.json"
        self.plot = self.path / "loss.png"
        self.sample = self.path / "sample.txt"

    def start(self) -> None:
        """Make the folder, without the files of a previous run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(
                f"out: expected a folder or a path where one can be made, got {str(self.path)!r}"
            ) from None
        for file in (self.metrics, self.checkpoint, self.summary, self.plot, self.sample):
            file.unlink(missing_ok=True)

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add rows to metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl, without a last line that was cut off."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def cut_after(self, step: int) -> None:
        """Drop the rows that are newer than `step`."""
        kept = [row for row in self.rows() if row["step"] <= step]
        self.metrics.unlink(missing_ok=True)
        self.append(kept)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Write checkpoint.pt in one piece."""
        unfinished = self.checkpoint.with_suffix(".unfinished")
        torch.save({"format": _FORMAT, **state}, unfinished)
        os.replace(unfinished, self.checkpoint)

    def load_checkpoint(self) -> dict[str, Any]:
        """The last checkpoint, its tensors on the CPU.

        Raises
        ------
        ValueError
            When there is none, or another version of Guild wrote it.
        """
        if not self.checkpoint.exists():
            raise ValueError(f"resume: no checkpoint.pt in {str(self.path)!r}; start without it")
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"resume: {str(self.checkpoint)!r} has format {state.get('format')}, "
                f"expected {_FORMAT}"
            )
        return state

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        self.summary.write_text(json.dumps(summary, indent=2) + "\n")
