"""What fails in a benchmark is noted in its case and does not cost the others their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

from guild.train.failures import is_out_of_memory

Noted = Callable[[Exception], bool]  # whether an error is noted; others end the benchmark


def is_expected(error: Exception) -> bool:
    """Whether a candidate raises it that is out of memory, unsupported or wrong."""
    return isinstance(error, RuntimeError | ArithmeticError | TypeError | ValueError | MemoryError)


def is_any(error: Exception) -> bool:
    """True: a file of candidates may raise whatever it likes."""
    return True


def note_failure(case: dict[str, Any], name: str, error: Exception, console: Console) -> None:
    """Note the first line of an error in the case's `failures`, by candidate, and print it."""
    message = case["failures"][name] = _first_line(error)
    console.print(f"[red]{escape(_title(case))}, {escape(name)}:[/] {escape(message)}")


def note_no_rows(case: dict[str, Any], name: str, console: Console) -> None:
    """Print that a way of routing leaves the experts nothing to compute."""
    console.print(
        f"[yellow]{escape(_title(case))}, {escape(name)}:[/] no expert has a row left, so its time "
        "is that of a layer without experts; more tokens give it rows"
    )


@contextmanager
def noting(
    case: dict[str, Any],
    name: str,
    console: Console,
    noted: Noted = is_expected,
) -> Iterator[None]:
    """Note an error raised inside as a failure of the candidate."""
    try:
        yield
    except Exception as error:
        if not noted(error):
            raise
        note_failure(case, name, error, console)


@contextmanager
def skipping(skipped: dict[str, str], name: str, console: Console) -> Iterator[None]:
    """Note that there was too little memory inside, for what is called `name`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        skipped[name] = _first_line(error)
        console.print(f"[red]{escape(name)}:[/] {escape(skipped[name])}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _title(case: dict[str, Any]) -> str:
    """Shape and routing, and at decode the number of tokens and what is timed."""
    parts = [case["name"], f"{case['routing']} routing"]
    if "part" in case:
        parts += [f"{case['shape']['tokens']} tokens", case["part"]]
    return ", ".join(parts)
