"""guild::float8_weights: a layer's weights as codes, in both orders, whatever their layout."""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.autograd import library, register_without_gradient
from guild._torch.float8_formats import E4M3, blocks
from guild._torch.float8_steps import QuantizedExperts
from guild._torch.operators import ops


def halves_of(
    w_up: Tensor, w_gate: Tensor | None, layout: tuple[bool, bool, bool]
) -> tuple[Tensor, ...]:
    """Gate (if there is one) and up as (E, I, H) each; layout: LayerFlags.up_weight."""
    gated, interleaved, transposed = layout
    if transposed:
        w_up, w_gate = w_up.mT, None if w_gate is None else w_gate.mT
    if not gated:
        return (w_up,)
    if w_gate is not None:
        return w_gate, w_up
    return (w_up[:, 0::2], w_up[:, 1::2]) if interleaved else w_up.chunk(2, 1)


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


def _quantize_out(
    w_up, w_gate, w_down, gated, interleaved, transposed, experts_at, scale, *out
) -> None:
    made = QuantizedExperts(*out)
    first, *second = halves_of(w_up, w_gate, (gated, interleaved, transposed))
    up_at = down_at = None
    if experts_at is not None:  # its rows are for w_up, w_gate and w_down
        down_at = experts_at[2:]
        up_at = experts_at[:1]
        if gated:  # gate, which lies in w_up where it is one tensor, then up; no host waits for it
            up_at = torch.cat((up_at if w_gate is None else experts_at[1:2], up_at))
    ops.quantize_weights_out(
        first,
        E4M3,
        scale,
        made.up,
        made.up_transposed,
        made.up_scales.flatten(1, 2),
        up=second[0] if second else None,
        experts_at=up_at,
    )
    down = w_down.mT if transposed else w_down
    codes = made.down, made.down_transposed, made.down_scales
    ops.quantize_weights_out(down, E4M3, scale, *codes, experts_at=down_at)


def _quantize(w_up, w_gate, w_down, gated, interleaved, transposed, experts_at, scale):
    made = _empty_codes(w_down, gated, transposed)
    _quantize_out(w_up, w_gate, w_down, gated, interleaved, transposed, experts_at, scale, *made)
    return tuple(made)


def _quantize_fake(w_up, w_gate, w_down, gated, interleaved, transposed, experts_at, scale):
    return tuple(_empty_codes(w_down, gated, transposed))


_GIVEN = "Tensor w_up, Tensor? w_gate, Tensor w_down, bool gated, bool interleaved, bool "
_GIVEN += "transposed, Tensor? experts_at, int scale"
_RESULTS = ", ".join(f"Tensor {name}" for name in QuantizedExperts._fields)
_WRITTEN = ", ".join(
    f"Tensor({letter}!) {name}"
    for letter, name in zip("abcdef", QuantizedExperts._fields, strict=True)
)
library.define(f"float8_weights({_GIVEN}) -> ({_RESULTS})")
library.define(f"float8_weights_out({_GIVEN}, {_WRITTEN}) -> ()")
for _name, _function, _shapes in (
    ("float8_weights", _quantize, _quantize_fake),
    ("float8_weights_out", _quantize_out, lambda *args: None),
):
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _function, _key)
    torch.library.register_fake(f"guild::{_name}", lib=library)(_shapes)
register_without_gradient("float8_weights", "float8_weights_out")
