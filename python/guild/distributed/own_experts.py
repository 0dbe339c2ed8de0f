"""Weights of this rank's experts, which look like replicas: same names and sizes on every rank.

`guild.MoE(expert_group=...)` has such parameters, and so has `ExpertParallel.routed_experts`. Each
call notes its ranks on them, for `clip_grad_norm_`, and refuses what would mix up the experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from guild.distributed.ranks import Ranks

_NOTE = "_guild_ranks"
# Where a module's replicas lie, parameters and buffers: they may be many, and calls are frequent.
_averaged: WeakKeyDictionary[DistributedDataParallel, set[int]] = WeakKeyDictionary()


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
    _expect_no_replicas(layer, experts, ranks.everyone)
    for tensor in experts:
        if tensor.requires_grad and tensor.is_leaf and ranks_of(tensor) is not ranks.group:
            setattr(tensor, _NOTE, _Note(ranks.group))
    return 0 if layer is None else layer._number


def ranks_of(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that have the other experts of a parameter; None if it is no expert's."""
    note = getattr(parameter, _NOTE, None)
    return None if note is None else note.group


def _expect_no_replicas(layer: nn.Module | None, experts: list[Tensor], ranks: list[int]) -> None:
    """ranks: those that share the experts, by their numbers among all."""
    if any(getattr(t, "_fsdp_flattened", False) for t in (*experts, *(t._base for t in experts))):
        raise ValueError(
            "expert_group: expected experts in the ignored_states of FullyShardedDataParallel, got "
            "some that it has sharded as if they were the same on every rank"
        )
    if layer is not None and not isinstance(layer.w_up, DTensor):
        if any(len({*ranks} & _sharded_over(h)) > 1 for h in layer._state_dict_pre_hooks.values()):
            raise ValueError(
                "expert_group: expected experts in the ignored_params of fully_shard, or "
                "guild.distribute_experts in place of expert_group; got experts that FSDP2 has "
                "sharded as if they were the same on every rank"
            )
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or len({*ranks} & {*dist.get_process_group_ranks(ddp.process_group)}) < 2:
        return
    if ddp not in _averaged:
        _averaged[ddp] = {t.data_ptr() for t in (*ddp._module_parameters, *ddp.modules_buffers)}
    if any(tensor.data_ptr() in _averaged[ddp] for tensor in experts):
        raise ValueError(
            "expert_group: expected experts that DistributedDataParallel leaves alone, got some "
            "that it has overwritten with another rank's; make the model again and call "
            "guild.distributed.placement.leave_out_experts(model) before DistributedDataParallel"
        )


def _sharded_over(hook: Callable[..., object]) -> set[int]:
    """All ranks of FSDP2, from the hook for state dicts that it gives a layer with parameters."""
    if not hook.__module__.startswith("torch.distributed.fsdp."):
        return set()
    parameters = inspect.getclosurevars(hook).nonlocals.get("self")
    mesh = getattr(getattr(parameters, "mesh_info", None), "mesh", None)
    return set() if mesh is None else {*mesh.mesh.flatten().tolist()}
