"""`guild bench`: what the command line asks for, measured, printed and written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from .bench_plan import plan_bench

_LOG_WIDTH = 170  # of a table that goes to a file, where rich would assume 80 columns


def run_bench(args: argparse.Namespace) -> int:
    """Run what the command line asks for; 1 when a candidate failed or was wrong."""
    # With --json, standard output is the JSON alone.
    console = Console(stderr=args.json)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    plan = plan_bench(args)
    if args.out is not None:
        _make_folder(args.out)
    if args.steps:
        from .bench_steps import measure_steps

        record = measure_steps(plan, console, args.bias, args.quack)
    elif args.memory:
        from .bench_memory import measure_memory

        record = measure_memory(plan, console)
    else:
        from .bench import measure

        record = measure(plan, console)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        console.print(table_of(record))
    if args.out is not None:
        _write(record, args.out, console)
    return 1 if any(case["failures"] for case in record["cases"]) else 0


def table_of(record: dict[str, Any]) -> RenderableType:
    """A record's table, whatever was measured."""
    if record["mode"] == "steps":
        from .bench_steps_table import steps_table

        return steps_table(record)
    if record["mode"] == "memory":
        from .bench_memory_table import memory_table

        return memory_table(record)
    from .bench_table import bench_table

    return bench_table(record)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"out: expected a folder, got the file {str(out)!r}") from None


def _write(record: dict[str, Any], out: Path, console: Console) -> None:
    """bench.json and bench.png, steps.json or memory.json."""
    name = {"layers": "bench"}.get(record["mode"], record["mode"])
    written = [f"{name}.json"]
    (out / written[0]).write_text(json.dumps(record, indent=2) + "\n")
    if record["mode"] == "layers":
        from .plots import plot_bench

        written.append(f"{name}.png")
        plot_bench(record, out / written[1])
    console.print(f"results in {out}: {', '.join(written)}")
