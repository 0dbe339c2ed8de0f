"""Experts of every family in 16 bits, with the same routing: Guild's error beside grouped_mm's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="Transformers is not installed")

from calls import error, layouts, results, routing  # noqa: E402
from families import HIDDEN, Family, families, make_experts  # noqa: E402

TOKENS = 256


@pytest.mark.parametrize("family", families(), ids=str)
def test_every_family_on_a_gpu(family: Family, gpu: str) -> None:
    expect_at_most_twice_the_error_of_grouped_mm(family, gpu)


@layouts
def test_every_layout_on_the_cpu(family: Family) -> None:
    expect_at_most_twice_the_error_of_grouped_mm(family, "cpu")


def expect_at_most_twice_the_error_of_grouped_mm(family: Family, device: str) -> None:
    """Output and every gradient, compared with the model's own loop in float64."""
    torch.manual_seed(0)
    experts = make_experts(family, torch.bfloat16)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    ids, scores = routing(TOKENS)
    exact = results("eager", copy.deepcopy(experts).double(), x.double(), ids, scores.double())
    call = [t.to(device) for t in (experts, x, ids, scores)]
    ours, theirs = errors("guild", exact, *call), errors("grouped_mm", exact, *call)
    assert ours.keys() == theirs.keys() == exact.keys()
    worse = {name: (ours[name], theirs[name]) for name in ours if ours[name] > 2 * theirs[name]}
    assert not worse


def errors(name: str, exact: dict[str, Tensor], *call: nn.Module | Tensor) -> dict[str, float]:
    """Errors of one implementation by result, each at least a float32 rounding."""
    found = results(name, *call)
    return {key: max(error(value.cpu().double(), exact[key]), 1e-7) for key, value in found.items()}
