"""The ops of the peer engine with a single rank, which sends rows to itself."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
from torch import Tensor

import guild
from guild._torch.gradients import wanted_bits
from guild._torch.operators import LayerFlags, ops
from guild.distributed.peer_memory import _place
from guild.distributed.peers import peers_of
from layers import ACTIVATIONS, Case, Layer, make_layer, moved

SMALL = Case("small", 40, 64, 48, 4, 2, "sentinel", frozenset())
ALL = 40 * 2  # its slots
NAMES = "x", "w_up", "w_down", "b_up", "b_down", "residual", "dout"


class Alone:
    """A rank, its memory, and its layer's forward and backward."""

    def __init__(self, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.layer = make_layer(SMALL, ACTIVATIONS["swiglu"], dtype, device)
        given = self.layer.arguments("concatenated")
        self.given: dict[str, Tensor] = {n: given[n].detach() for n in NAMES[1:5]}
        self.given |= {"x": self.layer.x, "dout": self.layer.dout}
        self.given["residual"] = torch.randn_like(self.layer.x)
        row_bytes = SMALL.hidden * self.layer.x.element_size()
        self.numbers = [0, SMALL.tokens, SMALL.top_k, row_bytes, 1]
        size = ops.peer_memory_sizes(1, self.numbers)[0]
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.peers = torch.tensor([self.memory.data_ptr()], device=device)
        self.report = torch.zeros(5, dtype=torch.int64, pin_memory=device == "cuda")
        self.streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []
        self.flags = LayerFlags(*self.layer.activation.scalars, False, False)

    def barriers(self) -> tuple[Tensor, list[int], float, list[int], list[int], Tensor, list[int]]:
        """What both ops take first."""
        streams = [s.cuda_stream for s in self.streams]
        return self.peers, self.numbers, 20.0, [1, 2], [3], self.report, streams

    def forward(self, room: int = -1, kept: int = ALL, **changed: Tensor) -> tuple[Tensor, ...]:
        """The output and what backward needs.

        room: of rows; -1: as many as slots. kept: rows of pre-activations.
        """
        t = self.given | changed
        ids = self.layer.ids.int()
        routing = ids, self.layer.scores, SMALL.experts, t["residual"]
        weights = t["w_up"], None, t["w_down"], t["b_up"], t["b_down"]
        how = *self.flags, room, kept
        return ops.peer_forward(*self.barriers(), t["x"], *routing, *weights, *how)

    def backward(self, kept: tuple[Tensor, ...], **changed: Tensor) -> list[Tensor]:
        """Gradients of x, scores, w_up, w_down and the biases."""
        t = self.given | changed
        wanted = wanted_bits(True, True, (True,) * 4, by_row=True)
        weights = t["w_up"], None, t["w_down"], t["b_up"], t["b_down"]
        found = ops.peer_backward(*self.barriers(), t["dout"], *kept, *weights, *self.flags, wanted)
        return [found[i] for i in (0, 1, 2, 4, 5, 6)]

    def results(self, room: int = -1, kept: int = ALL, **changed: Tensor) -> list[Tensor]:
        """The output and all gradients."""
        out, *rest, _ = self.forward(room, kept, **changed)
        return [out, *self.backward(rest, **changed)]

    def rows(self) -> int:
        """How many the experts have: fewer than there are slots."""
        ids = self.layer.ids
        used = int(((ids >= 0) & (ids < SMALL.experts)).sum())
        assert used < ids.numel()
        return used


def by_one_process(layer: Layer, given: dict[str, Tensor]) -> list[Tensor]:
    """The same without the engine."""
    arguments = layer.arguments("concatenated")
    x, scores = layer.x.detach().requires_grad_(), layer.scores.detach().requires_grad_()
    out = guild.routed_experts(x, layer.ids, scores, **arguments, residual=given["residual"])
    out.backward(given["dout"])
    weights = [arguments[name].grad for name in NAMES[1:5]]
    return [out.detach(), x.grad, scores.grad, *weights]


def expect_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), i


def test_results(device: str) -> None:
    """Those of a layer without ranks, but for the rounding of sums that are sent."""
    rank = Alone(device)
    wanted = by_one_process(rank.layer, rank.given)
    for _ in range(3):  # the memory has two places for rows
        for found, truth in zip(rank.results(), wanted, strict=True):
            error, size = (t.float().norm() for t in (found - truth, truth))
            assert error <= (2.0**-7 if device == "cuda" else 1e-5) * size
    assert not rank.report.any()
    ids = rank.layer.ids[(rank.layer.ids >= 0) & (rank.layer.ids < SMALL.experts)]
    ends = ids.flatten().bincount(minlength=SMALL.experts).cumsum(0).int()
    assert torch.equal(rank.forward()[-1][1:], ends)  # of this rank's tokens


