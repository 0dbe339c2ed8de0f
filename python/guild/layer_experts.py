"""A layer's expert weights and the ops that run them: all here, or a share on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from guild.experts import routed_experts_and_offsets, routed_layer

if TYPE_CHECKING:
    from guild.distributed.expert_parallel import ExpertParallel


def local_count(expert_group: ExpertParallel | None, experts: int) -> int:
    """How many of a layer's experts this process has.

    Raises TypeError or ValueError, naming the argument, unless the group can share them.
    """
    if expert_group is None:
        return experts
    if not hasattr(expert_group, "local_experts"):
        raise TypeError(
            f"expert_group: expected a guild.ExpertParallel, got {type(expert_group).__name__}"
        )
    return len(expert_group.local_experts(experts))


def expert_parameters(
    layer: nn.Module, bias: bool, make: dict[str, Any]
) -> Iterator[nn.Parameter | None]:
    """Uninitialised w_up, w_down, b_up and b_down of a guild.MoE whose sizes are set."""
    width = layer.activation.width(layer.intermediate)
    up, down = (width, layer.hidden), (layer.hidden, layer.intermediate)
    if layer.transposed:
        up, down = up[::-1], down[::-1]
    count = local_count(layer.expert_group, layer.experts)
    for shape, wanted in ((up, True), (down, True), ((width,), bias), ((layer.hidden,), bias)):
        yield nn.Parameter(torch.empty(count, *shape, **make)) if wanted else None


def fill_normal(weight: Tensor, std: float, expert_group: ExpertParallel | None) -> None:
    """Normal values; over ranks other ones on each."""
    if expert_group is None:
        nn.init.normal_(weight, std=std)
    else:
        expert_group.fill_normal(weight, std)


def expert_ops(
    expert_group: ExpertParallel | None, number: int, out: Tensor | None = None
) -> tuple[Callable, Callable]:
    """`routed_layer` and `routed_experts_and_offsets`, here or over the ranks of a group.

    number: of the layer, by which ranks find out that they run different ones; out: what the result
    is written to, if anything.
    """
    if expert_group is None or expert_group.size == 1:
        if out is None:
            return routed_layer, routed_experts_and_offsets
        return partial(routed_layer, out=out), partial(routed_experts_and_offsets, out=out)
    if out is not None:
        raise ValueError("out: expected None with experts on other ranks, got a tensor")
    return (
        partial(expert_group.routed_layer, layer=number),
        partial(expert_group.routed_experts_and_offsets, layer=number),
    )


def local_parts(
    expert_group: ExpertParallel | None, *weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    """This rank's parts of weights that are DTensors; others as they are."""
    return weights if expert_group is None else expert_group.local_parts(*weights)
