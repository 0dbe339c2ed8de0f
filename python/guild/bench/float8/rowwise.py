"""The layer's experts in FP8 as PyTorch trains them, for comparison: one scale per row.

Products are `torch._scaled_grouped_mm`'s. Its groups are multiples of 16 rows, and it takes one
scale for each row of A and column of B, so a matrix is quantised along the dimension that a product
sums over: rows of X, A, dY and dH for O and dX, and columns of each expert's rows for dW. Rows are
padded when they are gathered. Router and sort are Guild's, so that only the experts differ; all but
products and quantisation is compiled. Weights are quantised separately, as in Guild's layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import guild
from guild._torch.operators import ops
from guild.bench.candidates import Layer
from guild.bench.float8.rowwise_passes import ROWS, Passes, fast
from guild.bench.problem import Problem


class Places(NamedTuple):
    """Where rows lie: sorted by expert, each expert's padded to a multiple of 16.

    Attributes
    ----------
    ends : torch.Tensor
        int32 (experts,), where each expert's rows end.
    row_token, row_score : torch.Tensor
        int64 and float32 (rows,); 0 at padding.
    slot_row : torch.Tensor
        int32 (tokens, top_k).
    """

    ends: Tensor
    row_token: Tensor
    row_score: Tensor
    slot_row: Tensor


def padded_places(ids: Tensor, scores: Tensor, experts: int) -> Places:
    """Places of slots whose ids are all in range, with room for the most rows possible."""
    offsets, _, slot_row, _ = ops.sort_by_expert(ids, scores, experts)
    room = (offsets.diff() + ROWS - 1) // ROWS * ROWS
    ends = room.cumsum(0)
    slot_row = slot_row + (ends - room - offsets[:-1])[ids.long()]
    rows = -(-(ids.numel() + experts * (ROWS - 1)) // ROWS) * ROWS
    place = slot_row.flatten()
    slots = torch.arange(ids.numel(), device=ids.device)
    row_token = torch.zeros(rows, dtype=torch.int64, device=ids.device)
    row_score = torch.zeros(rows, device=ids.device)
    row_token.scatter_(0, place, slots // ids.shape[1])
    row_score.scatter_(0, place, scores.flatten())
    return Places(ends.int(), row_token, row_score, slot_row.int())


class Codes(NamedTuple):
    """Both weights in both orders, each with its scales.

    Attributes
    ----------
    up, down : tuple of torch.Tensor
        (experts, outputs, inputs), and scales (experts, outputs).
    up_turned, down_turned : tuple of torch.Tensor
        (experts, inputs, outputs), and scales (experts, inputs).
    """

    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    up_turned: tuple[Tensor, Tensor]
    down_turned: tuple[Tensor, Tensor]


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], ends: Tensor) -> Tensor:
    """Sums over the last dimension of both, in bfloat16.

    a (rows, K) with b (experts, N, K): row r with the matrix of its expert, (rows, N); rows after
    the last end are not written. a (M, rows) with b (N, rows): (experts, M, N).
    """
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return torch._scaled_grouped_mm(a[0], b[0].mT, a[1], b[1], ends, **options)


class RowwiseExperts(torch.autograd.Function):
    """x (tokens, hidden) and scores (tokens, top_k) to the layer's output."""

    @staticmethod
    def forward(ctx, x, scores, w_up, w_down, ids, codes, passes):
        """w_up and w_down get gradients, but only their codes are read."""
        places = padded_places(ids, scores, w_up.shape[0])
        rows = x.index_select(0, places.row_token)
        h = product(passes.rows(rows), codes.up, places.ends)
        a = fast(_swiglu, h)(h)
        y = product(passes.rows(a), codes.down, places.ends)
        ctx.save_for_backward(rows, h, a, y, *places)
        ctx.codes, ctx.passes = codes, passes
        return fast(_combined, y)(y, places.slot_row, scores)

    @staticmethod
    def backward(ctx, dout):
        """dX, dscores, dW1 and dW2."""
        rows, h, a, y, *places = ctx.saved_tensors
        places, codes, passes = Places(*places), ctx.codes, ctx.passes
        dscores = fast(_score_gradient, y)(dout, y, places.slot_row)
        dy = fast(_weighted, dout)(dout, places.row_token, places.row_score)
        da = product(passes.rows(dy), codes.down_turned, places.ends)
        dw_down = product(*passes.columns(dy, a, places.ends), places.ends)
        dh = fast(_swiglu_gradient, h)(h, da)
        dx = product(passes.rows(dh), codes.up_turned, places.ends)
        dw_up = product(*passes.columns(dh, rows, places.ends), places.ends)
        return fast(_summed, dx)(dx, places.slot_row), dscores, dw_up, dw_down, None, None, None


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, -1)
    return (F.silu(gate) * up).to(h.dtype)


