"""guild::float8_experts: a layer of quantised experts, with its gradient.

Masters may be float32 where x has 16 bits: only the quantiser reads them, and their gradients have
their dtype.
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
    wants_gradient,
    with_lists,
    without_lists,
)
from guild._torch.float8_formats import E4M3, blocks
from guild._torch.float8_gradients import bias_gradients, weight_gradients
from guild._torch.float8_steps import (
    Codes,
    Kept,
    QuantizedExperts,
    Recipe,
    Wanted,
    data_gradients,
    forward,
    quantized_rows,
    row_scales,
    up_step,
)
from guild._torch.gradient_memory import gradient_maker
from guild._torch.operators import LayerFlags, ops
from guild._torch.row_routing import RowRouting
from guild.activations import to_concatenated, to_interleaved

_FLAGS = len(LayerFlags._fields)
_CODES = len(QuantizedExperts._fields)
_RECIPE = len(Recipe._fields)
_ROUTING = 4  # results of sort_by_expert


def _taken(kind: type, rest: tuple, count: int) -> tuple:
    """A NamedTuple made of the first arguments, and the arguments that follow."""
    return kind(*rest[:count]), rest[count:]


def _given(result: Tensor | None, like: Tensor) -> Tensor:
    """An op's result, which is an empty tensor where there is none."""
    return like.new_empty(0) if result is None else result


def settings_of(rest: tuple) -> tuple[QuantizedExperts, LayerFlags, Recipe, bool]:
    """The arguments that follow a layer's biases, except experts_at."""
    experts, rest = _taken(QuantizedExperts, rest, _CODES)
    flags, rest = _taken(LayerFlags, rest, _FLAGS)
    recipe, (keep, *_) = _taken(Recipe, rest, _RECIPE)
    return experts, flags, recipe, keep


def _forward(x, ids, scores, token_offsets, residual, w_up, w_gate, w_down, b_up, b_down, *rest):
    experts, flags, recipe, keep = settings_of(rest)
    tokens = x, ids, scores, token_offsets, residual
    down = Codes(experts.down, experts.down_scales)
    flags, b_up = in_halves(flags, recipe, b_up)
    biases = b_up, b_down
    out, kept, codes, routing = forward(tokens, experts.halves(), down, biases, flags, recipe, keep)
    codes = codes if recipe.keeps_codes else (None, None)
    return out, *(_given(t, x) for t in (*kept, *codes)), *routing[:_ROUTING]


def experts_fake(
    x, ids, scores, token_offsets, residual, w_up, w_gate, w_down, b_up, b_down, *rest
):
    experts, _, recipe, keep = settings_of(rest)
    (count, hidden, size), halves = experts.down.shape, experts.up_scales.shape[1]
    rows = ids.numel()
    h = scales = codes = x_scales = None
    if keep:
        h = x.new_empty(rows, halves * size, dtype=torch.uint8 if recipe.save_codes else x.dtype)
        if recipe.save_codes:
            scales = row_scales(scores, rows, size, halves)
    if recipe.keeps_codes:
        codes = x.new_empty(x.shape, dtype=torch.uint8)
        x_scales = scores.new_empty(x.shape[0], blocks(hidden))

    def indices(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    routing = indices(count + 1), indices(rows), indices(*ids.shape), scores.new_empty(rows)
    made = (_given(t, x) for t in (h, scales, codes, x_scales))
    return x.new_empty(x.shape[0], hidden), *made, *routing


@torch.enable_grad()
def _without_elements(x: Tensor) -> Tensor | None:
    """A tensor with x's place in the graph that does not keep x's memory alive."""
    return x.narrow(0, 0, 0).clone() if wants_gradient(x) else None


def _setup(ctx, inputs, output):
    x, _, scores, token_offsets, _, w_up, w_gate, w_down, b_up, b_down, *rest = inputs
    _, *kept = output
    experts, ctx.flags, ctx.recipe, ctx.keep = settings_of(tuple(rest))
    experts_at = rest[_CODES + _FLAGS + _RECIPE + 1 :]
    masters = without_lists(ctx, experts_at[0] if experts_at else None, w_up, w_gate, w_down)
    x, node = (None, _without_elements(x)) if ctx.recipe.keeps_codes else (x, None)
    codes = experts.for_backward(ctx.keep)
    layer = *codes, b_up, b_down, *masters
    ctx.save_for_backward(node, scores, x, token_offsets, *kept, *layer)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx, dout, *_):
    nothing = (None,) * (_CODES + _FLAGS + _RECIPE + 2)
    if dout is None:
        return (*(None,) * 10, *nothing)
    want_x, _, want_scores, _, residual, up, gate, down, up_bias, down_bias = ctx.needs_input_grad[
        1:11
    ]
    wanted = Wanted(want_x, want_scores, up or gate, down, up_bias, down_bias)
    dx = dscores = None
    dlayer = (None,) * 5
    if any(wanted):
        node, scores, *saved = ctx.saved_tensors
        saved, masters = saved[:-3], with_lists(ctx, *saved[-3:])
        by_all = tied(rows_of(dout), node, scores)
        lists = ctx.experts_at is not None
        settings = *ctx.flags, *ctx.recipe, ctx.keep, lists, False, list(wanted)
        made = ops.float8_backward(by_all, *saved, *masters, *settings)
        needs = want_x, want_scores, up, gate, down, up_bias, down_bias
        dx, dscores, *dlayer = (g if want else None for g, want in zip(made, needs, strict=True))
    return dx, None, dscores, None, dout if residual else None, *dlayer, *nothing


