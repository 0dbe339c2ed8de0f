"""A layer's expert weights and the ops that run them: all here, or a share on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from guild.experts import routed_experts_and_offsets, routed_layer
from guild.float8.settings import expect_fp8
from guild.layer_routing import is_exporting

if TYPE_CHECKING:
    from guild.distributed.expert_parallel import ExpertParallel
    from guild.float8.experts import FP8Weights
    from guild.float8.settings import FP8


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
    """Fill a weight with normal values; over ranks, different ones on each."""
    if expert_group is None:
        nn.init.normal_(weight, std=std)
    else:
        expert_group.fill_normal(weight, std)


def expert_ops(
    expert_group: ExpertParallel | None,
    number: int,
    out: Tensor | None,
    fp8: FP8 | FP8Weights | None,
) -> tuple[Callable, Callable]:
    """`routed_layer` and `routed_experts_and_offsets`, here or over the ranks of a group.

    number: identifies the layer, so that ranks notice when they run different ones; out: where the
    result is written, if given; fp8: how, or with which weights, the experts run in FP8.
    """
    if expert_group is None or expert_group.size == 1:
        given: dict[str, Any] = {} if out is None else {"out": out}
        given |= {} if fp8 is None else {"fp8": fp8}
        return partial(routed_layer, **given), partial(routed_experts_and_offsets, **given)
    if fp8 is not None:
        raise NotImplementedError(
            "fp8: expected None with experts on other ranks (expert_group), got guild.FP8"
        )
    if out is not None:
        raise ValueError("out: expected None with experts on other ranks, got a tensor")
    return (
        partial(expert_group.routed_layer, layer=number),
        partial(expert_group.routed_experts_and_offsets, layer=number),
    )


def layer_fp8(layer: nn.Module) -> FP8 | FP8Weights | None:
    """The `fp8` argument that a guild.MoE passes to `routed_experts`."""
    fp8 = layer.fp8
    expect_fp8(fp8)
    if fp8 is None or not fp8.cached:
        return fp8
    if _is_only_noted():  # kept codes would become constants, or not exist at all
        return replace(fp8, cached=False)
    layout = layer.activation, layer.order, layer.transposed
    return layer._fp8_weights.of(fp8, layer.w_up, layer.w_down, *layout)


def _is_only_noted() -> bool:
    """Whether torch.export is tracing this call, or fake tensors stand for its results."""
    if torch.compiler.is_compiling():
        return is_exporting()
    return is_exporting() or detect_fake_mode() is not None


def local_parts(
    expert_group: ExpertParallel | None, *weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    """This rank's parts of weights that are DTensors; other weights as they are."""
    return weights if expert_group is None else expert_group.local_parts(*weights)
