"""guild::lora_forward and guild::lora_backward: the layer of experts with low-rank terms.

With t = X[row_token] A1^T and H = X[row_token] W1^T + b1 + t B1^T, A = activation(H), and
Y = A W2^T + b2 + (A A2^T) B2^T, where B1 and B2 hold the scale. Backward, with s the rows' scores:

    u2 = dO[row_token] B2     g = dO[row_token] W2 + u2 A2       dH = d activation(s g, H), A' = s A
    dB2 = dO[row_token]^T (A' A2^T)                              dA2 = u2^T A'
    u1 = dH B1                dX = dH W1 + u1 A1
    dB1 = dH^T t                                                 dA1 = u1^T X[row_token]

Every product is one of the layer's own steps. A term of rank r adds r to a product's inner
dimension, [X, t] [W1, B1]^T, whose sums the step adds before it rounds or activates them. The steps
that compute t and u, and those that read them, work on narrow matrices of r columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guild._torch.alignment import aligned, needs_alignment
from guild._torch.autograd import (
    library,
    register,
    register_without_gradient,
    rows_of,
    tied,
    with_lists,
    without_lists,
)
from guild._torch.gradient_memory import gradient_maker
from guild._torch.operators import LayerFlags, ops, score_dtype
from guild._torch.row_routing import RowRouting
from guild.activations import Activation

_LINEAR = (*Activation(gated=False).scalars, False, False)  # an up projection that gives only H


class LowRank(NamedTuple):
    """The low-rank operands of a layer; both of a projection without a term are None."""

    a_up: Tensor | None  # (E, r1, H)
    b_up: Tensor | None  # (E, W, r1), times the scale
    a_down: Tensor | None  # (E, r2, I)
    b_down: Tensor | None  # (E, H, r2), times the scale

    @property
    def rank_up(self) -> int:
        """r1, 0 without a term of the up projection."""
        return 0 if self.a_up is None else self.a_up.shape[1]

    def wants_gradient(self) -> bool:
        """Whether any of them wants one."""
        return any(t is not None and t.requires_grad for t in self)

    def aligned(self) -> LowRank:
        """The same, aligned as the kernels of their device require."""
        return LowRank(*(None if t is None else aligned(t) for t in self))


class Weights(NamedTuple):
    """The weights and biases of a layer, as its ops take them."""

    w_up: Tensor
    w_gate: Tensor | None
    w_down: Tensor
    b_up: Tensor | None
    b_down: Tensor | None
    experts_at: Tensor | None = None  # for w_up, w_gate and w_down: see src/torch/ops.h


# ---- steps --------------------------------------------------------------------------------------


def _narrow(rows: Tensor, routing: RowRouting, weight: Tensor, gathered: bool) -> Tensor:
    """rows weight_e^T of (E, r, width), by row; gathered: rows are those of each row's token."""
    if gathered and routing.row_token is not None:
        return ops.up_projection(
            rows, routing.offsets, routing.row_token, weight, None, None, *_LINEAR, True
        )[1]
    return ops.down_projection(rows, routing.offsets, weight, None, False)


def _like(term: Tensor, weight: Tensor, inputs: int) -> Tensor:
    """term (E, outputs, r) in the layout in which a product with this weight reads it.

    A kernel reads both contiguous along their inputs, or both along their outputs. inputs: which
    dimension of the weight that is.
    """
    if not needs_alignment(term):
        return term
    by_inputs = weight.stride(inputs) == 1 and weight.stride(3 - inputs) != 1
    return term.contiguous() if by_inputs else term.mT.contiguous().mT


