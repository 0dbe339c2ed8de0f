"""guild::float8_moe: router and experts in FP8 as one op, with one gradient for x.

As in guild::moe_layer, in 16 bits, the router's part of dX is added where the experts' rows are
summed. X is kept for the router's gradient, so X's codes are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.autograd import library, register, rows_of, tied
from guild._torch.float8_layer import MASTERS_AND_BIASES, SETTINGS, experts_fake, settings_of
from guild._torch.float8_steps import QuantizedExperts, Recipe, Wanted
from guild._torch.operators import LayerFlags, ops
from guild._torch.router_gradients import (
    ROUTE_ARGUMENTS,
    ROUTER_ARGUMENTS,
    Weighing,
    route_tokens_fake,
    router_gradients,
)
from guild._torch.row_routing import RowRouting

_MASTERS = 5  # weights and biases
_REST = len(QuantizedExperts._fields) + len(LayerFlags._fields) + len(Recipe._fields) + 1


def _forward(x: Tensor, weight: Tensor, *rest):
    router, (residual, *layer) = rest[:ROUTER_ARGUMENTS], rest[ROUTER_ARGUMENTS:]
    scores, ids, slopes = ops.route_tokens(x, weight, *router)
    out, h, h_scales, _, _, *routing = ops.float8_experts(x, ids, scores, None, residual, *layer)
    return out, h, h_scales, *routing, scores, ids, slopes


def _fake(x: Tensor, weight: Tensor, *rest):
    router, (residual, *layer) = rest[:ROUTER_ARGUMENTS], rest[ROUTER_ARGUMENTS:]
    scores, ids, slopes = route_tokens_fake(x, weight, *router)
    out, h, h_scales, _, _, *routing = experts_fake(x, ids, scores, None, residual, *layer)
    return out, h, h_scales, *routing, scores, ids, slopes


def _setup(ctx, inputs, output):
    x, weight, bias, _, _, _, *router = inputs[: 2 + ROUTER_ARGUMENTS]
    _, w_up, w_gate, w_down, b_up, b_down, *rest = inputs[2 + ROUTER_ARGUMENTS :]
    _, h, h_scales, *routing, scores, ids, slopes = output
    experts, ctx.flags, ctx.recipe, ctx.keep = settings_of(tuple(rest))
    ctx.weighing = Weighing.of(router)
    routed = weight, bias, scores, ids, ctx.weighing.kept(slopes)
    layer = b_up, b_down, w_up, w_gate, w_down
    codes = experts.for_backward(ctx.keep)
    ctx.save_for_backward(x, h, h_scales, *routing, *codes, *layer, *routed)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx, dout, *_):
    nothing = (None,) * _REST
    if dout is None:
        return (*(None,) * (2 + ROUTER_ARGUMENTS + 1 + _MASTERS), *nothing)
    x, h, h_scales, *saved, weight, bias, scores, ids, slopes = ctx.saved_tensors
    b_up = saved[-5]
    want_x, *want_router = (needs := ctx.needs_input_grad[1:])[:3]
    want_residual, up, gate, down, up_bias, down_bias = needs[
        2 + ROUTER_ARGUMENTS : 8 + ROUTER_ARGUMENTS
    ]
    want_scores = want_x or any(want_router)
    wanted = Wanted(want_x, want_scores, up or gate, down, up_bias, down_bias)
    dx = dweight = dbias = None
    dlayer = (None,) * _MASTERS
    if any(wanted):
        by_all = tied(rows_of(dout), weight, bias, b_up)
        codes = x.new_empty(0), x.new_empty(0)
        settings = *ctx.flags, *ctx.recipe, ctx.keep, False, True, list(wanted)
        made = ops.float8_backward(by_all, x, None, h, h_scales, *codes, *saved, *settings)
        dx_rows, dscores, *dlayer = made
        layer_needs = up, gate, down, up_bias, down_bias
        dlayer = (g if want else None for g, want in zip(dlayer, layer_needs, strict=True))
        if wanted.scores:
            slot_row = RowRouting(*saved[:4]).slot_row
            routed = scores, ids, slopes
            rows = dx_rows if want_x else None
            operands = x, weight, bias
            dx, dweight, dbias = router_gradients(
                rows, slot_row, dscores, routed, operands, ctx.weighing, want_router
            )
    dresidual = dout if want_residual else None
    return dx, dweight, dbias, *(None,) * ROUTE_ARGUMENTS, dresidual, *dlayer, *nothing


library.define(
    "float8_moe(Tensor x, Tensor weight, Tensor? bias, Tensor? selection_bias, Tensor? token_mask, "
    "int top_k, int score, bool renormalize, float scale, int groups, int top_groups, float "
    f"sum_floor, int group_score, Tensor? residual, {MASTERS_AND_BIASES}, {SETTINGS}) -> (Tensor "
    "o, Tensor h, Tensor h_scales, Tensor offsets, Tensor row_token, Tensor slot_row, Tensor "
    "row_score, Tensor scores, Tensor ids, Tensor slopes)"
)
for _key in ("CPU", "CUDA"):
    library.impl("float8_moe", _forward, _key)
torch.library.register_fake("guild::float8_moe", lib=library)(_fake)
register("float8_moe", _gradient, _setup)
