"""`guild bench --fp8`: every recipe is checked and timed, and the weights' quantisation apart."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

import guild
from guild.bench.float8 import measure as bench_float8
from guild.bench.float8.measure import RECIPES, figures, measure_float8
from guild.bench.float8.table import float8_table
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape

SHAPE = Shape(tokens=96, hidden=64, intermediate=48, experts=4, top_k=2)


def plan_of(device: str) -> BenchPlan:
    given = {"rounds": 2, "calls": 1}
    shapes = {"layer": SHAPE}
    return BenchPlan(shapes, ("random",), ("guild",), torch.device(device), torch.bfloat16, **given)


def test_every_recipe_is_timed(device: str) -> None:
    """16 bits first; FP8 keeps less of H, and errs by its three mantissa bits."""
    record = measure_float8(plan_of(device), Console(file=io.StringIO()))
    assert json.loads(json.dumps(record)) == record
    (case,) = record["cases"]
    assert case["failures"] == {}
    figures_ = case["figures"]
    assert figures_.keys() == {*RECIPES, "weights", "steps"}
    assert len(figures_["weights"]["rounds_ms"]) == 2 and figures_["steps"]["up"]["low"] > 0
    saved, rows = case["saved_bytes"], SHAPE.tokens * SHAPE.top_k
    assert saved["fp8"] - saved["fp8, H in fp8"] == rows * (2 * 2 * 48 - 2 * 48 - 4 * 2)
    for name, errors in case["errors"].items():
        assert (errors["out"] > 0.01) == (name != "bf16")
    console = Console(file=io.StringIO(), width=200)
    console.print(float8_table(record))
    assert "weights, once a step" in console.file.getvalue()


def test_figures_by_hand() -> None:
    """Ratios are medians of the rounds', with the weights' quantisation and without."""
    times = {
        ("bf16", "forward"): [2.0, 4.0, 3.0],
        ("bf16", "backward"): [4.0, 8.0, 6.0],
        ("fp8", "forward"): [1.0, 2.0, 2.0],
        ("fp8", "backward"): [2.0, 4.0, 2.0],
        ("weights", "quantised"): [1.0, 2.0, 4.0],
        ("steps", "up"): [0.5, 0.25, 0.75],
    }
    found = figures(times, SHAPE)
    assert found["fp8"]["both"]["ms"]["median"] == 4.0
    assert found["fp8"]["forward"]["speedup"]["median"] == 2.0
    assert found["fp8"]["both"]["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.25}
    assert found["fp8"]["with_weights"]["median"] == 1.5
    assert found["weights"]["ms"]["median"] == 2.0 and found["steps"]["up"]["median"] == 0.5


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with its errors; the others are timed all the same."""
    recipes = {"bf16": None, "fp8": guild.FP8(cached=True)}
    monkeypatch.setattr(bench_float8, "RECIPES", recipes)
    monkeypatch.setattr(bench_float8, "MOST_ERROR", 1e-3)
    console = Console(file=io.StringIO(), width=200)
    (case,) = measure_float8(plan_of("cpu"), console)["cases"]
    assert case["failures"]["fp8"].startswith("wrong: errors") and "fp8" not in case["figures"]
    assert "bf16" in case["figures"] and "layer, fp8:" in console.file.getvalue()
