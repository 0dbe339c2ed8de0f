"""A layer's fast path without gradients, like that of `routed_experts_fast_path`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from guild._torch.layer_operator import infer_layer
from guild._torch.operators import LayerFlags
from guild.activations import is_interleaved
from guild.logits import RouterLinear
from guild.routed_experts_fast_path import (
    REFUSED,
    below_autograd,
    is_plainly_called,
    settings_tensor,
)
from guild.routing import Router, router_scalars
from guild.shared_experts import SharedExperts, shared_rows

_infer_layer = infer_layer._op.__wrapped__  # its errors are raised again by the slow path
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
        and layer._routes_in_one()
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
    shared = modules.get("shared") or layer.shared
    dense = (None,) * 5  # a residual; or weights and scale of what is added, or the scale's gate
    if type(shared) is SharedExperts and shared.is_plain(layer):
        gate = shared.gate_weight(flat)
        dense = None, *shared.weights(), shared.scale(flat) if gate is None else None, gate
    elif shared is not None:
        dense = shared_rows(shared, flat), None, None, None, None
    try:
        rest = *dense, w_up, w_down, layer.b_up, layer.b_down, _prepared(layer)
        if torch.is_inference_mode_enabled():
            out, offsets = _infer_layer(flat, weight, bias, *rest)
        else:
            with below_autograd():
                out, offsets = _infer_layer(flat, weight, bias, *rest)
    except (*REFUSED, AttributeError):  # AttributeError: the activation is a name, say
        return None
    return out if len(shape) == 2 else out.view(shape), offsets


def _prepared(layer: nn.Module) -> Tensor:
    """The layer's settings as the op takes them; made again when one of them changes."""
    settings = layer.top_k, layer.routing, layer.activation, layer.order, layer.transposed
    found = layer.__dict__.get(PREPARED)
    if found is None or found[0] != settings:
        flags = LayerFlags(*layer.activation.scalars, is_interleaved(layer.order), layer.transposed)
        numbers = settings_tensor(*flags, *router_scalars(layer.top_k, layer.routing))
        found = layer.__dict__[PREPARED] = settings, numbers
    return found[1]
