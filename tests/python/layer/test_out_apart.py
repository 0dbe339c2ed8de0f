"""`out=` may not share memory with parameters that only a part of the call reads."""

from __future__ import annotations

import pytest
import torch

import guild


@torch.no_grad()
def test_shared_experts(device: str) -> None:
    layer = guild.MoE(64, 16, 4, 1, shared_experts=1, dtype=torch.bfloat16, device=device)
    x = torch.randn(4, 64, dtype=torch.bfloat16, device=device)
    for name in ("shared.w_up", "shared.w_down", "router.weight"):
        out = layer.get_parameter(name).data.flatten()[: x.numel()].view(x.shape)
        with pytest.raises(ValueError, match=rf"out: .* shared with {name}"):
            layer(x, out=out)


@pytest.mark.parametrize("scale", [1.0, 2.0])  # with another scale than 1 the op reads a copy
@torch.no_grad()
def test_low_rank_factors(scale: float, device: str) -> None:
    layer = guild.MoE(64, 16, 4, 1, dtype=torch.bfloat16, device=device)
    x = torch.randn(4, 64, dtype=torch.bfloat16, device=device)
    ids, scores = torch.zeros(4, 1, dtype=torch.int32, device=device), x.new_ones(4, 1)
    ends = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32, device=device)
    memory = x.new_ones(4 * 32 * 64)
    low = guild.LoRA(x.new_ones(4, 8, 64), memory.view(4, 64, 32)[:, :32, :8], scale)
    own = guild.LoRA(memory[: 4 * 8 * 64].view(4, 8, 64), x.new_ones(4, 32, 8), scale)
    for name, term in (("b", low), ("a", own)):
        options = {"lora_up": term, "out": memory[: x.numel()].view(x.shape)}
        weights = layer.w_up, layer.w_down
        with pytest.raises(ValueError, match=rf"out: .* shared with lora_up\.{name}"):
            guild.routed_experts(x, ids, scores, *weights, **options)
        with pytest.raises(ValueError, match=rf"out: .* shared with lora_up\.{name}"):
            guild.experts_mlp(x, ends, *weights, **options)


@torch.no_grad()
def test_low_rank_terms_beside_an_output_without_strides() -> None:
    layer, x = guild.MoE(64, 16, 4, 1), torch.ones(4, 64)
    chosen = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    low = guild.LoRA(torch.ones(4, 8, 64), torch.ones(4, 32, 8))
    for out, kind in (
        (torch.zeros(4, 64).to_sparse(), r"one of layout torch\.sparse_coo"),
        (torch.nested.nested_tensor(list(torch.zeros(4, 64))), "a nested one"),
    ):
        with pytest.raises(TypeError, match=rf"^out: expected a dense tensor, got {kind}"):
            guild.routed_experts(x, *chosen, layer.w_up, layer.w_down, lora_up=low, out=out)
