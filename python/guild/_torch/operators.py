"""torch.ops.guild: loads the compiled ops and tells torch what their outputs look like.

The fake kernels are all that `torch.compile`, export and meta tensors need; each mirrors the
allocations of its op in src/torch. Gradients are registered in `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guild._torch import library
from guild._torch.checks import autocast_dtype
from guild._torch.gradient_memory import gradient_maker

LIBRARY = library.load()
ops = torch.ops.guild

# Bits of `wanted` (guild::binding::Wanted in src/torch/backward.h) in moe_backward,
# experts_backward, data_gradients and peer_backward.
# WANT_ROWS: dx by row, instead of WANT_X.
WANT_X, WANT_SCORES, WANT_UP, WANT_DOWN, WANT_UP_BIAS, WANT_DOWN_BIAS, WANT_ROWS = (
    1 << i for i in range(7)
)

SOFTMAX = 0  # guild::Score::softmax: the only score without slopes

_SCORE_PART = 256  # columns of A whose <g, A> is one partial sum of dS (guild::score_parts)


class LayerFlags(NamedTuple):
    """How a layer's activation and weights are read, in the order of the ops' arguments."""

    kind: int  # index in activations.KINDS: guild::ActivationKind
    gated: bool
    alpha: float
    limit: float
    up_offset: float
    clamp_after: bool
    interleaved: bool
    transposed: bool

    @staticmethod
    def and_last(arguments: Sequence[Any]) -> tuple[LayerFlags, Any]:
        """The flags at the beginning of an op's last arguments, and the argument after them."""
        count = len(LayerFlags._fields)
        return LayerFlags(*arguments[:count]), arguments[count]

    @staticmethod
    def experts_at(arguments: Sequence[Any]) -> Tensor | None:
        """Of the same arguments, the one after those; None if it was left out."""
        return next(iter(arguments[len(LayerFlags._fields) + 1 :]), None)

    def up_weight(self) -> tuple[bool, bool, bool]:
        """The layout of w_up, for ops that take it without an activation."""
        return self.gated, self.interleaved, self.transposed


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores in a layer of `dtype`: float32, float64 in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def score_parts(intermediate: int) -> int:
    """Number of partial sums of dS that the down gradient leaves for a row."""
    return (intermediate + _SCORE_PART - 1) // _SCORE_PART


