"""guild::moe_layer: router product, routing and experts as one op; and ops without gradients:
guild::moe_layer_out into a tensor of the caller's, guild::infer_layer with few arguments.

In one op x gets one gradient: the router's part, dlogits W, is added where the experts' rows are
summed, at no cost in time; autograd would add the two in a separate pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.autograd import (
    library,
    register,
    register_without_gradient,
    rows_of,
    tied,
)
from guild._torch.gradients import expert_gradients, pre_activations
from guild._torch.operators import LayerFlags, moe_forward_fake, ops
from guild._torch.router_gradients import (
    ROUTE_ARGUMENTS,
    ROUTER_ARGUMENTS,
    Weighing,
    route_tokens_fake,
    router_gradients,
)


def _forward(x: Tensor, weight: Tensor, *rest):
    """route_tokens, then moe_forward: the outputs of both, those of moe_forward first."""
    router, (residual, *layer) = rest[:ROUTER_ARGUMENTS], rest[ROUTER_ARGUMENTS:]
    scores, ids, slopes = ops.route_tokens(x, weight, *router)
    return *ops.moe_forward(x, ids, scores, None, residual, *layer), scores, ids, slopes


def _fake(x: Tensor, weight: Tensor, *rest):
    router, (residual, *layer) = rest[:ROUTER_ARGUMENTS], rest[ROUTER_ARGUMENTS:]
    scores, ids, slopes = route_tokens_fake(x, weight, *router)
    return *moe_forward_fake(x, ids, scores, None, residual, *layer), scores, ids, slopes


def _setup(ctx, inputs, output):
    x, weight, bias, _, _, _, *router = inputs[: 2 + ROUTER_ARGUMENTS]
    _, w_up, w_gate, w_down, b_up, b_down, *rest = inputs[2 + ROUTER_ARGUMENTS :]
    _, h, *places, scores, ids, slopes = output
    ctx.weighing, (ctx.flags, ctx.kept) = Weighing.of(router), LayerFlags.and_last(rest)
    layer = w_up, w_gate, w_down, b_up, b_down
    routed = scores, ids, ctx.weighing.kept(slopes)
    ctx.save_for_backward(x, weight, bias, *routed, h, *places, *layer)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx, dout, *_):
    nothing = (None,) * (len(ctx.flags) + 1)
    if dout is None:
        return (*(None,) * (8 + ROUTER_ARGUMENTS), *nothing)
    x, weight, bias, *saved = ctx.saved_tensors
    scores, ids, slopes, h, *places, w_up, w_gate, w_down, b_up, b_down = saved
    offsets, row_token, *_ = places
    want_x, *want_router = (needs := ctx.needs_input_grad[1:])[:3]
    want_residual, *want_layer = needs[2 + ROUTER_ARGUMENTS : 8 + ROUTER_ARGUMENTS]
    wanted = want_x, want_x or any(want_router), *want_layer
    dx_rows = dx = dscores = dweight = dbias = None
    dlayer = [None] * len(want_layer)
    if any(wanted):
        again = x, offsets, row_token, w_up, w_gate, b_up, ctx.flags
        h = pre_activations(h, ctx.kept, *again)
        saved = x, h, *places, None, w_up, w_gate, w_down, b_down
        by_all = tied(rows_of(dout), weight, bias, b_up)
        gradients = expert_gradients(saved, by_all, ctx.flags, wanted, by_row=True)
        dx_rows, dscores, *dlayer = gradients
    if dscores is not None:
        routed = scores, ids, slopes
        operands = x, weight, bias
        dx, dweight, dbias = router_gradients(
            dx_rows, places[2], dscores, routed, operands, ctx.weighing, want_router
        )
    dresidual = dout if want_residual else None
    return dx, dweight, dbias, *(None,) * ROUTE_ARGUMENTS, dresidual, *dlayer, *nothing


library.define(
    "moe_layer(Tensor x, Tensor weight, Tensor? bias, Tensor? selection_bias, Tensor? token_mask, "
    "int top_k, int score, bool renormalize, float scale, int groups, int top_groups, float "
    "sum_floor, int group_score, Tensor? residual, Tensor w_up, Tensor? w_gate, Tensor w_down, "
    "Tensor? b_up, Tensor? b_down, int kind, bool gated, float alpha, float limit, float "
    "up_offset, bool clamp_after, bool interleaved, bool transposed, bool keep) -> (Tensor o, "
    "Tensor h, Tensor offsets, Tensor row_token, Tensor slot_row, Tensor row_score, Tensor scores, "
    "Tensor ids, Tensor slopes)"
)
for _key in ("CPU", "CUDA"):
    library.impl("moe_layer", _forward, _key)
torch.library.register_fake("guild::moe_layer", lib=library)(_fake)
register("moe_layer", _gradient, _setup)


moe_layer_out = ops.moe_layer_out.default
moe_forward_out = ops.moe_forward_out.default
experts_forward_out = ops.experts_forward_out.default
infer_layer = ops.infer_layer.default
infer_experts = ops.infer_experts.default
infer_shared = ops.infer_shared.default


@torch.library.register_fake("guild::moe_forward_out", lib=library)
def _forward_out_fake(x, ids, scores, token_offsets, residual, w_up, w_gate, w_down, *rest):
    return x.new_empty(w_down.shape[0] + 1, dtype=torch.int32)


@torch.library.register_fake("guild::moe_layer_out", lib=library)
def _layer_out_fake(x, router, *rest):
    return x.new_empty(router.shape[0] + 1, dtype=torch.int32)


@torch.library.register_fake("guild::experts_forward_out", lib=library)
def _experts_forward_out_fake(*args):
    return None


def _expect_one_device(x, *operands):
    """Raise for a tensor that is elsewhere: with one on meta among them, torch calls the fake."""
    for tensor in operands:
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"expected tensors on {x.device} like x, got one on {tensor.device}")


@torch.library.register_fake("guild::infer_layer", lib=library)
def _infer_layer_fake(x, router, *rest):
    _expect_one_device(x, router, *rest[:-1])  # the last are the settings, on the CPU
    return x.new_empty(x.shape), x.new_empty(router.shape[0] + 1, dtype=torch.int32)


@torch.library.register_fake("guild::infer_experts", lib=library)
def _infer_experts_fake(x, ids, scores, residual, w_up, w_down, *rest):
    _expect_one_device(x, ids, scores, residual, w_up, w_down, *rest[:-1])
    return x.new_empty(x.shape), x.new_empty(w_down.shape[0] + 1, dtype=torch.int32)


@torch.library.register_fake("guild::infer_shared", lib=library)
def _infer_shared_fake(x, *rest):
    _expect_one_device(x, *rest[:-1])
    return x.new_empty(x.shape)


register_without_gradient("moe_forward_out", "moe_layer_out", "experts_forward_out")
register_without_gradient("infer_layer", "infer_experts", "infer_shared")
