"""Gradients of the weights of a layer in FP8: from 16-bit values, or from chunks of codes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guild._torch.float8_formats import E4M3, blocks
from guild._torch.float8_steps import Codes, DataGradients, Recipe, new_chunks
from guild._torch.float8_weights import halves_of
from guild._torch.gradient_memory import gradient_maker
from guild._torch.operators import LayerFlags, ops
from guild._torch.row_routing import RowRouting


class Chunked(NamedTuple):
    """Operands of the weight gradients in FP8; None if no wanted gradient reads it."""

    x: Codes | None
    dout: Codes | None
    dh: Codes | None  # halves of columns
    a_scaled: Codes | None
    routing: RowRouting
    gradients: int  # the format of dout and dh


def chunks_of(
    x: Tensor | Codes, routing: RowRouting, gathered: bool, halves: int, format_: int, scales: int
) -> Codes:
    """Rows, by token or already sorted, as `guild.float8.quantize_chunks` transposes them."""
    codes, x_scales = x if isinstance(x, Codes) else (x, None)
    columns, experts = codes.shape[1], routing.offsets.shape[0] - 1
    made = new_chunks(codes, routing.row_token.shape[0], experts, columns // halves, halves)
    row_token = routing.row_token if gathered else None
    ops.quantize_chunks_out(
        codes, x_scales, routing.offsets, row_token, halves, format_, scales, *made
    )
    return made


def chunked(
    made: DataGradients,
    x: Tensor | Codes,
    dout: Tensor,
    routing: RowRouting,
    halves: int,
    recipe: Recipe,
    up: bool,
) -> Chunked:
    """The operands of the weights' gradients as chunks; up: dW1's among them."""
    x_chunks = dout_chunks = None
    dh, a = made.dh_chunks, made.a_chunks
    gradient = recipe.gradients, recipe.scales
    if up:
        x_chunks = chunks_of(x, routing, True, 1, E4M3, recipe.scales)
        if dh is None:
            dh = chunks_of(made.dh, routing, False, halves, *gradient)
    if made.a_scaled is not None:
        a = chunks_of(made.a_scaled, routing, False, 1, E4M3, recipe.scales)
    if a is not None:
        source = made.dout_codes if recipe.regroups else dout
        dout_chunks = chunks_of(source, routing, True, 1, *gradient)
    return Chunked(x_chunks, dout_chunks, dh, a, routing, recipe.gradients)


def chunk_products(*given: Any) -> None:
    """Write dW1 and dW2: run the calls of `each_product`, whose arguments it takes."""
    for product in each_product(*given):
        product()


def each_product(
    operands: Chunked,
    up: Tensor | None,
    gate: Tensor | None,
    down: Tensor | None,
    flags: LayerFlags,
    pair: bool,
    accumulate: tuple[bool, bool] = (False, False),
    experts_at: Tensor | None = None,
) -> list[partial[None]]:
    """The calls that write dW1 into up and gate, and dW2 into down, where these are not None.

    There is one for each half of up, for gate and for down. pair: gate is a tensor of its own.
    accumulate: whether to add to up and gate, and to down. experts_at: for up, gate and down.
    """
    rows, offsets = operands.routing.row_token.shape[0], operands.routing.offsets
    products = []

    def product(a: Codes, b: Codes, out: Tensor, add: bool, list_: int) -> None:
        at = None if experts_at is None else experts_at[list_ : list_ + 1]
        given = *a, operands.gradients, *b, offsets, rows, out, add, at
        products.append(partial(ops.chunk_product_out, *given))

    targets = _up_targets(up, gate, flags, pair)
    for i, (target, list_) in enumerate(targets):
        if target is not None:
            codes, scales = operands.dh
            size = codes.shape[1] // len(targets)
            half = Codes(
                codes[:, i * size : (i + 1) * size],
                scales[:, i * blocks(size) : (i + 1) * blocks(size)],
            )
            product(half, operands.x, target, accumulate[0], list_)
    if down is not None:
        out = down.mT if flags.transposed else down
        product(operands.dout, operands.a_scaled, out, accumulate[1], 2)
    return products


def _up_targets(
    up: Tensor | None, gate: Tensor | None, flags: LayerFlags, pair: bool
) -> list[tuple[Tensor | None, int]]:
    """Where the gate's gradient (if there is one) and up's go, and in which list that is."""
    if up is not None and not pair:
        return [(half, 0) for half in halves_of(up, None, flags.up_weight())]
    both = [(gate, 1), (up, 0)] if flags.gated else [(up, 0)]
    if flags.transposed:
        return [(None if t is None else t.mT, list_) for t, list_ in both]
    return both


def weight_gradients(
    made: DataGradients,
    x: Tensor | Codes,
    dout: Tensor,
    routing: RowRouting,
    weights: tuple[Tensor, Tensor | None, Tensor],
    flags: LayerFlags,
    recipe: Recipe,
    wanted: tuple[bool, bool],
    lists: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dw_up, dw_gate and dw_down, each in its weight's dtype and layout.

    wanted: whether up's, and down's; lists: weights are views of unevenly spaced lists.
    """
    w_up, w_gate, w_down = weights
    like = gradient_maker(lists)
    up = gate = down = None
    if wanted[0]:
        up, gate = like(w_up), None if w_gate is None else like(w_gate)
    if wanted[1]:
        down = like(w_down)
    if recipe.wgrad_codes:
        operands = chunked(made, x, dout, routing, 2 if flags.gated else 1, recipe, wanted[0])
        chunk_products(operands, up, gate, down, flags, w_gate is not None)
        return up, gate, down
    rows = routing.offsets, routing.row_token
    layout = flags.up_weight()
    if up is not None and down is not None and up.dtype == down.dtype:
        operands = x, dout, made.dh, made.a_scaled, *rows
        ops.weight_gradients_out(*operands, up, gate, down, *layout, False)
    else:
        if up is not None:
            ops.up_weight_gradient_out(x, made.dh, *rows, up, gate, *layout, False)
        if down is not None:
            operands = dout, made.a_scaled, *rows
            ops.down_weight_gradient_out(*operands, down, flags.transposed, False)
    return up, gate, down


def bias_gradients(
    made: DataGradients,
    dout: Tensor,
    routing: RowRouting,
    biases: tuple[Tensor | None, Tensor | None],
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """db_up and db_down."""
    b_up, b_down = biases
    db_up = db_down = None
    if wanted[0]:
        db_up = torch.empty_like(b_up, memory_format=torch.contiguous_format)
        ops.bias_gradient_out(made.dh, routing.offsets, None, None, db_up, False)
    if wanted[1]:
        db_down = torch.empty_like(b_down, memory_format=torch.contiguous_format)
        ops.bias_gradient_out(
            dout, routing.offsets, routing.row_token, routing.row_score, db_down, False
        )
    return db_up, db_down
