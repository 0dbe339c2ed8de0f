"""Experts that a rank has to itself: no replicas for clipping, DDP and FSDP; tied, or in FP8.

Run by test_four_ranks.py.
"""

from __future__ import annotations

import copy
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

import guild
from guild.distributed import own_experts
from guild.distributed.placement import clip_grad_norm_, expert_weights, leave_out_experts
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


class _Scaled(nn.Module):
    """Scales what it is given by a number that is the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale.mean()


_COMPUTED = {
    "parametrised": lambda layer: parametrize.register_parametrization(layer, "w_up", _Scaled()),
    "normed": lambda layer: parametrizations.weight_norm(layer, "w_up"),
    "normed as before": lambda layer: nn.utils.weight_norm(layer, "w_up"),
    "pruned": lambda layer: prune.l1_unstructured(layer, "w_up", 0.3),
}


def computed_experts(rank: int) -> None:
    """Experts that are computed from other parameters."""
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(rank))
    group = guild.ExpertParallel()
    for kind, change in _COMPUTED.items():
        layers = []
        for _ in range(2):
            torch.manual_seed(0)
            layers.append(guild.MoE(32, 16, 8, 2, expert_group=group))
        lost, layer = layers
        change(lost), change(layer)
        plain = lost(x)
        with pytest.raises(ValueError, match=r"^expert_group: .* DistributedDataParallel"):
            DistributedDataParallel(lost)(x)
        model = nn.Sequential(layer)
        out = model(x)
        torch.testing.assert_close(out, plain)
        leave_out_experts(model)
        torch.testing.assert_close(DistributedDataParallel(model)(x), out)
        model(x).square().sum().backward()
        for weight in (layer.router.weight, *(p for p in model.parameters() if p.shape == (2,))):
            dist.all_reduce(weight.grad)
        norms = gathered(clip_grad_norm_(model.parameters(), 1e9))
        assert len({*map(float, norms)}) == 1, (kind, norms)
        own = expert_weights(model)
        assert own <= {*model.parameters()} and len(own) == (3 if "normed" in kind else 2)
        sharded = fully_shard(nn.Sequential(layer), mesh=everyone, ignored_params=own)
        torch.testing.assert_close(sharded(x), out)
        layer = guild.MoE(32, 16, 8, 2)
        change(layer)
        with pytest.raises(ValueError, match=r"^module: .* parametrisation"):
            guild.distribute_experts(layer, everyone)


def copies_of_a_layer(rank: int) -> None:
    """A copy is another layer, which the others' calls of the first do not match."""
    layer = guild.MoE(32, 16, 8, 2, expert_group=guild.ExpertParallel())
    other, x = copy.deepcopy(layer), torch.randn(3, 32)
    called = layer if rank % 2 else other
    with pytest.raises(ValueError, match=r"^expert_group: .* got layer \d+ on rank"):
        called(x)


def infinite_norm_of_nan(rank: int) -> None:
    """NaN on one rank is the norm on all."""
    layer = guild.MoE(32, 16, 8, 2, expert_group=guild.ExpertParallel())
    layer(torch.randn(3, 32)).sum().backward()
    if rank == 1:
        layer.w_up.grad[0, 0, 0] = torch.nan
    assert clip_grad_norm_(layer.parameters(), 1.0, float("inf")).isnan()


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
    out = module(x)
    with pytest.raises(ValueError, match=r"^expert_group: .* DistributedDataParallel"):
        DistributedDataParallel(copy.deepcopy(module))(x)
    leave_out_experts(module, iter([module.w_up, module.w_down]))
    assert torch.equal(DistributedDataParallel(module)(x), out)
    del module.w_up
    module.register_buffer("all", torch.randn(3, 32, 32))
    module.register_buffer("row", module.all[0, 1])  # lies in the other
    module.w_up = module.all[1:]
    with pytest.raises(ValueError, match=r"^expert_group: .* DistributedDataParallel"):
        DistributedDataParallel(module)(x)


_KINDS = "whole", "halves", "lists", "part", "lora"


class _Own(nn.Module):
    """Parameters that a call over ranks gets as they are, in pairs, lists or LoRA terms."""

    def __init__(self, group: guild.ExpertParallel, kind: str = "whole") -> None:
        super().__init__()
        self.group, self.kind = group, kind
        self.router = nn.Linear(16, 8, bias=False)
        shapes = {"up": (24, 16), "down": (16, 12), "a": (3, 16), "b": (24, 3)}
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.randn(2 + (kind == "part"), *shape))
            self.register_parameter(name, weight)

    def experts(self) -> list[nn.Parameter]:
        return [self.up, self.down, self.a, self.b]

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(2)
        w_up: Any = self.up
        w_down: Any = self.down
        more: dict[str, Any] = {}
        if self.kind == "halves":
            w_up = self.up[:, 12:], self.up[:, :12]
        elif self.kind == "lists":
            w_up, w_down = [*self.up.unbind()][::-1], [*self.down.unbind()]
        elif self.kind == "part":
            w_up, w_down = self.up[1:], self.down[1:]
        elif self.kind == "lora":
            w_up, w_down = w_up.detach().clone(), w_down.detach().clone()
            more["lora_up"] = guild.LoRA(self.a, self.b)
        return self.group.routed_experts(x, ids, scores, w_up, w_down, **more)


