"""Rows between ranks that reach each other's memory, without involving the host.

Every rank pulls the rows that its experts need from the others' memory, and pushes the results into
it: include/guild/exchange.h has the steps. Rows have places that do not depend on the routing
(token t of rank r is row r * max_tokens + t), so nothing waits for a count. The only waits are
barriers that run in a single block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from guild._torch.autograd import below_autograd, rows_of
from guild._torch.operators import ops
from guild.distributed.call_arguments import int32_ids
from guild.distributed.peer_memory import PeerMemory
from guild.distributed.peers import BACKWARD_RESULTS, FORWARD_RESULTS, Peers
from guild.distributed.ranks import Ranks


@dataclass(frozen=True)
class Lists:
    """The slots of this rank's experts without gaps, used if there is room for only some rows.

    Attributes
    ----------
    place : torch.Tensor
        int64, shape of the ids by slot: where a slot is in the lists, `rows` where it is not.
    ids, token_offsets : torch.Tensor
        int32 (rows,) and (ranks * max_tokens + 1), as `guild.routed_experts` takes them.
    needed : torch.Tensor
        int32 (1,): rows that room is needed for.
    rows : int
        Rows that there is room for.
    """

    place: Tensor
    ids: Tensor
    token_offsets: Tensor
    needed: Tensor
    rows: int

    @staticmethod
    def of(ids: Tensor, rows: int) -> Lists:
        """Make them from ids by slot, -1 where a slot is not for this rank."""
        here = ids >= 0
        ends = here.flatten().cumsum(0)
        place = torch.where(here, ends.view(ids.shape) - 1, rows).clamp(max=rows)
        offsets = F.pad(ends[ids.shape[1] - 1 :: ids.shape[1]], (1, 0)).clamp(max=rows).int()
        packed = ids.new_full((rows + 1,), -1)
        packed = packed.scatter_(0, place.flatten(), ids.flatten())[:rows]
        return Lists(place, packed, offsets, ends[-1:].int(), rows)


@dataclass(frozen=True)
class PeerTraffic:
    """The rows and slots of one forward pass: `traffic.Traffic` over shared memory.

    Attributes
    ----------
    peers : Peers
        The ranks, and the memory that rows pass through.
    call : int
        Number of the forward pass.
    own_ids : torch.Tensor
        int32 (tokens, top_k): ids of all experts.
    experts : int
        Number of experts on all ranks.
    token_row : torch.Tensor
        int32 (tokens, ranks): which row comes back from a rank, or -1.
    by_slot : torch.Tensor
        int32 (ranks * max_tokens, top_k): this rank's experts of everyone's tokens, or -1.
    counts : torch.Tensor
        int32 (ranks,): number of tokens of every rank.
    lists : Lists, optional
        With a capacity.
    """

    peers: Peers
    call: int
    own_ids: Tensor
    experts: int
    token_row: Tensor
    by_slot: Tensor
    counts: Tensor
    lists: Lists | None

    @property
    def ranks(self) -> Ranks:
        """The ranks that take part."""
        return self.peers.ranks

    @property
    def memory(self) -> PeerMemory:
        """What rows pass through now."""
        return self.peers.newest()

    @property
    def ids(self) -> Tensor:
        """Ids of the slots of this rank's experts, as `guild.routed_experts` takes them."""
        return self.by_slot if self.lists is None else self.lists.ids

    @property
    def token_offsets(self) -> Tensor | None:
        """Offsets of the same slots."""
        return None if self.lists is None else self.lists.token_offsets

    @property
    def keeps_all_rows(self) -> bool:
        """Whether all rows that there is room for may be kept for backward."""
        return self.peers.keeps_all_rows

    @property
    def slot_place(self) -> Tensor:
        """int32, shape of the own ids: where a slot's row comes back with exact=True, or -1."""
        known = (self.own_ids >= 0) & (self.own_ids < self.experts)
        places = torch.arange(known.numel(), device=known.device, dtype=torch.int32)
        return torch.where(known, places.view(known.shape), -1)

    def as_lists(self, values: Tensor, fill: float) -> Tensor:
        """Values by slot as the experts take them."""
        if self.lists is None:
            return values
        packed = values.new_full((self.lists.rows + 1,), fill)
        return packed.scatter_(0, self.lists.place.flatten(), values.flatten())[:-1]

    def begin_backward(self, like: Tensor) -> None:
        """Raise an earlier failure."""
        self.peers.expect_no_failure()

    def send_rows(self, matrix: Tensor, what: str) -> Tensor:
        """(tokens, width) -> (ranks * max_tokens, width), zeros where nothing is for this rank.

        In forward the rows are already published.
        """
        if what != "forward":
            self.peers.publish_backward(matrix, self.memory, self.call)
        return ops.peer_pull(self._peers, self.memory.numbers, self.by_slot, matrix)

    def return_sums(self, rows: Tensor, residual: Tensor | None, what: str) -> Tensor:
        """(ranks * max_tokens, width) -> (tokens, width): the sum over the ranks."""
        self.peers.before_return(self.memory)
        self._push_sums(rows)
        self._meet_after(what)
        return self._sums(rows, residual)

    def return_rows(self, rows: Tensor, slot_row: Tensor, what: str) -> Tensor:
        """Rows by expert -> (slots, width), to be read at `slot_place` before the next call."""
        self.peers.before_return(self.memory)
        self._push_rows(rows, slot_row)
        self._meet_after(what)
        return self.memory.returned_rows(self.own_ids.numel(), rows)

    def return_gradients(
        self,
        drows: Tensor | None,
        dscores: Tensor | None,
        slot_row: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the experts' rows and slots -> gradients of tokens and scores.

        With slot_row, drows are by expert and come back as from `return_rows`.
        """
        self.peers.before_return(self.memory)
        if drows is not None and slot_row is not None:
            self._push_rows(drows, slot_row)
        elif drows is not None:
            self._push_sums(drows)
        if dscores is not None:
            pushed = self._by_slot(dscores, 0.0).contiguous()
            ops.peer_push_scores(self._peers, self.memory.numbers, self.by_slot, pushed)
        self._meet_after("backward")
        dx = drows
        if drows is not None and slot_row is not None:
            dx = self.memory.returned_rows(self.own_ids.numel(), drows)
        elif drows is not None:
            dx = self._sums(drows, None)
        if dscores is not None:
            came = self.memory.returned_scores(self.own_ids.numel(), dscores.dtype)
            dscores = torch.where(self.slot_place >= 0, came.view(self.own_ids.shape), 0)
        return dx, dscores

    @property
    def _peers(self) -> Tensor:
        return self.memory.peers

    def _by_slot(self, values: Tensor, fill: float) -> Tensor:
        """Reorder values from the experts' order to slots."""
        if self.lists is None:
            return values
        return F.pad(values, (0, 1), value=fill)[self.lists.place]

    def _push_sums(self, rows: Tensor) -> None:
        """Rows by token, which are sums already."""
        every = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
        here = (self.by_slot >= 0).any(1)
        row_of = torch.where(here, every, -1)[:, None].contiguous()
        to = row_of, None, None, self.counts, False
        ops.peer_push(self._peers, self.memory.numbers, rows_of(rows), *to)

    def _push_rows(self, rows: Tensor, slot_row: Tensor) -> None:
        row_of = self._by_slot(slot_row, -1).contiguous()
        to = row_of, None, None, self.counts, True
        ops.peer_push(self._peers, self.memory.numbers, rows, *to)

    def _meet_after(self, what: str) -> None:
        facts, forward = {"call": self.call}, what == "forward"
        limit = (None, 0) if self.lists is None else (self.lists.needed, self.lists.rows)
        needed, capacity = limit if forward else (None, 0)
        about = {"needed": needed, "capacity": capacity}
        step = FORWARD_RESULTS if forward else BACKWARD_RESULTS
        self.peers.meet(step, facts, memory=self.memory, **about)

    def _sums(self, rows: Tensor, residual: Tensor | None) -> Tensor:
        at = self._peers, self.memory.numbers
        return ops.peer_collect(*at, self.token_row, rows, residual)


@below_autograd
def plan_peer_traffic(
    peers: Peers,
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    experts: int,
    facts: dict[str, int],
) -> tuple[PeerTraffic, Tensor]:
    """Publish this rank's rows and routing, and learn those of all ranks.

    Parameters
    ----------
    peers : Peers
        The ranks.
    x, ids, scores : torch.Tensor
        (tokens, hidden), (tokens, top_k) of all experts, and their weights.
    experts : int
        Number of the layer's experts.
    facts : dict
        What must be the same on every rank.

    Returns
    -------
    traffic : PeerTraffic
    scores : torch.Tensor
        Of the slots of this rank's experts, as `guild.routed_experts` takes them.

    Raises
    ------
    ValueError, RuntimeError
        If ranks differ or one is gone, in this call or an earlier one.
    """
    top_k = ids.shape[1]
    memory = peers.begin_forward(x, top_k, facts)
    ids = int32_ids(ids, experts)
    token_row = peers.publish_forward(x, memory, ids, scores, experts)
    tables = ops.peer_tables(memory.peers, memory.numbers, top_k, experts, x)
    local_ids, local_scores, counts = tables
    room = peers.room(top_k)
    lists = None if room < 0 else Lists.of(local_ids, room)
    traffic = PeerTraffic(
        peers=peers,
        call=peers.ranks.calls,
        own_ids=ids,
        experts=experts,
        token_row=token_row,
        by_slot=local_ids,
        counts=counts,
        lists=lists,
    )
    return traffic, traffic.as_lists(local_scores, 0.0)
