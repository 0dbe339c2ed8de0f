"""Experts that a rank has to itself: no replicas for clipping, DDP and FSDP; tied, or in FP8.

Run by test_four_ranks.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import guild
from guild.distributed.placement import clip_grad_norm_, leave_out_experts
from processes import gathered


def group_of_experts(rank: int) -> None:
    """Experts of an expert_group are no replicas: not in a norm, for DDP, nor for FSDP2."""
    group = guild.ExpertParallel()
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(rank))

    def made() -> tuple[guild.MoE, nn.Module]:
        torch.manual_seed(0)
        layer = guild.MoE(32, 16, 8, 2, bias=True, expert_group=group)
        return layer, nn.Sequential(layer)

    alone = made()[0]
    out = alone(x)
    out.sum().backward()
    grads = {name: weight.grad for name, weight in alone.named_parameters()}
    dist.all_reduce(grads["router.weight"])
    grads["router.weight"] /= dist.get_world_size()
    for layer in made():
        with pytest.raises(ValueError, match=r"^expert_group: .* DistributedDataParallel"):
            DistributedDataParallel(layer)(x)
    frozen, model = made()  # DistributedDataParallel overwrites these, too
    frozen.w_up.requires_grad_(False), frozen.w_down.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^expert_group: .* DistributedDataParallel"):
        DistributedDataParallel(model)(x)
    for original in (False, True):
        model = FullyShardedDataParallel(
            made()[1], device_id=torch.device("cpu"), use_orig_params=original
        )
        with pytest.raises(ValueError, match=r"^expert_group: .* ignored_states"):
            model(x)
    for layer, model in (made(), made()[:1] * 2):
        leave_out_experts(model)
        together = DistributedDataParallel(model)
        found = together(x)
        assert torch.equal(found, out)
        layer.zero_grad()
        found.sum().backward()
        for name, weight in layer.named_parameters():
            torch.testing.assert_close(weight.grad, grads[name])
    experts = torch.cat([grads[name].flatten() for name in ("w_up", "w_down", "b_up", "b_down")])
    for kind in (2.0, float("inf")):
        truth = torch.cat([*gathered(experts), grads["router.weight"].flatten()]).norm(kind)
        torch.testing.assert_close(clip_grad_norm_(layer.parameters(), 1e9, kind), truth)
    layer, model = made()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(ValueError, match=r"^expert_group: .* that FSDP2 has sharded"):
        model(x)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    layer = guild.MoE(32, 16, 8, 2, expert_group=guild.ExpertParallel(mesh["experts"]))
    out = layer(x)
    data = mesh["data"]  # of ranks with the same experts
    averaged = DistributedDataParallel(copy.deepcopy(layer), process_group=data.get_group())
    for same in (averaged, fully_shard(layer, mesh=data)):
        assert torch.equal(same(x), out)


class _Frozen(nn.Module):
    """Experts that are buffers, called over ranks without a layer."""

    def __init__(self, group: guild.ExpertParallel) -> None:
        super().__init__()
        self.scale, self.group = nn.Parameter(torch.ones(())), group
        self.register_buffer("w_up", torch.randn(2, 32, 32))
        self.register_buffer("w_down", torch.randn(2, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        ids, scores = torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1)
        return self.scale * self.group.routed_experts(x, ids, scores, self.w_up, self.w_down)


def experts_in_buffers(rank: int) -> None:
    """DistributedDataParallel overwrites buffers, too."""
    module, x = _Frozen(guild.ExpertParallel()), torch.randn(4, 32)
    assert torch.isfinite(module(x)).all()
    with pytest.raises(ValueError, match=r"^expert_group: .* DistributedDataParallel"):
        DistributedDataParallel(module)(x)


def low_rank_terms_of_experts(rank: int) -> None:
    """LoRA terms of a rank's experts count in a norm over all ranks."""
    group = guild.ExpertParallel()
    torch.manual_seed(rank)
    w_up, w_down = torch.randn(2, 32, 8), torch.randn(2, 8, 16)
    a, b = nn.Parameter(torch.randn(2, 2, 8)), nn.Parameter(torch.randn(2, 32, 2))
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    terms = guild.LoRA(a, b)
    out = group.routed_experts(
        torch.randn(4, 8), ids, torch.rand(4, 2), w_up, w_down, lora_up=terms
    )
    out.sum().backward()
    truth = torch.cat(gathered(torch.cat([a.grad.flatten(), b.grad.flatten()]))).norm()
    torch.testing.assert_close(clip_grad_norm_([a, b], 1e9), truth)


def cached_codes(rank: int) -> None:
    """FP8 is refused by its name where experts are on other ranks, and works on a mesh of one."""
    options = {"fp8": guild.FP8(cached=True), "dtype": torch.bfloat16}
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    layer = guild.MoE(128, 128, 4, 2, **options)
    wanted = layer(x)
    alone = DeviceMesh("cpu", [rank])
    guild.distribute_experts(layer, alone)
    assert torch.equal(layer(x), wanted)
    layer = guild.MoE(128, 128, 4, 2, **options)
    guild.distribute_experts(layer, init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(NotImplementedError, match=r"^fp8: expected None with experts on other"):
        layer(x)


def tied_experts(rank: int) -> None:
    """Layers that share experts still do once these are distributed."""
    first, second = (guild.MoE(16, 8, 4, 2) for _ in range(2))
    second.w_up = first.w_up
    guild.distribute_experts(
        nn.Sequential(first, second), init_device_mesh("cpu", (dist.get_world_size(),))
    )
    assert second.w_up is first.w_up and isinstance(first.w_up, DTensor)
    assert second.w_down is not first.w_down


CHECKS = (
    group_of_experts,
    experts_in_buffers,
    low_rank_terms_of_experts,
    cached_codes,
    tied_experts,
)