def experts_without_a_layer(rank: int) -> None:
    """FSDP2 over a module of one's own is refused as well, over whatever the call gets of it."""
    group = guild.ExpertParallel()
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(6, 16)
    text = r"^expert_group: .* of fully_shard; got experts that FSDP2 has sharded"
    refused = pytest.raises(ValueError, match=text)

    def model(kind: str = "whole", over: guild.ExpertParallel = group) -> _Own:
        torch.manual_seed(rank)
        return _Own(over, kind)

    for kind in _KINDS:
        for frozen in (False, True):
            sharded = model(kind)
            for weight in sharded.experts():
                weight.requires_grad_(not frozen)
            with refused:
                fully_shard(nn.Sequential(sharded), mesh=everyone)(x)
    called = model()
    called(x)  # the notes of a call do not outlast fully_shard
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for sharded, how in ((called, {}), (model(), {"mp_policy": half})):
        with refused:
            fully_shard(sharded, mesh=everyone, **how)(x)
    left = model()
    fully_shard(left, mesh=everyone, ignored_params={*left.experts()})
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    twins = model(over=guild.ExpertParallel(pairs["experts"]))
    fully_shard(twins, mesh=pairs["data"])
    for allowed in (left, twins):
        allowed(x).sum().backward()


def averaged_without_a_layer(rank: int) -> None:
    """DistributedDataParallel, unless it is told what to leave alone."""
    group, x = guild.ExpertParallel(), torch.randn(6, 16)
    for kind in _KINDS:
        torch.manual_seed(rank)
        model = _Own(group, kind)
        refused = r"^expert_group: .*leave_out_experts\(model, experts\) before"
        with pytest.raises(ValueError, match=refused):
            DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)(x)
        kept = [weight.clone() for weight in model.experts()]
        leave_out_experts(model, model.experts())
        DistributedDataParallel(model)(x).sum().backward()
        assert all(map(torch.equal, model.experts(), kept))
        norms = gathered(clip_grad_norm_(model.experts(), 1e9))
        assert all(torch.equal(norm, norms[0]) for norm in norms)
    model, both = _Own(group), torch.randn(2, 24, 32)
    model.up, model.other = (nn.Parameter(half) for half in both.split(16, -1))  # row by row
    leave_out_experts(model, model.experts())
    assert torch.isfinite(DistributedDataParallel(model)(x)).all()
    leave_out_experts(other := nn.Sequential(_Own(group)), other[0].up)
    assert other._ddp_params_and_buffers_to_ignore == {"0.up"}
    for error, text, experts in (
        (ValueError, r"^module: expected one with a guild.MoE", []),
        (
            ValueError,
            r"^experts: expected .* of the module, got a tensor of shape \(2,\)",
            x[:2, 0],
        ),
        (TypeError, r"^experts: expected a torch.Tensor, got str", ["up"]),
    ):
        with pytest.raises(error, match=text):
            leave_out_experts(other, experts)


def experts_in_one_optimizer(rank: int) -> None:
    """ZeroRedundancyOptimizer, which sends what one rank has updated, gets none of them."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    sgd: dict[str, Any] = {"optimizer_class": torch.optim.SGD, "lr": 1.0}
    for mesh, kind, frozen in product((None, pairs["experts"]), _KINDS, (False, True)):
        torch.manual_seed(rank)
        model = _Own(guild.ExpertParallel(mesh), kind)
        for weight in model.experts():
            weight.requires_grad_(not frozen)
        model(torch.randn(6, 16)).sum().backward()
        kept = [weight.clone() for weight in model.parameters()]
        optimizer = ZeroRedundancyOptimizer(model.parameters(), **sgd)
        with pytest.raises(ValueError, match=r"^expert_group: .* in a ZeroRedundancyOptimizer"):
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), kept))
        ZeroRedundancyOptimizer(model.router.parameters(), **sgd).step()
        torch.optim.SGD(model.experts(), lr=1.0).step()
    data = pairs.get_group("data")  # of ranks with the same experts
    ZeroRedundancyOptimizer(model.parameters(), process_group=data, **sgd).step()
    ended = dist.new_group()
    model = _Own(guild.ExpertParallel(ended))
    model(torch.randn(6, 16))
    dist.barrier()
    dist.destroy_process_group(ended)
    ZeroRedundancyOptimizer(model.parameters(), **sgd).step()  # nobody shares them any more


def records_of_other_torches(rank: int) -> None:
    """FSDP2's records as torch 2.10 has them, and with nothing that Guild knows of."""
    model = _Own(guild.ExpertParallel())
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.unshard()
    state = model._get_fsdp_state()
    group = next(iter(getattr(state, "_fsdp_param_groups", ())), None) or state._fsdp_param_group
    x = torch.randn(4, 16)
    for state, known in (
        (SimpleNamespace(_fsdp_param_group=group), True),
        (SimpleNamespace(_fsdp_param_group=None), False),
        (SimpleNamespace(_fsdp_param_groups=[SimpleNamespace(is_unsharded=True)]), False),
        (SimpleNamespace(), False),
    ):
        with mock.patch.object(own_experts, "_states", {model: state}):
            if known:
                with pytest.raises(ValueError, match=r"^expert_group: .* that FSDP2 has sharded"):
                    model.forward(x)
            else:
                assert torch.isfinite(model.forward(x)).all()


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
    computed_experts,
    copies_of_a_layer,
    infinite_norm_of_nan,
    experts_in_buffers,
    experts_without_a_layer,
    averaged_without_a_layer,
    experts_in_one_optimizer,
    records_of_other_torches,
    low_rank_terms_of_experts,
    tied_experts,
)
