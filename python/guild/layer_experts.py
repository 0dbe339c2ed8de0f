"""A layer's expert weights and the ops that run them: all here, or a share on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from guild._torch.checks import expect_device, expect_dims
from guild.activations import as_activation
from guild.experts import routed_experts_and_offsets, routed_layer
from guild.float8.settings import expect_fp8
from guild.initial_values import fill_normal_
from guild.layer_routing import is_exporting, is_transformed
from guild.routed_call import RoutedArguments
from guild.routing import Router

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
    _expect_group(expert_group)
    return len(expert_group.local_experts(experts))


def _expect_group(expert_group: object) -> None:
    if not hasattr(expert_group, "local_experts"):
        raise TypeError(
            f"expert_group: expected a guild.ExpertParallel, got {type(expert_group).__name__}"
        )


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


def shown_options(layer: nn.Module) -> dict[str, Any]:
    """What print(layer) shows of a guild.MoE: sizes, and options that are not the default."""
    shown = {name: getattr(layer, name) for name in ("hidden", "intermediate", "experts", "top_k")}
    shown |= {"activation": layer.activation, "bias": layer.b_up is not None}
    usual = {"routing": Router(), "order": "concatenated", "transposed": False, "recompute": False}
    usual |= dict.fromkeys(("balance_over", "fp8", "expert_group", "weight_gradients"))
    return shown | {
        name: getattr(layer, name) for name, value in usual.items() if getattr(layer, name) != value
    }


def fill_weight(weight: Tensor, std: float, expert_group: ExpertParallel | None) -> None:
    """Fill a weight with normal values; over ranks, different ones on each."""
    if expert_group is None:
        fill_normal_(weight, std)
    else:
        expert_group.fill_normal(weight, std)


def expect_shareable(
    expert_group: ExpertParallel | None, experts: int, fp8: FP8 | FP8Weights | None
) -> None:
    """Raise, naming the argument, unless a group's ranks can share a layer's experts."""
    local_count(expert_group, experts)
    expect_reachable(expert_group, None, fp8)


def expect_reachable(
    expert_group: ExpertParallel | None, out: Tensor | None, fp8: FP8 | FP8Weights | None
) -> None:
    """Raise for options of a call that experts on other ranks do not support."""
    if _are_all_here(expert_group):
        return
    if fp8 is not None:
        raise NotImplementedError(
            "fp8: expected None with experts on other ranks (expert_group), got guild.FP8"
        )
    if out is not None:
        raise ValueError("out: expected None with experts on other ranks, got a tensor")


def run_layer(
    layer: nn.Module,
    weights: tuple[Tensor | None, ...],
    x: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    selection_bias: Tensor | None,
    token_mask: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    fp8: FP8 | FP8Weights | None,
) -> tuple[Tensor, Tensor]:
    """`routed_layer` of a guild.MoE, here or over the ranks of its group."""
    given = _arguments(layer, weights, x=x, residual=residual, out=out, fp8=fp8)
    router = router_weight, router_bias, layer.top_k, layer.routing, selection_bias, token_mask
    if _are_all_here(layer.expert_group):
        return routed_layer(given, *router)
    return layer.expert_group.routed_layer(given, *router, layer=layer)


def run_experts(
    layer: nn.Module,
    weights: tuple[Tensor | None, ...],
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    token_offsets: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    fp8: FP8 | FP8Weights | None,
) -> tuple[Tensor, Tensor]:
    """`routed_experts_and_offsets` of a guild.MoE, here or over the ranks of its group."""
    if layer.routing.applied_to == "input":
        x, scores = (x * scores).to(x.dtype), torch.ones_like(scores)
    given = _arguments(
        layer,
        weights,
        x=x,
        topk_ids=ids,
        topk_weights=scores,
        token_offsets=token_offsets,
        residual=residual,
        out=out,
        fp8=fp8,
    )
    if _are_all_here(layer.expert_group):
        return routed_experts_and_offsets(given)
    return layer.expert_group.routed_experts_and_offsets(given, layer=layer)


def _arguments(
    layer: nn.Module,
    weights: tuple[Tensor | None, ...],
    *,
    x: Tensor,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    token_offsets: Tensor | None = None,
    residual: Tensor | None,
    out: Tensor | None,
    fp8: FP8 | FP8Weights | None,
) -> RoutedArguments:
    """A call with a guild.MoE's weights and settings; without ids and weights, the router's."""
    w_up, w_down, b_up, b_down = weights
    _expect_experts(w_down, local_count(layer.expert_group, layer.experts))
    return RoutedArguments(
        x=x,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        w_up=w_up,
        w_down=w_down,
        b_up=b_up,
        b_down=b_down,
        activation=layer.activation,
        order=layer.order,
        transposed=layer.transposed,
        token_offsets=token_offsets,
        residual=residual,
        recompute=layer.recompute,
        weight_gradients=layer.weight_gradients,
        out=out,
        fp8=fp8,
    )


def _expect_experts(w_down: Tensor, experts: int) -> None:
    """Raise ValueError for weights of fewer experts, whose tokens would be left out, or of more."""
    shape = getattr(w_down, "shape", ())
    if len(shape) == 3 and shape[0] != experts:  # other shapes are refused elsewhere
        raise ValueError(
            f"w_down: expected the layer's {experts} experts, got {shape[0]}, in shape "
            f"{tuple(shape)}; where experts are pruned, prune the router's rows and set "
            "MoE.experts too"
        )


def _are_all_here(expert_group: ExpertParallel | None) -> bool:
    """Whether this process has all experts."""
    return expert_group is None or expert_group.size == 1


def layer_fp8(layer: nn.Module) -> FP8 | FP8Weights | None:
    """The `fp8` argument that a guild.MoE passes to `routed_experts`."""
    fp8 = layer.fp8
    expect_fp8(fp8)
    if fp8 is None or not fp8.cached:
        return fp8
    w_up, w_down = layer.w_up, layer.w_down
    # Kept codes would become constants, or not exist at all; replicas of nn.DataParallel, which run
    # at the same time, would share them. Those of a DTensor are not looked for; the class itself
    # would take half a second to import.
    if _is_only_noted() or hasattr(w_up, "to_local") or getattr(layer, "_is_replica", False):
        return replace(fp8, cached=False)
    expect_dims("w_down", w_down, 3, what="(experts, hidden, intermediate)")
    expect_device("w_down", w_down, w_up, "w_up")
    layout = as_activation(layer.activation), layer.order, layer.transposed
    return layer._fp8_weights.of(fp8, w_up, w_down, *layout)


def _is_only_noted() -> bool:
    """Whether a transform is tracing this call, or fake tensors stand for its results."""
    if torch.compiler.is_compiling():
        return is_exporting()
    return is_exporting() or is_transformed() or detect_fake_mode() is not None


def local_parts(
    expert_group: ExpertParallel | None, *weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    """This rank's parts of weights that are DTensors; other weights as they are."""
    if expert_group is None:
        return weights
    _expect_group(expert_group)
    return expert_group.local_parts(*weights)
