"""Experts of every family in Transformers: the model's own loop beside Guild."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed")

from calls import both, error, routing  # noqa: E402
from families import HIDDEN, Family, families, is_listed, make_experts  # noqa: E402
from guild.integrations.transformers.gate import gate_of  # noqa: E402


def test_all_families_are_found() -> None:
    assert len(families()) >= 50
    assert {"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v4", "nemotron_h"} <= {
        family.model for family in families()
    }


@pytest.mark.parametrize("family", families(), ids=str)
def test_family_is_the_same(family: Family) -> None:
    torch.manual_seed(0)
    experts = make_experts(family)
    x = 3 * torch.randn(12, HIDDEN)
    ids, scores = routing(12)
    with warnings.catch_warnings():
        # Every family takes the fused path, except those newer than the documents.
        warnings.simplefilter("error" if is_listed(family) else "ignore")
        eager, ours = both(experts, x, ids, scores)
    assert eager.keys() == ours.keys()
    for name in eager:
        assert error(ours[name], eager[name]) < 1e-5, name


@pytest.mark.parametrize("family", [f for f in families() if is_listed(f)], ids=str)
def test_family_has_an_activation(family: Family) -> None:
    experts = make_experts(family)
    gate = gate_of(experts)
    assert gate is not None
    assert gate.order == ("concatenated" if experts.is_concatenated else "interleaved")
