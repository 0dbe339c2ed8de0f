"""The ops of the peer engine with two ranks in one process, on one GPU.

Each rank has streams of its own, and its barriers wait for what the other has queued. Two layers
are large enough for their products to be divided while rows travel; the kernels of the third start
before the ones before them have ended.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import guild
from guild._torch.gradients import wanted_bits
from guild._torch.operators import LayerFlags, ops
from guild.activations import as_activation

RANKS = 2


class Sizes(NamedTuple):
    """Sizes of a layer; tokens are a rank's."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int


LARGE = Sizes(4096, 16, 4, 2048, 512)  # rows come during products
WIDE = Sizes(8192, 16, 1, 7168, 1024)  # sums are sent during products, too
FEW = Sizes(48, 16, 4, 512, 256)
FLAGS = LayerFlags(*as_activation("silu").scalars, False, False)


@functools.cache
def six_streams() -> list[torch.cuda.Stream]:
    """Neighbours in torch's pool: a GPU has eight queues, and a barrier holds up its own."""
    return [torch.cuda.Stream() for _ in range(3 * RANKS)]


class TwoRanks:
    """Both ranks' tokens, experts and memory.

    Parameters
    ----------
    overlaps : bool
        Whether ranks have streams for what overlaps.
    biases : bool
        Whether the experts have biases.
    sizes : Sizes
        Of the layer.
    tokens : tuple
        Of each rank.
    """

    def __init__(self, overlaps: bool, biases: bool, sizes: Sizes, tokens: tuple[int, int]) -> None:
        torch.manual_seed(5)
        self.sizes = sizes
        most, experts, top_k, hidden, intermediate = sizes
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = [torch.randn(t, hidden, **bf16) for t in tokens]
        self.dout = [torch.randn(t, hidden, **bf16) for t in tokens]
        chosen = [torch.rand(t, experts, device="cuda").topk(top_k) for t in tokens]
        self.ids = [c.indices.int().contiguous() for c in chosen]
        self.scores = [c.values.softmax(1).contiguous() for c in chosen]
        self.w_up = torch.randn(experts, 2 * intermediate, hidden, **bf16) * 0.02
        self.w_down = torch.randn(experts, hidden, intermediate, **bf16) * 0.02
        self.b_up = torch.randn(experts, 2 * intermediate, **bf16) if biases else None
        self.b_down = torch.randn(experts, hidden, **bf16) if biases else None
        self.report = torch.zeros(5, dtype=torch.int64, pin_memory=True)
        room = [most, top_k, 2 * hidden, RANKS]
        self.numbers = [[rank, *room] for rank in range(RANKS)]
        size = ops.peer_memory_sizes(RANKS, self.numbers[0])[0]
        self.memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(RANKS)]
        self.peers = torch.tensor([m.data_ptr() for m in self.memory], device="cuda")
        streams = six_streams()
        self.main, more = streams[:RANKS], streams[RANKS:]
        self.more = [more[2 * rank :][:2] if overlaps else [] for rank in range(RANKS)]
        self.seconds = 20.0
        counts = [ids.flatten().bincount(minlength=experts) for ids in self.ids]
        self.own_ends = [count.cumsum(0).int() for count in counts]  # of each rank's own tokens
        self.own_offsets: list[tuple[int, Tensor]] = []  # as forwards return them

    def warm_up(self, call: Callable[[], object]) -> None:
        """Load a call's kernels, and allocate: both may wait for a barrier that waits here."""
        self.seconds = 1e-3
        call()
        torch.cuda.synchronize()
        self.seconds = 20.0
        for memory in (*self.memory, self.report):
            memory.zero_()

    def weights(self, rank: int) -> tuple[Tensor | None, ...]:
        """As the ops take them."""
        local = self.sizes.experts // RANKS
        mine = slice(rank * local, (rank + 1) * local)
        w_up, w_down, b_up, b_down = (
            None if w is None else w[mine] for w in (self.w_up, self.w_down, self.b_up, self.b_down)
        )
        return w_up, None, w_down, b_up, b_down

    def barriers(self, rank: int) -> tuple:
        """What both ops take first."""
        streams = [s.cuda_stream for s in self.more[rank]]
        return self.peers, self.numbers[rank], self.seconds, [1, 2], [3], self.report, streams

    def of_both(self, call: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
        """What the call queues for each rank, once it is done."""
        found = []
        torch.cuda.synchronize()
        for rank, stream in enumerate(self.main):
            with torch.cuda.stream(stream):
                found.append(call(rank))
        torch.cuda.synchronize()
        assert self.seconds < 1 or not self.report.any()
        for rank, own in self.own_offsets:
            assert torch.equal(own[1:], self.own_ends[rank])
        self.own_offsets.clear()
        return found

    def step(self, room: int, kept_rows: int, scores: bool) -> list[list[Tensor]]:
        """Of each rank: output, dx, dscores, and the gradients of weights and biases."""
        kept: list[list[Tensor]] = []

        def forward(rank: int) -> list[Tensor]:
            routing = (
                self.ids[rank],
                self.scores[rank],
                self.sizes.experts,
                self.dout[rank],
            )  # a residual
            arguments = self.x[rank], *routing, *self.weights(rank), *FLAGS, room, kept_rows
            out, *rest, own = ops.peer_forward(*self.barriers(rank), *arguments)
            self.own_offsets.append((rank, own))
            kept.append(rest)
            return [out]

        bias = self.b_up is not None
        wanted = wanted_bits(True, scores, (True, True, bias, bias), by_row=True)

        def backward(rank: int) -> list[Tensor]:
            arguments = self.dout[rank], *kept[rank], *self.weights(rank), *FLAGS, wanted
            return list(ops.peer_backward(*self.barriers(rank), *arguments))

        outs = self.of_both(forward)
        return [out + found for out, found in zip(outs, self.of_both(backward), strict=True)]

    def by_one_process(self) -> list[Tensor]:
        """The same of all tokens together."""
        leaves = [torch.cat(self.x), self.w_up, self.w_down, torch.cat(self.scores)]
        if self.b_up is not None:
            leaves += [self.b_up, self.b_down]
        x, w_up, w_down, scores, *biases = (leaf.detach().requires_grad_() for leaf in leaves)
        dout = torch.cat(self.dout)
        out = guild.routed_experts(
            x, torch.cat(self.ids), scores, w_up, w_down, *biases, residual=dout
        )
        out.backward(dout)
        grads = [x.grad, scores.grad, w_up.grad, w_down.grad, *(b.grad for b in biases)]
        return [out.detach(), *grads]


def joined(found: list[list[Tensor]]) -> list[Tensor]:
    """Both ranks' tokens and experts, one after the other; without w_gate's empty gradient."""
    together = [torch.cat(both) for both in zip(*found, strict=True)]
    out, dx, dscores, dw_up, _, dw_down, db_up, db_down = together
    return [t for t in (out, dx, dscores, dw_up, dw_down, db_up, db_down) if t.numel()]


def two_kinds(
    biases: bool, sizes: Sizes, *how: Any, tokens: tuple[int, int] | None = None
) -> list[TwoRanks]:
    """The same without overlap and with it, ready for `step(*how)`."""
    tokens = tokens or (sizes.tokens, max(sizes.tokens - 96, 5))
    if int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")) < 8:
        pytest.skip("CUDA_DEVICE_MAX_CONNECTIONS: fewer queues than streams")
    kinds = [TwoRanks(overlaps, biases, sizes, tokens) for overlaps in (False, True)]
    for kind in (*kinds, *kinds):
        kind.warm_up(functools.partial(kind.step, *how))
    return kinds


@pytest.mark.parametrize("sizes", [LARGE, WIDE, FEW])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("room", [-1, 1.25])  # times the rows of a rank if all have equally many
@pytest.mark.parametrize("kept", [0, 0.5, 1.25])
def test_two_ranks(gpu: str, biases: bool, sizes: Sizes, room: float, kept: float) -> None:
    """Overlap changes no bit, and results are those of one process."""
    even = sizes.tokens * sizes.top_k
    how = int(room * even) if room > 0 else -1, int(kept * even), True
    plain, apart = two_kinds(biases, sizes, *how)
    wanted = joined(plain.step(*how))
    for _ in range(3):  # the same memory again
        for a, b in zip(joined(apart.step(*how)), wanted, strict=True):
            assert torch.equal(a, b)
    names = "out", "dx", "dscores", "dw_up", "dw_down", "db_up", "db_down"
    for name, a, b in zip(names, wanted, plain.by_one_process(), strict=False):
        if name in ("dw_up", "dw_down"):
            assert torch.equal(a, b), name
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < 1e-2, f"{name}: off by {error:.2g}"


@pytest.mark.parametrize("sizes", [LARGE, WIDE, FEW])
@pytest.mark.parametrize("empty", range(RANKS))
def test_a_rank_without_tokens(gpu: str, empty: int, sizes: Sizes) -> None:
    """Its experts work for the other's."""
    how = -1, RANKS * sizes.tokens * sizes.top_k, True
    tokens = (0, sizes.tokens) if empty == 0 else (sizes.tokens, 0)
    plain, apart = two_kinds(False, sizes, *how, tokens=tokens)
    wanted = joined(plain.step(*how))
    for a, b, c in zip(joined(apart.step(*how)), wanted, plain.by_one_process(), strict=True):
        assert torch.equal(a, b)
        assert (b.float() - c.float()).norm() < 1e-2 * c.float().norm()


@pytest.mark.parametrize("tokens", [(48, 5), (48, 0), (1, 1)])
def test_forwards_in_a_row(gpu: str, tokens: tuple[int, int]) -> None:
    """Forwards of few tokens that are queued at once, each after the one before."""
    how = -1, 0, False
    plain, _ = two_kinds(False, FEW, *how, tokens=tokens)
    everyones = [[(ids + shift) % FEW.experts for ids in plain.ids] for shift in range(8)]

    def forwards(rank: int) -> list[Tensor]:
        local, found = plain.weights(rank), []
        for ids in everyones:
            routing = ids[rank], plain.scores[rank], FEW.experts, None
            arguments = plain.x[rank], *routing, *local, *FLAGS, -1, 0
            found.append(ops.peer_forward(*plain.barriers(rank), *arguments)[0])
        return found

    plain.warm_up(lambda: plain.of_both(forwards))
    outs = [torch.cat(both) for both in zip(*plain.of_both(forwards), strict=True)]
    x, scores = torch.cat(plain.x), torch.cat(plain.scores)
    for ids, out in zip(everyones, outs, strict=True):
        truth = guild.routed_experts(x, torch.cat(ids), scores, plain.w_up, plain.w_down)
        assert (out.float() - truth.float()).norm() < 1e-2 * truth.float().norm()


def test_without_gradients_of_scores(gpu: str) -> None:
    """Where only tokens and weights have gradients, these are the same."""
    how = -1, RANKS * LARGE.tokens * LARGE.top_k
    plain, apart = two_kinds(False, LARGE, *how, False)
    without = joined(plain.step(*how, False))
    plain.warm_up(lambda: plain.step(*how, True))
    with_scores = joined(plain.step(*how, True))
    assert len(without) == len(with_scores) - 1
    for a, b in zip(joined(apart.step(*how, False)), without, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(without[1], with_scores[1])
