"""Random layers against the oracle: 100 on each device, `--fuzz N` or GUILD_FUZZ=N for more."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import oracle
from fuzz import drawn, failures_of_seed, from_repr
from fuzz_compare import Truth, compare, compare_recipe, compare_rounded, same_bits
from fuzz_draw import Values, place
from fuzz_experts import RoutedCase, SortedCase
from fuzz_moe import MoECase

PARTS, MOST_SHOWN = 10, 5

# A list is used where it is, on the CPU whatever its strides.
pytestmark = pytest.mark.filterwarnings("error::guild.CopiedWeightsWarning")


@pytest.mark.parametrize("part", range(PARTS))
def test_layers(part: int, device: str, request: pytest.FixtureRequest) -> None:
    """Results agree and repeat bit for bit, with zeros where they are promised."""
    count = request.config.getoption("--fuzz")
    seeds = range(part * count // PARTS, (part + 1) * count // PARTS)
    failed = [lines for seed in seeds if (lines := failures_of_seed(seed, device))]
    shown = "\n".join("\n    ".join(lines) for lines in failed[:MOST_SHOWN])
    assert not failed, f"{len(failed)} of {len(seeds)} cases\n{shown}"


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_a_printed_case_is_the_case(device_kind: str) -> None:
    """A seed gives the same case each time, and the case's repr gives it again."""
    for seed in range(200):
        text = repr(drawn(seed, device_kind))
        assert text == repr(drawn(seed, device_kind)) == repr(from_repr(text))


def test_parts_in_16_bits_err_as_in_16_bits() -> None:
    """A fifth off where the recipe is exact: fine if the layer without FP8 is half as far off."""
    truth = Truth({"x": torch.ones(100, dtype=torch.float64)})
    off = [{"x": torch.full((100,), 1 + part)} for part in (0.2, 0.11, 0.09)]
    assert len(compare_recipe(off[0], truth, truth)) == 1
    assert compare_recipe(off[0], truth, truth, off[1]) == []
    assert len(compare_recipe(off[0], truth, truth, off[2])) == 1


def test_half_wrong_needs_a_reference_as_wrong_in_the_same_way() -> None:
    """A layer of one token may have its only value on the other side of a limit."""
    truth = Truth({"x": torch.ones(100, dtype=torch.float64)})
    up, down = ({"x": torch.full((100,), value)} for value in (1.6, 0.4))
    assert compare_rounded(up, truth, {"x": up["x"] * 1.001}, truth, torch.bfloat16) == []
    assert len(compare_rounded(up, truth, down, truth, torch.bfloat16)) == 1
    assert len(compare_rounded(up, truth, truth.values, truth, torch.bfloat16)) == 1


def lists(case: Any) -> bool:
    return isinstance(case, RoutedCase) and case.slots is not None


def lora(case: Any) -> bool:
    """Whether a case has LoRA terms on both projections."""
    weights = getattr(case, "weights", None)
    terms = getattr(weights, "lora", None)
    return terms is not None and bool(terms.up or terms.gate) and bool(terms.down)


