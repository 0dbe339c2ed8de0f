"""Experts with low-rank terms: what `routed_experts` and `experts_mlp` call where LoRA is given."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from guild._torch import low_rank as steps
from guild._torch.alignment import aligned
from guild._torch.autograd import (
    expect_even_lists_unchanged,
    expect_one_backward,
    rows_of,
    watch_even_lists,
    with_lists,
    without_lists,
)
from guild._torch.gradient_targets import decided
from guild._torch.low_rank import LowRank, Weights
from guild._torch.operators import LayerFlags, ops
from guild._torch.row_routing import RowRouting
from guild._torch.versions import Versions
from guild.sink_experts import Operands, Unchanged, expect_computable, gradient_steps
from guild.weight_gradients import Sink

_ARGUMENTS = 14 + len(LayerFlags._fields)  # weights, low-rank operands, routing, flags
_lora_forward = ops.lora_forward.default


def sorted_rows(
    ids: Tensor, scores: Tensor, experts: int, token_offsets: Tensor | None
) -> RowRouting:
    """Rows of routed tokens, sorted by expert. No gradient reaches the scores through it."""
    offsets, row_token, slot_row, row_score = ops.sort_by_expert(
        ids, scores.detach(), experts, token_offsets
    )
    return RowRouting(offsets, row_token, slot_row, row_score, token_offsets)


def experts_with_lora(
    x: Tensor,
    scores: Tensor | None,
    residual: Tensor | None,
    layer: list[Any],
    low: LowRank,
    routing: RowRouting,
    keep: bool,
    recompute: bool,
    sink: Sink | None,
    experts_at: Tensor | None,
) -> Tensor:
    """The layer's output, (T, H) or, of sorted rows, (R, H).

    layer: weights, biases and flags in the ops' order; keep: whether a gradient is wanted;
    experts_at: for weights that are lists, as the ops take it.
    """
    weights, flags = layer[:5], layer[5:]
    arguments = *weights, *low, *routing, *flags
    if sink is not None:
        return _ExpertsWithSink.apply(
            sink.gradients,
            sink.parameters,
            recompute,
            experts_at,
            x,
            scores,
            residual,
            *arguments,
            *sink.reached,
        )
    return _lora_forward(x, scores, residual, *arguments, keep and not recompute, experts_at)[0]


class _ExpertsWithSink(torch.autograd.Function):
    """`experts_with_lora` with the gradients of weights and biases left to a WeightGradients."""

    @staticmethod
    def forward(ctx, sink, parameters, recompute, experts_at, x, scores, residual, *arguments):
        """The arguments are followed by the parameters that autograd must reach."""
        arguments, reached = arguments[:_ARGUMENTS], arguments[_ARGUMENTS:]
        out, h, t = ops.lora_forward(x, scores, residual, *arguments, not recompute, experts_at)
        ctx.sink, ctx.parameters, ctx.flags = sink, parameters, LayerFlags(*arguments[14:])
        ctx.reached, ctx.versions = reached, Versions("weights", reached)
        weights = without_lists(ctx, experts_at, *arguments[:3])
        watch_even_lists(ctx, *arguments)
        ctx.save_for_backward(x, h, t, *weights, *arguments[3:14])
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dout):
        """dX, dscores and the low-rank gradients; the others go to the sink."""
        expect_one_backward(dout)
        nothing = (None,) * (5 + len(ctx.flags))  # of routing and flags
        if dout is None:
            return (*(None,) * 16, *nothing, *(None,) * len(ctx.reached))
        ctx.versions.expect_unchanged()
        expect_even_lists_unchanged(ctx)
        x, h, t, *rest = ctx.saved_tensors
        weights = Weights(*with_lists(ctx, *rest[:3]), *rest[3:5], ctx.experts_at)
        routing = RowRouting(*rest[9:])
        low = LowRank(*rest[5:9]).aligned()
        want_x, want_scores, want_residual = ctx.needs_input_grad[4:7]
        want_low = ctx.needs_input_grad[12:16]
        h, t = steps.recomputed(x, h, t, routing, weights, low, ctx.flags)
        dresidual = dout if want_residual else None
        dout = aligned(rows_of(dout))
        dh, a, parts, u_down = steps.down_gradient(dout, h, routing, weights, low, ctx.flags)
        routed = routing.slot_row is not None
        borrowed = Unchanged(x, dout) if routed else Unchanged(x, dout, routing.offsets)
        where = routing.offsets, routing.row_token, routing.row_score
        operands = Operands(x, dout, dh, a, *where)
        given = decided(ctx.parameters)
        dscores = None
        if want_scores:
            dscores = steps.score_gradient(parts, dout, a.shape[1], routing, weights)
        dx, u_up = steps.x_gradient(dh, routing, weights, low, ctx.flags, want_x, want_low[0])
        dlow = steps.low_rank_gradients(
            x, dout, dh, a, t, u_up, u_down, routing, low, tuple(want_low)
        )
        # Last, so that an error before it has added nothing to a main_grad.
        check = partial(expect_computable, ctx.sink, given, borrowed)
        ctx.sink.take(given, check, gradient_steps(ctx.sink, given, ctx.flags, operands))
        late = ctx.sink.gradients_without_meaning(ctx.reached)
        own = (None,) * 4
        return *own, dx, dscores, dresidual, *(None,) * 5, *dlow, *nothing, *late
