"""What fails in a benchmark is noted in its case and does not cost the others their figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

# What a candidate raises that is out of memory, unsupported or wrong.
EXPECTED: tuple[type[Exception], ...] = (RuntimeError, ArithmeticError, TypeError, ValueError)
OUT_OF_MEMORY: tuple[type[Exception], ...] = (torch.OutOfMemoryError,)


def note_failure(case: dict[str, Any], name: str, error: Exception, console: Console) -> None:
    """Note the first line of an error in the case's `failures`, by candidate, and print it."""
    message = case["failures"][name] = _first_line(error)
    console.print(f"[red]{escape(_title(case))}, {escape(name)}:[/] {escape(message)}")


@contextmanager
def noting(
    case: dict[str, Any],
    name: str,
    console: Console,
    kinds: tuple[type[Exception], ...] = EXPECTED,
) -> Iterator[None]:
    """Note an error of one of `kinds` raised inside as a failure of the candidate."""
    try:
        yield
    except kinds as error:
        note_failure(case, name, error, console)


@contextmanager
def skipping(skipped: dict[str, str], name: str, console: Console) -> Iterator[None]:
    """Note that there was too little memory inside, for what is called `name`."""
    try:
        yield
    except OUT_OF_MEMORY as error:
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
