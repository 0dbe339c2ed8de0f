"""Memory for the gradients of weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def stacked_like(weight: Tensor) -> Tensor:
    """A new tensor of a weight's shape: its matrices one after the other, each with its strides."""
    experts, rows, columns = weight.shape
    if weight.stride(1) >= weight.stride(2):
        return weight.new_empty(experts, rows, columns)
    return weight.new_empty(experts, columns, rows).mT


def gradient_maker(lists: bool) -> Callable[[Tensor], Tensor]:
    """What makes memory for a weight's gradient; lists: weights are views of uneven lists."""
    return stacked_like if lists else torch.empty_like
