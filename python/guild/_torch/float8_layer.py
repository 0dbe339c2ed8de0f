"""guild::float8_experts, a layer of quantised experts with its gradient, and guild::float8_weights.

Products are of codes, but the weights' gradients of 16-bit values. Masters may be float32 where x
has 16 bits: they are read by the quantiser alone, and their gradients are written in their dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.autograd import library, register, register_without_gradient, rows_of, tied
from guild._torch.float8_steps import (
    Codes,
    DataGradients,
    Kept,
    Places,
    QuantizedExperts,
    Recipe,
    Wanted,
    data_gradients,
    forward,
    quantized_rows,
    row_scales,
    up_step,
)
from guild._torch.operators import LayerFlags, ops
from guild.float8.formats import blocks

_FLAGS = len(LayerFlags._fields)
_CODES = len(QuantizedExperts._fields)

# ---- weights ------------------------------------------------------------------------------------


def _masters(w_up: Tensor, w_gate: Tensor | None, w_down: Tensor, layout: tuple[bool, ...]):
    """Gate (if there is one) and up as (E, I, H) each, and down as (E, H, I)."""
    gated, interleaved, transposed = layout
    if transposed:
        w_up, w_down = w_up.mT, w_down.mT
        w_gate = None if w_gate is None else w_gate.mT
    if not gated:
        halves = [w_up]
    elif w_gate is not None:
        halves = [w_gate, w_up]
    elif interleaved:
        halves = [w_up[:, 0::2], w_up[:, 1::2]]
    else:
        halves = list(w_up.chunk(2, 1))
    return halves, w_down


def _empty_codes(w_down: Tensor, gated: bool, transposed: bool) -> QuantizedExperts:
    experts, hidden, size = w_down.shape
    if transposed:
        hidden, size = size, hidden
    halves = 2 if gated else 1

    def codes(*shape: int) -> Tensor:
        return w_down.new_empty(shape, dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        return w_down.new_empty(shape, dtype=torch.float32)

    return QuantizedExperts(
        codes(experts, halves * size, hidden),
        codes(experts, hidden, halves * size),
        scales(experts, halves, blocks(size), blocks(hidden)),
        codes(experts, hidden, size),
        codes(experts, size, hidden),
        scales(experts, blocks(hidden), blocks(size)),
    )


def _quantize_out(w_up, w_gate, w_down, gated, interleaved, transposed, scale, *out) -> None:
    made = QuantizedExperts(*out)
    halves, down = _masters(w_up, w_gate, w_down, (gated, interleaved, transposed))
    size = down.shape[2]
    for i, half in enumerate(halves):
        span = slice(i * size, (i + 1) * size)
        ops.quantize_weights_out(
            half, 0, scale, made.up[:, span], made.up_transposed[:, :, span], made.up_scales[:, i]
        )
    ops.quantize_weights_out(down, 0, scale, made.down, made.down_transposed, made.down_scales)


def _quantize(w_up, w_gate, w_down, gated, interleaved, transposed, scale):
    made = _empty_codes(w_down, gated, transposed)
    _quantize_out(w_up, w_gate, w_down, gated, interleaved, transposed, scale, *made)
    return tuple(made)


def _quantize_fake(w_up, w_gate, w_down, gated, interleaved, transposed, scale):
    return tuple(_empty_codes(w_down, gated, transposed))


_WEIGHTS = "Tensor w_up, Tensor? w_gate, Tensor w_down, bool gated, bool interleaved, bool "
_WEIGHTS += "transposed, int scale"
_OUT = ("up", "up_transposed", "up_scales", "down", "down_transposed", "down_scales")
library.define(
    f"float8_weights({_WEIGHTS}) -> (" + ", ".join(f"Tensor {name}" for name in _OUT) + ")"
)
library.define(
    f"float8_weights_out({_WEIGHTS}, "
    + ", ".join(f"Tensor({'abcdef'[i]}!) {name}" for i, name in enumerate(_OUT))
    + ") -> ()"
)

# ---- experts ------------------------------------------------------------------------------------


def _split(rest: tuple) -> tuple[QuantizedExperts, LayerFlags, Recipe, bool]:
    """The arguments that follow a layer's biases."""
    codes, rest = QuantizedExperts(*rest[:_CODES]), rest[_CODES:]
    flags, (*recipe, keep) = LayerFlags(*rest[:_FLAGS]), rest[_FLAGS:]
    return codes, flags, Recipe(*recipe), keep