def test_room(device: str) -> None:
    """Room for the rows in use, and no more, changes no bit; less is a failure that says so."""
    rank = Alone(device)
    used = (rank.layer.ids >= 0) & (rank.layer.ids < SMALL.experts)
    rows = rank.rows()
    wanted = rank.results()
    for room in (rows, rows + 1, 10 * rows):
        expect_equal(rank.results(room), wanted)
    assert not rank.report.any()
    kept = rank.forward(rows)[1:]
    assert kept[1].shape[0] == kept[3].shape[0] == rows  # pre-activations, and rows' tokens
    out = rank.forward(rows - 1)[0]
    if device == "cuda":
        torch.cuda.synchronize()
    overflow = 3  # guild::PeerFailure
    assert rank.report.tolist() == [overflow, 0, 0, 0, rows]
    assert out[used.any(1)].isnan().all()


def test_kept_pre_activations(device: str) -> None:
    """However many there is memory for: read if all are there, else computed again."""
    rank = Alone(device)
    wanted, rows = rank.results(), rank.rows()
    for count in (0, 1, rows - 1, rows, rows + 1, ALL):
        out, *kept, _ = rank.forward(kept=count)
        h = kept[1]
        assert h.shape[0] == min(count, rank.layer.ids.numel())
        expect_equal([out, *rank.backward(kept)], wanted)
        h.fill_(float("nan"))
        dx = rank.backward(kept)[0]
        assert bool(dx.isnan().any()) == (count >= rows)


def test_kept_pre_activations_in_a_graph(gpu: str) -> None:
    """How many rows the experts have may change from replay to replay."""
    rank = Alone("cuda")
    ids, rows = rank.layer.ids.clone(), rank.rows()
    rank.results(kept=rows)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = rank.results(kept=rows)
    more, fewer = ids.clamp(0, SMALL.experts - 1), ids.clone()
    fewer[:5] = -1
    for new in (ids, more, fewer, more, ids):
        rank.layer.ids.copy_(new)
        graph.replay()
        replayed = [t.clone() for t in found]
        expect_equal(replayed, rank.results())
    assert not rank.report.any()


def test_kept_is_a_count(device: str) -> None:
    """A negative one is an error."""
    with pytest.raises(RuntimeError, match="kept: expected at least 0, got -1"):
        Alone(device).forward(kept=-1)


@pytest.mark.parametrize("name", ["x", "dout"])
def test_rows_at_any_address(name: str, device: str) -> None:
    """Tokens and gradients are copied where kernels cannot read them."""
    rank = Alone(device)
    wanted = rank.results()
    given = rank.given[name]
    expect_equal(rank.results(**{name: moved(given, 1)}), wanted)
    wide = torch.cat((given, given[:, :4]), 1)[:, : SMALL.hidden]
    expect_equal(rank.results(**{name: wide}), wanted)


def test_refused_calls_send_nothing(gpu: str) -> None:
    """What a late step cannot run is refused before the first; the call that follows is right."""
    rank = Alone(gpu)
    wanted = rank.results()
    out, *kept, _ = rank.forward()
    torch.cuda.synchronize()
    before = rank.memory.clone()
    for name in ("w_up", "w_down", "b_up", "b_down", "residual"):
        wrong = {name: moved(rank.given[name], 1)}
        with pytest.raises(RuntimeError, match=f"^{name}: expected 16-byte aligned data on CUDA"):
            rank.forward(**wrong)
        if name in ("w_up", "w_down", "b_down"):
            with pytest.raises(RuntimeError, match=f"^{name}: expected 16-byte aligned data"):
                rank.backward(kept, **wrong)
        torch.cuda.synchronize()
        assert torch.equal(rank.memory, before), name
    expect_equal([out, *rank.backward(kept)], wanted)
    expect_equal(rank.results(), wanted)
    assert not rank.report.any()


def test_place_leaves_no_file_open() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        kind, host, *_ = _place(torch.device("cpu"))
    assert kind == "cpu" and host and not said


def test_an_engine_that_one_rank_asks_for() -> None:
    """Where it cannot run, the others raise too, whose "auto" would take another."""
    ranks = mock.Mock()
    ranks.meet.return_value = {"auto", "peer"}
    with mock.patch("guild.distributed.peers.why_not", lambda *_: "they are far apart"):
        with pytest.raises(ValueError, match=r"^engine: expected .* for 'peer', .* far apart$"):
            peers_of(ranks, torch.device("cuda"), "auto", None, None, False)
        ranks.meet.return_value = {"auto"}
        assert peers_of(ranks, torch.device("cuda"), "auto", None, None, False) is None
