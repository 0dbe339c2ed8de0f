"""A layer's call without gradients, in as little time of the host as it can take.

At a few tokens a layer takes some ten microseconds of a GPU, less than Python takes to check its
arguments one by one. Here nothing is checked or prepared twice: one op does what the layer does,
and compares sizes, types and devices itself. What it refuses, and what it cannot do, goes the long
way, where each argument has its own message.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from guild._torch.layer_operator import moe_layer_out
from guild._torch.operators import LayerFlags
from guild.activations import is_interleaved
from guild.logits import RouterLinear
from guild.routing import router_scalars

# Without the wrapper that names torch's errors: whatever is raised is raised again the long way.
_moe_layer_out = moe_layer_out._op.__wrapped__
_PREPARED = "_prepared"


def quick_output(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """A `guild.MoE`'s output in x's shape and the offsets of its rows, or None: take the long way.

    Called without mask, and with nothing else wanted than the output. Weights may change between
    calls in every way, in place, in type or in device: nothing of them is kept.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    router, parameters = layer._modules.get("router"), layer._parameters
    w_up, w_down = parameters.get("w_up"), parameters.get("w_down")
    if not (
        layer.expert_group is None
        and type(x) is Tensor
        and type(w_up) is type(w_down) is nn.Parameter
        and type(router) is RouterLinear
        and type(weight := router._parameters["weight"]) is nn.Parameter
        and (x.is_cuda or x.is_cpu)
        and x.dtype is w_up.dtype
        and (x.dim() == 2 or x.is_contiguous())
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled(x.device.type)
        and layer._routes_in_one()
    ):
        return None
    *shape, hidden = x.shape or (0,)
    if hidden != layer.hidden or weight.shape[0] != layer.experts:
        return None
    flat = x if len(shape) == 1 else x.view(math.prod(shape), hidden)
    scalars, flags = _prepared(layer)
    bias = None
    if layer.routing.selection_bias and (bias := router._buffers.get("selection_bias")) is None:
        return None
    shared = None if layer.shared is None else layer.shared(flat)
    weights = w_up, w_down, layer.b_up, layer.b_down
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    try:
        with torch._C._AutoDispatchBelowADInplaceOrView():  # out is new: nobody keeps its version
            offsets = _moe_layer_out(
                flat, weight, bias, None, *scalars, shared, *weights, *flags, out
            )
    except RuntimeError:
        return None
    return out if len(shape) == 1 else out.view(x.shape), offsets


def _prepared(layer: nn.Module) -> tuple[tuple[Any, ...], LayerFlags]:
    """The layer's settings as the op takes them, made again when one of them is another."""
    settings = layer.top_k, layer.routing, layer.activation, layer.order, layer.transposed
    found = layer.__dict__.get(_PREPARED)
    if found is None or found[0] != settings:
        flags = LayerFlags(*layer.activation.scalars, is_interleaved(layer.order), layer.transposed)
        found = settings, router_scalars(layer.top_k, layer.routing), flags
        layer.__dict__[_PREPARED] = found
    return found[1:]