def in_halves(
    flags: LayerFlags, recipe: Recipe, b_up: Tensor | None
) -> tuple[LayerFlags, Tensor | None]:
    """Flags and bias for an H with gate before up, the order that chunks of dH's codes need."""
    if not (flags.interleaved and flags.gated and recipe.wgrad_codes):
        return flags, b_up
    if b_up is not None:
        b_up = to_concatenated(b_up)
    return flags._replace(interleaved=False), b_up


def kept_or_again(
    kept: Kept,
    keep: bool,
    x: Tensor | Codes,
    routing: RowRouting,
    experts: QuantizedExperts,
    b_up: Tensor | None,
    flags: LayerFlags,
    recipe: Recipe,
    dtype: torch.dtype,
) -> Kept:
    """H as forward kept it, or computed again from x."""
    if keep:
        return kept
    codes = x if isinstance(x, Codes) else quantized_rows(x, E4M3, recipe.scales)
    return up_step(codes, routing, experts.halves(), b_up, flags, recipe, dtype, True)[1]


def _backward(dout, x, token_offsets, h, h_scales, codes, x_scales, *rest):
    routing, rest = RowRouting(*rest[:_ROUTING], token_offsets), rest[_ROUTING:]
    experts, (b_up, b_down, *masters) = _taken(QuantizedExperts, rest, _CODES)
    masters, rest = tuple(masters[:3]), masters[3:]
    flags, rest = _taken(LayerFlags, rest, _FLAGS)
    recipe, (keep, lists, by_row, wanted) = _taken(Recipe, rest, _RECIPE)
    wanted = Wanted(*wanted)
    layout = flags
    flags, bias = in_halves(flags, recipe, b_up)
    source = x
    if recipe.keeps_codes:
        source = Codes(codes, x_scales)
    elif recipe.regroups and (wanted.up or not keep):
        # Quantising X and making chunks of its codes takes less time than chunks of 16-bit rows.
        source = quantized_rows(x, E4M3, recipe.scales)
    kept = Kept(h, h_scales if recipe.save_codes else None)
    again = source, routing, experts, bias, flags, recipe, dout.dtype
    kept = kept_or_again(kept, keep, *again)
    about = routing, experts, b_down, flags, recipe, wanted
    made = data_gradients(dout, kept, *about, by_row)
    want = wanted.up, wanted.down
    operands = made, source, dout, routing
    weights = weight_gradients(*operands, masters, layout, recipe, want, lists)
    want = wanted.up_bias, wanted.down_bias
    db_up, db_down = bias_gradients(made, dout, routing, (b_up, b_down), want)
    if db_up is not None and flags != layout:
        db_up = to_interleaved(db_up)
    biases = db_up, db_down
    return tuple(_given(g, dout) for g in (*made[:2], *weights, *biases))


def _backward_fake(dout, x, token_offsets, h, h_scales, codes, x_scales, *rest):
    _, row_token, slot_row, row_score, *rest = rest
    b_up, b_down, w_up, w_gate, w_down = rest[_CODES : _CODES + 5]
    *_, lists, by_row, (want_x, want_scores, up, down, up_bias, down_bias) = rest

    def like(tensor: Tensor | None, want: bool, make=torch.empty_like) -> Tensor:
        return _given(make(tensor) if want and tensor is not None else None, dout)

    weight = gradient_maker(lists)
    rows = row_token.shape[0] if by_row else dout.shape[0]
    return (
        _given(dout.new_empty(rows, dout.shape[1]) if want_x else None, dout),
        _given(row_score.new_empty(slot_row.shape) if want_scores else None, dout),
        like(w_up, up, weight),
        like(w_gate, up, weight),
        like(w_down, down, weight),
        like(b_up, up_bias),
        like(b_down, down_bias),
    )


_CODE_ARGUMENTS = ", ".join(f"Tensor {name}" for name in QuantizedExperts._fields)
_BACKWARD_CODES = ", ".join(
    f"Tensor{'?' if name in ('up', 'down') else ''} {name}" for name in QuantizedExperts._fields
)
SETTINGS = (
    "int kind, bool gated, float alpha, float limit, float up_offset, bool clamp_after, bool "
    "interleaved, bool transposed, int gradients, int scales, bool save_codes, bool wgrad_codes, "
    "bool reads_x, bool keep"
)
_KEPT = (
    "Tensor h, Tensor h_scales, Tensor x_codes, Tensor x_scales, Tensor offsets, Tensor row_token, "
    "Tensor slot_row, Tensor row_score"
)
_MASTERS, _BIASES = "Tensor w_up, Tensor? w_gate, Tensor w_down", "Tensor? b_up, Tensor? b_down"
MASTERS_AND_BIASES = f"{_MASTERS}, {_BIASES}, {_CODE_ARGUMENTS}"
library.define(
    "float8_experts(Tensor x, Tensor ids, Tensor scores, Tensor? token_offsets, Tensor? residual, "
    f"{MASTERS_AND_BIASES}, {SETTINGS}, Tensor? experts_at=None) -> (Tensor "
    f"o, {_KEPT})"
)
library.define(
    f"float8_backward(Tensor dout, Tensor? x, Tensor? token_offsets, {_KEPT}, {_BACKWARD_CODES}, "
    f"{_BIASES}, {_MASTERS}, {SETTINGS}, bool lists, bool by_row, bool[] wanted) -> (Tensor dx, "
    "Tensor dscores, Tensor dw_up, Tensor dw_gate, Tensor dw_down, Tensor db_up, Tensor db_down)"
)
for _name, _function, _shapes in (
    ("float8_experts", _forward, experts_fake),
    ("float8_backward", _backward, _backward_fake),
):
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _function, _key)
    torch.library.register_fake(f"guild::{_name}", lib=library)(_shapes)
register("float8_experts", _gradient, _setup)
register_without_gradient("float8_backward")
