"""Two ranks with gloo: selection biases that stay equal, sums over ranks, FSDP's conversions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import guild
from processes import run_on_ranks

_RANKS, _STEPS, _RATE = 2, 6, 1e-2


def layer_of() -> guild.MoE:
    """The same layer on every rank."""
    torch.manual_seed(0)
    router = guild.Router("sigmoid", selection_bias=True)
    return guild.MoE(16, 8, 6, 2, router=router, balance_over="batch")


def tokens_of(rank: int, step: int) -> Tensor:
    """Different tokens on every rank that prefer different experts: own biases would diverge."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(40 + 10 * rank, 16, generator=draw)
    return x + 2 * layer_of().router.weight[rank].detach()


def gathered(tensor: Tensor) -> list[Tensor]:
    """The tensor of every rank."""
    everyone = [torch.empty_like(tensor) for _ in range(_RANKS)]
    dist.all_gather(everyone, tensor)
    return everyone


def biases_stay_equal(rank: int) -> None:
    """Each step follows the load of all ranks' tokens, to the last bit."""
    moe, alone = layer_of(), layer_of()
    for step in range(_STEPS):
        moe(tokens_of(rank, step))
        moe.balance(_RATE)
        alone(torch.cat([tokens_of(r, step) for r in range(_RANKS)]))
        load = alone.expert_counts
        alone.router.selection_bias += _RATE * torch.sign(load.double().mean() - load).float()
        for bias in gathered(moe.router.selection_bias):
            assert torch.equal(bias, alone.router.selection_bias), step
    assert moe.router.selection_bias.unique().numel() > 2


def groups_are_apart(rank: int) -> None:
    """Ranks of other groups are not counted."""
    groups = [dist.new_group([r]) for r in range(_RANKS)]
    moe = layer_of()
    moe(tokens_of(rank, 0))
    load = moe.expert_counts.double()
    moe.balance(_RATE, groups[rank])
    expected = _RATE * torch.sign(load.mean() - load).float()
    assert torch.equal(moe.router.selection_bias, expected)
    first, second = gathered(moe.router.selection_bias)
    assert not torch.equal(first, second)
    moe.balance(_RATE, group=dist.group.WORLD)
    both = gathered(moe.router.selection_bias - expected)
    torch.testing.assert_close(*both)


def strangers_are_refused(rank: int) -> None:
    """A rank outside the group would move its bias by its own load alone."""
    group = dist.new_group([0])
    moe = layer_of()
    moe(tokens_of(rank, 0))
    if rank == 0:
        moe.balance(_RATE, group)
        moe.balance_sums.over_ranks(group)
        return
    for call in (lambda: moe.balance(_RATE, group), lambda: moe.balance_sums.over_ranks(group)):
        with pytest.raises(ValueError, match=r"^group: expected one that this rank is in"):
            call()
    assert not moe.router.selection_bias.any()


def sums_over_ranks(rank: int) -> None:
    """Counts of all ranks, in a tensor of their own; the mean of the losses is that of all."""
    moe, alone = layer_of(), layer_of()
    parts = [tokens_of(r, 0)[:40] for r in range(_RANKS)]
    moe(parts[rank])
    alone(torch.cat(parts))
    own = moe.balance_sums.counts.clone()
    sums = moe.balance_sums.over_ranks()
    assert torch.equal(sums.counts, alone.balance_sums.counts)
    assert torch.equal(moe.balance_sums.counts, own) and not torch.equal(own, sums.counts)
    losses = gathered(sums.load_balancing_loss().detach())
    torch.testing.assert_close(torch.stack(losses).mean(), alone.load_balancing_loss)
    lone = moe.balance_sums.over_ranks([dist.new_group([r]) for r in range(_RANKS)][rank])
    assert torch.equal(lone.counts, own)


def converted_by_fsdp(rank: int) -> None:
    """Parameters in bfloat16, the selection bias in float32; a step that bfloat16 would swallow."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    whole = init_device_mesh("cpu", (_RANKS,))
    for shard_router in (False, True):
        moe = layer_of().to(torch.bfloat16).float()
        if shard_router:
            fully_shard(moe.router, mesh=whole, mp_policy=policy)
        fully_shard(moe, mesh=whole, mp_policy=policy)
        out = moe(tokens_of(rank, 0))
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        assert moe.router.weight.grad.norm() > 0
        assert moe.router.selection_bias.dtype == torch.float32
        moe.router.selection_bias.fill_(3)
        moe.balance(1e-3)
        moved = moe.router.selection_bias - 3
        assert (moved.abs() > 5e-4).any()
        assert all(torch.equal(bias, moved) for bias in gathered(moved))


CHECKS = (
    biases_stay_equal,
    groups_are_apart,
    strangers_are_refused,
    sums_over_ranks,
    converted_by_fsdp,
)


def test_two_ranks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every check on both ranks."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    run_on_ranks(CHECKS, _RANKS, tmp_path)


def test_without_ranks() -> None:
    """One process: the load of its own forward; experts at the mean stay."""
    moe = layer_of()
    x = tokens_of(0, 0)
    moe(x)
    load = moe.expert_counts.double()
    moe.balance(_RATE)
    expected = (_RATE * torch.sign(load.mean() - load)).float()
    assert torch.equal(moe.router.selection_bias, expected) and expected.unique().numel() > 1
