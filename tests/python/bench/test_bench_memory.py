"""`guild bench --memory`: what is counted, against formulas worked out by hand."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from guild.bench.memory import SLOT_BYTES, measure_memory, memory_formula, saved_tensors
from guild.bench.plan import BenchPlan
from guild.bench.presets import PRESETS, Shape
from guild.bench.tables.memory import memory_table

SHAPE = Shape(tokens=256, hidden=64, intermediate=128, experts=16, top_k=4)


def plan_of(device: str, dtype: torch.dtype, candidates: tuple[str, ...]) -> BenchPlan:
    return BenchPlan({"layer": SHAPE}, ("random",), candidates, torch.device(device), dtype)


def measured(device: str, dtype: torch.dtype, *candidates: str) -> dict[str, Any]:
    record = measure_memory(
        plan_of(device, dtype, candidates), Console(file=io.StringIO(), width=150)
    )
    assert json.loads(json.dumps(record)) == record
    (case,) = record["cases"]
    assert case["failures"] == {}
    assert case["layers"].keys() == set(candidates) - {"bound"}
    console = Console(file=io.StringIO(), width=150)
    console.print(memory_table(record))
    assert "saved" in console.file.getvalue()
    return case


def test_formula() -> None:
    """2TH + 4TKI and 24 bytes a slot in bf16; forward adds A, Y, O and float32 logits to H."""
    t, h, i, e, k = PRESETS["qwen30b"]
    found = memory_formula(PRESETS["qwen30b"], torch.bfloat16)
    assert found["saved"] == 2 * t * h + 4 * t * k * i + 24 * t * k
    forward = t * k * (4 * i + 2 * i + 2 * h + 24) + 2 * t * h + 4 * t * e
    assert found["forward"] == forward
    assert found["backward"] == t * k * (4 * i + 2 * i + 2 * h + 4)


def test_each_storage_counts_once() -> None:
    """Views and parameters are not counted; of a product, autograd keeps the input."""
    layer = nn.Linear(8, 4)
    x = torch.randn(5, 8, requires_grad=True)
    (kept,) = saved_tensors(lambda: layer(x), layer.parameters())
    assert kept.data_ptr() == x.data_ptr()
    layers = nn.Sequential(nn.Flatten(), layer, nn.Sigmoid())
    assert len(saved_tensors(lambda: layers(x), layers.parameters())) == 2


def test_guild_keeps_what_the_formula_says(device: str) -> None:
    """X, H and the routing are kept, but not the router's logits."""
    dtype = torch.bfloat16
    case = measured(device, dtype, "guild", "bound")
    found = case["layers"]["guild"]
    assert found["saved_bytes"] <= case["formula"]["saved"]
    without_routing = case["formula"]["saved"] - SLOT_BYTES * SHAPE.tokens * SHAPE.top_k
    assert found["saved_bytes"] > without_routing
    assert sum(tensor["bytes"] for tensor in found["saved"]) == found["saved_bytes"]
    assert ("forward_peak_bytes" in found) == (device == "cuda")


def test_plain_torch_keeps_more() -> None:
    case = measured("cpu", torch.float32, "plain", "guild")
    layers = case["layers"]
    assert layers["plain"]["saved_bytes"] > 1.5 * layers["guild"]["saved_bytes"]


def test_peaks(gpu: str) -> None:
    """The layer is large enough that the allocator's rounding does not matter."""
    shape = Shape(4096, 512, 512, 16, 4)
    plan = BenchPlan({"a": shape}, ("random",), ("guild",), torch.device(gpu), torch.bfloat16)
    (case,) = measure_memory(plan, Console(file=io.StringIO()))["cases"]
    found = case["layers"]["guild"]
    slack = 12 * shape.tokens * shape.experts + 24 * shape.tokens * shape.top_k
    for which in ("forward", "backward"):
        wanted = case["formula"][which]
        assert 0.9 * wanted < found[f"{which}_peak_bytes"] <= wanted + slack, which


@pytest.mark.parametrize("name", ["guild", "eager"])
def test_failures_are_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("guild.bench.memory.layer_module", fail)
    record = measure_memory(
        plan_of("cpu", torch.float32, (name,)), Console(file=io.StringIO(), width=150)
    )
    assert record["cases"][0]["failures"] == {name: "out of memory"}
    Console(file=io.StringIO()).print(memory_table(record))
