"""Gradients of the ops: what is saved, and which backward op gives the gradient.

Backward keeps only the layer's input, the pre-activations, the routing, and the weights by
reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from guild._torch import (
    float8_operators,  # noqa: F401 - registers FP8's ops
    router_gradients,  # noqa: F401 - registers the router's gradients
)
from guild._torch.autograd import (
    library,
    register,
    register_without_gradient,
    rows_of,
    tied,
    with_lists,
    without_lists,
)
from guild._torch.operators import LayerFlags, ops
from guild.activations import KINDS, NO_LIMIT, ORDERS, Activation

_FLAGS = (None,) * (len(LayerFlags._fields) + 2)  # gradients of flags, `keep` and experts_at


def wanted_bits(
    dx: bool,
    dscores: bool,
    weights: Sequence[bool] = (),
    by_row: bool = False,
) -> int:
    """The `wanted` argument of the backward ops.

    weights: whether for w_up, w_down, b_up, b_down; by_row: dx is (R, H), one row each.
    """
    up, down, up_bias, down_bias = weights or (False,) * 4
    results = dx and not by_row, dscores, up, down, up_bias, down_bias, dx and by_row
    return sum(1 << i for i, result in enumerate(results) if result)


# ---- layers -------------------------------------------------------------------------------------


def pre_activations(
    h: Tensor,
    kept: bool,
    x: Tensor,
    offsets: Tensor,
    row_token: Tensor | None,
    w_up: Tensor,
    w_gate: Tensor | None,
    b_up: Tensor | None,
    flags: LayerFlags,
    experts_at: Tensor | None = None,
) -> Tensor:
    """H (R, W): as kept, or computed again from x."""
    if kept:
        return h
    layer = w_up, w_gate, b_up, *flags
    return ops.up_projection(x, offsets, row_token, *layer, True, experts_at=experts_at)[1]


def _moe_setup(ctx, inputs, output):
    x, _, scores, token_offsets, _, w_up, w_gate, w_down, b_up, b_down, *rest = inputs
    _, h, offsets, row_token, slot_row, row_score = output
    ctx.flags, ctx.kept = LayerFlags.and_last(rest)
    weights = without_lists(ctx, LayerFlags.experts_at(rest), w_up, w_gate, w_down)
    ctx.save_for_backward(
        scores,
        b_up,
        x,
        h,
        offsets,
        row_token,
        slot_row,
        row_score,
        token_offsets,
        *weights,
        b_down,
    )
    ctx.mark_non_differentiable(h, offsets, row_token, slot_row, row_score)
    ctx.set_materialize_grads(False)


def _moe_gradient(ctx, dout, *_):
    if dout is None:
        return (*(None,) * 10, *_FLAGS)
    want_x, _, want_scores, _, residual, *layer = ctx.needs_input_grad[1:11]
    wanted = want_x, want_scores, *layer
    dx = dscores = None
    dlayer = [None] * len(layer)
    if any(wanted):
        scores, b_up, x, h, offsets, row_token, *places, b_down = ctx.saved_tensors
        places, weights = places[:3], with_lists(ctx, *places[3:])
        lists = ctx.experts_at
        again = x, offsets, row_token, *weights[:2], b_up, ctx.flags, lists
        h = pre_activations(h, ctx.kept, *again)
        saved = x, h, offsets, row_token, *places, *weights, b_down
        by_all = tied(rows_of(dout), scores, b_up)
        dx, dscores, *dlayer = expert_gradients(saved, by_all, ctx.flags, wanted, experts_at=lists)
    return dx, None, dscores, None, dout if residual else None, *dlayer, *_FLAGS


def expert_gradients(
    saved: Sequence[Tensor | None],
    dout: Tensor,
    flags: LayerFlags,
    wanted: Sequence[bool],
    by_row: bool = False,
    experts_at: Tensor | None = None,
) -> list[Tensor | None]:
    """dx, dscores, dw_up, dw_gate, dw_down, db_up and db_down, None where not wanted.

    saved: the arguments of moe_backward from x to b_down; by_row: dx is (R, H), not summed.
    """
    x, scores, w_up, w_gate, w_down, b_up, b_down = wanted
    bits = wanted_bits(x, scores, (w_up or w_gate, w_down, b_up, b_down), by_row)
    gradients = ops.moe_backward(dout, *saved, *flags, bits, experts_at)
    return [g if want else None for g, want in zip(gradients, wanted, strict=True)]


def _experts_setup(ctx, inputs, output):
    x, offsets, w_up, w_gate, w_down, b_up, _, *rest = inputs
    _, h = output
    ctx.flags, ctx.kept = LayerFlags.and_last(rest)
    weights = without_lists(ctx, LayerFlags.experts_at(rest), w_up, w_gate, w_down)
    ctx.save_for_backward(b_up, x, h, offsets, *weights)
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)


def _experts_gradient(ctx, dout, _):
    if dout is None:
        return (*(None,) * 7, *_FLAGS)
    b_up, x, h, offsets, *weights = ctx.saved_tensors
    weights = with_lists(ctx, *weights)
    again = x, offsets, None, *weights[:2], b_up, ctx.flags, ctx.experts_at
    h = pre_activations(h, ctx.kept, *again)
    saved = x, h, offsets, *weights
    dout = tied(rows_of(dout), b_up)
    x, _, w_up, w_gate, w_down, b_up, b_down = ctx.needs_input_grad[1:8]
    wanted = wanted_bits(x, False, (w_up or w_gate, w_down, b_up, b_down))
    dx, dw_up, dw_gate, dw_down, db_up, db_down = ops.experts_backward(
        dout, *saved, *ctx.flags, wanted, ctx.experts_at
    )
    return (
        dx if x else None,
        None,
        dw_up if w_up else None,
        dw_gate if w_gate else None,
        dw_down if w_down else None,
        db_up if b_up else None,
        db_down if b_down else None,
        *_FLAGS,
    )


# ---- grouped products ---------------------------------------------------------------------------


def _bias_gradient(m: Tensor, offsets: Tensor) -> Tensor:
    db = m.new_empty(offsets.shape[0] - 1, m.shape[1])
    ops.bias_gradient_out(m, offsets, None, None, db, False)
    return db


def _bias_setup(ctx, inputs, output):
    m, offsets = inputs
    ctx.rows = m.shape[0]
    ctx.save_for_backward(offsets)


def _bias_second_gradient(ctx, ddb):
    (offsets,) = ctx.saved_tensors
    rows = torch.arange(ctx.rows, device=ddb.device, dtype=torch.int32)
    ends = _clamped(offsets[1:], ctx.rows)
    expert = torch.searchsorted(ends, rows, right=True)  # E if a row belongs to no expert
    return F.pad(ddb, (0, 0, 0, 1)).index_select(0, expert), None


library.define("bias_gradient(Tensor m, Tensor offsets) -> Tensor")
for _key in ("CPU", "CUDA"):
    library.impl("bias_gradient", _bias_gradient, _key)


@torch.library.register_fake("guild::bias_gradient", lib=library)
def _bias_fake(m, offsets):
    return m.new_empty(offsets.shape[0] - 1, m.shape[1])


def bias_gradient(m: Tensor, offsets: Tensor) -> Tensor:
    """Sums of m's rows (R, width) by expert: (E, width) in m's dtype.

    offsets: int32 (E + 1), the first one 0. Differentiable.
    """
    return ops.bias_gradient(m, offsets)


def starts(offs: Tensor) -> Tensor:
    """END positions (E) as offsets (E + 1): a zero in front."""
    return F.pad(offs, (1, 0))


def _clamped(ends: Tensor, size: int) -> Tensor:
    """END positions as the ops clamp them, along a dimension of this size."""
    return ends.clamp(0, size).cummax(0).values


def _grouped_mm_setup(ctx, inputs, output):
    mat_a, mat_b, offs, _, _, *lists = inputs
    ctx.a, ctx.b = SimpleNamespace(), SimpleNamespace()
    a_at, b_at = (*lists, None, None)[:2]
    ctx.save_for_backward(
        *without_lists(ctx.a, a_at, mat_a), *without_lists(ctx.b, b_at, mat_b), offs
    )


def _grouped_mm_gradient(ctx, dout):
    mat_a, mat_b, offs = ctx.saved_tensors
    (mat_a,), (mat_b,) = with_lists(ctx.a, mat_a), with_lists(ctx.b, mat_b)
    want_a, want_b, _, want_bias = ctx.needs_input_grad[1:5]
    dout = rows_of(dout.to(mat_a.dtype))
    a_at, b_at = ctx.a.experts_at, ctx.b.experts_at
    da = ops.grouped_mm(dout, mat_b.mT, offs, None, False, None, b_at) if want_a else None
    db = ops.grouped_mm(mat_a.mT, dout, offs, None, False, a_at) if want_b else None
    dbias = _grouped_bias_gradient(mat_a, mat_b, offs, dout) if want_bias else None
    return da, db, None, dbias, None, None, None


def _groups(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None) -> int:
    """How many groups a grouped product has."""
    stacked = [t.shape[0] for t in (mat_a, mat_b) if t.dim() == 3]
    return stacked[0] if stacked else offs.shape[0]


def _grouped_bias_gradient(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, dout: Tensor
) -> Tensor:
    by_row = mat_a.dim() == 3 and mat_b.dim() == 2
    width = dout.shape[-2 if by_row else -1]
    if mat_a.shape[-1] == 0 or width == 0:  # an empty sum gets no bias
        return dout.new_zeros(_groups(mat_a, mat_b, offs), width)
    if offs is None:
        return dout.sum(1)
    if mat_a.dim() == mat_b.dim():  # nor do groups with an empty sum
        filled = starts(_clamped(offs, mat_a.shape[1])).diff() > 0
        return torch.where(filled[:, None], dout.sum(1), 0)
    by_row = dout if mat_b.dim() == 3 else dout.mT.contiguous()
    return bias_gradient(by_row, starts(offs))


# ---- the fused pair -----------------------------------------------------------------------------


def _pair_up_setup(ctx, inputs, output):
    x, w_up, offsets, _, *flags = inputs
    ctx.flags = LayerFlags(*flags, transposed=True)
    _, h = output
    ctx.save_for_backward(x, w_up, offsets, h)
    ctx.set_materialize_grads(False)


def _activation_of(flags: LayerFlags) -> tuple[Activation, str]:
    """An activation and its order."""
    kind, gated, alpha, limit, *rest, interleaved, _ = flags
    limit = limit if limit < NO_LIMIT else math.inf
    return Activation(KINDS[kind], gated, alpha, limit, *rest), ORDERS[interleaved]


def _calls_for_composition(*gradients):
    """Whether a pair's backward has to consist of ops that have gradients and can be batched."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    is_batched = torch._C._functorch.is_legacy_batchedtensor  # of is_grads_batched=True
    return any(g is not None and is_batched(g) for g in gradients)


