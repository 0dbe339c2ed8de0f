"""Layers that FSDP2 shards and groups of experts on the same ranks, run by test_four_ranks.py."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import guild
from guild.distributed.placement import clip_grad_norm_, expert_weights, shard_layers
from processes import gathered


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))


def norm_of_sharded_parts_of_experts(rank: int) -> None:
    """FSDP2 divides each rank's experts over other ranks: all parts of all experts count."""
    mesh = two_by_two()
    torch.manual_seed(0)
    group = guild.ExpertParallel(mesh["experts"])
    layer = guild.MoE(16, 8, 8, 2, expert_group=group, dtype=torch.float64)
    fully_shard(layer, mesh=mesh["data"])
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    layer(x).square().sum().backward()
    experts = [layer.w_up, layer.w_down]
    squares = sum(w.grad.to_local().square().sum() for w in experts)
    dist.all_reduce(squares)
    assert clip_grad_norm_(experts, 1e9).item() == pytest.approx(squares.sqrt().item(), rel=1e-5)


def initial_values_of_shards(rank: int) -> None:
    """Every expert, row of a router and row of shared experts gets values of its own."""
    mesh, everyone = two_by_two(), init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    group = guild.ExpertParallel(mesh["experts"])
    own = guild.MoE(16, 8, 8, 2, expert_group=group, device="meta")
    fully_shard(own, mesh=mesh["data"])
    block = nn.Sequential(guild.MoE(16, 8, 8, 2, shared_experts=1, device="meta"))
    guild.distribute_experts(block, mesh["experts"])
    fully_shard(block, mesh=everyone, ignored_params=expert_weights(block))
    shard_layers(block, everyone, mesh["data"])
    plain = guild.MoE(16, 8, 8, 2, device="meta")
    fully_shard(plain, mesh=everyone)
    whole: list[Tensor] = []
    for layer in (own, block[0], plain):
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        whole += [w.full_tensor() for w in layer.parameters()]
        if layer is own:  # each rank has half of the experts
            whole[:2] = [torch.cat(gathered(w)[:2]) for w in whole[:2]]
    for weight in whole:
        rows = weight.detach().flatten(1)
        assert len(rows.unique(dim=0)) == len(rows)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = guild.MoE(16, 8, 8, 2, shared_experts=1)

    def forward(self, x: Tensor) -> Tensor:
        out, routing = self.moe(x, return_routing=True)
        out += x
        return out + routing.logits.mean()


