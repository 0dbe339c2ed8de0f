"""Replaced blocks with PEFT's adapters on any of their parts."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial

import pytest
import torch
from torch import nn

if not all(map(importlib.util.find_spec, ("transformers", "peft"))):
    pytest.skip("Transformers or PEFT is not installed", allow_module_level=True)

import peft  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

from guild.integrations.transformers import replace_moe_blocks, restore_moe_blocks  # noqa: E402
from models import eager, expect_same, step  # noqa: E402
from test_transformers_peft import random_terms  # noqa: E402

ROUTERS = {
    "Llama4TextConfig": "feed_forward.router",
    "GptOssConfig": "mlp.router",
    "DeepseekV3Config": "mlp.gate",
    "Qwen3MoeConfig": "mlp.gate",
}

EXPERTS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def adapted(model: nn.Module, *parameters: str, **options: object) -> nn.Module:
    """The model with low-rank terms of these parameters, none of them zero."""
    options = {"target_modules": [], "target_parameters": list(parameters)} | options
    torch.manual_seed(1)
    return random_terms(peft.get_peft_model(model, peft.LoraConfig(r=2, **options)))


def replaced_in(model: nn.Module) -> list[str]:
    """The blocks that are replaced, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [name[name.index("layers") :] for name in replace_moe_blocks(model)]


def expect_same_when_replaced(name: str, first: str, *parameters: str, **options: object) -> None:
    expected = step(adapted(eager(name), *parameters, **options))
    model = eager(name)
    blocks = [n[n.index("layers") :] for n, m in model.named_modules() if hasattr(m, "experts")]
    if first == "blocks":
        assert replaced_in(model) == blocks
        model = adapted(model, *parameters, **options)
    else:
        model = adapted(model, *parameters, **options)
        assert replaced_in(model) == blocks
    expect_same(step(model), expected)
    assert len(restore_moe_blocks(model)) == len(blocks)
    expect_same(step(model), expected)


@pytest.mark.parametrize("first", ["adapters", "blocks"])
@pytest.mark.parametrize("name", ROUTERS)
def test_adapters_on_routers(name: str, first: str) -> None:
    expect_same_when_replaced(name, first, f"{ROUTERS[name]}.weight")


@pytest.mark.parametrize("layer", [0, 1])
def test_adapters_on_the_router_of_one_layer(layer: int) -> None:
    """Whether or not it is the first block, which is tried for its class."""
    expect_same_when_replaced("Qwen3MoeConfig", "adapters", f"layers.{layer}.mlp.gate.weight")


@pytest.mark.parametrize("first", ["adapters", "blocks"])
@pytest.mark.parametrize("weight", ["gate_up_proj", "down_proj"])
def test_adapters_on_experts_of_llama4(weight: str, first: str) -> None:
    expect_same_when_replaced("Llama4TextConfig", first, f"feed_forward.experts.{weight}")


def test_adapters_on_all_of_llama4() -> None:
    parts = "router.weight", "experts.gate_up_proj", "experts.down_proj"
    expect_same_when_replaced("Llama4TextConfig", "blocks", *(f"feed_forward.{p}" for p in parts))


def test_adapters_on_experts_with_a_forward_of_their_own() -> None:
    """As a profiler gives them one: it runs, with PEFT's sum of weights."""
    expected = step(adapted(eager("Qwen3MoeConfig"), *EXPERTS))
    model = adapted(eager("Qwen3MoeConfig"), *EXPERTS)
    for module in model.modules():
        if isinstance(module, modeling_qwen3_moe.Qwen3MoeExperts):
            module.forward = partial(module.forward)
    assert len(replaced_in(model)) == 2
    expect_same(step(model), expected)


def test_trained_copies_of_blocks() -> None:
    """PEFT's `modules_to_save`: the blocks, and the copies of them that are trained."""
    options = dict(target_modules=["q_proj"], modules_to_save=["mlp"])
    expected = step(adapted(eager("Qwen3MoeConfig"), **options))
    model = adapted(eager("Qwen3MoeConfig"), **options)
    assert len(replaced_in(model)) == 4
    expect_same(step(model), expected)