REACHED: dict[str, Callable[[Any], bool]] = {
    "fewer slots than tokens, recompute": lambda c: (
        lists(c) and 0 < c.slots < c.tokens and c.backward.recompute and bool(c.backward.wants)
    ),
    "fewer slots than tokens, weight_gradients": lambda c: (
        lists(c) and 0 < c.slots < c.tokens and c.backward.later and bool(c.backward.wants)
    ),
    "more slots than tokens": lambda c: lists(c) and c.slots > c.tokens > 0,
    "a slice of longer lists": lambda c: lists(c) and c.lead and c.spare and bool(c.backward.wants),
    "offsets[0] > 0": lambda c: isinstance(c, SortedCase) and c.lead and c.poison,
    "padding with NaN": lambda c: isinstance(c, MoECase) and c.poison != c.poison,
    "rounding in training": lambda c: isinstance(c, MoECase) and c.rounds,
    "no tokens": lambda c: isinstance(c, RoutedCase) and c.tokens == 0,
    "one expert": lambda c: isinstance(c, RoutedCase) and c.weights.experts == 1,
    "every expert": lambda c: isinstance(c, RoutedCase) and c.top_k == c.weights.experts > 1,
    "gradients of two passes": lambda c: hasattr(c, "backward") and c.backward.passes == 2,
    "LoRA of gate and up apart, weight_gradients": lambda c: (
        lora(c)
        and c.weights.lora.gate != c.weights.lora.up
        and c.weights.apart
        and c.backward.later
    ),
    "LoRA of transposed weights, lists": lambda c: lora(c) and c.weights.transposed and lists(c),
    "LoRA of frozen weights": lambda c: (
        lora(c) and any("." in n for n in c.backward.wants) and "w_up" not in c.backward.wants
    ),
    "LoRA, offsets[0] > 0": lambda c: isinstance(c, SortedCase) and lora(c) and c.lead and c.poison,
    "only gate or up": lambda c: (
        isinstance(c, RoutedCase)
        and c.weights.apart
        and ("w_up" in c.backward.wants) != ("w_gate" in c.backward.wants)
    ),
}


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", list(REACHED))
def test_reaches(name: str, device_kind: str) -> None:
    """The long form draws each of these features several times."""
    assert sum(bool(REACHED[name](drawn(seed, device_kind))) for seed in range(2000)) >= 3


def test_stochastic_rounding_is_the_same_on_every_device(device: str) -> None:
    """A GPU's results and the CPU reference that judges them choose the same rows."""
    cases = (c for s in range(1000) if isinstance(c := drawn(s, "cuda"), MoECase) and c.rounds)
    stochastic = [c for c in cases if c.routing.rounding == "stochastic"]
    assert len(stochastic) >= 5
    for case in stochastic:
        values = case.values(torch.float16)
        got, rounded = (case.run(values, d, torch.float16) for d in (device, "cpu"))
        assert torch.equal(got["counts0"].cpu(), rounded["counts0"])


def test_differences_are_found() -> None:
    """A wrong digit, a NaN, a missing or an unwanted gradient, a number in place of zero."""
    one = torch.ones(3, 2, dtype=torch.float64)
    zeros = torch.tensor([[True], [False], [False]])
    right = one.masked_fill(zeros, 0)
    truth = Truth({"out": right}, {"out": zeros})
    assert not compare({"out": right.clone()}, truth)
    leak = right.clone()
    leak[0, 1] = 1e-300
    for wrong in (right * (1 + 1e-9), right / zeros.logical_not(), leak, right[:2]):
        assert compare({"out": wrong}, truth)
    assert compare({}, truth) and compare({"out": right, "x": one}, truth)
    assert same_bits({"out": one}, {"out": one * (1 + 1e-15)})


def test_an_oracle_off_by_a_little_is_found(request: pytest.FixtureRequest) -> None:
    """What the oracle computes matters: with another activation no case agrees."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    cases = [c for s in range(300) if isinstance(c := drawn(s, "cpu"), SortedCase) and c.rows]
    for case in cases[:5]:
        values = case.values(torch.float64)
        activation = replace(case.weights.activation, alpha=1.01, kind="silu", limit=float("inf"))
        other = replace(case, weights=replace(case.weights, activation=activation))
        assert compare(case.run(values, "cpu", torch.float64), other.truth(values, {}))


@pytest.mark.parametrize("layout", ["packed", "window", "flipped", "every_second", "scattered"])
def test_layouts_hold_the_values(layout: str) -> None:
    """The same numbers, in memory of their own, in strides that differ."""
    for shape in ((3, 4, 5), (3, 1, 5), (3, 4, 1)):
        values = Values(0, torch.float64).normal(*shape)
        placed = place(values, layout, torch.float64, "cpu")
        assert torch.equal(placed, values) and placed.data_ptr() != values.data_ptr()
    values = values.expand(3, 4, 5)
    placed = place(values, layout, torch.float64, "cpu")
    assert (placed.stride() == (20, 5, 1)) == (layout == "packed")


def test_oracle_is_on_its_own() -> None:
    """It imports Python, torch and itself: nothing of Guild, which it judges."""
    found = set()
    for path in Path(oracle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
    assert "torch" in found and found - sys.stdlib_module_names == {"torch"}
