"""`guild bench --report` and `--sweep`: Markdown from records, random shapes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from guild.bench.layers import measure
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape
from guild.bench.record import read_record
from guild.bench.report import full_table, markdown_tables, report, short_table
from guild.bench.sweep import CPU_RANGES, GPU_RANGES, needed_bytes, random_shapes
from guild.bench.tables.sweep import sweep_table
from guild.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
RECORDED = sorted((ROOT / "bench/results").glob("*-balanced.json"))
RECORDED += sorted((ROOT / "bench/results").glob("*-h200-layers.json"))
TINY = Shape(tokens=48, hidden=32, intermediate=16, experts=8, top_k=2)


def tiny_record(*routings: str) -> dict[str, Any]:
    plan = BenchPlan(
        {"tiny": TINY},
        routings,
        ("guild", "bound", "plain"),
        torch.device("cpu"),
        torch.float32,
        rounds=2,
        calls=1,
    )
    return measure(plan, Console(file=io.StringIO()))


def test_tables_in_the_documents_are_printed_ones() -> None:
    """README's table and docs/measured/layers.md's come from the record whose plot README shows."""
    readme = (ROOT / "README.md").read_text()
    measured = (ROOT / "docs/measured/layers.md").read_text()
    (plot,) = re.findall(r"\(bench/results/(\S+)\.png\)", readme)
    record = read_record(ROOT / f"bench/results/{plot}.json")
    assert len(record["cases"]) >= 7
    assert short_table(record) in readme
    assert full_table(record) in measured


def test_report_of_layers() -> None:
    record = tiny_record("balanced", "zipf")
    text = report(json.loads(json.dumps(record)))
    guild = record["cases"][1]["figures"]["guild"]
    assert "| tiny, zipf | 48, 32, 16, 8, 2 |" in text
    assert f"{guild['forward']['over_balanced']['median']:.3f} / " in text
    times = (guild[which]["ms"]["median"] for which in ("forward", "backward"))
    assert "| " + " / ".join(f"{ms:.3f}" for ms in times) + " |" in text
    assert "plain PyTorch / Guild" in text
    for table in text.split("\n\n")[1:]:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    del record["cases"][0]["figures"]["plain"], record["cases"][0]["figures"]["guild"]
    assert "| tiny |" not in report(record)


def test_short_table_of_two_routings() -> None:
    """One line per shape: the first routing leads, with Guild's figures for balanced beside it."""
    record = tiny_record("random", "balanced")
    random, balanced = (case["figures"]["guild"] for case in record["cases"])

    def pair(figures: dict[str, Any], name: str) -> str:
        return " / ".join(f"{figures[p][name]['median']:.2f}" for p in ("forward", "backward"))

    for number, figures in enumerate((random, balanced)):
        for which in figures:
            figures[which]["ms"]["median"] = 2.0 + number
            figures[which]["over_bound"]["median"] = 4.0 + number
    headings, _, *lines = short_table(record).splitlines()
    assert "| Guild ms, random | Guild ms, balanced | plain PyTorch ms |" in headings
    assert headings.endswith("| Guild / bound, random | Guild / bound, balanced |")
    assert len(lines) == 1 and lines[0].startswith("| tiny | 48, 32, 16, 8, 2 | 2.00 / 2.00 | 3.00")
    assert lines[0].endswith(f"| {pair(random, 'over_bound')} | {pair(balanced, 'over_bound')} |")
    del record["cases"][1]["figures"]["guild"]
    assert short_table(record).splitlines()[2].endswith("| 4.00 / 4.00 |  |")


def test_markdown_of_a_table() -> None:
    table = Table(title="sizes")
    table.add_column("name")
    table.add_column("ms", justify="right")
    table.add_row("a", "1")
    assert markdown_tables(table) == ["sizes\n\n| name | ms |\n|---|---:|\n| a | 1 |"]