def _pair_up_gradient(ctx, da, dh):
    nothing = (None,) * 7
    x, w_up, offsets, h = ctx.saved_tensors
    want_x, want_w, _, want_bias = ctx.needs_input_grad[1:5]
    again = _calls_for_composition(da, dh)
    if da is not None:  # swiglu_out was used on its own
        activation, order = _activation_of(ctx.flags)
        if again:  # rows of no expert may hold NaN, and NaN times their zero gradients is NaN
            nobody = torch.arange(h.shape[0], device=h.device) >= offsets.amax()
            h = h.masked_fill(nobody[:, None], 0)
        from_a = activation.gradient(h, da, order)
        dh = from_a if dh is None else dh + from_a
    if dh is None:
        return (*(None,) * 4, *nothing)
    dh = rows_of(dh)
    dx = ops.grouped_mm(dh, w_up.mT, offsets[1:], None, False) if want_x else None
    dw = None
    if want_w and again:
        dw = ops.grouped_mm(x.mT, dh, offsets[1:], None, False)
    elif want_w:
        dw = torch.empty_like(w_up)
        layout = ctx.flags.up_weight()
        ops.up_weight_gradient_out(x, dh, offsets, None, dw, None, *layout, False)
    db = bias_gradient(dh, offsets) if want_bias else None
    return dx, dw, None, db, *nothing