def autocast(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands of a product in the autocast dtype of x's device, as they are without autocast.

    As torch's own rules do, this leaves float64 and integers alone; gradients come back in each
    operand's dtype.
    """
    operands = (x, *others)
    dtype = autocast_dtype(x)
    if dtype is None:
        return operands
    return tuple(t.to(dtype) if t is not None and _is_cast(t) else t for t in operands)


def is_cast(x: Tensor) -> bool:
    """Whether `autocast` converts it."""
    dtype = autocast_dtype(x)
    return dtype is not None and _is_cast(x) and x.dtype != dtype


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64


def _fake(name: str) -> Callable:
    return torch.library.register_fake(f"guild::{name}")


def _empty_int32(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.int32)


# ---- routing ------------------------------------------------------------------------------------


def route_fake(logits, selection_bias, token_mask, top_k, score, *rest):
    tokens = logits.shape[0]
    return (
        logits.new_empty(tokens, top_k),
        _empty_int32(logits, tokens, top_k),
        logits.new_empty(0 if score == SOFTMAX else tokens, top_k),
    )


_fake("route")(route_fake)


@_fake("route_backward")
def _route_backward(
    dscores,
    scores,
    ids,
    slopes,
    logits,
    experts,
    score,
    renormalize,
    scale,
    token_offsets=None,
    like=None,
    sum_floor=0.0,
):
    dtype = dscores.dtype if like is None else like.dtype
    return dscores.new_empty(_tokens(ids, token_offsets), experts, dtype=dtype)


def _tokens(by_slot: Tensor, token_offsets: Tensor | None) -> int:
    """The number of tokens of (T, K) slots, or of lists of any length."""
    return by_slot.shape[0] if token_offsets is None else token_offsets.shape[0] - 1


def rounded_slots(tokens: int, experts: int, top_k: int, rounding: int, tile: int) -> int:
    """guild::rounded_slots: the most slots that rounding can leave."""
    more = (experts * (tile // 2), experts * (tile - 1), 0, experts * (tile - 1), tile // 2)
    # Not min(), which in a trace of any number of tokens would decide for that of the example.
    return torch.sym_min(tokens * max(experts, top_k), tokens * top_k + more[rounding])


@_fake("round_tokens")
def _round_tokens(logits, ids, seed, score, renormalize, scale, rounding, tile, sum_floor):
    tokens, experts = logits.shape
    slots = rounded_slots(tokens, experts, ids.shape[1], rounding, tile)
    return (
        logits.new_empty(slots),
        _empty_int32(logits, slots),
        logits.new_empty(0 if score == SOFTMAX else slots),
        _empty_int32(logits, tokens + 1),
    )


@_fake("balance_sums")
def _balance_sums(logits, ids, token_mask, score, sequences):
    experts = logits.shape[1]
    return (
        logits.new_empty(sequences, experts),
        logits.new_empty(sequences),
        _empty_int32(logits, sequences, experts),
    )


@_fake("balance_sums_backward")
def _balance_sums_backward(dshares, dsquares, logits, token_mask, score):
    return logits.new_empty(logits.shape)


@_fake("sort_by_expert")
def _sort_by_expert(ids, scores, experts, token_offsets=None):
    rows = ids.numel()
    return (
        _empty_int32(ids, experts + 1),
        _empty_int32(ids, rows),
        _empty_int32(ids, *ids.shape),
        scores.new_empty(rows),
    )


# ---- layers -------------------------------------------------------------------------------------


def _layer_sizes(w_down: Tensor, flags: LayerFlags) -> tuple[int, int, int]:
    """experts, hidden and the width of h."""
    experts, hidden, intermediate = w_down.shape
    if flags.transposed:
        hidden, intermediate = intermediate, hidden
    return experts, hidden, 2 * intermediate if flags.gated else intermediate


def moe_forward_fake(
    x, ids, scores, token_offsets, residual, w_up, w_gate, w_down, b_up, b_down, *rest
):
    flags, keep = LayerFlags.and_last(rest)
    experts, hidden, width = _layer_sizes(w_down, flags)
    rows = ids.numel()
    return (
        x.new_empty(x.shape[0], hidden),
        x.new_empty(rows if keep else 0, width),
        _empty_int32(x, experts + 1),
        _empty_int32(x, rows),
        _empty_int32(x, *ids.shape),
        x.new_empty(rows, dtype=score_dtype(x.dtype)),
    )


_fake("moe_forward")(moe_forward_fake)


def _has_lists(arguments: Sequence[Any]) -> bool:
    """Whether an op's last arguments, from its flags on, say that weights are uneven lists."""
    return LayerFlags.experts_at(arguments) is not None


def _weight_gradients(x, w_up, w_gate, w_down, flags, wanted, lists):
    """dw_up, dw_gate, dw_down, db_up, db_down: empty tensors where not wanted."""
    experts, hidden, width = _layer_sizes(w_down, flags)
    nothing = (0,)
    want_up, like = wanted & WANT_UP, gradient_maker(lists)
    return (
        like(w_up) if want_up else x.new_empty(nothing),
        like(w_gate) if want_up and w_gate is not None else x.new_empty(nothing),
        like(w_down) if wanted & WANT_DOWN else x.new_empty(nothing),
        x.new_empty((experts, width) if wanted & WANT_UP_BIAS else nothing),
        x.new_empty((experts, hidden) if wanted & WANT_DOWN_BIAS else nothing),
    )


@_fake("moe_backward")
def _moe_backward(
    dout,
    x,
    h,
    offsets,
    row_token,
    slot_row,
    row_score,
    token_offsets,
    w_up,
    w_gate,
    w_down,
    b_down,
    *rest,
):
    flags, wanted = LayerFlags.and_last(rest)
    scores = slot_row.shape if wanted & WANT_SCORES else (0,)
    rows = (row_token.shape[0], x.shape[1]) if wanted & WANT_ROWS else (0,)
    return (
        x.new_empty(x.shape if wanted & WANT_X else rows),
        x.new_empty(scores, dtype=score_dtype(x.dtype)),
        *_weight_gradients(x, w_up, w_gate, w_down, flags, wanted, _has_lists(rest)),
    )


@_fake("experts_forward")
def _experts_forward(x, offsets, w_up, w_gate, w_down, b_up, b_down, *rest):
    flags, keep = LayerFlags.and_last(rest)
    _, hidden, width = _layer_sizes(w_down, flags)
    rows = x.shape[0]
    return x.new_empty(rows, hidden), x.new_empty(rows if keep else 0, width)


@_fake("experts_backward")
def _experts_backward(dout, x, h, offsets, w_up, w_gate, w_down, *rest):
    flags, wanted = LayerFlags.and_last(rest)
    return (
        x.new_empty(x.shape if wanted & WANT_X else (0,)),
        *_weight_gradients(x, w_up, w_gate, w_down, flags, wanted, _has_lists(rest)),
    )


@_fake("data_gradients")
def _data_gradients(
    dout,
    h,
    offsets,
    row_token,
    slot_row,
    row_score,
    token_offsets,
    w_up,
    w_gate,
    w_down,
    b_down,
    *rest,
):
    flags, wanted = LayerFlags.and_last(rest)  # then the biases
    rows, intermediate = h.shape[0], w_down.shape[1 if flags.transposed else 2]
    scores = slot_row.shape if wanted & WANT_SCORES else (0,)
    by_row = (rows, dout.shape[1]) if wanted & WANT_ROWS else (0,)
    return (
        dout.new_empty(dout.shape if wanted & WANT_X else by_row),
        dout.new_empty(scores, dtype=score_dtype(dout.dtype)),
        dout.new_empty(h.shape),
        dout.new_empty(rows, intermediate),
    )


# ---- steps --------------------------------------------------------------------------------------


@_fake("up_projection")
def _up_projection(x, offsets, row_token, w_up, w_gate, b_up, *rest):
    flags, keep = LayerFlags.and_last(rest)  # then a low-rank term
    rows = x.shape[0] if row_token is None else row_token.shape[0]
    out = w_up.shape[2] if flags.transposed else w_up.shape[1]
    packed = flags.gated and w_gate is None
    width = out if packed or not flags.gated else 2 * out
    return x.new_empty(rows, out // 2 if packed else out), x.new_empty(rows if keep else 0, width)


@_fake("down_projection")
def _down_projection(a, offsets, w_down, b_down, transposed, *low_rank):
    return a.new_empty(a.shape[0], w_down.shape[2 if transposed else 1])


@_fake("combine")
def _combine(
    y,
    slot_row,
    slot_score,
    token_offsets=None,
    residual=None,
    dlogits=None,
    ids=None,
    router=None,
):
    return y.new_empty(_tokens(slot_row, token_offsets), y.shape[1])


@_fake("down_gradient")
def _down_gradient(dout, h, offsets, row_token, row_score, w_down, *rest):
    flags = LayerFlags(*rest[: len(LayerFlags._fields)])  # then the biases' gradients
    rows, intermediate = h.shape[0], w_down.shape[1 if flags.transposed else 2]
    return (
        dout.new_empty(h.shape),
        dout.new_empty(rows, intermediate),
        dout.new_empty(rows, score_parts(intermediate), dtype=score_dtype(dout.dtype)),
    )


@_fake("score_gradient")
def _score_gradient(score_parts, slot_row, offsets, dout, b_down, intermediate, token_offsets=None):
    return score_parts.new_empty(slot_row.shape)


@_fake("up_gradient")
def _up_gradient(dh, offsets, w_up, w_gate, gated, interleaved, transposed, *low_rank):
    return dh.new_empty(dh.shape[0], w_up.shape[1 if transposed else 2])


# ---- grouped products ---------------------------------------------------------------------------


@_fake("grouped_mm")
def _grouped_mm(mat_a, mat_b, offs, bias, float_out, *lists):
    rows, columns = mat_a.shape[-2], mat_b.shape[-1]
    stacked = mat_a.dim() == mat_b.dim()
    groups = mat_a.shape[0] if mat_a.dim() == 3 else offs.shape[0] if stacked else 0
    shape = (groups, rows, columns) if stacked else (rows, columns)
    return mat_a.new_empty(shape, dtype=torch.float32 if float_out else mat_a.dtype)


@_fake("pair_up")
def _pair_up(x, w_up, offsets, bias, kind, gated, *rest):
    width = w_up.shape[2]
    return x.new_empty(x.shape[0], width // 2 if gated else width), x.new_empty(x.shape[0], width)


@_fake("pair_down")
def _pair_down(a, aux, w_down, offsets, bias, *rest):
    return a.new_empty(a.shape[0], w_down.shape[2])


# ---- ops that only write into their arguments ---------------------------------------------------

for _name in (
    "weight_gradients_out",
    "up_weight_gradient_out",
    "down_weight_gradient_out",
    "bias_gradient_out",
    "grouped_mm_out",
):
    _fake(_name)(lambda *args: None)
