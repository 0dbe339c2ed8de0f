"""Calls without gradients, in as little time of the host as they can take.

At a few tokens a layer takes some ten microseconds of a GPU, less than Python takes to check its
arguments one by one. Here nothing is checked or prepared twice: one op does what the layer does,
and compares sizes, types and devices itself. What it refuses, and what it cannot do, goes the long
way, where each argument has its own message.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from guild._torch.layer_operator import infer_experts, infer_layer
from guild._torch.operators import LayerFlags
from guild.activations import Activation, as_activation, is_interleaved
from guild.logits import RouterLinear
from guild.routing import router_scalars

# Without the wrapper that names torch's errors: whatever is raised is raised again the long way.
_infer_experts, _infer_layer = (op._op.__wrapped__ for op in (infer_experts, infer_layer))
_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView  # the results are new: no versions
_PREPARED = "_prepared"
_PLAIN = frozenset((Tensor, nn.Parameter))
_REFUSED = (RuntimeError, TypeError, ValueError)


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
        and x.dtype is w_up.dtype
        and _is_plainly_called(x)
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
    shared = None if layer.shared is None else layer.shared(flat)
    try:
        rest = shared, w_up, w_down, layer.b_up, layer.b_down, _prepared(layer)
        if torch.is_inference_mode_enabled():
            out, offsets = _infer_layer(flat, weight, bias, *rest)
        else:
            with _below_autograd():
                out, offsets = _infer_layer(flat, weight, bias, *rest)
    except _REFUSED:
        return None
    return out if len(shape) == 2 else out.view(shape), offsets


def quick_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation: Activation | str,
    order: str,
    transposed: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """What `routed_experts` returns and the offsets of the rows, or None: take the long way.

    Called with no other options than these.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not (
        type(x) is type(topk_ids) is type(topk_weights) is Tensor
        and type(w_up) in _PLAIN
        and type(w_down) in _PLAIN
        and (b_up is None or type(b_up) in _PLAIN)
        and (b_down is None or type(b_down) in _PLAIN)
        and (residual is None or type(residual) is Tensor)
        and type(transposed) is bool
        and topk_ids.dim() == 2
        and _is_plainly_called(x)
    ):
        return None
    try:
        settings = _expert_settings(activation, order, transposed)
        rest = residual, w_up, w_down, b_up, b_down, settings
        if torch.is_inference_mode_enabled():
            return _infer_experts(x, topk_ids, topk_weights, *rest)
        with _below_autograd():
            return _infer_experts(x, topk_ids, topk_weights, *rest)
    except _REFUSED:
        return None


def _is_plainly_called(x: Tensor) -> bool:
    """Whether nothing stands between a call and the op: no transform, tangent or autocast."""
    return (
        (x.is_cuda or x.is_cpu)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled(x.device.type)
    )


def _prepared(layer: nn.Module) -> Tensor:
    """The layer's settings as the op takes them, made again when one of them is another."""
    settings = layer.top_k, layer.routing, layer.activation, layer.order, layer.transposed
    found = layer.__dict__.get(_PREPARED)
    if found is None or found[0] != settings:
        flags = LayerFlags(*layer.activation.scalars, is_interleaved(layer.order), layer.transposed)
        told = _settings(*flags, *router_scalars(layer.top_k, layer.routing))
        found = layer.__dict__[_PREPARED] = settings, told
    return found[1]


@lru_cache
def _expert_settings(activation: Activation | str, order: str, transposed: bool) -> Tensor:
    return _settings(*as_activation(activation).scalars, is_interleaved(order), transposed)


def _settings(*values: float) -> Tensor:
    """Numbers and flags as one tensor, which the host reads."""
    with torch.inference_mode(False):  # it outlives the mode that it is first asked for in
        told = torch.tensor(values, dtype=torch.float64, device="cpu")
    if type(told) is not Tensor:  # under a FakeTensorMode, say
        raise TypeError(f"settings: expected a torch.Tensor, got {type(told).__name__}")
    return told
