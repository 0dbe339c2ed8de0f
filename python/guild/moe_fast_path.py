"""A layer's fast path without gradients, like that of `routed_experts_fast_path`."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import NoneType

import torch
from torch import Tensor, nn

from guild._torch.checks import expect_choice, expect_count, expect_flag
from guild._torch.layer_operator import infer_layer
from guild._torch.operators import LayerFlags
from guild.activations import is_interleaved
from guild.expert_arguments import expect_backward_options
from guild.layer_routing import BALANCE_OVER
from guild.logits import LogitLinear, RouterLinear, has_plain_call
from guild.routed_experts_fast_path import (
    REFUSED,
    below_autograd,
    is_plainly_called,
    settings_tensor,
)
from guild.routing import Router, router_scalars
from guild.shared_experts import SharedExperts

# Without the wrappers that translate errors: the slow path raises them again.
_infer_layer = infer_layer._op.__wrapped__
PREPARED = "_prepared"  # attribute of a layer: its settings, and the tensor made of them


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
        and type(layer.hidden) is type(layer.experts) is int
        and isinstance(layer.routing, Router)
        and type(x) is Tensor
        and type(w_up) is type(w_down) is nn.Parameter
        and type(router) is RouterLinear
        and type(weight := router._parameters.get("weight")) is nn.Parameter
        and x.dtype is w_up.dtype
        and is_plainly_called(x)
        and layer._uses_only_the_choice()
        and router.is_plain()
    ):
        return None
    shape = x.shape
    if not shape or shape[-1] != layer.hidden or weight.shape[0] != layer.experts:
        return None
    if w_down.dim() != 3 or w_down.shape[0] != layer.experts:
        return None
    flat = x
    if len(shape) != 2:
        if not x.is_contiguous():
            return None
        flat = x.view(math.prod(shape[:-1]), layer.hidden)
    product = weight, router._parameters["bias"]
    if type(product[1]) not in (nn.Parameter, NoneType):
        return None
    bias = None
    if layer.routing.selection_bias and (bias := router._buffers.get("selection_bias")) is None:
        return None
    shared = layer.shared if (found := modules.get("shared")) is None else found
    if not _is_known(layer, shared):  # a refusal below would have it called twice
        return None
    added = _added(flat, shared)
    experts = w_up, w_down, layer.b_up, layer.b_down
    try:
        with nullcontext() if torch.is_inference_mode_enabled() else below_autograd():
            out, offsets = _infer_layer(flat, *product, bias, *added, *experts, _prepared(layer))
    except (*REFUSED, AttributeError):  # AttributeError: the activation is a name, say
        return None
    return out if len(shape) == 2 else out.view(shape), offsets


def _is_known(layer: nn.Module, shared: nn.Module | None) -> bool:
    """Whether shared experts and their gate run no code of others, such as hooks."""
    if shared is None:
        return True
    if not (type(shared) is SharedExperts and shared.is_plain(layer)):
        return False
    gate = shared._modules.get("gate")
    return gate is None or (type(gate) is LogitLinear and has_plain_call(gate))


def _added(x: Tensor, shared: SharedExperts | None) -> tuple[Tensor | None, ...]:
    """A residual; or weights and scale of what is added, or the scale's gate; or none of these."""
    if shared is None:
        return (None,) * 5
    gate = shared.gate_weight(x)
    return None, *shared.weights(), shared.scale(x) if gate is None else None, gate


def _prepared(layer: nn.Module) -> Tensor:
    """The layer's settings as the op takes them; made again when one of them changes.

    Raises TypeError or ValueError if one is wrong, also of those that only training reads.
    """
    settings = (
        layer.top_k,
        layer.routing,
        layer.activation,
        layer.order,
        layer.transposed,
        layer.recompute,
        layer.weight_gradients,
        layer.balance_over,
        type(layer.top_k),  # 1 == True
        type(layer.transposed),
        type(layer.recompute),
    )
    found = layer.__dict__.get(PREPARED)
    if found is None or found[0] != settings:
        expect_backward_options(layer.recompute, layer.weight_gradients)
        expect_choice("balance_over", layer.balance_over, BALANCE_OVER)
        expect_count("top_k", layer.top_k, 1)
        expect_flag("transposed", layer.transposed)
        flags = LayerFlags(*layer.activation.scalars, is_interleaved(layer.order), layer.transposed)
        numbers = settings_tensor(*flags, *router_scalars(layer.top_k, layer.routing))
        found = layer.__dict__[PREPARED] = settings, numbers
    return found[1]
