"""The ranks of a group on one host: the memory that they share, and its barriers.

The hosts of all ranks meet only for what is new: a layer's first call, and more memory. All else is
compared in barriers on the device; a later call finds in a report what went wrong there.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from guild._torch.autograd import rows_of
from guild._torch.operators import ops
from guild.distributed.facts import room_facts, shown
from guild.distributed.peer_memory import PeerMemory, Room, why_not
from guild.distributed.ranks import BACKWARD_ORDER, Ranks, expect_same, where_ranks_are

_LATE, _OVERFLOW = 1, 3  # guild::PeerFailure; 2: ranks differ
_STEPS = ("forward", "forward's results", "backward", "backward's results", "wait")
FORWARD, FORWARD_RESULTS, BACKWARD, BACKWARD_RESULTS, WAIT = range(len(_STEPS))
_BEYOND = "tokens beyond max_tokens"

# Without a capacity, pre-activations are kept for so many times the rows of balanced routing. Room
# for any routing is as many times as there are ranks: too much to keep for more than two.
_KEPT = 2
_FEW_ROWS = 4096  # of any routing; all are kept


class Peers:
    """Calls of a group on one host: its barriers, the memory for its rows, and what went wrong.

    Parameters
    ----------
    ranks : Ranks
        For what the hosts have to agree on: new layers and more memory.
    device : torch.device
        This rank's.
    max_tokens : int, optional
        The most tokens of any rank; default: what the first call needs.
    capacity : float, optional
        Rows of experts that a rank has room for, in units of its even share.
    exact : bool
        Whether results come back row by row.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        max_tokens: int | None,
        capacity: float | None,
        exact: bool,
    ) -> None:
        self.ranks, self.device, self.max_tokens = ranks, device, max_tokens
        self.capacity, self.exact = capacity, exact
        self.memory: PeerMemory | None = None
        self._all: list[PeerMemory] = []  # captured graphs may use earlier ones
        self._known: set[tuple[int, ...]] = set()
        pinned = device.type == "cuda"
        self._report = torch.zeros(5, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._facts: dict[str, int] = {}  # what the ranks compare in forward
        self._returned = False  # whether anything came back since the last rows were published
        self._streams: list[torch.cuda.Stream] = []  # in addition to the stream of the calls
        if pinned:  # the transfer of rows has a higher priority
            self._streams = [torch.cuda.Stream(device, priority=p) for p in (-1, 0)]

    @property
    def keeps_all_rows(self) -> bool:
        """Whether the pre-activations of all rows that there is room for may be kept."""
        return self.capacity is not None or self.ranks.size <= _KEPT

    def room(self, top_k: int) -> int:
        """How many rows this rank has room for in a call; -1: as many as any routing takes."""
        return -1 if self.capacity is None else self._times_even(self.capacity, top_k)

    def kept_rows(self, top_k: int) -> int:
        """For how many rows a call may keep the pre-activations."""
        if self.capacity is not None:
            return self._times_even(self.capacity, top_k)
        every = self._times_even(self.ranks.size, top_k)
        return every if every <= _FEW_ROWS else self._times_even(_KEPT, top_k)

    def _times_even(self, times: float, top_k: int) -> int:
        """Of a rank's even share of rows; at most those of any routing."""
        even = self.max_tokens * top_k
        return min(math.ceil(times * even), self.ranks.size * even)

    def newest(self) -> PeerMemory:
        """The memory of a pass that begins now, also of the backward of an earlier forward.

        All ranks have taken the same step to it, so none waits in a barrier of an older one.
        """
        assert self.memory is not None  # a forward made it
        return self.memory

    def begin_forward(self, x: Tensor, top_k: int, facts: dict[str, int]) -> PeerMemory:
        """The memory for rows of x. Keeps `facts`, which the barrier compares.

        Raises
        ------
        ValueError, RuntimeError
            If ranks differ or one is gone, in this call or an earlier one.
        """
        self.expect_no_failure()
        tokens = x.shape[0]
        facts = {"call": 0, **facts, "top_k": top_k, _BEYOND: 0}
        memory = self._memory_for(x, top_k, facts)
        facts["call"] = self.ranks.calls
        facts[_BEYOND] = tokens if tokens > self.max_tokens else 0
        self._facts = facts
        if facts[_BEYOND]:
            self.meet(FORWARD, facts, published=True, wait=False)
            raise ValueError(
                f"x: expected at most {self.max_tokens} tokens (max_tokens of ExpertParallel), got "
                f"{tokens}"
            )
        return memory

    def meet_first(self, facts: dict[str, int]) -> None:
        """The barrier of a forward, before the hosts agree on it, and wait for the GPU.

        A rank that makes another call may be in a barrier, where the hosts would wait for it.

        Raises
        ------
        ValueError, RuntimeError
            If ranks differ or one is gone, in this call or an earlier one.
        """
        if self.memory is None:  # nobody has been in a barrier
            return
        call = self.ranks.calls + 1
        self._facts = {"call": call, **facts, "top_k": facts.get("top_k", 0), _BEYOND: 0}
        self.meet(FORWARD, self._facts)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.expect_no_failure()

    def publish_forward(
        self, x: Tensor, memory: PeerMemory, ids: Tensor, scores: Tensor, experts: int
    ) -> Tensor:
        """Tokens and their routing, then the barrier; what `ops.peer_publish` gives."""
        self._returned = False
        routing = ids, scores, experts
        token_row = ops.peer_publish(memory.peers, memory.numbers, rows_of(x), *routing)
        self.meet(FORWARD, self._facts, memory=memory, published=True)
        return token_row

    def publish_backward(self, rows: Tensor, memory: PeerMemory, call: int) -> None:
        """Gradients of a forward's output, then the barrier."""
        self._returned = False
        ops.peer_publish(memory.peers, memory.numbers, rows_of(rows), None, None, 1)
        self.meet(BACKWARD, {"call": call}, memory=memory, published=True)

    def barriers(
        self, step: int, results: int, call: int
    ) -> tuple[float, list[int], list[int], Tensor, list[int]]:
        """The barriers and streams that `ops.peer_forward` and `peer_backward` take."""
        facts = self._facts if step == FORWARD else {"call": call}
        streams = [stream.cuda_stream for stream in self._streams]
        return self.ranks.timeout, [step, *facts.values()], [results, call], self._report, streams

    def after_call(self, returned: bool = True) -> None:
        """Called after these ops. On the CPU a failure raises here, on a GPU in a later call."""
        self._returned = returned
        if self.device.type == "cpu":
            self.expect_no_failure()

    def before_return(self, memory: PeerMemory) -> None:
        """Between two returns in a row: the first must have been read on all ranks."""
        if self._returned:
            self.meet(WAIT, {"call": self.ranks.calls}, memory=memory)
        self._returned = True

    def meet(
        self,
        step: int,
        facts: dict[str, int],
        *,
        memory: PeerMemory | None = None,
        published: bool = False,
        needed: Tensor | None = None,
        capacity: int = 0,
        wait: bool = True,
    ) -> None:
        """Run the barrier. On the CPU a failure raises here, on a GPU in a later call."""
        memory = memory or self.memory
        values = [step, *facts.values()]
        ops.peer_meet(
            memory.peers,
            memory.numbers,
            published,
            self.ranks.timeout,
            values,
            self._report,
            needed,
            capacity,
        )
        if self.device.type == "cpu" and wait:
            self.expect_no_failure()

    def expect_no_failure(self) -> None:
        """Raise a failure that a barrier has found, without waiting for the GPU.

        Raises
        ------
        ValueError, RuntimeError
            See `ExpertParallel`.
        """
        self.ranks.expect_alive()
        failure = int(self._report[0])
        if failure:
            self._raise(failure)

    def _memory_for(self, x: Tensor, top_k: int, facts: dict[str, int]) -> PeerMemory:
        """The memory for this call's rows. The hosts agree on layers that are new."""
        tokens, size = x.shape[0], self.ranks.size
        key = tuple(facts[name] for name in ("layer", "hidden", "dtype", "top_k", "experts"))
        if key in self._known and self.memory is not None:
            self.ranks.calls += 1
            return self.memory
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "expert_group: expected a layer's first call before it is captured in a CUDA graph"
            )
        named = {name: value for name, value in facts.items() if name not in ("call", _BEYOND)}
        self.meet_first(named)
        told = torch.full((1, size), tokens, dtype=torch.int64, device=x.device)
        given = room_facts(self.max_tokens, self.capacity)
        _, (everyone,) = self.ranks.agree(named | given, told)
        self._known.add(key)
        self.max_tokens = self.max_tokens or max(*everyone, 1)
        returned = max(size, top_k) if self.exact else size
        room = Room(self.max_tokens, top_k, x.shape[1] * x.element_size(), returned)
        if self.memory is None or not self.memory.room.holds(room):
            room = room if self.memory is None else room.joined(self.memory.room)
            self.memory = PeerMemory(self.ranks, room, self.device)
            self._all.append(self.memory)
        return self.memory

    def _raise(self, failure: int) -> NoReturn:
        _, rank, reporter, fact, rows = self._report.tolist()
        arrived = {reporter} if failure in (_LATE, _OVERFLOW) else {reporter, rank}
        by_rank = self._arrivals(arrived)
        step, call, *_ = by_rank.get(self.ranks.rank, by_rank[reporter])
        call = shown("call", call)
        where = f"in the {_STEPS[step]} of call {call}"
        if failure == _LATE:
            self.ranks.end(
                RuntimeError,
                f"expert_group: no answer from rank {rank} (rank {self.ranks.everyone[rank]} of "
                f"all) to rank {reporter}, {where}; the time limit is {self.ranks.timeout:g} s. "
                "The group cannot be used any more: restart all ranks",
                lost=True,
            )
        if failure == _OVERFLOW:
            self.ranks.end(
                RuntimeError,
                f"capacity: expected room for all {rows} rows of rank {rank}, in call {call}, got "
                f"{self.capacity:g} times an even share. The group cannot be used any more: "
                "restart all ranks with a larger capacity, or with None",
            )
        names = ["step", *self._facts]
        if fact < 2:
            found = where_ranks_are({r: (_STEPS[w[0]], w[1]) for r, w in by_rank.items()})
            self.ranks.end(RuntimeError, f"{BACKWARD_ORDER}, got {found}")
        try:
            expect_same(names[fact], {r: values[fact] for r, values in by_rank.items()})
        except ValueError as error:
            self.ranks.end(ValueError, str(error))
        self.ranks.end(
            ValueError,
            f"expert_group: expected the same call on every rank, got another {names[fact]} on "
            f"rank {rank}",
        )

    def _arrivals(self, ranks: set[int]) -> dict[int, list[int]]:
        """The words of the ranks that have arrived in the barrier that failed.

        ranks: some that have. This rank may still be in the barrier before it.
        """
        control = self.memory.control()
        inbox, last = control[16:].view(2, -1, 16), int(control[0])
        for number in (last + 1, last):
            words = inbox[number % 2, : self.ranks.size].tolist()
            by_rank = {r: word for r, word in enumerate(words) if word[-1] == number}
            if ranks <= by_rank.keys():
                return by_rank
        return {r: words[r] for r in ranks | {self.ranks.rank}}  # on its way to this rank


def peers_of(
    ranks: Ranks,
    device: torch.device,
    engine: str,
    max_tokens: int | None,
    capacity: float | None,
    exact: bool,
) -> Peers | None:
    """The peer engine on a device; None where rows travel by the process group.

    Asks all ranks where there is a choice. Parameters as in `ExpertParallel`.

    Raises
    ------
    ValueError
        If a rank asked for engine="peer" and they cannot reach each other's memory.
    RuntimeError
        If a rank is gone or late, or in a pass of another engine.
    """
    if engine == "nccl" or (engine == "auto" and device.type != "cuda"):
        return None
    asked = ranks.meet(device)
    why = why_not(ranks, device)
    if why and "peer" in asked:
        raise ValueError(
            f"engine: expected ranks that reach each other's memory for 'peer', got some that do "
            f"not: {why}"
        )
    return None if why else Peers(ranks, device, max_tokens, capacity, exact)