@pytest.mark.parametrize(
    "mode", [["--steps"], ["--memory"], ["--rounding"], ["--fp8"], ["--sweep", "2"]]
)
def test_report_of_every_mode(
    mode: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The report reads the record that each mode writes."""
    shape = [] if "--sweep" in mode else ["--thiek", "32,16,8,4,2"]
    quick = [] if "--memory" in mode else "--rounds 1 --calls 1".split()
    words = ["bench", *mode, *shape, *quick, "--device", "cpu", "--out", str(tmp_path)]
    assert main(words) == 0
    (file,) = tmp_path.glob("*.json")
    assert file.stem == mode[0].removeprefix("--")
    capsys.readouterr()
    assert main(["bench", "--report", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n| ") >= 2 and "commit" in printed
    assert ("interleaved rounds" in printed) == ("--memory" not in mode)
    assert main(["bench", "--report", str(file), "--out", str(tmp_path)]) == 2
    assert "out: expected a record of layers or decode to draw" in capsys.readouterr().err


def test_report_says_that_sources_were_edited() -> None:
    record = json.loads(RECORDED[0].read_text())
    assert "commit 0123456+changes" in report({**record, "commit": "0123456789+changes"})
    assert "commit unknown" in report({**record, "commit": None})


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_recorded_layers_are_drawn(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", "--report", str(file), "--out", str(tmp_path)]) == 0
    assert "| mixtral |" in capsys.readouterr().out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "a record that guild bench wrote"), ("{", "a JSON file"), (None, "a JSON file")],
)
def test_report_of_something_else(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=f"report: expected {message}"):
        read_record(file)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("cases", 0, "figures", "guild", "forward", "ms", "median"), "fast"),
        (("cases", 0, "figures", "guild", "forward", "ms", "median"), 10**400),
        (("cases", 0, "figures", "guild", "forward", "over_bound", "high"), "fast"),
        (("cases", 0, "routing"), {}),
    ],
)
def test_report_of_a_damaged_record(
    place: tuple, value: object, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """One line, whether the text or the plot needs what is damaged."""
    record = json.loads(RECORDED[0].read_text())
    *way, last = place
    part = record
    for step in way:
        part = part[step]
    part[last] = value
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record))
    assert main(["bench", "--report", str(file), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("guild bench: report: expected a whole record") and "\n" not in said[:-1]


def test_report_of_others_alone() -> None:
    """What was timed without Guild is shown too."""
    record = json.loads(RECORDED[0].read_text())
    for case in record["cases"]:
        case["figures"].pop("guild")
    bound = record["cases"][0]["figures"]["bound"]["forward"]["ms"]["median"]
    assert f"{bound:.3f}" in report(record)


# ---- sweep --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [GPU_RANGES, CPU_RANGES], ids=["gpu", "cpu"])
def test_random_shapes(ranges: dict[str, tuple[int, int]]) -> None:
    """Shapes are in the given ranges, fit the memory, and repeat with the seed."""
    limit = 40 << 30
    shapes = random_shapes(40, 3, ranges, 2, limit)
    assert shapes == random_shapes(40, 3, ranges, 2, limit)
    assert shapes.keys() != random_shapes(40, 4, ranges, 2, limit).keys()
    assert len(shapes) == 40
    for name, shape in shapes.items():
        assert name == str(shape)
        assert needed_bytes(shape, 2) <= limit
        assert shape.hidden % 8 == shape.intermediate % 8 == 0
        for size, (least, most) in ranges.items():
            assert least <= getattr(shape, size) <= most
    assert len({shape.top_k for shape in shapes.values()}) >= 4


def test_random_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"sweep: expected 3 shapes within 0.0 GiB, found 0"):
        random_shapes(3, 0, GPU_RANGES, 2, 1 << 20)


def test_sweep_table_shows_median_and_worst() -> None:
    def case(ratio: float) -> dict[str, Any]:
        row = {"ms": {"median": 1.0}, "tflops": 2.0, "over_bound": {"median": ratio}}
        figures = {"guild": {"forward": row, "backward": row}}
        errors = {"guild": {"out": 1e-3}}
        shape = TINY._asdict()
        return {
            "name": "s",
            "shape": shape,
            "routing": "balanced",
            "figures": figures,
            "errors": errors,
        }

    failed = {**case(1), "figures": {}}
    record = {"cases": [case(1.1), case(1.5), case(1.2), failed], "seed": 0, "device": "d"}
    record |= {"dtype": "float32", "rounds": 1}
    (text,) = markdown_tables(sweep_table(record))
    assert "1.20 / 1.20" in text and "1.50 / 1.50" in text and "failed" in text


def test_records_with_missing_parts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of another version, or changed by hand: one line says so."""
    whole = json.dumps(tiny_record("balanced"))
    file = tmp_path / "bench.json"
    for key in ("figures", "name", "shape", "routing"):
        record = json.loads(whole)
        del record["cases"][0][key]
        file.write_text(json.dumps(record))
        assert main(["bench", "--report", str(file)]) == 2, key
    for cases in (None, [], {}, [3]):
        file.write_text(json.dumps(json.loads(whole) | {"cases": cases}))
        assert main(["bench", "--report", str(file)]) == 2, cases
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(re.findall(r"^guild bench: report: expected a .*\n", printed.err, re.M)) == 8
    file.write_text(whole)
    assert main(["bench", "--report", str(file)]) == 0
    assert "driver" not in capsys.readouterr().out
