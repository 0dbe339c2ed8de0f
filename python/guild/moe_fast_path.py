"""A layer's fast path without gradients, like that of `routed_experts_fast_path`."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guild._torch.layer_operator import infer_layer
from guild._torch.operators import LayerFlags, ops
from guild.activations import is_interleaved
from guild.logits import RouterLinear, has_plain_call
from guild.routed_experts_fast_path import (
    REFUSED,
    below_autograd,
    expert_settings,
    infer_experts,
    is_plainly_called,
    settings_tensor,
)
from guild.routing import Router, router_scalars
from guild.shared_experts import SharedExperts, shared_rows

# Without the wrappers that translate errors: the slow path raises them again.
_infer_layer = infer_layer._op.__wrapped__
_router_logits, _route = ops.router_logits.default, ops.route.default
Optionals = tuple[Tensor | None, ...]
PREPARED = "_prepared"  # attribute of a layer: its settings, and as `_prepared` gives them


def quick_output(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """A `guild.MoE`'s output in x's shape and the offsets of its rows; None: take the slow path.

    For calls without a mask that want nothing but the output. Nothing about the weights is kept, so
    they may change between calls in any way: in place, in type or in device.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    # Bypasses Module.__getattr__, which is slow.
    modules, parameters = layer._modules, layer._parameters
    router = modules.get("router")
    w_up, w_down = parameters.get("w_up"), parameters.get("w_down")
    if not (
        layer.expert_group is layer.fp8 is None
        and isinstance(layer.routing, Router)
        and type(x) is Tensor
        and type(w_up) is type(w_down) is nn.Parameter
        and type(router) is RouterLinear
        and type(weight := router._parameters.get("weight")) is nn.Parameter
        and x.dtype is w_up.dtype
        and is_plainly_called(x)
        and layer._uses_only_the_choice()
        and (router.is_plain() or _adds_a_bias(router, layer.experts, x.dtype))
    ):
        return None
    shape = x.shape
    if not shape or shape[-1] != layer.hidden or weight.shape[0] != layer.experts:
        return None
    flat = x
    if len(shape) != 2:
        if not x.is_contiguous():
            return None
        flat = x.view(math.prod(shape[:-1]), layer.hidden)
    bias = None
    if layer.routing.selection_bias and (bias := router._buffers.get("selection_bias")) is None:
        return None
    in_one = router._parameters.get("bias") is None
    added = _added(layer, flat, modules.get("shared") or layer.shared, as_rows=not in_one)
    try:
        experts = w_up, w_down, layer.b_up, layer.b_down
        out, offsets = _run(layer, flat, router, bias, added, experts)
    except (*REFUSED, AttributeError):  # AttributeError: the activation is a name, say
        return None
    return out if len(shape) == 2 else out.view(shape), offsets


def _added(layer: nn.Module, x: Tensor, shared: nn.Module | None, as_rows: bool) -> Optionals:
    """A residual; or weights and scale of what is added, or the scale's gate; or none of these."""
    if shared is None:
        return (None,) * 5
    if as_rows or not (type(shared) is SharedExperts and shared.is_plain(layer)):
        return shared_rows(shared, x), None, None, None, None
    gate = shared.gate_weight(x)
    return None, *shared.weights(), shared.scale(x) if gate is None else None, gate


def _run(
    layer: nn.Module,
    x: Tensor,
    router: nn.Module,
    bias: Tensor | None,
    added: Optionals,
    experts: Optionals,
) -> tuple[Tensor, Tensor]:
    """Output and offsets of tokens (T, H). bias: of the choice.

    By one op or, where the router's logits have a bias, as gpt-oss's, by an op for each step.
    """
    weight, by_expert = router._parameters["weight"], router._parameters.get("bias")
    with nullcontext() if torch.is_inference_mode_enabled() else below_autograd():
        if by_expert is None:
            return _infer_layer(x, weight, bias, *added, *experts, _prepared(layer))
        narrow = x.dtype is torch.bfloat16 or x.dtype is torch.float16
        logits = _router_logits(x, weight) if narrow else F.linear(x, weight)
        logits += by_expert
        scores, ids, _ = _route(logits, bias, None, *router_scalars(layer.top_k, layer.routing))
        settings = expert_settings(layer.activation, layer.order, layer.transposed)
        return infer_experts(x, ids, scores, added[0], *experts, settings)


def _adds_a_bias(router: nn.Module, experts: int, dtype: torch.dtype) -> bool:
    """Whether calling the router computes x weight^T + bias, and nothing else."""
    bias = router._parameters.get("bias")
    return (
        type(bias) is nn.Parameter
        and bias.dtype is dtype
        and bias.shape == (experts,)
        and has_plain_call(router)
    )


def _prepared(layer: nn.Module) -> Tensor:
    """The layer's settings as the op takes them; made again when one of them changes."""
    settings = layer.top_k, layer.routing, layer.activation, layer.order, layer.transposed
    found = layer.__dict__.get(PREPARED)
    if found is None or found[0] != settings:
        flags = LayerFlags(*layer.activation.scalars, is_interleaved(layer.order), layer.transposed)
        numbers = settings_tensor(*flags, *router_scalars(layer.top_k, layer.routing))
        found = layer.__dict__[PREPARED] = settings, numbers
    return found[1]
