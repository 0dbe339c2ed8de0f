"""Gradients of the router's ops: from the scores, and from the sums used for balancing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guild._torch.autograd import library, register, rows_of
from guild._torch.operators import SOFTMAX, ops, route_fake, score_dtype

ROUTE_ARGUMENTS = 10  # of route after the logits
ROUTER_ARGUMENTS = 1 + ROUTE_ARGUMENTS  # of route_tokens after x and weight, from bias on

# ---- route --------------------------------------------------------------------------------------


class Weighing(NamedTuple):
    """How a router's weights follow from its logits: guild::Router except for the choice."""

    score: int
    renormalize: bool
    scale: float
    sum_floor: float

    @staticmethod
    def of(router: Sequence[Any]) -> Weighing:
        """From the arguments of route after top_k."""
        score, renormalize, scale, _, _, sum_floor, _ = router
        return Weighing(score, renormalize, scale, sum_floor)

    @property
    def needs_logits(self) -> bool:
        """guild::needs_logits: whether every logit may get a gradient that depends on all."""
        return self.sum_floor > 0 if self.renormalize else self.score == SOFTMAX

    def kept(self, slopes: Tensor) -> Tensor | None:
        """The slopes that the gradient needs."""
        return None if self.score == SOFTMAX else slopes


def _weights_gradient(dscores, routed, logits, experts, weighing, token_offsets=None, like=None):
    """dlogits (T, E); routed: scores, ids, slopes."""
    score, renormalize, scale, sum_floor = weighing
    how = experts, score, renormalize, scale
    return ops.route_backward(
        rows_of(dscores), *routed, logits, *how, token_offsets, like, sum_floor
    )


def _keep_routing(ctx, weighing, output, *more) -> None:
    """Save scores, ids and slopes."""
    scores, ids, slopes = output
    ctx.weighing = weighing
    ctx.save_for_backward(scores, ids, weighing.kept(slopes), *more)
    ctx.mark_non_differentiable(ids, slopes)
    ctx.set_materialize_grads(False)


def _route_setup(ctx, inputs, output):
    logits, _, _, _, *router = inputs
    weighing = Weighing.of(router)
    ctx.experts = logits.shape[1]
    _keep_routing(ctx, weighing, output, logits if weighing.needs_logits else None)


def _route_gradient(ctx, dscores, *_):
    nothing = (None,) * ROUTE_ARGUMENTS
    if dscores is None:
        return None, *nothing
    *routed, logits = ctx.saved_tensors
    return _weights_gradient(dscores, routed, logits, ctx.experts, ctx.weighing), *nothing


def _round_setup(ctx, inputs, output):
    logits, _, _, score, renormalize, scale, _, _, sum_floor = inputs
    scores, ids, slopes, token_offsets = output
    ctx.experts = logits.shape[1]
    ctx.weighing = weighing = Weighing(score, renormalize, scale, sum_floor)
    kept_logits = logits if weighing.needs_logits else None
    ctx.save_for_backward(scores, ids, weighing.kept(slopes), kept_logits, token_offsets)
    ctx.mark_non_differentiable(ids, slopes, token_offsets)
    ctx.set_materialize_grads(False)


def _round_gradient(ctx, dscores, *_):
    nothing = (None,) * 8
    if dscores is None:
        return None, *nothing
    *routed, logits, token_offsets = ctx.saved_tensors
    dlogits = _weights_gradient(dscores, routed, logits, ctx.experts, ctx.weighing, token_offsets)
    return dlogits, *nothing


# ---- balancing ----------------------------------------------------------------------------------


def _balance_setup(ctx, inputs, output):
    logits, _, token_mask, ctx.score, _ = inputs
    ctx.save_for_backward(logits, token_mask)
    ctx.mark_non_differentiable(output[2])


def _balance_gradient(ctx, dshares, dsquares, _):
    dlogits = ops.balance_sums_backward(
        rows_of(dshares), rows_of(dsquares), *ctx.saved_tensors, ctx.score
    )
    return dlogits, *(None,) * 4


# ---- the router's product -----------------------------------------------------------------------


def _router_logits_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _logits_gradient(ctx, x, weight, bias, dlogits):
    want_x, want_weight, want_bias = ctx.needs_input_grad[1:4]
    dbias = _bias_gradient(dlogits, bias) if want_bias else None
    dlogits = dlogits.to(x.dtype)
    dx = dlogits @ weight if want_x else None
    return dx, dlogits.t() @ x if want_weight else None, dbias


def _bias_gradient(dlogits, bias):
    return dlogits.sum(0, dtype=score_dtype(dlogits.dtype)).to(bias.dtype)


def _router_logits_gradient(ctx, dlogits):
    return _logits_gradient(ctx, *ctx.saved_tensors, dlogits)


def _route_tokens_setup(ctx, inputs, output):
    x, weight, bias, _, _, _, *router = inputs
    _keep_routing(ctx, Weighing.of(router), output, x, weight, bias)


def _route_tokens_logits_gradient(dscores, routed, x, weight, bias, weighing):
    """dlogits in x's dtype; routed: scores, ids, slopes.

    The logits are not kept: a gradient that needs them computes them again, bit for bit.
    """
    logits = None
    if weighing.needs_logits:
        with torch.autocast(x.device.type, enabled=False):
            logits = ops.router_logits(x, weight, bias)
    return _weights_gradient(dscores, routed, logits, weight.shape[0], weighing, like=x)


def router_gradients(dx_rows, slot_row, dscores, routed, operands, weighing, want):
    """dx of the whole layer from the experts' by row, dweight and dbias; None where not wanted.

    routed: scores, ids, slopes; operands: x, weight, bias; want: the last two's gradients.

    If all logits have gradients, the router's part is a product; if only those of the chosen
    experts do, it is added in the sum over a token's rows.
    """
    x, weight, bias = operands
    want_weight, want_bias = want
    dlogits = _route_tokens_logits_gradient(dscores, routed, x, weight, bias, weighing)
    dx = None
    if dx_rows is not None and weighing.needs_logits:
        dx = ops.combine(dx_rows, slot_row, None).addmm_(dlogits, weight)
    elif dx_rows is not None:
        part = dlogits, routed[1], rows_of(weight)
        dx = ops.combine(dx_rows, slot_row, None, None, None, *part)
    dweight = dlogits.t() @ x if want_weight else None
    return dx, dweight, _bias_gradient(dlogits, bias) if want_bias else None


def _route_tokens_gradient(ctx, dscores, *_):
    nothing = (None,) * ROUTE_ARGUMENTS
    if dscores is None:
        return None, None, None, *nothing
    *routed, x, weight, bias = ctx.saved_tensors
    dlogits = _route_tokens_logits_gradient(dscores, routed, x, weight, bias, ctx.weighing)
    return *_logits_gradient(ctx, x, weight, bias, dlogits), *nothing


@torch.library.register_fake("guild::router_logits", lib=library)
def _router_logits_fake(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=score_dtype(x.dtype))


def route_tokens_fake(x, weight, bias, *rest):
    """Empty outputs of route_tokens."""
    return route_fake(_router_logits_fake(x, weight, bias), *rest)


torch.library.register_fake("guild::route_tokens", lib=library)(route_tokens_fake)


for _name, _backward, _setup in (
    ("route", _route_gradient, _route_setup),
    ("round_tokens", _round_gradient, _round_setup),
    ("balance_sums", _balance_gradient, _balance_setup),
    ("router_logits", _router_logits_gradient, _router_logits_setup),
    ("route_tokens", _route_tokens_gradient, _route_tokens_setup),
):
    register(_name, _backward, _setup)
