"""The plain PyTorch layer with shared experts, one dense MLP that every token goes through."""

from __future__ import annotations

import torch
from torch import nn

from guild.train.plain_moe import PlainMoE, plain_expert


class _Dense(nn.Module):
    """Weights under the names that `guild.MoE` has for them: shared.w_up, shared.w_down."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w_up = nn.Parameter(torch.empty(2 * width, hidden))
        self.w_down = nn.Parameter(torch.empty(hidden, width))
        for weight in (self.w_up, self.w_down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


class PlainSharedMoE(PlainMoE):
    """`PlainMoE` plus shared experts.

    Parameters
    ----------
    *sizes : int
        As `PlainMoE` takes them.
    shared : int
        Width of the dense MLP.
    compiled : bool
        As `PlainMoE` takes it.
    """

    def __init__(self, *sizes: int, shared: int, compiled: bool = False) -> None:
        super().__init__(*sizes, compiled=compiled)
        self.shared = _Dense(sizes[0], shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., hidden) -> (..., hidden)."""
        return super().forward(x) + plain_expert(x, self.shared.w_up, self.shared.w_down)