def up(
    x: Tensor, routing: RowRouting, weights: Weights, low: LowRank, flags: LayerFlags, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A (R, I), H (R, W) where it is kept, and t (R, r1) of rows of x."""
    where = routing.offsets, routing.row_token
    layer = weights.w_up, weights.w_gate, weights.b_up
    t = term = None
    if low.a_up is not None:
        t = _narrow(x, routing, low.a_up, True)
        term = _like(low.b_up, weights.w_up, 1 if flags.transposed else 2)
    return *ops.up_projection(x, *where, *layer, *flags, keep, t, term, weights.experts_at), t


def recomputed(
    x: Tensor,
    h: Tensor,
    t: Tensor,
    routing: RowRouting,
    weights: Weights,
    low: LowRank,
    flags: LayerFlags,
) -> tuple[Tensor, Tensor]:
    """H and t: as kept, or computed again from x where forward kept none."""
    rows = (x if routing.row_token is None else routing.row_token).shape[0]
    if h.shape[0] == rows:
        return h, t
    _, h, found = up(x, routing, weights, low, flags, True)
    return h, t if found is None else found


def down(
    a: Tensor, routing: RowRouting, weights: Weights, low: LowRank, flags: LayerFlags
) -> Tensor:
    """Y (R, H) of the activations."""
    t = term = None
    if low.a_down is not None:
        t = _narrow(a, routing, low.a_down, False)
        term = _like(low.b_down, weights.w_down, 1 if flags.transposed else 2)
    layer = weights.w_down, weights.b_down, flags.transposed
    return ops.down_projection(a, routing.offsets, *layer, t, term, weights.experts_at)


def down_gradient(
    dout: Tensor, h: Tensor, routing: RowRouting, weights: Weights, low: LowRank, flags: LayerFlags
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dH (R, W), A' (R, I), the scores' partial sums and u2 (R, r2)."""
    u = term = None
    if low.a_down is not None:
        u = _narrow(dout, routing, low.b_down.mT, True)
        term = _like(low.a_down.mT, weights.w_down, 2 if flags.transposed else 1)
    rows = dout, h, routing.offsets, routing.row_token, routing.row_score
    more = None, None, False, u, term, weights.experts_at  # no biases
    return *ops.down_gradient(*rows, weights.w_down, *flags, *more), u


def score_gradient(
    parts: Tensor, dout: Tensor, intermediate: int, routing: RowRouting, weights: Weights
) -> Tensor:
    """The scores' gradient (T, K) of the partial sums that the down gradient left."""
    slots = routing.slot_row, routing.offsets
    return ops.score_gradient(
        parts, *slots, dout, weights.b_down, intermediate, routing.token_offsets
    )


def x_gradient(
    dh: Tensor,
    routing: RowRouting,
    weights: Weights,
    low: LowRank,
    flags: LayerFlags,
    want_x: bool,
    want_u: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dX, by token or by sorted row, and u1 (R, r1); None where not wanted."""
    u = None
    if low.a_up is not None and (want_x or want_u):
        u = _narrow(dh, routing, low.b_up.mT, False)
    if not want_x:
        return None, u
    term = None if u is None else _like(low.a_up.mT, weights.w_up, 2 if flags.transposed else 1)
    layer = weights.w_up, weights.w_gate, *flags.up_weight()
    dx = ops.up_gradient(dh, routing.offsets, *layer, u, term, weights.experts_at)
    if routing.slot_row is None:
        return clear_nobodys(dx, routing.offsets), u
    return ops.combine(dx, routing.slot_row, None, routing.token_offsets), u


def low_rank_gradients(
    x: Tensor,
    dout: Tensor,
    dh: Tensor,
    a_scaled: Tensor,
    t: Tensor,
    u_up: Tensor | None,
    u_down: Tensor | None,
    routing: RowRouting,
    low: LowRank,
    wanted: tuple[bool, ...],
) -> LowRank:
    """dA and dB of both terms; None where not wanted."""
    offsets, row_token, *_ = routing
    want_a_up, want_b_up, want_a_down, want_b_down = wanted
    da_up = db_up = da_down = db_down = None
    if want_a_up:
        da_up = torch.empty_like(low.a_up)
        ops.up_weight_gradient_out(x, u_up, offsets, row_token, da_up, None, *(False,) * 4)
    if want_b_up:
        db_up = torch.empty_like(low.b_up)
        ops.down_weight_gradient_out(dh, t, offsets, None, db_up, False, False)
    if want_a_down:
        da_down = torch.empty_like(low.a_down)
        ops.down_weight_gradient_out(u_down, a_scaled, offsets, None, da_down, False, False)
    if want_b_down:
        db_down = torch.empty_like(low.b_down)
        narrow = _narrow(a_scaled, routing, low.a_down, False)
        ops.down_weight_gradient_out(dout, narrow, offsets, row_token, db_down, False, False)
    return LowRank(da_up, db_up, da_down, db_down)


def clear_nobodys(rows: Tensor, offsets: Tensor) -> Tensor:
    """Zero sorted rows before the first expert's and after the last one's, in place.

    An offset below its predecessor counts as the predecessor.
    """
    number = torch.arange(rows.shape[0], device=rows.device)
    nobody = (number < offsets[0]) | (number >= offsets.amax())
    return rows.masked_fill_(nobody[:, None], 0)


def output(
    y: Tensor, routing: RowRouting, scores: Tensor | None, residual: Tensor | None
) -> Tensor:
    """The layer's output from Y: by token, or by row if rows came sorted."""
    if routing.slot_row is None:
        return clear_nobodys(y, routing.offsets)
    return ops.combine(y, routing.slot_row, scores, routing.token_offsets, residual)


# ---- ops ----------------------------------------------------------------------------------------


def _forward(x, scores, residual, *rest):
    weights, low, routing, flags, keep = _parts(rest)
    low = low.aligned()
    a, h, t = up(x, routing, weights, low, flags, keep)
    out = output(down(a, routing, weights, low, flags), routing, scores, residual)
    return out, h, t if keep and t is not None else x.new_empty(0, low.rank_up)


def _forward_fake(x, scores, residual, *rest):
    weights, low, routing, flags, keep = _parts(rest)
    rows = (x if routing.row_token is None else routing.row_token).shape[0]
    width = weights.w_down.shape[1 if flags.transposed else 2] * (2 if flags.gated else 1)
    kept = rows if keep else 0
    t = x.new_empty(kept if low.rank_up else 0, low.rank_up)
    return x.new_empty(x.shape), x.new_empty(kept, width), t


def _parts(rest):
    """Split an op's arguments: weights, low-rank operands, routing, flags, the last argument."""
    weights = Weights(*rest[:5], LayerFlags.experts_at(rest[14:]))
    low, routing = LowRank(*rest[5:9]), RowRouting(*rest[9:14])
    return weights, low, routing, *LayerFlags.and_last(rest[14:])


def _wanted_flags(wanted: int) -> tuple[bool, ...]:
    """Whether x, scores, then the weights and low-rank operands in the ops' order are wanted."""
    return tuple(bool(wanted & 1 << i) for i in range(2 + 5 + 4))


def _backward(dout, x, h, t, *rest):
    weights, low, routing, flags, wanted = _parts(rest)
    low, dout = low.aligned(), aligned(dout)
    want_x, want_scores, *want = _wanted_flags(wanted)
    h, t = recomputed(x, h, t, routing, weights, low, flags)
    dh, a, parts, u_down = down_gradient(dout, h, routing, weights, low, flags)
    dscores = None
    if want_scores:
        dscores = score_gradient(parts, dout, a.shape[1], routing, weights)
    dweights = _weight_gradients(x, dout, dh, a, routing, weights, flags, want[:5])
    dx, u_up = x_gradient(dh, routing, weights, low, flags, want_x, want[5])
    dlow = low_rank_gradients(x, dout, dh, a, t, u_up, u_down, routing, low, tuple(want[5:]))
    found = dx, dscores, *dweights, *dlow
    return tuple(x.new_empty(0) if g is None else g for g in found)


def _weight_gradients(x, dout, dh, a, routing, weights, flags, wanted):
    """dW and db; None where not wanted."""
    offsets, row_token, _, row_score, _ = routing
    dw_up = dw_gate = dw_down = db_up = db_down = None
    like = gradient_maker(lists=weights.experts_at is not None)
    if wanted[0] or wanted[1]:
        dw_up = like(weights.w_up)
        dw_gate = None if weights.w_gate is None else like(weights.w_gate)
        layout = flags.up_weight()
        ops.up_weight_gradient_out(x, dh, offsets, row_token, dw_up, dw_gate, *layout, False)
    if wanted[2]:
        dw_down = like(weights.w_down)
        ops.down_weight_gradient_out(dout, a, offsets, row_token, dw_down, flags.transposed, False)
    if wanted[3]:
        db_up = weights.b_up.new_empty(weights.b_up.shape)
        ops.bias_gradient_out(dh, offsets, None, None, db_up, False)
    if wanted[4]:
        db_down = weights.b_down.new_empty(weights.b_down.shape)
        ops.bias_gradient_out(dout, offsets, row_token, row_score, db_down, False)
    return dw_up, dw_gate, dw_down, db_up, db_down


def _backward_fake(dout, x, h, t, *rest):
    weights, low, routing, _, wanted = _parts(rest)
    want_x, want_scores, *want = _wanted_flags(wanted)
    if want[0] or want[1]:
        want[:2] = True, weights.w_gate is not None
    scores = routing.slot_row.shape if want_scores else (0,)
    like = gradient_maker(lists=weights.experts_at is not None)
    kinds = *(like,) * 3, *(torch.empty_like,) * 6
    made = [
        make(t) if w else x.new_empty(0)
        for make, t, w in zip(kinds, (*weights[:5], *low), want, strict=True)
    ]
    return (
        x.new_empty(x.shape if want_x else (0,)),
        x.new_empty(scores, dtype=score_dtype(x.dtype) if want_scores else x.dtype),
        *made,
    )


def _setup(ctx, inputs, output):
    x, scores, _, *rest = inputs
    _, h, t = output
    weights, low, routing, ctx.flags, _ = _parts(rest)
    kept = without_lists(ctx, weights.experts_at, *weights[:3])
    ctx.save_for_backward(x, scores, h, t, *kept, *weights[3:5], *low, *routing)
    ctx.mark_non_differentiable(h, t)
    ctx.set_materialize_grads(False)


def _gradient(ctx, dout, *_):
    nothing = (None,) * (5 + len(ctx.flags) + 2)  # of routing, flags, keep and experts_at
    if dout is None:
        return (*(None,) * 12, *nothing)
    x, scores, h, t, *rest = ctx.saved_tensors
    weights = Weights(*with_lists(ctx, *rest[:3]), *rest[3:5])
    low, routing = LowRank(*rest[5:9]), RowRouting(*rest[9:])
    want_x, want_scores, want_residual, *want = ctx.needs_input_grad[1:13]
    dresidual = dout if want_residual else None
    found = [None] * 11
    wanted = want_x, want_scores, *want
    if any(wanted):
        dout = tied(rows_of(dout), scores, weights.b_up)
        bits = sum(1 << i for i, w in enumerate(wanted) if w)
        arguments = *weights[:5], *low, *routing, *ctx.flags, bits, ctx.experts_at
        found = ops.lora_backward(dout, x, h, t, *arguments)
        found = [g if w else None for g, w in zip(found, wanted, strict=True)]
    dx, dscores, *others = found
    return dx, dscores, dresidual, *others, *nothing


_LAYER = (
    "Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? b_down, Tensor? a_up, "
    "Tensor? lora_b_up, Tensor? a_down, Tensor? lora_b_down, Tensor offsets, Tensor? row_token, "
    "Tensor? slot_row, Tensor? row_score, Tensor? token_offsets, int kind, bool gated, float "
    "alpha, float limit, float up_offset, bool clamp_after, bool interleaved, bool transposed"
)
library.define(
    f"lora_forward(Tensor x, Tensor? scores, Tensor? residual, {_LAYER}, bool keep, Tensor? "
    "experts_at=None) -> (Tensor o, Tensor h, Tensor t)"
)
library.define(
    f"lora_backward(Tensor dout, Tensor x, Tensor h, Tensor t, {_LAYER}, int wanted, Tensor? "
    "experts_at=None) -> (Tensor dx, Tensor dscores, Tensor dw_up, Tensor dw_gate, Tensor dw_down, "
    "Tensor db_up, Tensor db_down, Tensor da_up, Tensor dlora_b_up, Tensor da_down, Tensor "
    "dlora_b_down)"
)
for _key in ("CPU", "CUDA"):
    library.impl("lora_forward", _forward, _key)
    library.impl("lora_backward", _backward, _key)
torch.library.register_fake("guild::lora_forward", lib=library)(_forward_fake)
torch.library.register_fake("guild::lora_backward", lib=library)(_backward_fake)
register("lora_forward", _gradient, _setup)
register_without_gradient("lora_backward")
