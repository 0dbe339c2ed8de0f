"""Gradients of the leaves, by name, through torch's autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def gradients(total: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a sum, by name; zeros for leaves that it does not depend on."""
    if not leaves:
        return {}
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
