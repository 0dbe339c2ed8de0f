"""`guild bench`: measures what the command line asks for, prints it and writes it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.errors import NotRenderableError

from guild.bench.plan import plan_bench
from guild.bench.results import make_folder, replacing
from guild.cli.console import CommandConsole
from guild.cli.streams import write_out
from guild.options import excludes
from guild.provenance import make_current

_DRAWN = ("layers", "decode")  # modes whose records have a plot
_OF_DAMAGE = (ArithmeticError, AttributeError, LookupError, NotRenderableError, TypeError)
_LOG_WIDTH = 170  # of a table written to a file, for which rich would assume 80 columns


def run_bench(args: argparse.Namespace, defaults: argparse.Namespace) -> int:
    """Run what the command line asks for; return 1 if a candidate failed or was wrong.

    defaults: the same without any options.
    """
    # With --json, standard output is the JSON alone.
    console = CommandConsole(stderr=args.json)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    if args.report is not None:
        return _report(args, defaults)
    plan = plan_bench(args)
    make_current(plan.device)
    if args.out is not None:
        make_folder(args.out)
    if args.steps:
        from guild.bench.steps import measure_steps

        record = measure_steps(plan, console, args.quack)
    elif args.memory:
        from guild.bench.memory import measure_memory

        record = measure_memory(plan, console)
    elif args.rounding:
        from guild.bench.rounding import measure_rounding

        record = measure_rounding(plan, console)
    elif args.fp8:
        from guild.bench.float8.measure import measure_float8

        record = measure_float8(plan, console)
    elif args.decode:
        from guild.bench.decode.measure import measure_decode

        record = measure_decode(plan, console)
    else:
        from guild.bench.layers import measure

        record = measure(plan, console)
        if args.sweep is not None:
            record["mode"] = "sweep"
    written = ""
    try:
        if args.out is not None:
            written = _write(record, args.out)
    finally:  # what cannot be written is printed, and what cannot be printed has been written
        _print(record, args.json, console)
    if written:
        console.print(f"results in {args.out}: {written}")
    return 1 if any(case["failures"] for case in record["cases"]) else 0


def _print(record: dict[str, Any], as_json: bool, console: Console) -> None:
    if as_json:
        write_out(json.dumps(record, indent=2))
        return
    from guild.bench.tables.by_mode import table_of
    from guild.bench.tables.narrow import fit

    console.print(fit(table_of(record), console))


def _report(args: argparse.Namespace, defaults: argparse.Namespace) -> int:
    """Print the tables of a recorded benchmark, and draw it into --out."""
    from guild.bench.record import read_record
    from guild.bench.report import report

    _require_report_alone(vars(args), vars(defaults))
    record = read_record(args.report)
    if args.out is not None:
        if record["mode"] not in _DRAWN:
            drawn = " or ".join(_DRAWN)
            raise ValueError(f"out: expected a record of {drawn} to draw, got {record['mode']}")
        make_folder(args.out)
    with _expecting_whole(args.report, ValueError):
        text = json.dumps(record, indent=2) if args.json else report(record)
    write_out(text)
    if args.out is not None:
        name = f"{_file_name(record)}.png"
        with _expecting_whole(args.report):  # a ValueError says that the file cannot be written
            _draw(record, args.out / name)
        CommandConsole(stderr=True).print(f"results in {args.out}: {name}")
    return 0


@contextmanager
def _expecting_whole(file: Path, *more: type[Exception]) -> Iterator[None]:
    """Raise ValueError for what a damaged record makes the code raise that reads it."""
    try:
        yield
    except (*_OF_DAMAGE, *more):
        whole = "a whole record of this version of guild bench"
        raise ValueError(f"report: expected {whole}, got {str(file)!r}") from None


def _require_report_alone(args: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise for options that say what to measure, and how."""
    for name, value in args.items():
        if value != defaults[name] and name not in ("report", "json", "out"):
            raise excludes(name, "--report")


def _draw(record: dict[str, Any], file: Path) -> None:
    from guild.bench.plots import plot_bench, plot_decode

    plot = plot_decode if record["mode"] == "decode" else plot_bench
    with replacing(file) as unfinished:
        plot(record, unfinished)


def _file_name(record: dict[str, Any]) -> str:
    """The name of the record's files, without a suffix."""
    return {"layers": "bench"}.get(record["mode"], record["mode"])


def _write(record: dict[str, Any], out: Path) -> str:
    """bench.json and bench.png, or the JSON of another mode under its name -> their names."""
    name = _file_name(record)
    written = [f"{name}.json"]
    with replacing(out / written[0]) as unfinished:
        unfinished.write_text(json.dumps(record, indent=2) + "\n")
    if record["mode"] in _DRAWN:
        written.append(f"{name}.png")
        _draw(record, out / written[1])
    return ", ".join(written)
