"""The steps of a layer as separate calls, each on what the steps before it left.

The layer runs once, so that every step's inputs exist; from then on each can be called repeatedly.
The order of the experts' backward is the core's (compose.h), which leaves its intermediate results
here; the names below are in that order, the router's steps last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from guild._torch.gradients import wanted_bits
from guild._torch.operators import LayerFlags, ops, score_dtype, score_parts
from guild.activations import as_activation
from guild.bench.presets import Shape
from guild.bench.problem import Problem
from guild.logits import router_logits
from guild.routing import route

FORWARD = ("logits", "route", "sort", "up", "down", "combine")
BACKWARD = (
    "down gradient",
    "score gradient",
    "dW2",
    "dW1",
    "up gradient",
    "router gradient",
    "combine gradient",
    "logits gradient",
)
_RULE = (0, True, 1.0)  # the router's: softmax, renormalised, not scaled


class Work(NamedTuple):
    """The least that a step has to do.

    Attributes
    ----------
    flops : int
        Operations of matrix products; 0 for a step without one.
    bytes : int
        Every operand read once, every result written once.
    """

    flops: int
    bytes: int


def step_work(shape: Shape, dtype: torch.dtype, bias: bool) -> dict[str, Work]:
    """Work of every step; x and dO count as T rows, however many rows are gathered from them."""
    t, h, i, e, k = shape
    rows, size, score = t * k, dtype.itemsize, score_dtype(dtype).itemsize
    parts = score_parts(i) * score
    tokens, up, down = t * h * size, 2 * e * i * h * size, e * i * h * size
    by_row = {"h": 2 * rows * i * size, "a": rows * i * size, "y": rows * h * size}
    logits, router = t * e * score, e * h * size
    b_up, b_down = (2 * e * i * size, e * h * size) if bias else (0, 0)
    product = 2 * rows * h * i
    gather = tokens + 4 * rows
    wide = by_row["h"] + by_row["a"]
    score_bytes = rows * (parts + 4 + score) + (tokens + b_down if bias else 0)
    down_bytes = gather + down + by_row["h"] + wide + rows * (score + parts) + b_up + b_down
    return {
        "logits": Work(2 * t * h * e, tokens + router + logits),
        "route": Work(0, logits + rows * (4 + score)),
        "sort": Work(0, rows * (4 + score) + rows * (8 + score) + 4 * (e + 1)),
        "up": Work(2 * product, gather + up + wide + b_up),
        "down": Work(product, by_row["a"] + down + by_row["y"] + b_down),
        "combine": Work(0, by_row["y"] + tokens + rows * (4 + score)),
        "down gradient": Work(product, down_bytes),
        "score gradient": Work(0, score_bytes),
        "dW2": Work(product, gather + by_row["a"] + down),
        "dW1": Work(2 * product, gather + by_row["h"] + up),
        "up gradient": Work(2 * product, by_row["h"] + up + by_row["y"]),
        "router gradient": Work(0, t * e * size + rows * (4 + 2 * score)),
        "combine gradient": Work(0, by_row["y"] + tokens + rows * (8 + size) + router),
        "logits gradient": Work(2 * t * h * e, t * e * size + tokens + router),
    }


class StepChain:
    """One layer, step by step.

    Parameters
    ----------
    problem : Problem
        Inputs; with biases, the chain has their gradients too.

    Attributes
    ----------
    calls : dict
        Every step by name, in order; a call repeats it and returns what it computed.
    offsets, row_token, row_score, slot_row : torch.Tensor
        The routing.
    h, a, y, dh, a_scaled : torch.Tensor
        (R, 2I), (R, I), (R, H), (R, 2I), (R, I): results of the steps.
    dw_up, dw_down : torch.Tensor
        The gradients of the weights, overwritten by every call that computes them.
    db_up, db_down : torch.Tensor or None
        The gradients of the biases, overwritten by every down gradient.
    """

    @torch.no_grad()
    def __init__(self, problem: Problem) -> None:
        self.shape = problem.shape
        self.x, self.dout = problem.x.detach(), problem.out_gradient
        self.router, self.w_up, self.w_down = (
            w.detach() for w in (problem.router, problem.w_up, problem.w_down)
        )
        self.b_up, self.b_down = (
            b if b is None else b.detach() for b in (problem.b_up, problem.b_down)
        )
        self.dw_up, self.dw_down = torch.empty_like(self.w_up), torch.empty_like(self.w_down)
        self.db_up, self.db_down = (
            b if b is None else torch.empty_like(b) for b in (self.b_up, self.b_down)
        )
        scalars = as_activation("silu").scalars
        self._flags = LayerFlags(*scalars, interleaved=False, transposed=False)
        self._run_forward()
        self._run_backward()
        self.calls = self._calls()

    def results(self) -> tuple[Tensor, ...]:
        """Output and gradients, as `reference.relative_errors` takes them."""
        dx, dw_router = self._combine_gradient(), self._logits_gradient()
        biases = () if self.b_up is None else (self.db_up, self.db_down)
        return (self._combine(), dx, dw_router, self.dw_up, self.dw_down, *biases)

    def _run_forward(self) -> None:
        self.logits = self._logits()
        self.ids, self.scores = self._route()
        self.offsets, self.row_token, self.slot_row, self.row_score = self._sort()
        self.a, self.h = self._up()
        self.y = self._down()

    def _run_backward(self) -> None:
        places = (self.offsets, self.row_token, self.slot_row, self.row_score, None)
        weights = (self.w_up, None, self.w_down, self.b_down)
        wanted = wanted_bits(dx=True, dscores=True, by_row=True)
        biases = (self.db_up, self.db_down)
        self._dx_rows, self._dscores, self.dh, self.a_scaled = ops.data_gradients(
            self.dout, self.h, *places, *weights, *self._flags, wanted, *biases
        )
        self._weight_gradients(self.dw_up, self.dw_down)
        _, _, self._parts = self._down_gradient()
        self._dlogits = self._router_gradient()

    def _calls(self) -> dict[str, Callable[[], object]]:
        forward = (self._logits, self._route, self._sort, self._up, self._down, self._combine)
        backward = (
            self._down_gradient,
            self._score_gradient,
            self._dw_down,
            self._dw_up,
            self._up_gradient,
            self._router_gradient,
            self._combine_gradient,
            self._logits_gradient,
        )
        return dict(zip((*FORWARD, *BACKWARD), (*forward, *backward), strict=True))

    def _logits(self) -> Tensor:
        return router_logits(self.x, self.router)

    def _route(self) -> tuple[Tensor, Tensor]:
        return route(self.logits, self.shape.top_k)

    def _sort(self) -> tuple[Tensor, ...]:
        return ops.sort_by_expert(self.ids, self.scores, self.shape.experts)

    def _up(self) -> tuple[Tensor, Tensor]:
        rows = (self.x, self.offsets, self.row_token)
        return ops.up_projection(*rows, self.w_up, None, self.b_up, *self._flags, True)

    def _down(self) -> Tensor:
        return ops.down_projection(self.a, self.offsets, self.w_down, self.b_down, False)

    def _combine(self) -> Tensor:
        return ops.combine(self.y, self.slot_row, self.scores)

    def _down_gradient(self) -> tuple[Tensor, ...]:
        rows = (self.dout, self.h, self.offsets, self.row_token, self.row_score)
        return ops.down_gradient(*rows, self.w_down, *self._flags, self.db_up, self.db_down)

    def _score_gradient(self) -> Tensor:
        width = self.shape.intermediate
        rows = (self._parts, self.slot_row, self.offsets)
        return ops.score_gradient(*rows, self.dout, self.b_down, width)

    def _dw_down(self) -> None:
        self._weight_gradients(None, self.dw_down)

    def _dw_up(self) -> None:
        self._weight_gradients(self.dw_up, None)

    def _weight_gradients(self, dw_up: Tensor | None, dw_down: Tensor | None) -> None:
        """With a schedule of its own, as the layer's backward makes one; it is part of the time."""
        operands = (self.x, self.dout, self.dh, self.a_scaled, self.offsets, self.row_token)
        layout = self._flags.up_weight()
        ops.weight_gradients_out(*operands, dw_up, None, dw_down, *layout, False)

    def _up_gradient(self) -> Tensor:
        return ops.up_gradient(self.dh, self.offsets, self.w_up, None, True, False, False)

    def _router_gradient(self) -> Tensor:
        rows = (self._dscores, self.scores, self.ids, None, None)
        return ops.route_backward(*rows, self.shape.experts, *_RULE, None, self.x)

    def _combine_gradient(self) -> Tensor:
        """The gradient of x, the router's part included."""
        part = (self._dlogits, self.ids, self.router)
        return ops.combine(self._dx_rows, self.slot_row, None, None, None, *part)

    def _logits_gradient(self) -> Tensor:
        """The gradient of the router's weight."""
        return self._dlogits.t() @ self.x


def in_turn(chains: list[StepChain]) -> dict[str, Callable[[], object]]:
    """The steps of several chains; each call uses the next chain."""

    def turn(name: str) -> Callable[[], object]:
        calls = itertools.cycle([chain.calls[name] for chain in chains])
        return lambda: next(calls)()

    return {name: turn(name) for name in chains[0].calls}
