"""A grouped linear layer whose weight gradients go to a `guild.WeightGradients`.

As in Transformer Engine, gradients of biases never go to `main_grad`: autograd has them, or they
come to `.grad` with the delayed gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from guild import WeightGradients, grouped_mm
from guild._torch.autograd import expect_one_backward, rows_of
from guild._torch.expert_lists import joined, table_of
from guild._torch.gradient_targets import decided, expect_targets, targets, wanting
from guild._torch.gradients import bias_gradient, starts
from guild._torch.operators import autocast, ops
from guild._torch.versions import Versions
from guild.sink_experts import Unchanged


def grouped_linear(
    x: Tensor,
    ends: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    sink: WeightGradients,
) -> Tensor:
    """x[rows of e] weights[e]^T + biases[e]; `biases` may be empty.

    x: (rows, in); ends: int32 (E,); weights: (out, in) each; biases: (out,) each.
    """
    _expect_targets(sink, weights, biases)
    placed = joined("weight", weights, attached=False)
    bias = joined("bias", biases, 1, attached=False).tensor if biases else None
    x, weight, bias = autocast(x, placed.tensor, bias)
    weight = placed._replace(tensor=weight)
    if not (torch.is_grad_enabled() and (x.requires_grad or wanting([weights, biases]))):
        return grouped_mm(x, weight.mT, ends, bias)
    return _Linear.apply(sink, len(weights), x, ends, weight, bias, *weights, *biases)


def _expect_targets(sink, weights, biases) -> None:
    expect_targets("weight", weights, sink.main_grad)
    if sink.delayed:
        expect_targets("bias", biases, False)
    sink.expect_no_averaging((weights, biases if sink.delayed else None))


def _expect_computable(sink, weights, biases, borrowed) -> None:
    _expect_targets(sink, weights, biases)
    borrowed.expect_unchanged()


class _Linear(torch.autograd.Function):
    """Backward computes dX; the weights' gradients are a step of the sink's.

    Those of the biases are, too, if delayed.
    """

    @staticmethod
    def forward(ctx, sink, experts, x, ends, weight, bias, *parameters):
        ctx.sink, ctx.experts, ctx.parameters = sink, experts, decided(parameters)
        ctx.versions = Versions("weights", parameters)
        ctx.weight = weight
        ctx.save_for_backward(x, ends)
        return grouped_mm(x, weight.mT, ends, bias)

    @staticmethod
    def backward(ctx, dout):
        way_out = "set neither fuse_wgrad_accumulation nor delay_wgrad_compute"
        expect_one_backward(dout, "GroupedLinear", way_out)
        ctx.versions.expect_unchanged()
        if ctx.weight.held is not None:
            ctx.weight.held.expect_unchanged()
        x, ends = ctx.saved_tensors
        weight, lists = ctx.weight.tensor, table_of(ctx.weight)
        parameters = ctx.parameters
        dout = rows_of(dout)
        dx = None
        if ctx.needs_input_grad[2]:
            dx = ops.grouped_mm(dout, weight, ends, None, False, None, lists)
        weights, biases = parameters[: ctx.experts], parameters[ctx.experts :]
        check = partial(_expect_computable, ctx.sink, weights, biases, Unchanged(x, dout))
        steps = [partial(_compute_weights, ctx.sink, x, ends, dout, weights)]
        now: Sequence[Tensor | None] = [None] * len(biases)
        if ctx.sink.delayed:
            steps.append(partial(_compute_biases, ends, dout, biases))
        elif wanting([biases]):
            now = bias_gradient(dout, starts(ends)).unbind(0)
        ctx.sink.take(parameters, check, steps)
        late = ctx.sink.gradients_without_meaning(weights)
        return None, None, dx, None, None, None, *late, *now


@torch.no_grad()
def _compute_weights(sink, x, ends, dout, weights) -> list[partial]:
    """dW[e] = dout[rows of e]^T x[rows of e], into the sink's targets."""
    later: list[partial] = []
    named = "weight", weights
    with targets(sink.main_grad, dout.dtype, named, later=later) as ((target,), add):
        if target is not None:
            lists = None, None, table_of(target)
            ops.grouped_mm_out(dout.mT, x, ends, None, target.tensor, add, *lists)
    return later


@torch.no_grad()
def _compute_biases(ends, dout, biases) -> list[partial]:
    later: list[partial] = []
    named = "bias", biases or None
    with targets(False, dout.dtype, named, later=later) as ((target,), add):
        if target is not None:
            ops.bias_gradient_out(dout, starts(ends), None, None, target.tensor, add)
    return later
