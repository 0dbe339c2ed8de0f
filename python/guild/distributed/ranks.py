"""The ranks of an expert-parallel group: rows between them, agreement, a time limit.

Every message between ranks goes through `Ranks`. Before rows move, in forward and in each half of
backward, all ranks tell each other what they are about to do, and in forward how many rows follow
(`agree`, `agree_backward`); if two differ, all raise the same error. These first messages all have
one size, so that a rank that skipped a pass still meets the others in the pass that they are in. A
rank that does not answer ends the others with an error that names it.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from guild.distributed.facts import calls_of, shown

_GRACE_SECONDS = 2.0  # in which live ranks report after a failure
_STORE_SECONDS = 5.0  # the longest wait for a store, whose host may be dead or stopped
_WORDS = 24  # of the first message of a pass
_END_OF_RECOMPUTATION = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())

PASSES = "forward", "backward of the output", "backward of the tokens", "choice of an engine"
ENGINES = "auto", "peer", "nccl"
_FORWARD, _CHOICE = 0, 3  # in PASSES

# How many were made of each process group, by its name, which all of its ranks know.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class Ranks:
    """A process group, as an expert-parallel layer uses it.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks.
    timeout : float
        Seconds that one rank waits for another.
    engine : str
        The one of `ENGINES` that this rank asked for.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, engine: str) -> None:
        self.group, self.timeout = group, timeout
        self._engine = ENGINES.index(engine)
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.everyone = dist.get_process_group_ranks(group)  # numbers among all ranks
        self._number = next(_numbers[group.group_name])  # the same on every rank of the group
        # Counts forward passes, the same on every rank, from a number of this object's own.
        self.calls = calls_of(self._number)
        self._first_call = self.calls + 1
        self._failure: str | None = None
        self._error: type[Exception] = RuntimeError
        self._doubt: Tensor | None = None  # backward's comparison on a GPU, not yet checked

    def exchange(
        self,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        what: str,
        capacity: int = 0,
    ) -> Tensor:
        """Rows sorted by the rank they go to, for rows sorted by the rank they come from.

        Parameters
        ----------
        rows : torch.Tensor
            (sum of sent, ...).
        sent, received : sequence of int
            Rows to and from each rank.
        what : str
            For the message of an error.
        capacity : int
            Least number of rows to make room for.

        Returns
        -------
        torch.Tensor
            (sum of received or capacity, ...); rows past those received are fresh memory.

        Raises
        ------
        RuntimeError
            If a rank is gone or does not answer in time.
        """
        count = sum(received)
        out = rows.new_empty(max(count, capacity), *rows.shape[1:])
        self._all_to_all(out[:count], rows.contiguous(), list(received), list(sent), what)
        return out

    def agree(self, facts: dict[str, int], counts: Tensor) -> tuple[list[list[int]], ...]:
        """Check that all ranks make the same call, and learn what each will send. Waits for them.

        Parameters
        ----------
        facts : dict
            What must be the same on every rank.
        counts : torch.Tensor
            int64 (C, ranks): C numbers for each rank.

        Returns
        -------
        sent, received : list
            `counts`, and what the others have for this rank, (C, ranks) each.

        Raises
        ------
        ValueError
            If ranks differ, the same error on all of them.
        RuntimeError
            If a rank is gone or does not answer in time, or if backward passes did not match.
        """
        self._expect_group()
        self.calls += 1
        words = _FORWARD, self.calls, self._engine, *facts.values()
        own = torch.tensor(words, device=counts.device)
        sent = torch.cat((own.expand(self.size, -1), counts.t()), 1)
        sent = F.pad(sent, (0, _WORDS - sent.shape[1]))
        received = torch.empty_like(sent)
        self._all_to_all(received, sent, None, None, "forward")
        both = torch.stack((sent, received))
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            both = torch.cat((both, doubt.expand(2, self.size, 1)), 2)
        sent_rows, received_rows = self._on_host(both).tolist()
        _expect_same_pass(received_rows, [0])
        names = ("pass", "call", "engine", *facts)
        for place, name in enumerate(names):
            if name != "engine":  # "auto" may stand for any
                expect_same(name, {r: row[place] for r, row in enumerate(received_rows)})
        if doubt is not None and any(row[-1] for row in received_rows):
            raise RuntimeError(BACKWARD_ORDER)
        first, last = len(names), len(names) + counts.shape[0]
        return tuple(
            [list(column) for column in zip(*(row[first:last] for row in rows), strict=True)]
            for rows in (sent_rows, received_rows)
        )

    def meet(self, device: torch.device) -> set[str]:
        """Wait for all ranks, before they choose an engine in a way that has no time limit.

        Returns
        -------
        set of str
            The engines that they asked for.

        Raises
        ------
        RuntimeError
            If a rank is gone or does not answer in time, or is in a pass already.
        """
        _, others = self._pass_and_call(_CHOICE, self.calls + 1, device, "forward", self._engine)
        by_rank = self._on_host(others).tolist()
        _expect_same_pass(by_rank, [0])
        return {ENGINES[row[2]] for row in by_rank}

    def tell(self, value: Any, device: torch.device) -> list[Any]:
        """Tell all ranks something of any type and size, in the time limit; every rank's value.

        On a GPU all earlier work of the stream is then done, on every rank.

        Raises
        ------
        RuntimeError
            If a rank is gone or does not answer in time.
        """
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._from_all(torch.tensor([own.shape[0]], device=device)).flatten().tolist()
        found = self._from_all(F.pad(own, (0, max(sizes) - own.shape[0])).to(device))
        return [
            pickle.loads(row[:size].numpy().tobytes())
            for row, size in zip(found, sizes, strict=True)
        ]

    def _from_all(self, own: Tensor) -> Tensor:
        """A vector of each rank, on the CPU."""
        sent = own.expand(self.size, -1).contiguous()
        found = torch.empty_like(sent)
        self._all_to_all(found, sent, None, None, "forward")
        return self._on_host(found)

    def agree_backward(self, call: int, like: Tensor, half: int = 1) -> None:
        """Check that all ranks run the backward of the same forward.

        half: 1 for the gradient of the output, 2 for that of the tokens, which a rank may leave out
        if its autograd.grad() is for the weights alone. On a GPU the host does not wait: the next
        `agree` raises.

        Raises
        ------
        RuntimeError
            If they do not, on all ranks.
        """
        own, others = self._pass_and_call(half, call, like.device, "backward")
        if not like.is_cuda:
            _expect_same_pass(others.tolist(), [0, 1])
            return
        differs = (others != own).any()
        self._doubt = differs if self._doubt is None else self._doubt | differs

    def _pass_and_call(
        self, number: int, call: int, device: torch.device, what: str, engine: int = 0
    ) -> tuple[Tensor, Tensor]:
        """A pass's first message, with no more to say: this rank's words and the others'."""
        self._expect_group()
        own = torch.tensor([number, call, engine], device=device)
        own = F.pad(own, (0, _WORDS - own.shape[0])).expand(self.size, -1).contiguous()
        others = torch.empty_like(own)
        self._all_to_all(others, own, None, None, what)
        return own, others

    @contextlib.contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """Runs between two messages of a pass: an error here leaves the other ranks waiting."""
        try:
            yield
        except BaseException as error:
            # A checkpoint ends its second forward by raising once it has what it needs, on all
            # ranks at the same place.
            if self._failure is None and not isinstance(error, _END_OF_RECOMPUTATION):
                self._failure = (
                    f"expert_group: this rank raised {type(error).__name__} in the {what} of call "
                    f"{shown('call', self.calls)}, where the others wait for it. The group cannot "
                    "be used any more: restart all ranks"
                )
            raise

    def _expect_group(self) -> None:
        try:
            dist.get_process_group_ranks(self.group)
        except (KeyError, ValueError, RuntimeError, AttributeError) as error:
            raise RuntimeError(
                "expert_group: its process group has been destroyed; make the ExpertParallel and "
                "its layers after torch.distributed.init_process_group()"
            ) from error

    def expect_alive(self) -> None:
        """Raise again the error that ended the group."""
        if self._failure is not None:
            raise self._error(self._failure)

    def end(self, error: type[Exception], text: str, lost: bool = False) -> NoReturn:
        """Raise an error, now and in every later call; lost: a rank is gone."""
        self._failure, self._error = text, error
        if lost:
            self._end_kernels()
        raise error(text)

    def _all_to_all(
        self,
        out: Tensor,
        rows: Tensor,
        received: list[int] | None,
        sent: list[int] | None,
        what: str,
    ) -> None:
        self.expect_alive()
        try:
            work = dist.all_to_all_single(
                out, rows, received, sent, group=self.group, async_op=True
            )
            if rows.is_cuda:  # the stream waits; the host keeps the time in `_on_host`
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            self._fail(what, error)

    def _on_host(self, tensor: Tensor) -> Tensor:
        """A tensor that depends on the other ranks, on the CPU, within the time limit."""
        if not tensor.is_cuda:
            return tensor
        where: dict[str, Any] = {"device": "cpu", "pin_memory": True}  # whatever the default is
        host = torch.empty(tensor.shape, dtype=tensor.dtype, **where)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        until = time.monotonic() + self.timeout
        while not copied.query():  # a wait in the driver has no time limit
            if time.monotonic() > until:
                self._fail("forward", TimeoutError("the GPU still waits for the other ranks"))
        return host

    def _fail(self, what: str, error: Exception) -> NoReturn:
        silent = self._silent()
        if silent is None:
            who = "a rank did not answer, and the store that could say which did not either"
        elif silent:
            named = ", ".join(f"rank {r} (rank {self.everyone[r]} of all)" for r in silent)
            who = f"no answer from {named}"
        else:
            who = "the connection failed, or a rank was late, though every rank has reported since"
        call = max(self.calls, self._first_call)  # not counted before its first message
        self._failure = (
            f"expert_group: {who}, in the {what} of call {shown('call', call)}; the time "
            f"limit is {self.timeout:g} s. The group cannot be used any more: restart all ranks. "
            f"Cause: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        self._end_kernels()
        raise RuntimeError(self._failure) from error

    def _end_kernels(self) -> None:
        """Release GPU kernels that wait for a lost rank, so that the process can end."""
        with contextlib.suppress(Exception):  # other backends have none
            abort = getattr(self.group._get_backend(torch.device("cuda")), "abort", None)
            if abort is not None and dist.get_backend(self.group) == "nccl":
                abort()

    def _silent(self) -> list[int] | None:
        """Ranks of the group that do not report after a failure; None if that cannot be known."""
        found: list[list[int]] = []

        def ask() -> None:
            store = _store_of(self.group)
            name = f"{self.group.group_name}/{self._number}"
            keys = [f"guild/failed/{name}/{r}" for r in self.everyone]
            store.set(keys[self.rank], "here")
            until = time.monotonic() + _GRACE_SECONDS
            while True:
                silent = [r for r, key in enumerate(keys) if not store.check([key])]
                if not silent or time.monotonic() > until:
                    break
                time.sleep(0.05)
            found.append(silent)

        def ask_quietly() -> None:
            try:
                ask()
            except Exception:
                return  # the store is gone with its host

        thread = threading.Thread(target=ask_quietly, daemon=True)
        thread.start()
        thread.join(_GRACE_SECONDS + _STORE_SECONDS)
        return found[0] if found else None


BACKWARD_ORDER = (
    "expert_group: expected every rank to run the same forward and backward passes in the same "
    "order"
)


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_default_store()


def _by_rank(values: dict[int, object]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in values.items())


def where_ranks_are(calls: dict[int, tuple[str, int]]) -> str:
    """The pass, and the number of its call, of each rank in words."""
    return _by_rank(
        {r: f"{name} of call {shown('call', call)}" for r, (name, call) in calls.items()}
    )


def _expect_same_pass(by_rank: list[list[int]], words: Sequence[int]) -> None:
    """Raise RuntimeError where these words differ, of which 0 is the pass and 1 its call."""
    if any(row[word] != by_rank[0][word] for row in by_rank for word in words):
        found = where_ranks_are({r: (PASSES[row[0]], row[1]) for r, row in enumerate(by_rank)})
        if {row[0] for row in by_rank} == {_FORWARD, _CHOICE}:  # 2: the engine asked for
            engines = {r: repr(ENGINES[row[2]]) for r, row in enumerate(by_rank)}
            if len({*engines.values()}) > 1:
                found += f"; engine is {_by_rank(engines)}"
        raise RuntimeError(f"{BACKWARD_ORDER}, got {found}")


def expect_same(name: str, by_rank: dict[int, int]) -> None:
    """Raise ValueError unless all ranks have the same value of what is called `name`."""
    if len(set(by_rank.values())) > 1:
        found = {r: shown(name, value) for r, value in by_rank.items()}
        raise ValueError(
            f"expert_group: expected the same call on every rank, got {name} {_by_rank(found)}"
        )
