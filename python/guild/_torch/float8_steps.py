"""A layer of quantised experts as a sequence of ops, which forward and backward consist of.

Codes are uint8 here: E4M3, except for gradients' where `Recipe.gradients` says otherwise. Weights
are laid out as in `QuantizedExperts`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guild._torch.float8_formats import BLOCK, E4M3, blocks
from guild._torch.operators import LayerFlags, ops, score_parts
from guild._torch.row_routing import RowRouting
from guild.activations import Activation, to_interleaved

_POWER_OF_TWO = 1


class Recipe(NamedTuple):
    """A `guild.FP8` as the ops take it."""

    gradients: int  # guild::Float8 of dO and dH
    scales: int  # guild::ScaleKind of activations and gradients
    save_codes: bool  # keep H as codes
    wgrad_codes: bool  # weights' gradients are products of codes
    reads_x: bool = False  # X is kept for another gradient anyway

    @property
    def regroups(self) -> bool:
        """Whether weight gradients use existing codes, exactly, as scales are powers of two."""
        return self.wgrad_codes and self.scales == _POWER_OF_TWO

    @property
    def keeps_codes(self) -> bool:
        """Whether backward needs X's codes instead of X."""
        return self.regroups and not self.reads_x


class Codes(NamedTuple):
    """Codes of rows or weights, and their scales."""

    codes: Tensor
    scales: Tensor


class QuantizedExperts(NamedTuple):
    """Weights of one layer in both orders; halves: 2 with a gate, which comes first, else 1."""

    up: Tensor  # (E, halves * I, H)
    up_transposed: Tensor  # (E, H, halves * I)
    up_scales: Tensor  # (E, halves, ceil(I / 128), ceil(H / 128))
    down: Tensor  # (E, H, I)
    down_transposed: Tensor  # (E, I, H)
    down_scales: Tensor  # (E, ceil(H / 128), ceil(I / 128))

    def halves(self) -> list[Codes]:
        """Gate and up, or up alone, each (E, I, H)."""
        count, size = self.up_scales.shape[1], self.down_transposed.shape[1]
        return [
            Codes(self.up[:, i * size : (i + 1) * size], self.up_scales[:, i]) for i in range(count)
        ]

    def for_backward(self, keep: bool) -> tuple[Tensor | None, ...]:
        """The tensors that backward reads, None for others; keep: it need not recompute H."""
        return self._replace(up=None if keep else self.up, down=None)