def _pair_down_setup(ctx, inputs, output):
    a, aux, w_down, offsets, _, *flags = inputs
    ctx.flags = LayerFlags(*flags, transposed=True)
    ctx.fused = aux is not None
    ctx.save_for_backward(aux if ctx.fused else a, w_down, offsets)


def _pair_down_gradient(ctx, dout):
    kept, w_down, offsets = ctx.saved_tensors
    want_a, want_aux, want_w, _, want_bias = ctx.needs_input_grad[1:6]
    dout = rows_of(dout)
    gradients = _pair_down_again if _calls_for_composition(dout) else _pair_down_kernels
    want = want_a and not ctx.fused, want_aux, want_w
    da, dh, dw = gradients(ctx, dout, kept, w_down, offsets, *want)
    db = bias_gradient(dout, offsets) if want_bias else None
    return da, dh, dw, None, db, *(None,) * 7


def _pair_down_kernels(ctx, dout, kept, w_down, offsets, want_a, want_aux, want_w):
    a, da, dh, dw = kept, None, None, None
    if ctx.fused and (want_aux or want_w):
        dh, a, _ = ops.down_gradient(dout, kept, offsets, None, None, w_down, *ctx.flags)
    if want_a:
        da = ops.grouped_mm(dout, w_down.mT, offsets[1:], None, False)
    if want_w:
        dw = torch.empty_like(w_down)
        ops.down_weight_gradient_out(dout, a, offsets, None, dw, True, False)
    return da, dh if want_aux else None, dw


