"""`guild bench --fp8`: every recipe is checked and timed; quantising the weights is timed apart."""

from __future__ import annotations

import io
import itertools
import json

import pytest
import torch
from rich.console import Console

import guild
from guild.bench.float8 import measure as bench_float8
from guild.bench.float8.measure import RECIPES, Float8Layer, figures, measure_float8
from guild.bench.float8.rowwise import padded_places
from guild.bench.float8.rowwise_passes import torch_passes
from guild.bench.float8.table import float8_table
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape
from guild.bench.problem import make_problems

SHAPE = Shape(tokens=96, hidden=64, intermediate=48, experts=4, top_k=2)


def plan_of(device: str, shape: Shape = SHAPE) -> BenchPlan:
    given = {"rounds": 2, "calls": 1}
    shapes = {"layer": shape}
    return BenchPlan(shapes, ("random",), ("guild",), torch.device(device), torch.bfloat16, **given)


def test_every_recipe_is_timed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 16-bit layer comes first; FP8 keeps less of H, and errs by its three mantissa bits."""
    monkeypatch.setattr(bench_float8, "why_not", lambda *_: "half a minute of compilation")
    console = Console(file=io.StringIO(), width=200)
    record = measure_float8(plan_of(device), console)
    assert "without PyTorch's layers in FP8: half a minute" in console.file.getvalue()
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


def test_input_sets_that_have_not_run() -> None:
    """Recipes share the codes that the first one made, also for input sets that it has not run."""
    device = torch.device("cpu")
    sets = [make_problems(SHAPE, "random", torch.bfloat16, device, seed)[0] for seed in (0, 1)]
    first = Float8Layer("fp8, 16-bit dW", sets)
    first.results()
    second = Float8Layer("fp8", sets, first)
    outs = [second.forward() for _ in sets]
    assert second.weights().codes is first.weights().codes
    assert torch.equal(outs[0], first.forward()) and torch.equal(outs[1], first.forward())
    assert not torch.equal(*outs)


def test_figures_by_hand() -> None:
    """Ratios are medians over rounds, with and without the quantisation of the weights."""
    times = {
        ("bf16", "forward"): [2.0, 4.0, 3.0],
        ("bf16", "backward"): [4.0, 8.0, 6.0],
        ("bf16", "both"): [6.0, 12.0, 9.0],
        ("fp8", "forward"): [1.0, 2.0, 2.0],
        ("fp8", "backward"): [2.0, 4.0, 2.0],
        ("fp8", "both"): [3.0, 6.0, 4.0],
        ("weights", "quantised"): [1.0, 2.0, 4.0],
        ("steps", "up"): [0.5, 0.25, 0.75],
    }
    found = figures(times, SHAPE)
    assert found["fp8"]["both"]["ms"]["median"] == 4.0
    assert found["fp8"]["forward"]["speedup"]["median"] == 2.0
    assert found["fp8"]["both"]["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.25}
    assert found["fp8"]["with_weights"]["median"] == 1.5
    assert found["weights"]["ms"]["median"] == 2.0 and found["steps"]["up"]["median"] == 0.5


def test_few_tokens_may_err_more() -> None:
    """The router's gradient of 8 tokens is a sum of numbers that nearly cancel."""
    console = Console(file=io.StringIO(), width=200)
    (case,) = measure_float8(plan_of("cpu", Shape(8, 128, 64, 4, 2)), console)["cases"]
    assert case["failures"] == {}
    assert bench_float8.most_error(8) > 2 * bench_float8.MOST_ERROR


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong layer is named with its errors, and the others are still timed."""
    recipes = {"bf16": None, "fp8": guild.FP8(cached=True)}
    monkeypatch.setattr(bench_float8, "RECIPES", recipes)
    monkeypatch.setattr(bench_float8, "MOST_ERROR", 1e-3)
    console = Console(file=io.StringIO(), width=200)
    (case,) = measure_float8(plan_of("cpu"), console)["cases"]
    assert case["failures"]["fp8"].startswith("wrong: errors") and "fp8" not in case["figures"]
    assert "bf16" in case["figures"]
    assert "layer, random routing, fp8:" in console.file.getvalue()


def product_in_float64(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """What torch._scaled_grouped_mm documents, with its requirements; the CPU has no such op."""
    assert a.is_contiguous() and b.mT.is_contiguous() and use_fast_accum
    assert offs.dtype == torch.int32 and not (offs % 16).any()
    assert all(size % 16 == 0 for size in (*a.shape, *b.shape[-2:]))
    assert scale_a.is_contiguous() and scale_b.is_contiguous()
    ends, (a, b) = offs.tolist(), (a.double(), b.double())
    spans = list(zip([0, *ends], ends, strict=False))
    if b.dim() == 2:  # each column of an expert has a scale
        factors = zip(scale_a.view(len(ends), -1), scale_b.view(len(ends), -1), strict=True)
        parts = zip(spans, factors, strict=True)
        sums = [of_a[:, None] * of_b * (a[:, s:e] @ b[s:e]) for (s, e), (of_a, of_b) in parts]
        return torch.stack(sums).to(out_dtype)
    assert scale_a.shape == a.shape[:1] and scale_b.shape == (b.shape[0], b.shape[2])
    out = a.new_full((a.shape[0], b.shape[2]), torch.nan)  # rows that belong to no group may be NaN
    for expert, (s, e) in enumerate(spans):
        out[s:e] = scale_a[s:e, None] * scale_b[expert] * (a[s:e] @ b[expert])
    return out.to(out_dtype)


@pytest.mark.parametrize("torchao", [False, True])
def test_torch_layer_beside(torchao: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer with PyTorch's products is right, and Guild's speed is reported relative to it."""
    monkeypatch.setattr(torch, "_scaled_grouped_mm", product_in_float64)
    monkeypatch.setattr(bench_float8, "why_not", lambda *_: None)
    passes = torch_passes() if torchao else None
    monkeypatch.setattr(bench_float8, "torchao_passes", lambda: passes)
    recipes = {name: RECIPES[name] for name in ("bf16", "fp8")}
    monkeypatch.setattr(bench_float8, "RECIPES", recipes)
    console = Console(file=io.StringIO(), width=200)
    record = measure_float8(plan_of("cpu"), console)
    (case,) = record["cases"]
    assert not case["failures"]
    assert ("torchao 0.18 is not installed" in console.file.getvalue()) == (not torchao)
    for peer in ("torch rowwise", "torchao rowwise")[: 1 + torchao]:
        ours, theirs = (case["errors"][name] for name in ("fp8", peer))
        assert all(0.5 * ours[name] < theirs[name] < 2 * ours[name] for name in ours)
        found = case["figures"][peer]
        assert found["guild"].keys() == {"both", "with_weights"}
        assert found["weights"]["ms"]["low"] > 0
    console.print(float8_table(record))
    assert "Guild x with weights" in console.file.getvalue()


@pytest.mark.parametrize("counts", [(0, 1, 15, 16, 17, 0), (0, 0, 0)], ids=str)
def test_places_are_padded(counts: tuple[int, ...]) -> None:
    """Every slot has a row in its expert's part, and padding rows have no score."""
    ids = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)]).int()
    scores = torch.rand(len(ids), 1) + 1
    places = padded_places(ids[:, None], scores, len(counts))
    ends = places.ends.tolist()
    assert ends == list(itertools.accumulate(-(-count // 16) * 16 for count in counts))
    assert len(places.row_token) % 16 == 0 and len(places.row_token) >= ends[-1]
    rows = places.slot_row.flatten().long()
    assert torch.equal(places.row_token[rows], torch.arange(len(ids)))
    assert torch.equal(places.row_score[rows], scores[:, 0])
    assert torch.searchsorted(places.ends, rows, right=True).tolist() == ids.tolist()
    assert (places.row_score > 0).sum() == len(ids)
