"""Gradients of the router's ops: from the scores, and from the sums that balancing needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from guild._autograd import library, register, rows_of
from guild._operators import SIGMOID, SOFTMAX, ops, route_fake, score_dtype

# ---- route --------------------------------------------------------------------------------------


def _needs_logits(score: int, renormalize: bool) -> bool:
    """Whether every logit gets a gradient, which then depends on all of them."""
    return score == SOFTMAX and not renormalize


def _keep_routing(ctx, router, output, *more) -> None:
    """Save scores, ids and slopes; `router`: score, renormalize, scale, ..."""
    scores, ids, slopes = output
    ctx.router = router[:3]
    ctx.save_for_backward(scores, ids, slopes if router[0] == SIGMOID else None, *more)
    ctx.mark_non_differentiable(ids, slopes)
    ctx.set_materialize_grads(False)


def _route_setup(ctx, inputs, output):
    logits, _, _, _, *router = inputs
    ctx.experts = logits.shape[1]
    _keep_routing(ctx, router, output, logits if _needs_logits(*router[:2]) else None)


def _route_gradient(ctx, dscores, *_):
    if dscores is None:
        return (None,) * 9
    return ops.route_backward(rows_of(dscores), *ctx.saved_tensors, ctx.experts, *ctx.router), *(
        (None,) * 8
    )


def _round_setup(ctx, inputs, output):
    logits, _, _, *ctx.router, _, _ = inputs
    scores, ids, slopes, token_offsets = output
    ctx.experts = logits.shape[1]
    score, renormalize, _ = ctx.router
    ctx.save_for_backward(
        scores,
        ids,
        slopes if score == SIGMOID else None,
        logits if _needs_logits(score, renormalize) else None,
        token_offsets,
    )
    ctx.mark_non_differentiable(ids, slopes, token_offsets)
    ctx.set_materialize_grads(False)


def _round_gradient(ctx, dscores, *_):
    if dscores is None:
        return (None,) * 8
    *routed, token_offsets = ctx.saved_tensors
    dlogits = ops.route_backward(rows_of(dscores), *routed, ctx.experts, *ctx.router, token_offsets)
    return dlogits, *(None,) * 7


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


def router_logits_forward(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T: float32 of 16-bit operands, without a float32 copy of x on the GPU."""
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype in (torch.float32, torch.float64):
            return F.linear(x, weight)
        if x.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return x.float() @ weight.float().t()


def _router_logits_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _logits_gradient(ctx, x, weight, dlogits):
    want_x, want_weight = ctx.needs_input_grad[1:3]
    dlogits = dlogits.to(x.dtype)
    return dlogits @ weight if want_x else None, dlogits.t() @ x if want_weight else None


def _router_logits_gradient(ctx, dlogits):
    return _logits_gradient(ctx, *ctx.saved_tensors, dlogits)


def route_tokens_forward(x, weight, *rest):
    """route of the logits x weight^T."""
    return ops.route(router_logits_forward(x, weight), *rest)


def _route_tokens_setup(ctx, inputs, output):
    x, weight, _, _, _, *router = inputs
    _keep_routing(ctx, router, output, x, weight)


def _route_tokens_logits_gradient(dscores, routed, x, weight, router):
    """dlogits in x's dtype; routed: scores, ids, slopes; router: score, renormalize, scale.

    The logits are not kept: a gradient that needs them computes them again, bit for bit.
    """
    logits = router_logits_forward(x, weight) if _needs_logits(*router[:2]) else None
    experts = weight.shape[0]
    return ops.route_backward(rows_of(dscores), *routed, logits, experts, *router, None, x)


def router_gradients(dx_rows, slot_row, dscores, routed, x, weight, router, want_weight):
    """dx of the whole layer from the experts' by row, and dweight; None where not wanted.

    Where all logits have gradients, the router's part is a product; where only the chosen experts'
    have, it comes with the sum over a token's rows.
    """
    dlogits = _route_tokens_logits_gradient(dscores, routed, x, weight, router)
    dx = None
    if dx_rows is not None and _needs_logits(*router[:2]):
        dx = ops.combine(dx_rows, slot_row, None).addmm_(dlogits, weight)
    elif dx_rows is not None:
        part = dlogits, routed[1], rows_of(weight)
        dx = ops.combine(dx_rows, slot_row, None, None, None, *part)
    return dx, dlogits.t() @ x if want_weight else None


def _route_tokens_gradient(ctx, dscores, *_):
    nothing = (None,) * 8
    if dscores is None:
        return None, None, *nothing
    *routed, x, weight = ctx.saved_tensors
    dlogits = _route_tokens_logits_gradient(dscores, routed, x, weight, ctx.router)
    return *_logits_gradient(ctx, x, weight, dlogits), *nothing


library.define("router_logits(Tensor x, Tensor weight) -> Tensor")
library.define(
    "route_tokens(Tensor x, Tensor weight, Tensor? selection_bias, Tensor? token_mask, int top_k, "
    "int score, bool renormalize, float scale, int groups, int top_groups) -> (Tensor scores, "
    "Tensor ids, Tensor slopes)"
)
for _key in ("CPU", "CUDA"):
    library.impl("router_logits", router_logits_forward, _key)
    library.impl("route_tokens", route_tokens_forward, _key)


@torch.library.register_fake("guild::router_logits", lib=library)
def _router_logits_fake(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=score_dtype(x.dtype))


def route_tokens_fake(x, weight, *rest):
    """Empty outputs of route_tokens."""
    return route_fake(_router_logits_fake(x, weight), *rest)


torch.library.register_fake("guild::route_tokens", lib=library)(route_tokens_fake)


for _name, _backward, _setup in (
    ("route", _route_gradient, _route_setup),
    ("round_tokens", _round_gradient, _round_setup),
    ("balance_sums", _balance_gradient, _balance_setup),
    ("router_logits", _router_logits_gradient, _router_logits_setup),
    ("route_tokens", _route_tokens_gradient, _route_tokens_setup),
):
    register(_name, _backward, _setup)