def outputs_changed_in_place(rank: int) -> None:
    """With their routing, too; and with outputs of another dtype."""
    mesh, everyone = two_by_two(), init_device_mesh("cpu", (4,))
    block = Block()
    guild.distribute_experts(block, mesh["experts"])
    fully_shard(block, mesh=everyone, ignored_params=expert_weights(block))
    shard_layers(block, everyone, mesh["data"])
    x = torch.randn(2, 3, 16)
    block(x).sum().backward()
    layer = guild.MoE(16, 8, 8, 2, shared_experts=1)
    guild.distribute_experts(layer, mesh["experts"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    shard_layers(layer, everyone, mesh["data"], mp_policy=policy)
    assert layer(x).dtype == torch.float32


def rows_changed_in_place(rank: int) -> None:
    """FSDP2 itself allows it for outputs that are no views: those of rows, as nn.Linear's."""
    torch.manual_seed(0)
    layer, x = guild.MoE(16, 8, 8, 2), torch.randn(20, 16)
    (layer(x) + x).square().sum().backward()
    expected = layer.w_up.grad
    layer.zero_grad()
    fully_shard(layer)
    out = layer(x)
    out += x
    out.square().sum().backward()
    torch.testing.assert_close(layer.w_up.grad.full_tensor(), expected)


def delayed_gradients_of_shards(rank: int) -> None:
    """They would come after FSDP2 has reduced gradients: an error, not gradients that are lost."""
    sums = guild.WeightGradients(delayed=True)
    model = nn.Sequential(nn.Linear(16, 16), guild.MoE(16, 8, 8, 2, weight_gradients=sums))
    fully_shard(model)
    model(torch.randn(20, 16)).square().sum().backward()
    with pytest.raises(ValueError, match=r"^weight_gradients: expected no `delayed` where FSDP2"):
        sums.compute()


def groups_on_the_same_ranks(rank: int) -> None:
    """Ranks that call layers of different groups, or go back through them in another order."""
    x = torch.randn(5, 16, dtype=torch.float64)
    groups = [guild.ExpertParallel(engine="nccl") for _ in range(2)]
    layers = [guild.MoE(16, 8, 4, 2, expert_group=g, dtype=torch.float64) for g in groups]
    with pytest.raises(ValueError, match=r"^expert_group: expected the same call .*ExpertParallel"):
        layers[rank % 2](x)
    groups = [guild.ExpertParallel(engine="nccl") for _ in range(2)]
    layers = [guild.MoE(16, 8, 4, 2, expert_group=g, dtype=torch.float64) for g in groups]
    outs = [layer(x) for layer in layers]
    with pytest.raises(RuntimeError, match=r"^expert_group: expected every rank to run the same"):
        outs[rank % 2].sum().backward()


def order_after_memory_grows(rank: int) -> None:
    """Ranks in the backwards of calls before and after the shared memory was enlarged meet."""
    group = guild.ExpertParallel(engine="peer")
    narrow, wide = (guild.MoE(hidden, 8, 8, 2, expert_group=group) for hidden in (16, 64))
    outs = narrow(torch.randn(5, 16)), wide(torch.randn(5, 64))
    dist.barrier()  # else a rank may meet the others' error at the end of its forward
    with pytest.raises(RuntimeError, match=r"^expert_group: .* the same order, got ") as caught:
        outs[rank % 2].sum().backward()
    where = re.findall(r"backward of call ([12])[^,]* on rank ([0-3])", str(caught.value))
    assert {call for call, _ in where} == {"1", "2"}  # of those that have met
    assert all(int(call) == 1 + int(rank) % 2 for call, rank in where)


def sums_of_sequences_stay(rank: int) -> None:
    layer = guild.MoE(16, 8, 4, 2, balance_over="sequence")
    layer(torch.randn(3, 2, 16))
    with pytest.raises(ValueError, match=r"^over_ranks: expected sums over the whole batch"):
        layer.balance_sums.over_ranks()


def gradients_of_replicas(rank: int) -> None:
    """Experts in replicas and in shards of them, also where there is one of either."""
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))  # the same on every rank
    torch.manual_seed(0)
    whole = guild.MoE(16, 8, 4, 2, bias=True)
    whole(x).square().sum().backward()
    names = ("replicas", "shards", "experts")
    for sizes in ((1, 2, 2), (2, 1, 2), (4, 1, 1), (1, 1, 4), (2, 2, 1)):
        for dtype in (torch.float32, torch.float16):
            torch.manual_seed(0)
            layer = guild.MoE(16, 8, 4, 2, bias=True)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            guild.distribute_experts(layer, mesh["experts"])
            policy = MixedPrecisionPolicy(reduce_dtype=dtype)
            everyone = init_device_mesh("cpu", (4,))
            shard_layers(layer, everyone, mesh["replicas", "shards"], mp_policy=policy)
            layer(x).square().sum().backward()
            for (name, got), expected in zip(
                layer.named_parameters(), whole.parameters(), strict=True
            ):
                close = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.float16 else {}
                torch.testing.assert_close(
                    got.grad.full_tensor(),
                    expected.grad,
                    msg=lambda text, at=(sizes, dtype, name): f"{at}: {text}",
                    **close,
                )


CHECKS = (
    gradients_of_replicas,
    norm_of_sharded_parts_of_experts,
    initial_values_of_shards,
    outputs_changed_in_place,
    rows_changed_in_place,
    delayed_gradients_of_shards,
    groups_on_the_same_ranks,
    order_after_memory_grows,
    sums_of_sequences_stay,
)
