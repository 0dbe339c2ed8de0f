"""FSDP2 and DTensor on four ranks: losses of one process, clipping, checkpoints.

Run by test_four_ranks.py.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import guild
from guild.distributed.placement import (
    clip_grad_norm_,
    expert_weights,
    shard_layers,
)
from guild.train.model import LanguageModel

_STEPS, _CLIP = 20, 0.5


def model_of(device: str | None = None, **options) -> LanguageModel:
    """A model that is the same on every rank."""
    more = {"shared_experts": 1, "bias": True, "device": device} | options
    model = LanguageModel(32, 2, 2, 16, 8, 2, lambda *sizes: guild.MoE(*sizes, **more))
    if device is None:
        model.initialise(0)
    return model


def placed(
    model: LanguageModel, experts: int, block_first: bool = False, **options
) -> LanguageModel:
    """The model with experts shared by `experts` ranks at a time, the rest sharded by FSDP2."""
    ranks = dist.get_world_size()
    everyone = init_device_mesh("cpu", (ranks,))
    if experts > 1:
        names = ("data", "experts")
        mesh = init_device_mesh("cpu", (ranks // experts, experts), mesh_dim_names=names)
        guild.distribute_experts(model, mesh["experts"])
    for block in model.blocks:
        if block_first:
            fully_shard(block, mesh=everyone, ignored_params=expert_weights(block), **options)
        if experts > 1:
            shard_layers(block, everyone, mesh["data"], **options)
        if not block_first:
            fully_shard(block, mesh=everyone, **options)
    return fully_shard(model, mesh=everyone, **options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A batch of all ranks."""
    tokens = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def mean_of_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: list, clip: Callable
) -> tuple[Tensor, Tensor]:
    """Losses of the parts, whose mean is descended, and the norm of the gradient."""
    losses = []
    for i, (inputs, targets) in enumerate(parts):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(i == len(parts) - 1)
        losses.append(loss_of(model, inputs, targets) / len(parts))
        losses[-1].backward()
    norm = clip(model.parameters(), _CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum().detach(), norm


def losses_are_those_of_one_process(rank: int) -> None:
    """Losses over 20 steps, with clipping; experts on one, two and four ranks; micro-batches."""
    for experts, block_first in ((1, False), (2, False), (4, False), (2, True), (4, True)):
        one, many = model_of(), placed(model_of(), experts, block_first)
        assert isinstance(many.blocks[0].moe.w_up, DTensor)
        alone, together = optimizer_of(one), optimizer_of(many)
        for step in range(_STEPS if experts == 2 and not block_first else 3):
            # Every other step has two micro-batches, of which each rank takes its part.
            parts = [batch(step)] if step % 2 else [batch(step), batch(100 + step)]
            truth, norm = train_step(one, alone, parts, nn.utils.clip_grad_norm_)
            mine = [(own(inputs), own(targets)) for inputs, targets in parts]
            loss, its_norm = train_step(many, together, mine, clip_grad_norm_)
            assert abs(mean_of_ranks(loss) / float(truth) - 1) < 1e-6, (experts, step)
            assert abs(float(its_norm) / float(norm) - 1) < 1e-5, (experts, step)
            assert norm > _CLIP


def every_norm(rank: int) -> None:
    """Every kind of norm over both meshes; parameters without gradients are skipped."""
    one, many = model_of(), placed(model_of(), 2)
    loss_of(one, *batch(0)).backward()
    loss_of(many, *map(own, batch(0))).backward()
    for kind in (1.0, 3.0, float("inf")):
        expected = nn.utils.get_total_norm([p.grad for p in one.parameters()], kind)
        norm = clip_grad_norm_(many.parameters(), 1e9, kind)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for foreach in (True, False):
        again = clip_grad_norm_(many.parameters(), 1e9, float("inf"), foreach=foreach)
        assert torch.equal(again, norm)
    expert = many.blocks[0].moe.w_up  # of two ranks; all raise, and nothing is scaled
    before = expert.grad.to_local().clone()
    with torch.no_grad():
        many.blocks[0].moe.w_down.grad.to_local().fill_(float("inf") if rank == 3 else 1.0)
    with pytest.raises(RuntimeError, match=r"^error_if_nonfinite: expected .* got inf"):
        clip_grad_norm_(many.parameters(), 1e-3, error_if_nonfinite=True)
    assert torch.equal(expert.grad.to_local(), before)
    one = nn.Parameter(torch.ones(4))
    assert clip_grad_norm_([one], 1.0) == 0
    one.grad = torch.full((4,), 5.0)
    assert clip_grad_norm_(one, 1.0) == 10 and abs(float(one.grad.norm()) - 1) < 1e-6


def norm_of_sums_to_come(rank: int) -> None:
    """A gradient that is still to be summed over ranks, as torch's own DTensor layers give."""
    mesh = init_device_mesh("cpu", (2, 2))
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(8, 6, generator=draw), torch.randn(6, 5, generator=draw).requires_grad_()
    (x @ w).square().sum().backward()
    for placement in ([Shard(0), Replicate()], [Shard(0), Shard(0)]):
        own = nn.Parameter(distribute_tensor(w.detach(), mesh, [Replicate()] * 2))
        (distribute_tensor(x, mesh, placement) @ own).square().sum().backward()
        assert any(p.is_partial() for p in own.grad.placements), own.grad.placements
        torch.testing.assert_close(clip_grad_norm_([own], 1e9), w.grad.norm())


def gradients_of_any_dtype(rank: int) -> None:
    """Gradients are divided once, those of experts that FSDP2 does not shard included."""
    ranks = dist.get_world_size()
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-2)):
        x = torch.randn(ranks, 6, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        for experts in (2, 4):
            torch.manual_seed(0)
            one = guild.MoE(32, 16, 8, 2, bias=True, dtype=dtype)
            many = copy.deepcopy(one)
            mesh = init_device_mesh("cpu", (ranks // experts, experts), mesh_dim_names=("d", "e"))
            guild.distribute_experts(many, mesh["e"])
            shard_layers(many, init_device_mesh("cpu", (ranks,)), mesh["d"])
            one(x).mean().backward()
            many(x[rank]).mean().backward()
            for (name, leaf), sharded in zip(
                one.named_parameters(), many.parameters(), strict=True
            ):
                found = sharded.grad.full_tensor()
                off = (found - leaf.grad).norm() / leaf.grad.norm()
                assert off < limit, (dtype, experts, name, float(off))


def mixed_precision(rank: int) -> None:
    """Products and rows between ranks are bfloat16, gradient sums and weights float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    router = guild.Router("sigmoid", selection_bias=True)
    exact = loss_of(model_of(router=router), *batch(0)).detach()
    many = placed(model_of(router=router), 2, mp_policy=policy)
    loss = loss_of(many, *map(own, batch(0)))
    loss.backward()
    assert abs(mean_of_ranks(loss) / float(exact) - 1) < 1e-2
    for name, parameter in many.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
    bias = many.blocks[0].moe.router.selection_bias
    many.move_selection_biases(0.5, many.expert_counts())
    assert bias.dtype == torch.float32 and bias.any()


def compiled_blocks(rank: int) -> None:
    """Blocks are compiled one at a time, before FSDP2 is applied."""
    one, model = model_of(), model_of()
    model.blocks[0].compile(backend="eager")
    loss = loss_of(placed(model, 2), *map(own, batch(0)))
    loss.backward()
    assert abs(mean_of_ranks(loss) / float(loss_of(one, *batch(0)).detach()) - 1) < 1e-6


def from_the_meta_device(rank: int) -> None:
    """Nothing is allocated before it is sharded, and every expert has different values."""
    torch.manual_seed(0)
    many = placed(model_of("meta"), 2)
    many.to_empty(device="cpu")
    for module in many.modules():
        if isinstance(module, guild.MoE):
            module.reset_parameters()
    experts = many.blocks[0].moe.w_up.detach().full_tensor().flatten(1)
    assert len(experts.unique(dim=0)) == 8 and abs(float(experts.std()) * 32**0.5 - 1) < 0.1


def refusals(rank: int) -> None:
    """Each wrong argument is named."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    everyone = init_device_mesh("cpu", (4,))
    model = model_of()
    for error, text, call in (
        (TypeError, "^mesh: ", lambda: guild.distribute_experts(model, 4)),
        (
            ValueError,
            "^group: expected a mesh of one",
            lambda: guild.distribute_experts(model, mesh),
        ),
        (
            ValueError,
            r"^mesh: expected ranks in ascending order, got \[3, 1, 2, 0\]",
            lambda: guild.distribute_experts(model, DeviceMesh("cpu", [3, 1, 2, 0])),
        ),
        (
            ValueError,
            "^module: expected one with a guild.MoE",
            lambda: guild.distribute_experts(nn.Linear(2, 2), everyone),
        ),
        (
            ValueError,
            "^experts: expected a multiple of 4",
            lambda: guild.distribute_experts(guild.MoE(8, 8, 6, 2), everyone),
        ),
        (
            ValueError,
            "after distribute_experts",
            lambda: shard_layers(model, everyone, mesh["data"]),
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    guild.distribute_experts(model, mesh["experts"])
    with pytest.raises(ValueError, match="distributed already"):
        guild.distribute_experts(model, mesh["experts"])
    with pytest.raises(ValueError, match=r"^mesh: expected 8 ranks"):
        shard_layers(model, everyone, everyone)
    sharded = guild.MoE(16, 8, 4, 2)
    guild.distribute_experts(sharded, mesh["experts"])
    fully_shard(sharded, mesh=everyone, ignored_params=expert_weights(sharded))
    with pytest.raises(ValueError, match=r"^module: expected layers .* went to fully_shard"):
        shard_layers(sharded, everyone, mesh["data"])
    whole = model_of()
    guild.distribute_experts(whole, everyone)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("experts", "data"))["data"]
    with pytest.raises(ValueError, match=r"^experts_mesh: .* got a mesh without names"):
        shard_layers(whole, everyone, alone)


def checkpoint_moves(rank: int) -> None:
    """From four ranks to two, optimiser included, bit for bit; training then continues alike."""
    folder = os.environ["GUILD_TEST_FOLDER"]
    model, optimizer = trained(2)
    dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/saved")
    truth = whole(state_of(model, optimizer))
    loss, _ = train_step(model, optimizer, [tuple(map(own, batch(5)))], clip_grad_norm_)
    truth["loss"] = torch.tensor(mean_of_ranks(loss))
    dist.barrier()
    dist.destroy_process_group()
    if rank > 1:
        return
    dist.init_process_group("gloo", f"file://{folder}/two", rank=rank, world_size=2)
    model, optimizer = trained(1)
    state = state_of(model, optimizer)
    for tensor in tensors_in(state).values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(7)
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    weights, moments = state.values()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    found = whole(state_of(model, optimizer))
    loss, _ = train_step(model, optimizer, [tuple(map(own, batch(5)))], clip_grad_norm_)
    torch.testing.assert_close(mean_of_ranks(loss), float(truth.pop("loss")), rtol=1e-6, atol=0)
    assert found.keys() == truth.keys() and len(found) > 60
    for name, tensor in found.items():
        assert torch.equal(tensor, truth[name]), name


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = placed(model_of(), 2)
    optimizer = optimizer_of(model)
    for step in range(steps):
        train_step(model, optimizer, [tuple(map(own, batch(step)))], clip_grad_norm_)
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def whole(state: dict) -> dict[str, Tensor]:
    """Copies of all tensors, gathered from all ranks."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in tensors_in(state).items()
    }


def tensors_in(state: dict, path: str = "") -> dict[str, Tensor]:
    """All tensors of a nested dict, by path."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= tensors_in(value, f"{path}{name}/")
        elif isinstance(value, Tensor):
            found[path + name] = value
    return found


def fp8_over_ranks(rank: int) -> None:
    """Refused by its name where experts are on other ranks; works on a mesh of one."""
    options = {"fp8": guild.FP8(cached=True), "dtype": torch.bfloat16}
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    layer = guild.MoE(128, 128, 4, 2, **options)
    wanted = layer(x)
    alone = DeviceMesh("cpu", [rank])
    guild.distribute_experts(layer, alone)
    assert torch.equal(layer(x), wanted)
    layer = guild.MoE(128, 128, 4, 2, **options)
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    refused = pytest.raises(NotImplementedError, match=r"^fp8: expected None with experts on other")
    with refused:
        guild.distribute_experts(layer, everyone)
    assert layer.expert_group is None and type(layer.w_up) is nn.Parameter
    with refused:
        guild.MoE(128, 128, 4, 2, expert_group=guild.ExpertParallel(everyone), **options)
    layer = guild.MoE(128, 128, 4, 2, dtype=torch.bfloat16)
    guild.distribute_experts(layer, everyone)
    layer.fp8 = guild.FP8()
    with refused:
        layer(x)


CHECKS = (
    losses_are_those_of_one_process,
    every_norm,
    norm_of_sums_to_come,
    gradients_of_any_dtype,
    mixed_precision,
    compiled_blocks,
    from_the_meta_device,
    refusals,
    fp8_over_ranks,
    checkpoint_moves,
)
