"""`guild bench --rounding`: rows are counted correctly, and times stand beside those of top-k."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import guild
from guild.bench import rounding as bench_rounding
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape
from guild.bench.rounding import TILE, figures, measure_rounding
from guild.bench.tables.rounding import rounding_table

SHAPE = Shape(tokens=700, hidden=64, intermediate=32, experts=8, top_k=2)
WAYS = {"top_k", "nearest", "dropping"}


def plan_of(device: str) -> BenchPlan:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    given = {"rounds": 2, "calls": 1}
    return BenchPlan({"layer": SHAPE}, ("zipf",), ("guild",), torch.device(device), dtype, **given)


def test_every_way_is_timed(device: str) -> None:
    """Top-k's rows are all choices, rounding's are whole tiles, dropping's are even shares."""
    record = measure_rounding(plan_of(device), Console(file=io.StringIO()))
    assert json.loads(json.dumps(record)) == record
    (case,) = record["cases"]
    assert case["failures"] == {}
    rows, in_tiles = case["rows"], case["tile_rows"]
    assert rows["top_k"] == SHAPE.tokens * SHAPE.top_k < in_tiles["top_k"]
    assert rows["nearest"] == in_tiles["nearest"] and rows["nearest"] % TILE == 0
    assert rows["dropping"] < rows["top_k"]
    for part in ("routing", "layer"):
        assert case["figures"][part].keys() == WAYS
        for found in case["figures"][part].values():
            assert found["ms"]["low"] > 0 and len(found["rounds_ms"]) == 2
    console = Console(file=io.StringIO(), width=170)
    console.print(rounding_table(record))
    assert "rounding to nearest" in console.file.getvalue()


def test_figures_by_hand() -> None:
    """Medians over rounds of differences and ratios, chosen here so that they are not the means."""
    found = figures({"top_k": [1.0, 2.0, 3.0], "nearest": [1.75, 2.25, 3.0]})
    assert found["nearest"]["ms"] == {"median": 2.25, "low": 1.75, "high": 3.0}
    assert found["nearest"]["more_us"] == {"median": 250.0, "low": 0.0, "high": 750.0}
    assert found["nearest"]["over_top_k"] == {"median": 1.125, "low": 1.0, "high": 1.75}
    assert "more_us" not in found["top_k"]


def test_times_are_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's time, of one step or eight routings per input set, is divided by its calls."""
    repeats: list[int] = []
    monkeypatch.setattr(
        bench_rounding, "Replay", lambda call, count, pool: repeats.append(count) or call
    )
    monkeypatch.setattr(
        bench_rounding, "interleaved", lambda calls, *rest: dict.fromkeys(calls, [24.0])
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    calls = {part: {"top_k": lambda: None} for part in ("routing", "layer")}
    on_gpu = bench_rounding._time(calls, 3, plan_of("cuda"))
    assert on_gpu == {"routing": {"top_k": [1.0]}, "layer": {"top_k": [8.0]}}
    assert repeats == [8, 1]
    on_cpu = bench_rounding._time(calls, 3, plan_of("cpu"))
    assert on_cpu == {"routing": {"top_k": [8.0]}, "layer": {"top_k": [8.0]}}


def test_wrong_rows_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose counts are not rounded is reported by name; the others are still timed."""
    ways = bench_rounding._ways

    def without_rounding(problem: object) -> dict:
        found = ways(problem)
        return found | {"nearest": (found["nearest"][0], guild.MoE)}

    monkeypatch.setattr(bench_rounding, "_ways", without_rounding)
    record = measure_rounding(plan_of("cpu"), Console(file=io.StringIO()))
    (case,) = record["cases"]
    assert case["failures"].keys() == {"nearest"}
    assert case["failures"]["nearest"].startswith("wrong rows of expert ")
    assert case["figures"]["layer"].keys() == WAYS - {"nearest"}
    Console(file=io.StringIO()).print(rounding_table(record))


def test_rounding_that_leaves_no_rows_is_noted() -> None:
    """With few tokens, rounding to the nearest tile rounds every expert's count to 0."""
    plan = plan_of("cpu")
    few = Shape(tokens=64, hidden=64, intermediate=32, experts=8, top_k=2)
    console = Console(file=io.StringIO(), width=170)
    record = measure_rounding(replace(plan, shapes={"few": few}, routings=("balanced",)), console)
    assert record["cases"][0]["rows"]["nearest"] == 0
    printed = console.file.getvalue()
    assert "nearest: no expert has a row left" in printed and printed.count("no expert") == 1