def _pair_down_again(ctx, dout, kept, w_down, offsets, want_a, want_aux, want_w):
    """The same with differentiable operations."""
    a, da, dh, dw = kept, None, None, None
    ends = offsets[1:]
    if want_a or want_aux:
        da = ops.grouped_mm(dout, w_down.mT, ends, None, False)
    if ctx.fused:
        activation, order = _activation_of(ctx.flags)
        a = activation(kept, order)
        dh = activation.gradient(kept, da, order) if want_aux else None
    if want_w:
        dw = ops.grouped_mm(a.mT, dout, ends, None, False)
    return da if want_a else None, dh, dw


for _name, _backward, _setup in (
    ("moe_forward", _moe_gradient, _moe_setup),
    ("experts_forward", _experts_gradient, _experts_setup),
    ("grouped_mm", _grouped_mm_gradient, _grouped_mm_setup),
    ("pair_up", _pair_up_gradient, _pair_up_setup),
    ("pair_down", _pair_down_gradient, _pair_down_setup),
    ("bias_gradient", _bias_second_gradient, _bias_setup),
):
    register(_name, _backward, _setup)

register_without_gradient(
    "balance_sums_backward",
    "bias_gradient_out",
    "combine",
    "data_gradients",
    "down_gradient",
    "down_projection",
    "down_weight_gradient_out",
    "expert_table",
    "expert_view",
    "experts_backward",
    "grouped_mm_out",
    "moe_backward",
    "peer_collect",
    "peer_meet",
    "peer_publish",
    "peer_pull",
    "peer_push",
    "peer_push_scores",
    "peer_tables",
    "route_backward",
    "score_gradient",
    "sort_by_expert",
    "up_gradient",
    "up_projection",
    "up_weight_gradient_out",
    "weight_gradients_out",
)
