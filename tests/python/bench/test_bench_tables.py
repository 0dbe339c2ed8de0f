"""`guild bench`'s tables: figures stay whole in narrow terminals, and notes fit the tables."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console, Group
from rich.table import Table

import guild
from guild.bench.decode.measure import decode_figures, work_of
from guild.bench.decode.rates import Rates
from guild.bench.layers import figures, measure
from guild.bench.names import PARTS
from guild.bench.plan import BenchPlan
from guild.bench.presets import DECODE_PRESETS, PRESETS, Shape
from guild.bench.record import read_record
from guild.bench.tables.by_mode import table_of
from guild.bench.tables.narrow import fit
from guild.bench.tables.steps import step_cells

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(guild.__file__).parent.parent
RECORDED = {
    file.stem: read_record(file)
    for file in sorted((ROOT / "bench/results").glob("*.json"))
    if {"schema", "cases"} <= json.loads(file.read_text()).keys()  # others record here, too
}


def sweep_record() -> dict[str, Any]:
    """A sweep over the presets; its times are made up."""
    cases = []
    for shape in PRESETS.values():
        times = {name: {"forward": [12.345], "backward": [23.456]} for name in ("guild", "bound")}
        case = {"name": str(shape), "shape": shape._asdict(), "routing": "balanced"}
        case |= {"figures": figures(times, shape), "errors": {"guild": {"out": 3e-3}}}
        cases.append(case)
    head = {"mode": "sweep", "seed": 0, "device": "GPU", "dtype": "bfloat16", "rounds": 3}
    return {**head, "cases": cases}


def decode_record() -> dict[str, Any]:
    """Every preset at a few numbers of tokens; its times are made up."""
    cases = []
    rates, machine = Rates(4.4e6, 7e8), {"read_tbps": 4.4, "matrix_tflops": 700.0}
    for name, shape in DECODE_PRESETS.items():
        for tokens, part in product((1, 64, 4096), PARTS):
            at = shape._replace(tokens=tokens)
            case = {"name": name, "shape": at._asdict(), "routing": "random", "part": part}
            case |= work_of(at, part, torch.bfloat16, float(shape.experts), rates)
            times = {(n, how): [12.345] for n in ("guild", "torch") for how in ("graph", "eager")}
            figures = decode_figures(times, case["bytes"], case["floor_us"])
            for row in figures.values():
                row |= {"host_us": 34.56}
                row |= {"router_us": {"median": 3.21}} if part == "layer" else {}
            cases.append({**case, "machine": machine, "failures": {}, "figures": figures})
    return {"mode": "decode", "device": "GPU", "dtype": "bfloat16", "rounds": 3, "cases": cases}


RECORDS = {**RECORDED, "sweep": sweep_record(), "decode": decode_record()}


def newest(kind: str) -> dict[str, Any]:
    """The newest record of layers ("balanced", "skew"), of steps ("quack") or of memory."""
    return RECORDED[max(name for name in RECORDED if name.endswith(f"-{kind}"))]


def tables_of(record: dict[str, Any]) -> list[Table]:
    laid_out = table_of(record)
    return laid_out.renderables if isinstance(laid_out, Group) else [laid_out]


def printed(record: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(fit(table_of(record), console))
    return console.file.getvalue()


def test_records_of_every_mode() -> None:
    modes = {record["mode"] for record in RECORDS.values()}
    assert modes == {"layers", "steps", "memory", "rounding", "sweep", "decode", "fp8"}


@pytest.mark.parametrize("width", [80, 100, 139, 140, 170])
@pytest.mark.parametrize("name", RECORDS)
def test_figures_are_whole(name: str, width: int) -> None:
    """No ellipsis, no line too long, and each cell appears as often as it should."""
    text = printed(RECORDS[name], width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    lines = (re.split(r"\s{2,}|\s*[│┃]\s*", line.strip()) for line in text.splitlines())
    shown = Counter(cell for line in lines for cell in line)
    columns = (column for table in tables_of(RECORDS[name]) for column in table.columns)
    expected = Counter(cell for column in columns for cell in column.cells if cell)
    assert expected - shown == Counter()


@pytest.mark.parametrize("name", RECORDS)
def test_headings_are_whole(name: str) -> None:
    """At 80 columns headings break between words, and no word is lost."""
    words = set(re.split(r"[\s│┃]+", printed(RECORDS[name], 80)))
    for table in tables_of(RECORDS[name]):
        assert {w for c in table.columns for w in str(c.header).split()} <= words


@pytest.mark.parametrize("width", [140, 170])
def test_one_table_where_there_is_room(width: int) -> None:
    record = newest("balanced")
    text = printed(record, width)
    assert text.count("shape") == 1
    assert text.count("fine7b") == 1
    assert "┃ shape" in text


def test_parts_repeat_what_names_a_line() -> None:
    record = newest("balanced")
    text = printed(record, 80)
    assert text.count("shape") == text.count("mixtral") == 2
    assert text.count("backward") == 2 * 7 + 1  # and once in the notes
    assert text.count(record["device"]) == 1
    assert text.count("error:") == 1


def test_ratios_stay_beside_what_they_are_of() -> None:
    """Columns of the same name, such as "ratio", go into the same part as their figure."""
    text = printed(newest("memory"), 80)
    headings = [line for line in text.splitlines() if "ratio" in line]
    assert len(headings) == 3
    for part, figure in zip(headings, ("backward", "forward, peak", "backward, peak"), strict=True):
        assert re.search(rf"{figure} +ratio", part)


def test_a_terminal_that_is_too_narrow_for_anything() -> None:
    """Text wider than the terminal continues in the next line."""
    assert "…" not in printed(newest("balanced"), 20)


def test_spread_is_half_of_the_range() -> None:
    """Spread is in per cent of the median, alike in the tables of layers and of steps."""
    shape = PRESETS["fine7b"]
    taken = {"guild": {"forward": [9.0, 10.0, 13.0], "backward": [20.0, 20.0, 20.0]}}
    case = {"name": "a", "shape": shape._asdict(), "routing": "random", "failures": {}}
    case |= {"figures": figures(taken, shape), "errors": {}}
    record = {"mode": "layers", "device": "GPU", "dtype": "bfloat16", "torch": "2", "rounds": 3}
    text = printed({**record, "cases": [case]}, 140)
    assert "10.000 ±20%" in text and "20.000 ±0%" in text
    step = newest("quack")["cases"][0]["steps"]["up"]
    made_up = {**step, "ms": {"median": 10.0, "low": 9.0, "high": 13.0}}
    assert step_cells(made_up, quack=False)[0] == "10.0000 ±20%"


# ---- notes --------------------------------------------------------------------------------------


def caption(record: dict[str, Any]) -> str:
    return " ".join(str(table.caption) for table in tables_of(record))


def test_notes_on_layers_are_about_columns_there() -> None:
    record = newest("balanced")
    assert "copies" in caption(record) and "bound:" in caption(record)
    without = newest("skew")
    assert "floor" not in without["cases"][0]["figures"]
    assert "copies" not in caption(without)
    plan = BenchPlan(
        {"tiny": Shape(48, 32, 16, 8, 2)},
        ("random",),
        ("guild",),
        torch.device("cpu"),
        torch.float32,
        rounds=1,
        calls=1,
    )
    alone = caption(measure(plan, Console(file=io.StringIO())))
    assert "bound" not in alone and "copies" not in alone and "error" in alone


def test_notes_on_steps_name_quack_where_its_times_are_scaled() -> None:
    record = newest("quack")
    assert "QuACK" not in caption(record)  # measured in the same rounds
    (case, *_) = record["cases"]
    scaled = {"recorded_ms": 1.0, "scaled_ms": 1.0, "over": {"median": 1.0}}
    steps = {name: {**step, "quack": scaled} for name, step in case["steps"].items()}
    assert "QuACK's recorded time" in caption({**record, "cases": [{**case, "steps": steps}]})


def test_notes_on_memory_are_about_columns_there() -> None:
    record = newest("memory")
    assert "forward:" in caption(record)
    assert "forward:" not in caption({**record, "device_type": "cpu"})


# ---- the command --------------------------------------------------------------------------------


def bench_in_a_terminal(columns: int, *words: str) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    given = {name: value for name, value in given.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "guild", "bench", "--device", "cpu", "--calls", "1", *words]
    run = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=given)
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 1 << 16):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert run.wait(timeout=60) == 0, text.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode())


def test_bench_in_a_terminal() -> None:
    """The output as a user sees it in 80 columns."""
    text = bench_in_a_terminal(80, "--thiek", "1024,64,64,16,2", "--rounds", "2")
    # The title is as long as the processor's name.
    table = text[[m.end() for m in re.finditer(r"medians\s+of\s+2\s+rounds\s*\n", text)][-1] :]
    assert "…" not in table
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80
    for word in ("1024,64,64,16,2", "forward", "backward", "TFLOPS", "PyTorch", "bound", "error"):
        assert any(word in line for line in lines), word
    assert len(re.findall(r"\d\.\d{3} ±\d+%", table)) == 2 * 2 * 3  # routings, passes, candidates
