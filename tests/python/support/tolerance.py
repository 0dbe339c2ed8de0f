"""How far an op may be off: twice as far as rounding alone, by norms over a whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth||, or ||value|| if the truth is zero; infinite with NaN."""
    if value.shape != truth.shape:
        raise ValueError(f"value: expected shape {tuple(truth.shape)}, got {tuple(value.shape)}")
    truth = truth.double()
    difference = (value.detach().to(truth.device).double() - truth).norm()
    if difference.isnan():
        return float("inf")
    size = truth.norm()
    return float(difference / size) if size > 0 else float(difference)


def allowed_error(rounded: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Twice the rounded computation's error, plus that of sums in another order.

    `dtype` is the layer's: tensor cores cut the last bits off the fp32 sums of 16-bit operands.
    """
    few_ulps = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 5e-6)
    return 2 * relative_error(rounded, truth) + few_ulps
