"""A layer in FP8 whose weights' gradients go where a `guild.WeightGradients` says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from guild._torch.autograd import expect_one_backward, rows_of
from guild._torch.expert_lists import Listed, Placed, table_of
from guild._torch.float8_gradients import Chunked, chunked, each_product
from guild._torch.float8_layer import in_halves, kept_or_again
from guild._torch.float8_steps import (
    Codes,
    Kept,
    QuantizedExperts,
    Wanted,
    data_gradients,
)
from guild._torch.gradient_targets import decided, wanting
from guild._torch.operators import LayerFlags, ops
from guild._torch.row_routing import RowRouting
from guild._torch.versions import Versions
from guild.activations import to_interleaved
from guild.sink_experts import (
    Operands,
    Unchanged,
    bias_steps,
    expect_computable,
    gradient_steps,
)
from guild.weight_gradients import WeightGradients

_MASTERS = 5  # weights and biases
_ARGUMENTS = 10  # before those


class Float8Experts(torch.autograd.Function):
    """guild::float8_experts with gradients of weights and biases that bypass autograd."""

    @staticmethod
    def forward(
        ctx,
        sink,
        parameters,
        keep,
        flags,
        recipe,
        experts_at,
        x,
        scores,
        tokens,
        residual,
        *rest,
    ):
        """(out, offsets); tokens: ids, token_offsets, and the weights' codes.

        rest: weights and biases, and the parameters that autograd should reach.
        """
        (ids, token_offsets, experts), masters = tokens, rest[:_MASTERS]
        slots = ids, scores, token_offsets
        settings = *experts, *flags, *recipe, keep, experts_at
        out, *kept = ops.float8_experts(x, *slots, residual, *masters, *settings)
        ctx.sink, ctx.parameters, ctx.keep = sink, parameters, keep
        ctx.flags, ctx.recipe, ctx.reached = flags, recipe, rest[_MASTERS:]
        ctx.versions = Versions("weights", ctx.reached)
        saved = None if recipe.keeps_codes else x, token_offsets, *kept, *experts
        ctx.save_for_backward(*saved, *masters[3:])
        offsets = kept[4]
        ctx.mark_non_differentiable(offsets)
        ctx.set_materialize_grads(False)
        return out, offsets

    @staticmethod
    def backward(ctx, dout, _):
        """dX and dscores; the weights' gradients go to the sink."""
        expect_one_backward(dout)
        if dout is None:
            return (None,) * (_ARGUMENTS + _MASTERS + len(ctx.reached))
        ctx.versions.expect_unchanged()
        x, token_offsets, h, h_scales, codes, x_scales, *rest = ctx.saved_tensors
        routing, rest = RowRouting(*rest[:4], token_offsets), rest[4:]
        *experts, b_up, b_down = rest
        experts, recipe = QuantizedExperts(*experts), ctx.recipe
        flags, b_up = in_halves(ctx.flags, recipe, b_up)
        dresidual = dout if ctx.needs_input_grad[9] else None
        dout, source = rows_of(dout), Codes(codes, x_scales) if recipe.keeps_codes else x
        again = source, routing, experts, b_up, flags, recipe, dout.dtype
        kept = kept_or_again(Kept(h, h_scales if recipe.save_codes else None), ctx.keep, *again)
        given = decided(ctx.parameters)
        w_up, w_gate, w_down, *biases = (bool(wanting([p])) for p in given)
        want_x, want_scores = ctx.needs_input_grad[6:8]
        up, down = w_up or w_gate, w_down
        if not recipe.wgrad_codes:  # one op makes both, and needs the operands of both
            up = down = up or down
        wanted = Wanted(want_x, want_scores, up, down, *biases)
        made = data_gradients(dout, kept, routing, experts, b_down, flags, recipe, wanted)
        routed = routing.offsets, routing.row_token, routing.row_score
        if recipe.wgrad_codes:
            products = chunked(made, source, dout, routing, experts.up_scales.shape[1], recipe, up)
            sums = Operands(None, dout, made.dh if wanted.up_bias else None, None, *routed)
            about = products, sums, flags != ctx.flags
            steps = _steps_of_codes(ctx.sink, given, ctx.flags, *about)
            borrowed = Unchanged(None, dout if wanted.down_bias else None)
        else:
            operands = Operands(x, dout, made.dh, made.a_scaled, *routed)
            steps = gradient_steps(ctx.sink, given, flags, operands)
            borrowed = Unchanged(x, dout)
        check = partial(expect_computable, ctx.sink, given, borrowed)
        ctx.sink.take(given, check, steps)
        late = ctx.sink.gradients_without_meaning(ctx.reached)
        nothing = (None,) * 6
        return *nothing, made.dx, made.dscores, None, dresidual, *(None,) * _MASTERS, *late


def _steps_of_codes(
    sink: WeightGradients,
    parameters: tuple[Listed | None, ...],
    flags: LayerFlags,
    products: Chunked,
    sums: Operands,
    turned: bool,
) -> list[partial]:
    """dW and db of one backward pass, into the sink's targets.

    turned: dH's columns are not in b_up's order.
    """
    *weights, b_up, b_down = parameters
    given = flags, products, sums.dout.dtype
    steps = [partial(_compute_weight, sink, weights, place, *given) for place in range(3)]
    steps += bias_steps(sink, None if turned else b_up, b_down, sums)
    return [*steps, partial(_compute_turned_bias, sink, b_up, flags, sums)] if turned else steps


@torch.no_grad()
def _compute_weight(
    sink: WeightGradients,
    weights: Sequence[Listed | None],
    place: int,
    flags: LayerFlags,
    products: Chunked,
    dtype: torch.dtype,
    done: int = 0,
) -> list[partial]:
    """dW of one of the weights (up, gate, down); done: how many of its products are.

    The products of a weight's halves that are added in place are a step each. Any others can be
    repeated.
    """
    later, left = [], []
    places = sink._targets(dtype, place, weights[place], later=later, begun=done > 0)
    with places as ((target,), add):
        if target is not None:
            targets: list[Placed | None] = [None] * 3
            targets[place] = target
            tensors, pair = (t and t.tensor for t in targets), weights[1] is not None
            at = table_of(*targets)
            calls = each_product(products, *tensors, flags, pair, (add, add), at)
            calls = calls[done if add else 0 :]  # all, if what was begun has been dropped since
            if add and not later and len(calls) > 1:
                rest = weights, place, flags, products, dtype, done + 1
                calls, left = calls[:1], [partial(_compute_weight, sink, *rest)]
            for call in calls:
                call()
    return left + later


@torch.no_grad()
def _compute_turned_bias(
    sink: WeightGradients, b_up: Listed | None, flags: LayerFlags, sums: Operands
) -> list[partial]:
    later: list[partial] = []
    with sink._targets(sums.dout.dtype, 3, b_up, later=later) as ((target,), add):
        if target is not None:
            db = torch.empty_like(target.tensor, memory_format=torch.contiguous_format)
            ops.bias_gradient_out(sums.dh, sums.offsets, None, None, db, False)
            db = to_interleaved(db)
            target.tensor.add_(db) if add else target.tensor.copy_(db)
    return later
