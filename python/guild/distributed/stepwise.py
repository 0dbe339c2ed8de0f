"""The layer over ranks step by step, for exact=True.

A token's rows come back one by one, and are added where the token is, in the order of its experts:
the bits of one process that has all tokens. More bytes come back than with sums by rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from guild._torch.autograd import below_autograd, rows_of
from guild._torch.gradients import expert_gradients, pre_activations
from guild._torch.operators import LayerFlags, ops
from guild._torch.router_gradients import Weighing, router_gradients
from guild.distributed.peer_traffic import PeerTraffic
from guild.distributed.traffic import Traffic


class StepwiseExperts(torch.autograd.Function):
    """(x, router's weight and bias, scores, residual, weights) -> (tokens, hidden).

    With a router, ids and scores are those that it chose, and x gets one gradient for both, as in
    guild::moe_layer; `routed` then holds scores, ids, slopes and how they were weighed.
    """

    @staticmethod
    @below_autograd
    def forward(
        ctx: Any,
        traffic: Traffic | PeerTraffic,
        received: Tensor,
        token_offsets: Tensor | None,
        keep: bool,
        routed: tuple[Tensor, Tensor, Tensor | None, Weighing] | None,
        x: Tensor,
        router_weight: Tensor | None,
        router_bias: Tensor | None,
        scores: Tensor,
        residual: Tensor | None,
        *layer: Any,
    ) -> Tensor:
        """received: the scores that came with the traffic's plan; keep: the pre-activations."""
        w_up, w_gate, w_down, b_up, b_down, *flags = layer
        ctx.traffic, ctx.flags, ctx.weighing = traffic, LayerFlags(*flags), None
        ctx.kept = keep
        rows = traffic.send_rows(x, "forward")
        local = w_down.shape[0]
        places = ops.sort_by_expert(traffic.ids, received, local, traffic.token_offsets)
        offsets, row_token, slot_row, _ = places
        up = w_up, w_gate, b_up
        a, h = ops.up_projection(rows, offsets, row_token, *up, *ctx.flags, keep)
        y = ops.down_projection(a, offsets, w_down, b_down, ctx.flags.transposed)
        # rows is kept, as the layer keeps x: sending it again would cost as much as the first time.
        kept = rows, h, *places, token_offsets, *layer[:5]
        if routed is not None:
            scores, ids, slopes, ctx.weighing = routed
            kept = *kept, x, router_weight, router_bias, scores, ids, slopes
        ctx.save_for_backward(*kept)
        y = traffic.return_rows(y, slot_row, "forward")
        return ops.combine(y, traffic.slot_place, scores, token_offsets, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        """dx, the router's gradient or dscores, the residual's, and those of the weights."""
        # Unpacked with autograd on: a checkpoint may run its whole forward again for it.
        return StepwiseExperts._gradients(ctx, ctx.saved_tensors, dout)

    @staticmethod
    @below_autograd
    def _gradients(ctx: Any, saved: tuple[Tensor | None, ...], dout: Tensor) -> tuple:
        want_x, *want_router, want_scores, want_residual = ctx.needs_input_grad[5:10]
        want_layer = ctx.needs_input_grad[10:15]
        traffic = ctx.traffic
        rows, h, offsets, row_token, slot_row, row_score, token_offsets, *rest = saved
        w_up, w_gate, w_down, b_up, b_down, *routed = rest
        traffic.begin_backward(dout)
        drows = traffic.send_rows(rows_of(dout), "backward")
        again = rows, offsets, row_token, w_up, w_gate, b_up, ctx.flags
        h = pre_activations(h, ctx.kept, *again)
        saved = rows, h, offsets, row_token, slot_row, row_score, traffic.token_offsets
        saved = *saved, w_up, w_gate, w_down, b_down
        want_dscores = want_scores or (bool(routed) and (want_x or any(want_router)))
        wanted = want_x, want_dscores, *want_layer
        with traffic.ranks.in_step("backward"):
            dx, dscores, *dlayer = expert_gradients(saved, drows, ctx.flags, wanted, by_row=True)
        if want_x or want_dscores:
            dx, dscores = traffic.return_gradients(dx, dscores, slot_row)
        drouter = None, None
        if routed and want_dscores:
            operands, routed = routed[:3], routed[3:]
            arguments = dx, traffic.slot_place, dscores, routed, operands
            dx, *drouter = router_gradients(*arguments, ctx.weighing, want_router)
            dscores = None
        elif want_x:
            dx = ops.combine(dx, traffic.slot_place, None, token_offsets)
        dresidual = dout if want_residual else None
        nothing = (None,) * len(ctx.flags)
        return *(None,) * 5, dx, *drouter, dscores, dresidual, *dlayer, *nothing
