"""The function that Transformers calls in place of an experts module's own forward."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.integrations.moe import (
    grouped_mm_experts_forward,
    use_experts_implementation,
)

from guild import Activation, routed_experts
from guild.integrations.transformers.gate import gate_function, gate_of
from guild.integrations.transformers.messages import say_left, say_unfused
from guild.integrations.transformers.unfused import unfused_experts

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ON_CUDA = (torch.bfloat16, torch.float16)
_MOST_EXPERTS = {"cpu": 4096, "cuda": 1024}
# Whether torch.compile takes what it is told about a module, here its gate, for a constant.
COMPILES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_MISALIGNED = "it needs rows of weights that begin at multiples of 16 bytes"


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """All experts of a layer of a Transformers model, on Guild's kernels.

    Parameters
    ----------
    self : torch.nn.Module
        Experts of a class with `use_experts_implementation`. Their weights are read in place.
    hidden_states : torch.Tensor
        (tokens T, hidden H).
    top_k_index : torch.Tensor
        (T, K) int32 or int64. Ids outside the module's own experts, which expert parallelism gives
        to the slots of other ranks, are skipped.
    top_k_weights : torch.Tensor
        (T, K), any floating dtype.

    Returns
    -------
    torch.Tensor
        (T, H) in hidden_states' dtype.

    Notes
    -----
    Where Guild cannot compute on the device, in the dtype or with the sizes of the call, this is
    Transformers' `grouped_mm`, or the model's own loop where that cannot either. A warning says so
    once. Inside torch.compile it is `grouped_mm`, too, with torch before 2.13.
    """
    w_up = _local(self.gate_up_proj if self.has_gate else self.up_proj)
    w_down = _local(self.down_proj)
    b_up = b_down = None
    if self.has_bias:
        b_up = _local(self.gate_up_proj_bias if self.has_gate else self.up_proj_bias)
        b_down = _local(self.down_proj_bias)

    call = (self, hidden_states, top_k_index, top_k_weights)
    if torch.compiler.is_compiling() and not COMPILES:
        return grouped_mm_experts_forward(*call)
    why_not = _unknown_features(self) or _why_not(hidden_states, w_up, w_down)
    if why_not:
        say_left(type(self).__name__, "Transformers' grouped_mm", why_not)
        return grouped_mm_experts_forward(*call)
    dtype = _dtype(hidden_states, w_up)
    any_rows = _takes_any_rows(hidden_states.device.type)
    if not (any_rows or _begin_at_16_bytes(dtype, w_up, w_down)):
        say_left(type(self).__name__, "the model's own loop", _MISALIGNED)
        return type(self).forward.__wrapped__(*call)

    x = hidden_states.contiguous()
    if not _has_autocast(x):  # under autocast the products cast their operands themselves
        x, b_up, b_down = (None if t is None else t.to(w_up.dtype) for t in (x, b_up, b_down))
    layer = (x, top_k_index, top_k_weights, w_up, w_down, b_up, b_down)
    gate = _gate(self)
    if gate is None:
        say_unfused(type(self).__name__)
        out = unfused_experts(*layer, gate_function(self), self.is_transposed)
    else:
        order, *parameters = gate
        activation = Activation(*parameters)
        transposed = self.is_transposed
        out = routed_experts(*layer, activation=activation, order=order, transposed=transposed)
    return out.to(hidden_states.dtype)


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _has_autocast(x: Tensor) -> bool:
    return x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)


def _other_features(decorator: Callable) -> dict[str, object]:
    """What a class can say of its experts that is not known here, and what it says as a rule.

    Later versions of Transformers add some: 5.23 a norm behind each expert.
    """
    known = ("experts_class", "experts_interface", "has_gate", "has_bias", "is_transposed")
    parameters = inspect.signature(decorator).parameters.items()
    return {
        name: parameter.default
        for name, parameter in parameters
        if name not in (*known, "is_concatenated")  # the gate itself tells that
    }


_OTHER_FEATURES = _other_features(use_experts_implementation)


def _unknown_features(experts: nn.Module) -> str:
    """What these experts do beside projections, biases and a gate; empty if nothing."""
    for name, usual in _OTHER_FEATURES.items():
        if getattr(experts, name, usual) != usual:
            return f"it does not know {name}"
    return ""


def _why_not(x: Tensor, w_up: Tensor, w_down: Tensor) -> str:
    """Why Guild cannot compute these experts; empty if it can."""
    device = x.device.type
    if device not in _MOST_EXPERTS:
        return f"it has no kernels for {device} tensors"
    if w_up.dtype not in _FLOATS or w_down.dtype != w_up.dtype:
        return f"it has no kernels for weights in {w_up.dtype} and {w_down.dtype}"
    if w_down.shape[0] > _MOST_EXPERTS[device]:
        return f"it takes {_MOST_EXPERTS[device]} experts on a {device} device"
    if device == "cpu":
        return ""
    dtype = _dtype(x, w_up)
    if dtype not in _ON_CUDA:
        return f"on a CUDA device it computes in bfloat16 and float16, not in {dtype}"
    return _missing_kernels(x.device.index)


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """What the products are computed in."""
    return torch.get_autocast_dtype(x.device.type) if _has_autocast(x) else weight.dtype


def _takes_any_rows(device: str) -> bool:
    return device == "cpu"


def _begin_at_16_bytes(dtype: torch.dtype, *weights: Tensor) -> bool:
    """Whether all rows do, of weights in this dtype. torch's grouped_mm takes no others either."""
    steps = [n for w in weights for n in (*w.stride()[:-1], w.storage_offset())]
    return all(w.stride(-1) == 1 for w in weights) and not any(
        step * dtype.itemsize % 16 for step in steps
    )


@torch.compiler.assume_constant_result
def _missing_kernels(device: int) -> str:
    """Why the CUDA kernels cannot run on this device; empty if they can."""
    return _asked_once(device)


@functools.cache
def _asked_once(device: int) -> str:
    with torch.cuda.device(device):
        reason = torch.ops.guild.cuda_reason()
    return reason and f"of this GPU: {reason}"


@torch.compiler.assume_constant_result
def _gate(experts: nn.Module) -> tuple | None:
    """`gate_of` in plain numbers, which is all that a compiled function can take as constants."""
    gate = gate_of(experts)
    return None if gate is None else (gate.order, *dataclasses.astuple(gate.activation)[:6])
