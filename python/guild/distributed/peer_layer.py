"""The layer over ranks that reach each other's memory, in one op forward and one backward.

On a GPU the transfer of rows overlaps with the products: include/guild/peer_layer.h. Special cases,
results row by row or other gradients than one tensor for each weight, run step by step: `stepwise`,
`passage`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from guild._torch import flops
from guild._torch.autograd import below_autograd, rows_of
from guild._torch.gradients import wanted_bits
from guild._torch.operators import LayerFlags, ops
from guild.distributed.call_arguments import int32_ids
from guild.distributed.peers import (
    BACKWARD,
    BACKWARD_RESULTS,
    FORWARD,
    FORWARD_RESULTS,
    Peers,
)

flops.count("peer_forward")
flops.count("peer_backward")


class PeerExperts(torch.autograd.Function):
    """(x, scores, residual, weights) -> (tokens, hidden), offsets of this rank's rows by expert."""

    @staticmethod
    @below_autograd
    def forward(
        ctx: Any,
        peers: Peers,
        facts: dict[str, int],
        ids: Tensor,
        experts: int,
        keep: bool,
        x: Tensor,
        scores: Tensor,
        residual: Tensor | None,
        *layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """facts: what must be the same on every rank; keep: pre-activations, if there is room."""
        memory = peers.begin_forward(x, ids.shape[1], facts)
        ids = int32_ids(ids, experts)
        call = peers.ranks.calls
        with peers.ranks.in_step("forward"):
            barriers = peers.barriers(FORWARD, FORWARD_RESULTS, call)
            tokens = rows_of(x), ids, scores, experts, residual
            out, *kept, offsets = ops.peer_forward(
                memory.peers,
                memory.numbers,
                *barriers,
                *tokens,
                *layer,
                peers.room(ids.shape[1]),
                peers.kept_rows(ids.shape[1]) if keep else 0,
            )
        peers.after_call()
        ctx.peers, ctx.call = peers, call
        ctx.flags = LayerFlags(*layer[5:])
        ctx.save_for_backward(*kept, *layer[:5])
        ctx.mark_non_differentiable(offsets)
        ctx.set_materialize_grads(False)
        return out, offsets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None):
        """dx, dscores, the residual's gradient and those of the weights."""
        # Unpacked with autograd enabled: a checkpoint may run its whole forward again here.
        return PeerExperts._gradients(ctx, ctx.saved_tensors, dout)

    @staticmethod
    @below_autograd
    def _gradients(ctx: Any, saved: tuple[Tensor | None, ...], dout: Tensor | None) -> tuple:
        nothing = (None,) * len(ctx.flags)
        want_x, want_scores, want_residual, *want_layer = ctx.needs_input_grad[5:13]
        w_up, w_gate, w_down, b_up, b_down = want_layer
        weights = w_up or w_gate, w_down, b_up, b_down
        peers, memory = ctx.peers, ctx.peers.newest()
        if dout is None:  # the other ranks' tokens need this rank all the same
            rows, token_row = saved[0], saved[6]
            dout = rows.new_zeros(token_row.shape[0], rows.shape[1])
        peers.expect_no_failure()
        with peers.ranks.in_step("backward"):
            barriers = peers.barriers(BACKWARD, BACKWARD_RESULTS, ctx.call)
            wanted = wanted_bits(want_x, want_scores, weights, by_row=True)
            gradients = ops.peer_backward(
                memory.peers,
                memory.numbers,
                *barriers,
                rows_of(dout),
                *saved,
                *ctx.flags,
                wanted,
            )
        peers.after_call(returned=want_x or want_scores)
        wants = want_x, want_scores, *want_layer
        dx, dscores, *dlayer = (g if w else None for g, w in zip(gradients, wants, strict=True))
        dresidual = dout if want_residual else None
        return *(None,) * 5, dx, dscores, dresidual, *dlayer, *nothing
