"""Which rows belong to which expert and token: guild::Routing of include/guild/types.h."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowRouting(NamedTuple):
    """The results of sort_by_expert, and its token_offsets; sorted rows have only offsets."""

    offsets: Tensor
    row_token: Tensor | None = None
    slot_row: Tensor | None = None
    row_score: Tensor | None = None
    token_offsets: Tensor | None = None

    @property
    def ends(self) -> Tensor:
        """Where each expert's rows end."""
        return self.offsets[1:]