def _forward(x, ids, scores, token_offsets, residual, w_up, w_gate, w_down, b_up, b_down, *rest):
    experts, flags, recipe, keep = _split(rest)
    tokens = x, ids, scores, token_offsets, residual
    down = Codes(experts.down, experts.down_scales)
    out, kept, places = forward(tokens, experts.halves(), down, (b_up, b_down), flags, recipe, keep)
    nothing = x.new_empty(0)
    return out, *(nothing if t is None else t for t in kept), *places


def _forward_fake(
    x, ids, scores, token_offsets, residual, w_up, w_gate, w_down, b_up, b_down, *rest
):
    experts, _, recipe, keep = _split(rest)
    rows, (count, hidden, size), halves = (
        ids.numel(),
        experts.down.shape,
        experts.up_scales.shape[1],
    )
    nothing = x.new_empty(0)
    h = scales = nothing
    if keep:
        h = x.new_empty(rows, halves * size, dtype=torch.uint8 if recipe.save_codes else x.dtype)
        if recipe.save_codes:
            scales = row_scales(scores, rows, size, halves)

    def indices(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    places = indices(count + 1), indices(rows), indices(*ids.shape), scores.new_empty(rows)
    return x.new_empty(x.shape[0], hidden), h, scales, *places


def _setup(ctx, inputs, output):
    x, _, _, token_offsets, _, w_up, w_gate, w_down, b_up, b_down, *rest = inputs
    _, h, h_scales, *places = output
    experts, ctx.flags, ctx.recipe, ctx.keep = _split(tuple(rest))
    ctx.save_for_backward(
        x, token_offsets, h, h_scales, *places, *experts, w_up, w_gate, w_down, b_up, b_down
    )
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx, dout, *_):
    nothing = (None,) * (_CODES + _FLAGS + len(Recipe._fields) + 1)
    if dout is None:
        return (*(None,) * 10, *nothing)
    want_x, _, want_scores, _, residual, up, gate, down, up_bias, down_bias = ctx.needs_input_grad[
        1:11
    ]
    wanted = Wanted(want_x, want_scores, up or gate, down, up_bias, down_bias)
    dx = dscores = None
    dlayer = (None,) * 5
    if any(wanted):
        x, *saved = ctx.saved_tensors
        by_all = tied(rows_of(dout), *saved[-2:])
        made = ops.float8_backward(
            by_all, x, *saved, *ctx.flags, *ctx.recipe, ctx.keep, list(wanted)
        )
        needs = want_x, want_scores, up, gate, down, up_bias, down_bias
        dx, dscores, *dlayer = (g if want else None for g, want in zip(made, needs, strict=True))
    return dx, None, dscores, None, dout if residual else None, *dlayer, *nothing


def kept_or_again(
    kept: Kept,
    keep: bool,
    x: Tensor,
    places: Places,
    experts: QuantizedExperts,
    b_up: Tensor | None,
    flags: LayerFlags,
    recipe: Recipe,
) -> Kept:
    """H as forward kept it, or computed again from x."""
    if keep:
        return kept
    codes = quantized_rows(x, 0, recipe.scales)
    return up_step(codes, places, experts.halves(), b_up, flags, recipe, x.dtype, True)[1]


def _backward(dout, x, token_offsets, h, h_scales, *rest):
    places, rest = Places(*rest[:4]), rest[4:]
    experts, (w_up, w_gate, w_down, b_up, b_down, *rest) = (
        QuantizedExperts(*rest[:_CODES]),
        rest[_CODES:],
    )
    flags, rest = LayerFlags(*rest[:_FLAGS]), rest[_FLAGS:]
    *recipe, keep, wanted = rest
    recipe, wanted = Recipe(*recipe), Wanted(*wanted)
    kept = Kept(h, h_scales if recipe.save_codes else None)
    kept = kept_or_again(kept, keep, x, places, experts, b_up, flags, recipe)
    made = data_gradients(dout, kept, places, token_offsets, experts, b_down, flags, recipe, wanted)
    weights = _weight_gradients(made, x, dout, places, (w_up, w_gate, w_down), flags, wanted)
    biases = _bias_gradients(made, dout, places, b_up, b_down, wanted)
    nothing = dout.new_empty(0)
    return tuple(nothing if g is None else g for g in (*made[:2], *weights, *biases))


