"""The contract of Megatron-Core and Transformer Engine for `main_grad`.

Parameters follow it by attributes: `grad_added_to_main_grad` (set to True here; autograd hands the
parameter a dummy gradient so that its hooks run), `zero_out_wgrad` (that dummy is zero),
`overwrite_main_grad` (old contents are overwritten, not added to) and `get_main_grad()`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guild._torch.checks import dtype_name, expect_own_elements, is_negated


def follows_contract(parameter: Tensor) -> bool:
    """Whether the parameter relies on being reached by autograd."""
    return hasattr(parameter, "grad_added_to_main_grad")


def meaningless_gradients(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """What autograd hands to parameters whose gradient is or will be in `main_grad`.

    None for those that do not rely on it. Parameters of one shape share the memory, as nobody
    reads it, or it is zero.
    """
    gradients: list[Tensor | None] = [None] * len(parameters)
    alike: dict[tuple, list[int]] = {}
    for i, parameter in enumerate(parameters):
        if parameter.requires_grad and follows_contract(parameter):
            parameter.grad_added_to_main_grad = True
            zero = bool(getattr(parameter, "zero_out_wgrad", False))
            kind = parameter.shape, parameter.stride(), parameter.dtype, zero
            alike.setdefault(kind, []).append(i)
    for (*_, zero), places in alike.items():
        one = (torch.zeros_like if zero else torch.empty_like)(parameters[places[0]].detach())
        # A view each, which autograd keeps uncopied.
        for i, view in zip(places, one.expand(len(places), *one.shape).unbind(0), strict=True):
            gradients[i] = view
    return gradients


def main_grad_of(name: str, parameter: Tensor) -> Tensor:
    """The tensor to add to; ValueError if it is missing or does not fit."""
    if hasattr(parameter, "get_main_grad"):
        parameter.main_grad = parameter.get_main_grad()
    main = getattr(parameter, "main_grad", None)
    if type(main) is Tensor and main.dtype is torch.float32 and main.is_contiguous():
        if (
            main.shape == parameter.shape
            and main.device == parameter.device
            and not is_negated(main)
        ):
            return main  # the usual case, checked first as there may be hundreds
    if not isinstance(main, Tensor):
        raise ValueError(f"{name}.main_grad: expected a float32 tensor, got {main!r}")
    if main.dtype not in (torch.float32, parameter.dtype) or main.shape != parameter.shape:
        raise ValueError(
            f"{name}.main_grad: expected float32 of shape {tuple(parameter.shape)}, got "
            f"{dtype_name(main.dtype)} of shape {tuple(main.shape)}"
        )
    if main.device != parameter.device:
        raise ValueError(f"{name}.main_grad: expected device {parameter.device}, got {main.device}")
    expect_own_elements(f"{name}.main_grad", main)
    return main
