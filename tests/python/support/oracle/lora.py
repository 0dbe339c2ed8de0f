"""LoRA as a sum of matrices: what Guild never makes."""

from __future__ import annotations

from torch import Tensor


def delta(a: Tensor, b: Tensor, scale: float, experts: int) -> Tensor:
    """scale B_e A_e (E, outputs, inputs), of a and b by expert or as PEFT stores them."""
    if a.dim() == 2:
        # Rows of a: expert by expert. Columns of b: rank by rank, in each of them the experts.
        a = a.view(experts, -1, a.shape[1])
        b = b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    return scale * (b @ a)
