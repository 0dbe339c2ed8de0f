"""`routed_experts` without gradients, with as little work on the host as possible.

With few tokens a layer takes tens of microseconds on a GPU, less than Python takes to check its
arguments one by one. Here nothing is checked or prepared twice: one op runs the layer, and compares
sizes, types and devices itself. What it refuses or does not support takes the slow path, where each
argument has its own error message.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from guild._torch.layer_operator import infer_experts, infer_shared
from guild.activations import Activation, as_activation, is_interleaved

REFUSED = (RuntimeError, TypeError, ValueError)
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView  # results are new: no versions to bump
# Without the wrapper that translates torch's errors: the slow path raises them again.
_infer_experts, _infer_shared = (op._op.__wrapped__ for op in (infer_experts, infer_shared))
_PLAIN = frozenset((Tensor, nn.Parameter))


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
    """The result of `routed_experts` and the offsets of the rows; None: take the slow path.

    Called with no options other than these.
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
        and is_plainly_called(x)
    ):
        return None
    try:
        settings = _expert_settings(activation, order, transposed)
        rest = residual, w_up, w_down, b_up, b_down, settings
        if torch.is_inference_mode_enabled():
            return _infer_experts(x, topk_ids, topk_weights, *rest)
        with below_autograd():
            return _infer_experts(x, topk_ids, topk_weights, *rest)
    except REFUSED:
        return None


def quick_shared(
    x: Tensor, w_up: Tensor, w_down: Tensor, activation: Activation, order: str
) -> Tensor | None:
    """The output of shared experts (W, hidden) and (hidden, W); None: take the slow path."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not (type(x) is Tensor and {type(w_up), type(w_down)} <= _PLAIN and is_plainly_called(x)):
        return None
    try:
        settings = _expert_settings(activation, order, False)
        with below_autograd():
            return _infer_shared(x, w_up, w_down, settings)
    except REFUSED:
        return None


def is_plainly_called(x: Tensor) -> bool:
    """Whether nothing stands between a call and the op: no transform, tangent, autocast or trace.

    torch.jit.trace would crash where the op refuses its arguments, as it has recorded the op.
    """
    return (
        (x.is_cuda or x.is_cpu)
        and not x.is_nested
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch._C._is_tracing()
        and not torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    )


@lru_cache
def _expert_settings(activation: Activation | str, order: str, transposed: bool) -> Tensor:
    return settings_tensor(*as_activation(activation).scalars, is_interleaved(order), transposed)


def settings_tensor(*values: float) -> Tensor:
    """Numbers and flags as one tensor on the CPU."""
    with torch.inference_mode(False):  # it is cached, and outlives the mode of its first caller
        numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
    if type(numbers) is not Tensor:  # under a FakeTensorMode, say
        raise TypeError(f"settings: expected a torch.Tensor, got {type(numbers).__name__}")
    return numbers
