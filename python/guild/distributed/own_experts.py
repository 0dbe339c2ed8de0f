"""Weights of this rank's experts, which look like replicas: same names and sizes on every rank.

`guild.MoE(expert_group=...)` has such parameters, and so has `ExpertParallel.routed_experts`. Each
call notes its ranks on them, for `clip_grad_norm_`, and refuses what would mix up the experts.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from guild._torch.checks import ends_of, has_memory, share_memory
from guild.distributed.ranks import Ranks

try:  # FSDP2's own records, by module
    from torch.distributed._composable_state import _module_state_mapping as _states
except ImportError:  # a torch without them: what FSDP2 shards is not noticed
    _states = {}

EXPERT_WEIGHTS = ("w_up", "w_down", "b_up", "b_down")  # of a guild.MoE

_NOTE = "_guild_ranks"
# A module's parameters and buffers in the order of their addresses: where each begins, and the
# furthest end up to there. They may be many, and calls are frequent.
_averaged: WeakKeyDictionary[DistributedDataParallel, list[tuple[int, int]]] = WeakKeyDictionary()


class _Note:
    """The ranks that share a parameter's experts; lost where the parameter is pickled."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def number_of(layer: nn.Module | None, experts: list[Tensor], ranks: Ranks) -> int:
    """The number of a layer that is called, 0 for none, after looking at its experts' tensors.

    Raises
    ------
    ValueError
        If FSDP or DistributedDataParallel takes the experts for replicas.
    """
    if layer is not None:
        computed = (name for name in EXPERT_WEIGHTS if name not in layer._parameters)
        experts = [*experts, *(t for name in computed for t in tensors_of(layer, name))]
    # Of views, such as the entries of a list, the tensor that they are of.
    owners = {id(t): t for t in (t if t._base is None else t._base for t in experts)}.values()
    new = [tensor for tensor in owners if ranks_of(tensor) is not ranks.group]
    _expect_not_flattened(experts)
    if _states and new and not (layer is not None and isinstance(layer.w_up, DTensor)):
        _expect_not_sharded(layer, new, ranks.everyone)
    _expect_not_averaged(layer, experts, ranks.everyone)
    for tensor in new:
        if tensor.is_leaf:
            setattr(tensor, _NOTE, _Note(ranks.group))
            _watch_optimizers()
    return 0 if layer is None else layer._number


def tensors_of(layer: nn.Module, name: str) -> list[Tensor]:
    """The parameter, or the parameters and buffers, that hold one of EXPERT_WEIGHTS.

    Where a parametrisation, pruning or weight_norm computes it: those of its tensors that have two
    dimensions or more, the first one over the rank's experts. Others are the same on every rank, as
    far as Guild can know.
    """
    weight = getattr(layer, name)
    if weight is None or name in layer._parameters:
        return [] if weight is None else [weight]
    if is_parametrized(layer, name):
        computing = layer.parametrizations[name]
        held = [*computing.parameters(), *computing.buffers()]
    else:  # by the names that torch.nn.utils.prune and weight_norm give
        held = [layer._parameters.get(f"{name}_{kind}") for kind in ("orig", "v", "g")]
        held.append(layer._buffers.get(f"{name}_mask"))
    return [t for t in held if t is not None and t.dim() > 1 and len(t) == len(weight)]


def ranks_of(parameter: Tensor | None) -> dist.ProcessGroup | None:
    """The ranks that have the other experts of a parameter; None if it is no expert's."""
    note = getattr(parameter, _NOTE, None)
    return None if note is None else note.group


def ranks_by_shard() -> dict[int, dist.ProcessGroup]:
    """The same of parameters that FSDP2 shards, by their `id`: what it gathers has the note."""
    found = {}
    for group in _fsdp_groups():
        for one in getattr(group, "fsdp_params", ()):
            whole = getattr(one, "_unsharded_param", None)
            if not isinstance(whole, DTensor) and (ranks := ranks_of(whole)) is not None:
                found[id(one.sharded_param)] = ranks
    return found


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_expect_not_sent)


