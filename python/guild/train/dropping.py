"""The layer with a capacity: what token rounding is compared with by `guild train --capacity`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from guild._torch.checks import expect_count
from guild._torch.operators import ops
from guild.moe import MoE


class DroppingMoE(MoE):
    """`MoE` whose experts take at most capacity * slots / experts rows each in training.

    Slots are counted for real tokens only: padding, which `token_mask` marks, has none.

    An expert drops the slots that come last (Switch Transformer, arXiv:2101.03961, section 2.2).
    Evaluation drops nothing.

    Parameters
    ----------
    capacity : float
        Above 0; 1 is an even share.
    *sizes, **options
        As `MoE` takes them.
    """

    def __init__(self, *sizes: Any, capacity: float, **options: Any) -> None:
        super().__init__(*sizes, **options)
        if not 0 < capacity < math.inf:
            raise ValueError(f"capacity: expected a positive number, got {capacity}")
        self.capacity = capacity

    def _uses_only_the_choice(self) -> bool:
        return not self.training and super()._uses_only_the_choice()

    def _route(
        self, x: Tensor, logits: Tensor | None, token_mask: Tensor | None, shape: torch.Size
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ids, scores, token_offsets = super()._route(x, logits, token_mask, shape)
        if self.training:
            ids = first_slots(ids, scores, self.experts, self._most_slots(ids, token_mask))
        return ids, scores, token_offsets

    def _most_slots(self, ids: Tensor, token_mask: Tensor | None) -> int | Tensor:
        """Most slots of one expert, at least 1; a device tensor if padding is left out."""
        if token_mask is None:
            most = math.ceil(min(self.capacity * ids.numel() / self.experts, ids.numel()))
            return max(1, most)
        slots = (ids >= 0).sum().double()
        return (self.capacity * slots / self.experts).ceil().clamp(min=1)


def first_slots(ids: Tensor, scores: Tensor, experts: int, most: int | Tensor) -> Tensor:
    """Ids in which each expert keeps its first `most` slots; the others are -1.

    Parameters
    ----------
    ids, scores : torch.Tensor
        int32 and float (tokens, top_k).
    experts : int
        Number of experts.
    most : int or torch.Tensor
        Slots of each expert; a number on the device may be a scalar tensor.

    Returns
    -------
    torch.Tensor
        int32 (tokens, top_k).
    """
    if not isinstance(most, Tensor):
        expect_count("most", most, 0)
    offsets, _, slot_row, _ = ops.sort_by_expert(ids, scores.detach(), experts)
    first_row = offsets[:-1].index_select(0, ids.clamp(0, experts - 1).flatten()).view_as(ids)
    return torch.where(slot_row - first_row < most, ids, -1)