def _swiglu_gradient(h: Tensor, da: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, -1)
    share, da = gate.sigmoid(), da.float()
    of_gate = da * up * share * (1 + gate * (1 - share))
    return torch.cat((of_gate, da * gate * share), -1).to(h.dtype)


def _weighted(dout: Tensor, row_token: Tensor, row_score: Tensor) -> Tensor:
    return (dout[row_token].float() * row_score[:, None]).to(dout.dtype)


def _combined(y: Tensor, slot_row: Tensor, scores: Tensor) -> Tensor:
    return (y[slot_row.long()].float() * scores[..., None]).sum(1).to(y.dtype)


def _summed(dx: Tensor, slot_row: Tensor) -> Tensor:
    return dx[slot_row.long()].float().sum(1).to(dx.dtype)


def _score_gradient(dout: Tensor, y: Tensor, slot_row: Tensor) -> Tensor:
    return (dout[:, None].float() * y[slot_row.long()].float()).sum(-1)


class RowwiseModule:
    """The layer of a problem, with its weights' codes."""

    def __init__(self, problem: Problem, passes: Passes, codes: Codes | None = None) -> None:
        self._problem, self._passes = problem, passes
        self.codes = Codes(*(call() for call in self.quantising())) if codes is None else codes

    def quantising(self) -> list[Callable[[], tuple[Tensor, Tensor]]]:
        """The functions that make each of the weights' codes."""
        weights = self._problem.w_up.detach(), self._problem.w_down.detach()
        orders = self._passes.weights, self._passes.turned
        return [functools.partial(order, w) for order in orders for w in weights]

    def __call__(self, x: Tensor) -> Tensor:
        """x (tokens, hidden) -> the same."""
        problem = self._problem
        logits = guild.router_logits(x, problem.router)
        ids, scores = guild.route(logits, problem.shape.top_k)
        weights = problem.w_up, problem.w_down
        return RowwiseExperts.apply(x, scores, *weights, ids, self.codes, self._passes)


class RowwiseLayer(Layer):
    """The layer as a candidate, with the given quantising passes.

    codes_of: another one over the same input sets, whose codes of weights are shared.
    """

    def __init__(
        self,
        name: str,
        problems: list[Problem],
        passes: Passes,
        codes_of: RowwiseLayer | None = None,
    ) -> None:
        self._passes = passes
        others = codes_of._modules if codes_of else []
        self._codes = {id(p): m.codes for p, m in zip(problems, others, strict=False)}
        super().__init__(name, problems)

    def module(self, problem: Problem) -> Callable[[Tensor], Tensor]:
        """As `Layer.module`."""
        return RowwiseModule(problem, self._passes, self._codes.get(id(problem)))

    def quantise(self) -> None:
        """Make the codes of the first input set's weights again, one at a time, and drop them."""
        for call in self._modules[0].quantising():
            call()

    def owned(self) -> list[Tensor]:
        """Memory that a forward does not keep for backward: weights and their codes."""
        problem = self._problems[0]
        codes = [t for pair in self._modules[0].codes for t in pair]
        return [problem.router, problem.w_up, problem.w_down, *codes]


@functools.cache
def why_not(device: str, dtype: torch.dtype) -> str | None:
    """Why torch's FP8 products cannot be timed there; None if they can."""
    if device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        return "torch._scaled_grouped_mm wants a GPU of compute capability 9.0"
    if dtype != torch.bfloat16:
        return f"torch._scaled_grouped_mm writes bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None