def _expect_not_sent(optimizer: Optimizer, *_: Any) -> None:
    """Before each optimizer's step: raise ValueError if it would overwrite experts."""
    kind = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if kind is None or not isinstance(optimizer, kind):
        return
    ranks = _members(optimizer.process_group)
    held = (weight for group in optimizer.param_groups for weight in group["params"])
    for owners in {ranks_of(weight) for weight in held} - {None}:
        if len(ranks & _members(owners)) > 1:
            raise ValueError(
                "expert_group: expected experts in an optimizer of their own, got some in a "
                "ZeroRedundancyOptimizer, which would overwrite them with another rank's"
            )


def _members(group: dist.ProcessGroup) -> set[int]:
    """Numbers of a group's ranks among all; none of a group that has been destroyed."""
    try:
        return {*dist.get_process_group_ranks(group)}
    except (KeyError, ValueError):
        return set()


def _expect_not_flattened(experts: list[Tensor]) -> None:
    if any(getattr(t, "_fsdp_flattened", False) for t in (*experts, *(t._base for t in experts))):
        raise ValueError(
            "expert_group: expected experts in the ignored_states of FullyShardedDataParallel, got "
            "some that it has sharded as if they were the same on every rank"
        )


def _expect_not_sharded(layer: nn.Module | None, experts: list[Tensor], ranks: list[int]) -> None:
    """ranks: those that share the experts, by their numbers among all."""
    places = {t.untyped_storage().data_ptr() for t in experts if has_memory(t)} - {0}
    if any(_holds(group, places) and _is_over(group, ranks) for group in _fsdp_groups()):
        other = "" if layer is None else ", or guild.distribute_experts in place of expert_group"
        raise ValueError(
            f"expert_group: expected experts in the ignored_params of fully_shard{other}; got "
            "experts that FSDP2 has sharded as if they were the same on every rank"
        )


def _fsdp_groups() -> Iterator[Any]:
    """Parameters that FSDP2 gathers together, as it records them: those of all modules."""
    for held in [*_states.values()]:
        state = held() if isinstance(held, ReferenceType) else held
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.10 has one
            groups = [getattr(state, "_fsdp_param_group", None)]
        yield from groups


def _holds(group: Any, places: set[int]) -> bool:
    """Whether a parameter that is gathered now is in one of these places."""
    if not getattr(group, "is_unsharded", False):
        return False
    whole = (getattr(one, "_unsharded_param", None) for one in getattr(group, "fsdp_params", ()))
    # DTensors are this rank's part of experts that are known to be distributed.
    plain = (t for t in whole if isinstance(t, Tensor) and has_memory(t))
    return any(tensor.untyped_storage().data_ptr() in places for tensor in plain)


def _is_over(group: Any, ranks: list[int]) -> bool:
    """Whether more than one of the ranks have a part of it."""
    mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
    return mesh is not None and len({*ranks} & {*mesh.mesh.flatten().tolist()}) > 1


def _expect_not_averaged(layer: nn.Module | None, experts: list[Tensor], ranks: list[int]) -> None:
    """ranks: as in `_expect_not_sharded`."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or len({*ranks} & {*dist.get_process_group_ranks(ddp.process_group)}) < 2:
        return
    held = *ddp._module_parameters, *ddp.modules_buffers
    if ddp not in _averaged:
        places = sorted(ends_of(t) for t in held if t.numel() and has_memory(t))
        ends = accumulate((end for _, end in places), max)  # they may overlap
        _averaged[ddp] = [(first, end) for (first, _), end in zip(places, ends, strict=True)]
    near = [tensor for tensor in experts if _lies_in(tensor, _averaged[ddp])]
    if any(share_memory(tensor, other) for tensor in near for other in held):
        call = "model" if layer is not None else "model, experts"
        raise ValueError(
            "expert_group: expected experts that DistributedDataParallel leaves alone, got some "
            "that it has overwritten with another rank's; make the model again and call "
            f"guild.distributed.placement.leave_out_experts({call}) before DistributedDataParallel"
        )


def _lies_in(tensor: Tensor, places: list[tuple[int, int]]) -> bool:
    """Whether it overlaps with one of the places, as `_averaged` has them."""
    if not (tensor.numel() and has_memory(tensor)):
        return False
    first, end = ends_of(tensor)
    before = bisect_left(places, (end,))  # those that begin before its end
    return before > 0 and places[before - 1][1] > first
