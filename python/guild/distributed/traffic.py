"""Which rows go to which rank: made from the expert ids, used in forward and backward.

A token goes to a rank once, however many of its experts live there. Its row is followed by one
entry for each of these experts: the expert's number on that rank and the token's weight for it.

    rows    (token, rank) pairs, sorted by rank, then token; N are sent, M received
    slots   (token, k-th choice) pairs, sorted by rank, then slot; S are sent, P received

The receiver's rows and slots are sorted by the rank they come from. So an expert's rows are those
that one process with all tokens would have, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from guild._torch.operators import ops
from guild.distributed.call_arguments import int32_ids
from guild.distributed.ranks import Ranks


@dataclass(frozen=True)
class Traffic:
    """The rows and slots of one forward pass.

    Attributes
    ----------
    ranks : Ranks
        The ranks that take part.
    call : int
        Number of the forward pass.
    sent_tokens : torch.Tensor
        int64 (N,): token of each row that is sent.
    token_rows, row_lists : torch.Tensor
        int32 (N,) and (tokens + 1): the rows that are sent, token by token, and where each token's
        begin.
    sent_slots : torch.Tensor
        int64 (S,): place of each slot that is sent in the flattened ids.
    slot_place : torch.Tensor
        int32, shape of the ids: where a slot is among those that are sent, -1 where it is not.
    rows, slots : tuple of lists
        How many are sent to each rank, and received from each.
    ids, token_offsets : torch.Tensor
        int32 (P,) and (M + 1): the received rows' experts, as lists of `guild.routed_experts`.
    """

    ranks: Ranks
    call: int
    sent_tokens: Tensor
    token_rows: Tensor
    row_lists: Tensor
    sent_slots: Tensor
    slot_place: Tensor
    rows: tuple[list[int], list[int]]
    slots: tuple[list[int], list[int]]
    ids: Tensor
    token_offsets: Tensor
    keeps_all_rows: ClassVar[bool] = True  # there are no rows besides those that came

    def send_rows(self, matrix: Tensor, what: str) -> Tensor:
        """(tokens, width) -> (M, width): to the ranks of a token's experts."""
        return self.ranks.exchange(matrix.index_select(0, self.sent_tokens), *self.rows, what)

    def return_sums(self, rows: Tensor, residual: Tensor | None, what: str) -> Tensor:
        """(M, width) -> (tokens, width): the sum of a token's results."""
        rows = self.ranks.exchange(rows, *reversed(self.rows), what)
        return ops.combine(rows, self.token_rows, None, self.row_lists, residual)

    def return_rows(self, rows: Tensor, slot_row: Tensor, what: str) -> Tensor:
        """Rows by expert -> (slots, width), to be read at `slot_place`."""
        return self._return_slots(rows.index_select(0, slot_row), what)

    def return_gradients(
        self,
        drows: Tensor | None,
        dscores: Tensor | None,
        slot_row: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the experts' rows (M, width) and slots (P,) -> gradients of x and scores.

        With slot_row, drows are by expert and come back as from `return_rows`. A score's gradient
        is 0 where its slot was not sent.
        """
        dx = None
        if drows is not None and slot_row is not None:
            dx = self.return_rows(drows, slot_row, "backward")
        elif drows is not None:
            dx = self.return_sums(drows, None, "backward")
        if dscores is None:
            return dx, None
        mine = self._return_slots(dscores, "backward")[: self.sent_slots.shape[0]]
        out = mine.new_zeros(self.slot_place.numel()).index_copy_(0, self.sent_slots, mine)
        return dx, out.view(self.slot_place.shape)

    def begin_backward(self, like: Tensor) -> None:
        """Check that all ranks run the backward of this forward."""
        self.ranks.agree_backward(self.call, like)

    def _return_slots(self, values: Tensor, what: str) -> Tensor:
        """(P, ...) -> (slots, ...): those that are sent, in order, then fresh memory."""
        sent, received = reversed(self.slots)
        return self.ranks.exchange(values, sent, received, what, self.slot_place.numel())


def plan_traffic(
    ranks: Ranks,
    ids: Tensor,
    scores: Tensor,
    token_offsets: Tensor | None,
    experts: int,
    facts: dict[str, int],
) -> tuple[Traffic, Tensor]:
    """Tell every rank what to expect, and send the slots.

    Parameters
    ----------
    ranks : Ranks
        Each has experts / ranks consecutive experts.
    ids, scores : torch.Tensor
        (tokens, top_k) or, with token_offsets, (slots,); ids of all experts, others are skipped.
    token_offsets : torch.Tensor, optional
        int32 (tokens + 1), as `guild.routed_experts` takes it.
    experts : int
        Number of the layer's experts.
    facts : dict
        What must be the same on every rank.

    Returns
    -------
    traffic : Traffic
    scores : torch.Tensor
        (P,): of the received slots.

    Raises
    ------
    ValueError, RuntimeError
        As `Ranks.agree` does.
    """
    local = experts // ranks.size
    ids = int32_ids(ids, experts)
    known = (ids >= 0) & (ids < experts)
    to = torch.where(known, ids.div(local, rounding_mode="floor"), -1)
    # Sorting by rank is what sorting by expert is: the same op, deterministic, on the device.
    slot_ends, _, slot_place, _ = ops.sort_by_expert(to, scores, ranks.size, token_offsets)
    token = _token_of_slots(ids, token_offsets)
    tokens = ids.shape[0] if token_offsets is None else token_offsets.shape[0] - 1
    token_row, row_ends, sent_tokens = _rows_by_rank(to, token, slot_place, tokens, ranks.size)
    counts = torch.stack((row_ends.diff(), slot_ends.diff())).long()
    sent, received = ranks.agree(facts, counts)
    sent_tokens = sent_tokens[: sum(sent[0])].long()
    token_rows, row_lists = _by_token(token_row, sum(sent[0]))
    sent_slots = _inverse(slot_place, sum(sent[1]))

    to = to.flatten().index_select(0, sent_slots)
    row = token_row.view(-1)[token.index_select(0, sent_slots) * ranks.size + to]
    row = row - row_ends.index_select(0, to)  # in the block of rows that go to that rank
    local_id = ids.flatten().index_select(0, sent_slots) - to * local
    score = scores.detach().flatten().index_select(0, sent_slots)
    words = score.view(torch.int32).view(score.shape[0], score.element_size() // 4)
    message = torch.cat((local_id[:, None], row[:, None], words), 1)
    got = ranks.exchange(message, sent[1], received[1], "forward")

    starts = [0, *accumulate(received[0])]
    base = torch.tensor(starts[:-1], device=ids.device, dtype=torch.int32)
    blocks = torch.tensor(received[1], dtype=torch.int64, device=ids.device)
    row = got[:, 1] + base.repeat_interleave(blocks, output_size=got.shape[0])
    places = torch.arange(starts[-1] + 1, device=ids.device, dtype=torch.int32)
    lists = torch.searchsorted(row.contiguous(), places, out_int32=True)
    traffic = Traffic(
        ranks=ranks,
        call=ranks.calls,
        sent_tokens=sent_tokens,
        token_rows=token_rows,
        row_lists=row_lists,
        sent_slots=sent_slots,
        slot_place=slot_place,
        rows=(sent[0], received[0]),
        slots=(sent[1], received[1]),
        ids=got[:, 0].contiguous(),
        token_offsets=lists,
    )
    return traffic, got[:, 2:].contiguous().view(scores.dtype).view(-1)


def _token_of_slots(ids: Tensor, token_offsets: Tensor | None) -> Tensor:
    """int64 (slots,): the token of each; past the last one for slots of no token."""
    places = torch.arange(ids.numel(), device=ids.device)
    if token_offsets is None:
        return places.div(ids.shape[1], rounding_mode="floor")
    return torch.searchsorted(token_offsets[1:], places.int(), right=True)


def _rows_by_rank(
    to: Tensor, token: Tensor, slot_place: Tensor, tokens: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """token_row (tokens, ranks), where each rank's rows begin (ranks + 1), tokens of the rows."""
    place = torch.where(slot_place.flatten() >= 0, token * ranks + to.flatten(), tokens * ranks)
    goes = torch.zeros(tokens * ranks + 1, dtype=torch.bool, device=to.device)
    goes.index_fill_(0, place, True)
    every = torch.arange(ranks, device=to.device, dtype=torch.int32)
    pairs = torch.where(goes[:-1].view(tokens, ranks), every, -1)
    weights = torch.zeros(pairs.shape, dtype=torch.float32, device=to.device)
    ends, row_token, token_row, _ = ops.sort_by_expert(pairs, weights, ranks)
    return token_row, ends, row_token


def _by_token(token_row: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rows (tokens, ranks) that exist, as lists by token."""
    goes = token_row >= 0
    lists = F.pad(goes.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    place = torch.where(goes.flatten(), goes.flatten().cumsum(0) - 1, -1)
    return token_row.flatten().index_select(0, _inverse(place, count)), lists


def _inverse(place: Tensor, count: int) -> Tensor:
    """int64 (count,): which element has place 0, 1, ...; those of place -1 are left out."""
    place = place.flatten().long()
    out = place.new_empty(count + 1)
    every = torch.arange(place.shape[0], device=place.device)
    return out.index_copy_(0, torch.where(place < 0, count, place), every)[:count]