def _weight_gradients(
    made: DataGradients,
    x: Tensor,
    dout: Tensor,
    places: Places,
    weights: tuple[Tensor, Tensor | None, Tensor],
    flags: LayerFlags,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dw_up, dw_gate and dw_down, each in its weight's dtype and layout."""
    w_up, w_gate, w_down = weights
    up = gate = down = None
    if wanted.up:
        up = torch.empty_like(w_up)
        gate = None if w_gate is None else torch.empty_like(w_gate, dtype=up.dtype)
    if wanted.down:
        down = torch.empty_like(w_down)
    rows = places.offsets, places.row_token
    if up is not None and down is not None and up.dtype == down.dtype:
        operands = x, dout, made.dh, made.a_scaled, *rows
        ops.weight_gradients_out(*operands, up, gate, down, *flags.up_weight, False)
    else:
        if up is not None:
            ops.up_weight_gradient_out(x, made.dh, *rows, up, gate, *flags.up_weight, False)
        if down is not None:
            ops.down_weight_gradient_out(dout, made.a_scaled, *rows, down, flags.transposed, False)
    if gate is not None and gate.dtype != w_gate.dtype:
        gate = gate.to(w_gate.dtype)
    return up, gate, down


def _bias_gradients(
    made: DataGradients,
    dout: Tensor,
    places: Places,
    b_up: Tensor | None,
    b_down: Tensor | None,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None]:
    db_up = db_down = None
    if wanted.up_bias:
        db_up = torch.empty_like(b_up, memory_format=torch.contiguous_format)
        ops.bias_gradient_out(made.dh, places.offsets, None, None, db_up, False)
    if wanted.down_bias:
        db_down = torch.empty_like(b_down, memory_format=torch.contiguous_format)
        routed = places.offsets, places.row_token, places.row_score
        ops.bias_gradient_out(dout, *routed, db_down, False)
    return db_up, db_down


def _backward_fake(dout, x, token_offsets, h, h_scales, *rest):
    _, _, slot_row, row_score, *rest = rest
    w_up, w_gate, w_down, b_up, b_down = rest[_CODES : _CODES + 5]
    want_x, want_scores, up, down, up_bias, down_bias = rest[-1]
    nothing = dout.new_empty(0)

    def like(tensor: Tensor | None, want: bool) -> Tensor:
        return torch.empty_like(tensor) if want and tensor is not None else nothing

    return (
        dout.new_empty(x.shape) if want_x else nothing,
        row_score.new_empty(slot_row.shape) if want_scores else nothing,
        like(w_up, up),
        like(w_gate, up),
        like(w_down, down),
        like(b_up, up_bias),
        like(b_down, down_bias),
    )


_CODE_ARGUMENTS = ", ".join(f"Tensor {name}" for name in _OUT)
_SETTINGS = (
    "int kind, bool gated, float alpha, float limit, float up_offset, bool clamp_after, bool "
    "interleaved, bool transposed, int gradients, int scales, bool save_codes, "
    "bool wgrad_codes, bool keep"
)
_PLACES = "Tensor offsets, Tensor row_token, Tensor slot_row, Tensor row_score"
_LAYER = "Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? b_down"
library.define(
    "float8_experts(Tensor x, Tensor ids, Tensor scores, Tensor? token_offsets, Tensor? residual, "
    f"{_LAYER}, {_CODE_ARGUMENTS}, {_SETTINGS}) -> (Tensor o, Tensor h, Tensor h_scales, {_PLACES})"
)
library.define(
    "float8_backward(Tensor dout, Tensor x, Tensor? token_offsets, Tensor h, Tensor h_scales, "
    f"{_PLACES}, {_CODE_ARGUMENTS}, {_LAYER}, {_SETTINGS}, bool[] wanted) -> (Tensor dx, Tensor "
    "dscores, Tensor dw_up, Tensor dw_gate, Tensor dw_down, Tensor db_up, Tensor db_down)"
)
for _name, _function, _shapes in (
    ("float8_weights", _quantize, _quantize_fake),
    ("float8_weights_out", _quantize_out, lambda *args: None),
    ("float8_experts", _forward, _forward_fake),
    ("float8_backward", _backward, _backward_fake),
):
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _function, _key)
    torch.library.register_fake(f"guild::{_name}", lib=library)(_shapes)
register("float8_experts", _gradient, _setup)
register_without_gradient("float8_weights", "float8_weights_out", "float8_backward")
