"""What `guild train` shows while it runs: a progress bar, and a line at every validation.

If the output is not a terminal the bar does not appear, and the lines say the same.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from guild.train.settings import Settings
from guild.train.speed import speed_facts


class TrainingView:
    """Shows loss, speed and expert balance of a run.

    Parameters
    ----------
    console : Console
        Where to print.
    settings : Settings
        The run.
    step : int
        Steps already done.
    """

    def __init__(self, console: Console, settings: Settings, step: int) -> None:
        self._console, self._settings = console, settings
        self._last: dict[str, Any] = {}
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(
            "training", total=settings.steps, completed=step, facts=""
        )

    def __enter__(self) -> TrainingView:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, step: int, row: dict[str, Any]) -> None:
        """Show the newest row of metrics."""
        self._last = row
        self._progress.update(self._task, completed=step, facts=self._facts(row))

    def validated(self, step: int, loss: float) -> None:
        """Print a line that stays."""
        facts = f"{self._facts(self._last)}  " if self._last else ""
        self._console.print(f"step {step:>5}  {facts}held out {loss:.3f}", highlight=False)

    def _facts(self, row: dict[str, Any]) -> str:
        speed = speed_facts(row)
        if not speed:
            speed = f"{self._settings.tokens_per_step / row['seconds']:,.0f} tokens/s"
        return f"loss {row['loss']:.3f}  {speed}  load {max(row['load']):.2f}x"
