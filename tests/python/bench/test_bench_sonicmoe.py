"""`guild bench --sonicmoe`: SonicMoE's weight order, calls and figures; the default routings."""

from __future__ import annotations

import io
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from guild.bench import sonicmoe
from guild.bench.layers import measure
from guild.bench.names import SONICMOE
from guild.bench.plan import BenchPlan, plan_bench
from guild.bench.presets import Shape
from guild.bench.report import full_table, report, short_table
from guild.cli.main import make_parser

TINY = Shape(tokens=48, hidden=32, intermediate=16, experts=8, top_k=2)


def layer_of_gate_and_up_in_turn(
    x: Tensor,
    router: Tensor,
    w_up: Tensor,
    b_up: None,
    w_down: Tensor,
    b_down: None,
    top_k: int,
    stream: int,
    activation: str,
    inference: bool,
) -> tuple[Tensor]:
    """What the package's function computes, with weights whose last dimension is the experts."""
    assert (b_up, b_down, stream, activation, inference) == (None, None, 77, "swiglu", False)
    top, ids = F.linear(x, router).topk(top_k)
    both = torch.einsum("th,uhe->teu", x, w_up)
    y = torch.einsum("tei,hie->teh", F.silu(both[..., 0::2]) * both[..., 1::2], w_down)
    chosen = y.gather(1, ids[..., None].expand(-1, -1, x.shape[1]))
    return ((top.softmax(-1)[..., None] * chosen).sum(1),)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for SonicMoE's package, with the parts that the benchmark calls."""
    functional = ModuleType("sonicmoe.functional")
    functional.moe_TC_softmax_topk_layer = layer_of_gate_and_up_in_turn
    enums = ModuleType("sonicmoe.enums")
    enums.ActivationType = str
    modules = {"sonicmoe": ModuleType("sonicmoe")}
    modules |= {"sonicmoe.functional": functional, "sonicmoe.enums": enums}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return functional


def record_of(routings: tuple[str, ...], *candidates: str) -> dict[str, Any]:
    place = torch.device("cpu"), torch.float32
    plan = BenchPlan({"tiny": TINY}, routings, candidates, *place, rounds=1, calls=1)
    return json.loads(json.dumps(measure(plan, Console(file=io.StringIO()))))


def test_gate_and_up_in_turn() -> None:
    weight = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    turned = sonicmoe.in_turn(weight)
    assert torch.equal(turned[:, 0::2], weight[:, :3])
    assert torch.equal(turned[:, 1::2], weight[:, 3:])
    assert torch.equal(sonicmoe.in_halves(turned), weight)


def test_layer_is_checked_and_timed(package: ModuleType) -> None:
    record = record_of(("random", "balanced"), "guild", "bound", "plain", SONICMOE)
    for case in record["cases"]:
        assert case["failures"] == {}
        assert max(case["errors"][SONICMOE].values()) < 1e-5
        assert case["figures"]["guild"]["backward"]["speedup_over"].keys() == {"plain", SONICMOE}
        assert "over_balanced" in case["figures"][SONICMOE]["forward"]
    both = ["| tiny, random", "| tiny, balanced"]
    for table, names in ((short_table(record), ["| tiny"]), (full_table(record), both)):
        first, _, *lines = table.splitlines()
        assert first.endswith("| SonicMoE / Guild |")
        assert [line.split(" | ")[0] for line in lines] == names
        assert all(line.count("|") == first.count("|") for line in lines)
    assert "over balanced" in report(record)


def test_a_wrong_layer_is_not_timed(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = package.moe_TC_softmax_topk_layer
    monkeypatch.setattr(
        package,
        "moe_TC_softmax_topk_layer",
        lambda x, router, w_up, *rest: right(x, router, w_up.flip(0), *rest),
    )
    (case,) = record_of(("random",), SONICMOE)["cases"]
    assert case["failures"][SONICMOE].startswith("wrong out")
    assert case["figures"] == {}


def planned(*words: str) -> BenchPlan:
    return plan_bench(make_parser().parse_args(["bench", "--device", "cpu", *words]))


def test_option_needs_the_package_and_whole_layers() -> None:
    with pytest.raises(ValueError, match="sonicmoe: expected a GPU and the package sonicmoe"):
        planned("--sonicmoe")
    with pytest.raises(ValueError, match="--sonicmoe: cannot be used with --steps"):
        planned("--steps", "--sonicmoe")


@pytest.mark.parametrize(
    ("words", "routings"),
    [
        ("", ("random", "balanced")),
        ("--routing zipf", ("zipf",)),
        ("--steps", ("balanced",)),
        ("--sweep 2", ("random",)),
        ("--memory", ("random",)),
        ("--rounding", ("random",)),
        ("--decode", ("random",)),
    ],
)
def test_default_routings(words: str, routings: tuple[str, ...]) -> None:
    assert planned(*words.split()).routings == routings
