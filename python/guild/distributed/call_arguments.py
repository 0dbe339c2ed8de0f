"""Arguments of a group and of its calls: what is not supported, and what is computed from them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from guild._torch.autograd import below_autograd, rows_of
from guild._torch.checks import expect_experts
from guild._torch.operators import ops
from guild.expert_arguments import residual_like, sink_of
from guild.lora import LoRA
from guild.routed_call import RoutedCall
from guild.weight_gradients import WeightGradients


def process_group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group that `group` stands for; an error names what is wrong with it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "group: expected torch.distributed to be initialised (torchrun, and "
            "torch.distributed.init_process_group)"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a mesh of one dimension, got {group.ndim}; take one of them: "
                'mesh["name"]'
            )
        if group.get_coordinate() is None:
            raise ValueError("group: expected a mesh that this rank is in, got one of other ranks")
        return group.get_group()
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected one that this rank is in, got one of other ranks")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: expected a ProcessGroup or a DeviceMesh, got {type(group).__name__}"
        )
    return group


def expect_plain(exact: bool, weight_gradients: Any, *lora: Any) -> None:
    """Raise if exact=True does not support what is asked for."""
    given = {"weight_gradients": weight_gradients}
    given |= dict(zip(("lora_up", "lora_down"), lora, strict=False))
    for name, value in given.items():
        if exact and value is not None:
            raise ValueError(
                f"{name}: expected None with ExpertParallel(exact=True), got a "
                f"{type(value).__name__}"
            )


def expect_runnable(size: int, call: RoutedCall, weight_gradients: WeightGradients | None) -> None:
    """Raise before the first message what would else be raised after it; size: number of ranks."""
    w_down = call.layer[2]
    expect_experts("w_down", w_down, size * w_down.shape[0], True, "experts on all ranks")
    if weight_gradients is None:
        return
    if any("_ToTorchTensor" in type(getattr(w, "grad_fn", None)).__name__ for w in call.given):
        raise ValueError(
            "weight_gradients: expected None with experts distributed as DTensors "
            "(distribute_experts), got WeightGradients"
        )
    sink_of(call.wants_gradient(), weight_gradients, call.given, call.order)


def tensors_in(*arguments: Any) -> list[Tensor]:
    """All tensors among arguments of a call: in lists, pairs and LoRA terms, too."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, LoRA):
            found += tensors_in(argument.a, argument.b)
        elif isinstance(argument, list | tuple | nn.ParameterList):
            found += tensors_in(*argument)
    return found


def expect_no_transform(*arguments: Any) -> None:
    """Raise NotImplementedError where torch.func or forward-mode AD would differentiate the call.

    Called before the first message: ranks that had got one would wait for the others.
    """
    duals = forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in tensors_in(*arguments)
    )
    if duals or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "expert_group: expected a call outside of torch.func's transforms (grad, vmap, jvp) "
            "and of forward-mode AD, which do not reach other ranks; use backward()"
        )


def expect_absent(**given: Any) -> None:
    """Raise for options of `guild.routed_experts` that calls over ranks do not support."""
    for name, value in given.items():
        if value is not None:
            what = "a tensor" if isinstance(value, Tensor) else f"{value!r:.200}"
            raise ValueError(f"{name}: expected None with experts on other ranks, got {what}")


def residual_rows(residual: Tensor | None, x: Tensor) -> Tensor | None:
    """The residual, checked, in the autocast dtype, which x already has."""
    residual = residual_like(residual, x)
    return None if residual is None else rows_of(residual)


def int32_ids(ids: Tensor, experts: int) -> Tensor:
    """Expert ids as int32; ids of no expert remain ids of no expert."""
    return ids if ids.dtype == torch.int32 else ids.clamp(-1, experts).int()


@below_autograd
def own_offsets(ids: Tensor, scores: Tensor, token_offsets: Tensor | None, experts: int) -> Tensor:
    """int32 (E + 1): where each expert's rows of this rank's tokens would begin."""
    return ops.sort_by_expert(ids, scores, experts, token_offsets)[0]