class Kept(NamedTuple):
    """Pre-activations for backward: H in 16 bits, or as codes with scales."""

    h: Tensor | None
    scales: Tensor | None = None

    def arguments(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """h, h_codes and h_scales of the ops."""
        return (self.h, None, None) if self.scales is None else (None, self.h, self.scales)


def reads_codes(flags: LayerFlags) -> bool:
    """Whether the down gradient's CUDA kernel reads H as codes, as only the plain SwiGLU's does."""
    settings = slice(5)  # without a limit clamp_after has no effect
    return flags[settings] == Activation.named("silu").scalars[settings]


def in_16_bits(kept: Kept, flags: LayerFlags, dtype: torch.dtype) -> Kept:
    """H in `dtype` from its codes, gate and up in the flags' order."""
    halves = 2 if flags.gated else 1
    h = kept.h.view(torch.float8_e4m3fn).to(dtype).unflatten(1, (halves, -1))
    scales = kept.scales.unflatten(1, (halves, -1))  # in place, products are rounded only once
    size = h.shape[2]
    if size % BLOCK == 0:
        h.unflatten(2, (-1, BLOCK)).mul_(scales[..., None])
    else:
        h.mul_(scales.repeat_interleave(BLOCK, 2)[..., :size])
    return Kept((h.mT if flags.gated and flags.interleaved else h).flatten(1))


def quantized_rows(x: Tensor, format_: int, scales: int) -> Codes:
    """Rows with a scale for every 128 columns."""
    rows, columns = x.shape
    codes = x.new_empty(rows, columns, dtype=torch.uint8)
    made = Codes(codes, x.new_empty(rows, blocks(columns), dtype=torch.float32))
    ops.quantize_rows_out(x, format_, scales, *made)
    return made


def row_scales(like: Tensor, rows: int, size: int, halves: int) -> Tensor:
    """(rows, halves * ceil(size / 128)), the rows of a block side by side, as products like it."""
    return like.new_empty(halves * blocks(size), rows).t()


def up_step(
    x: Codes,
    routing: RowRouting,
    halves: list[Codes],
    b_up: Tensor | None,
    flags: LayerFlags,
    recipe: Recipe,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[Codes, Kept]:
    """A (R, I) as codes, and H where it is kept."""
    rows, size = routing.row_token.shape[0], halves[0].codes.shape[1]
    width, like = len(halves) * size, x.scales
    a = Codes(like.new_empty(rows, size, dtype=torch.uint8), row_scales(like, rows, size, 1))
    kept = Kept(None)
    if keep and recipe.save_codes:
        scales = row_scales(like, rows, size, len(halves))
        kept = Kept(like.new_empty(rows, width, dtype=torch.uint8), scales)
    elif keep:
        kept = Kept(like.new_empty(rows, width, dtype=dtype))
    *gate, up = halves
    ops.scaled_up_out(
        *x,
        E4M3,
        routing.offsets,
        routing.row_token,
        *up,
        *(gate[0] if gate else (None, None)),
        b_up,
        *flags[:-1],
        E4M3,
        recipe.scales,
        *kept.arguments(),
        *a,
    )
    return a, kept


def forward(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    halves: list[Codes],
    down: Codes,
    biases: tuple[Tensor | None, Tensor | None],
    flags: LayerFlags,
    recipe: Recipe,
    keep: bool,
) -> tuple[Tensor, Kept, Codes, RowRouting]:
    """O (T, H) and X's codes; tokens: x, ids, scores, token_offsets and residual of moe_forward."""
    x, ids, scores, token_offsets, residual = tokens
    experts, hidden, _ = down.codes.shape
    routing = RowRouting(*ops.sort_by_expert(ids, scores, experts, token_offsets), token_offsets)
    b_up, b_down = biases
    codes = quantized_rows(x, E4M3, recipe.scales)
    a, kept = up_step(codes, routing, halves, b_up, flags, recipe, x.dtype, keep)
    y = x.new_empty(routing.row_token.shape[0], hidden)
    ops.scaled_grouped_mm_out(*a, E4M3, *down, E4M3, routing.ends, y, bias=b_down)
    return ops.combine(y, routing.slot_row, scores, token_offsets, residual), kept, codes, routing


class Wanted(NamedTuple):
    """Which gradients are."""

    x: bool
    scores: bool
    up: bool
    down: bool
    up_bias: bool
    down_bias: bool


class DataGradients(NamedTuple):
    """Results of backward except the weights' gradients; None where not wanted."""

    dx: Tensor | None  # (T, H), or (R, H) by row
    dscores: Tensor | None
    dh: Tensor | None  # (R, W) in 16 bits, if anything reads it
    a_scaled: Tensor | None  # (R, I)
    dh_codes: Codes
    dout_codes: Codes
    dh_chunks: Codes | None  # if weight gradients read what is quantised here
    a_chunks: Codes | None


def new_chunks(like: Tensor, rows: int, experts: int, columns: int, halves: int) -> Codes:
    """Room for rows as chunks, `halves` parts of `columns` columns."""
    slots = rows // BLOCK + experts
    return Codes(
        like.new_empty(slots, halves * columns, BLOCK, dtype=torch.uint8),
        like.new_empty(slots, halves * blocks(columns), dtype=torch.float32),
    )


def _down_gradient(
    dout: Tensor,
    kept: Kept,
    routing: RowRouting,
    experts: QuantizedExperts,
    flags: LayerFlags,
    recipe: Recipe,
    wanted: Wanted,
) -> tuple[DataGradients, Tensor | None]:
    """dH and A, without dX and dscores as yet; and the partial sums of dscores."""
    rows, (count, size, _) = routing.row_token.shape[0], experts.down_transposed.shape
    halves = experts.up_scales.shape[1]
    scores = routing.row_score
    order = flags
    if kept.scales is not None and dout.is_cuda:
        if reads_codes(flags):
            flags = flags._replace(interleaved=False)  # codes never are
        else:
            kept = in_16_bits(kept, flags, dout.dtype)
    given = quantized_rows(dout, recipe.gradients, recipe.scales)
    from_dh = (wanted.up and not recipe.regroups) or wanted.up_bias
    dh = dout.new_empty(rows, halves * size) if from_dh else None
    a_scaled = dh_chunks = a_chunks = None
    if recipe.regroups:
        if wanted.up:
            dh_chunks = new_chunks(dout, rows, count, size, halves)
        if wanted.down:
            a_chunks = new_chunks(dout, rows, count, size, 1)
    elif wanted.down:
        a_scaled = dout.new_empty(rows, size)
    parts = scores.new_empty(rows, score_parts(size)) if wanted.scores else None
    dh_codes = Codes(
        dout.new_empty(rows, halves * size, dtype=torch.uint8),
        row_scales(scores, rows, size, halves),
    )
    ops.scaled_down_gradient_out(
        *given,
        recipe.gradients,
        routing.offsets,
        routing.row_token,
        scores,
        experts.down_transposed.mT,
        experts.down_scales,
        *kept.arguments(),
        *flags[:-1],
        recipe.gradients,
        recipe.scales,
        *dh_codes,
        dh,
        a_scaled,
        parts,
        *(dh_chunks or (None, None)),
        *(a_chunks or (None, None)),
        dout,
    )
    if flags != order and dh is not None:
        dh = to_interleaved(dh)
    return DataGradients(None, None, dh, a_scaled, dh_codes, given, dh_chunks, a_chunks), parts


def data_gradients(
    dout: Tensor,
    kept: Kept,
    routing: RowRouting,
    experts: QuantizedExperts,
    b_down: Tensor | None,
    flags: LayerFlags,
    recipe: Recipe,
    wanted: Wanted,
    by_row: bool = False,
) -> DataGradients:
    """dX, dscores and operands of the weight gradients; by_row: dX is (R, H), not summed."""
    made, parts = _down_gradient(dout, kept, routing, experts, flags, recipe, wanted)
    _, size, hidden = experts.down_transposed.shape
    dscores = dx = None
    if parts is not None:
        dscores = ops.score_gradient(
            parts, routing.slot_row, routing.offsets, dout, b_down, size, routing.token_offsets
        )
    if wanted.x:
        dx = dout.new_empty(routing.row_token.shape[0], hidden)
        ops.scaled_grouped_mm_out(
            *made.dh_codes,
            recipe.gradients,
            experts.up_transposed,
            experts.up_scales.flatten(1, 2).mT,
            E4M3,
            routing.ends,
            dx,
            halves=experts.up_scales.shape[1],
        )
        if not by_row:
            dx = ops.combine(dx, routing.slot_row, None, routing.token_offsets)
    return made._replace(dx=dx, dscores=dscores)
