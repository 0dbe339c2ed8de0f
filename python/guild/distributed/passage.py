"""Tokens to their experts' ranks and back, for autograd: each is the other's gradient.

Dispatch   rows of x, once to every rank that needs them, and the scores of their slots
Collect    out[t] = residual[t] + sum over ranks of t's results there, in rank order, in float32
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from guild._torch.autograd import rows_of
from guild.distributed.peer_traffic import PeerTraffic
from guild.distributed.traffic import Traffic


class Dispatch(torch.autograd.Function):
    """(x (tokens, hidden), scores of the slots) -> (rows (M, hidden), scores (P,))."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, traffic: Traffic | PeerTraffic, received: Tensor
    ):
        """received: the scores, which arrived with the traffic's plan."""
        ctx.traffic = traffic
        rows, received = traffic.send_rows(x, "forward"), received.clone()
        needs = ctx.needs_input_grad
        ctx.mark_non_differentiable(
            *(t for t, need in zip((rows, received), needs, strict=False) if not need)
        )
        return rows, received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, dreceived: Tensor):
        """dx and dscores. All ranks have agreed which are wanted, and only those are sent."""
        want_x, want_scores, *_ = ctx.needs_input_grad
        # gloo ends the process where messages do not match; the peer engine has its own barriers.
        if isinstance(ctx.traffic, Traffic) and not drows.is_cuda:
            ctx.traffic.ranks.agree_backward(ctx.traffic.call, drows, half=2)
        drows, dreceived = drows if want_x else None, dreceived if want_scores else None
        dx, dscores = ctx.traffic.return_gradients(drows, dreceived)
        return dx, dscores, None, None


class Collect(torch.autograd.Function):
    """(results of the received rows (M, hidden), residual) -> (tokens, hidden)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, residual: Tensor | None, traffic: Traffic | PeerTraffic
    ) -> Tensor:
        """The sum over ranks, rounded once."""
        ctx.traffic = traffic
        return traffic.return_sums(rows, residual, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        """Send rows of dout to the ranks of the tokens' experts."""
        want_rows, want_residual, _ = ctx.needs_input_grad
        drows = None
        if want_rows:
            ctx.traffic.begin_backward(dout)
            drows = ctx.traffic.send_rows(rows_of(dout), "backward")
        return drows, dout if want_residual else None, None
