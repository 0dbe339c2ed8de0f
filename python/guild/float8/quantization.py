"""Rows and expert weights as narrow codes with one scale per block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guild._torch.checks import (
    expect_choice,
    expect_dims,
    expect_flags,
    expect_like,
    expect_rows,
    expect_shape,
    expect_tensor,
)
from guild._torch.expert_lists import Listed, Placed, is_pair, joined, joined_halves, table_of
from guild._torch.float8_formats import FORMATS, SCALES, blocks, expect_elements, expect_format
from guild._torch.operators import ops
from guild.float8.microscaling import ORDERS, ROUNDINGS, quantize_micro

# Kinds of scale of each format, the default first.
_SCALES_OF = {"blockwise": SCALES, "mxfp8": ROUNDINGS, "nvfp4": ROUNDINGS}

_quantize_rows_out = ops.quantize_rows_out.default
_quantize_weights_out = ops.quantize_weights_out.default


class Quantized(NamedTuple):
    """A quantised matrix, or one per expert.

    Parameters
    ----------
    codes : torch.Tensor
        Of the matrix's shape, float8_e4m3fn or float8_e5m2; of NVFP4 half as many columns,
        float4_e2m1fn_x2.
    scales : torch.Tensor
        float32: (rows, ceil(columns / 128)) of rows, (E, ceil(out / 128), ceil(in / 128)) of
        weights; of microscaling formats as `quantize` says.
    transposed : torch.Tensor, optional
        Of weights, where asked for: the codes as (E, in, out), contiguous. Their scales are
        ``scales.mT``.
    global_scale : torch.Tensor, optional
        Of NVFP4: float32 (1), a factor of all elements.
    """

    codes: Tensor
    scales: Tensor
    transposed: Tensor | None = None
    global_scale: Tensor | None = None


def quantize(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    format: str = "blockwise",
    scale: str | None = None,
    scale_order: str = "rows",
    global_scale: Tensor | None = None,
) -> Quantized:
    """Quantise rows, with a scale for every 128 columns of each, or to a microscaling format.

    Elements are multiplied in float32 by the inverse of their block's scale, and the products are
    rounded to the nearest code, ties to the even one; those beyond the format's largest value
    become that. The inverse is rounded to float32 (with scale="exact" it is the largest value of
    `dtype` over the block's largest absolute value), so where the scale is no power of two a
    division may give another code. The CPU and CUDA give the same bits. There is no gradient.

    - "blockwise": blocks of 1 x 128, codes of `dtype`, float32 scales. With scale="exact" a scale
      is the block's largest absolute value over the largest of `dtype`, with "power_of_two" the
      smallest power of two that is not below it. A largest absolute value below 2**-100 counts as
      2**-100.
    - "mxfp8" (OCP Microscaling Formats Specification 1.0): blocks of 1 x 32, codes of `dtype`, E8M0
      scales. With scale="floor" a scale is 2 to the power of floor(log2(largest absolute value))
      minus that of the largest of `dtype`, at least 2**-127; with "ceil" the smallest power of two
      that brings the block into the format's range.
    - "nvfp4": blocks of 1 x 16, E2M1 codes, two a byte, e4m3 scales: e4m3(largest absolute value
      / 6 / global_scale).

    A block that holds an infinity or a NaN gets NaN for its scale and its codes; E2M1 has no NaN,
    so its codes become zeros.

    Parameters
    ----------
    x : torch.Tensor
        (rows, columns), bfloat16, float16 or float32, columns contiguous.
    dtype : torch.dtype
        float8_e4m3fn or float8_e5m2; has no effect for "nvfp4".
    format : {"blockwise", "mxfp8", "nvfp4"}
        See above.
    scale : str, optional
        How scales are rounded, as above. By default "exact" or "floor".
    scale_order : {"rows", "swizzled"}
        Of microscaling formats: row by row, or in tiles of 128 x 4 as cuBLAS's block-scaled
        products take them (its "1D Block Scaling Factors Layout").
    global_scale : torch.Tensor, optional
        Of "nvfp4": float32 (1), to be used. By default the largest absolute value of all finite
        blocks, at least 2**-100, over 6 * 448.

    Returns
    -------
    Quantized
        blockwise: codes (rows, columns) and float32 scales (rows, ceil(columns / 128)). mxfp8: the
        same with float8_e8m0fnu scales (rows, ceil(columns / 32)). nvfp4: float4_e2m1fn_x2 codes
        (rows, columns / 2), the first element of a byte in its low half, float8_e4m3fn scales
        (rows, ceil(columns / 16)), and global_scale. Swizzled scales have rows and blocks rounded
        up to multiples of 128 and 4.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    expect_dims("x", x, 2)
    expect_choice("format", format, tuple(_SCALES_OF))
    scales_of = _SCALES_OF[format]
    if scale is None:
        scale = scales_of[0]
    elif format == "nvfp4" or not isinstance(scale, str) or scale not in scales_of:
        wanted = "none" if format == "nvfp4" else " or ".join(map(repr, scales_of))
        raise ValueError(f"scale: expected {wanted} with format={format!r}, got {scale!r}")
    expect_choice("scale_order", scale_order, ORDERS)
    if global_scale is not None:
        expect_tensor("global_scale", global_scale)
        if format != "nvfp4":
            raise ValueError(f"global_scale: expected none with format={format!r}, got a tensor")
    _expect_source("x", x, dtype)
    if format != "blockwise":
        made = quantize_micro(x, dtype, format, scale, scale_order, global_scale)
        return Quantized(made[0], made[1], None, made[2])
    if scale_order != "rows":
        raise ValueError(f"scale_order: expected 'rows' with format={format!r}, got 'swizzled'")
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scales = torch.empty(rows, blocks(columns), dtype=torch.float32, device=x.device)
    with torch.no_grad():
        _quantize_rows_out(
            x, FORMATS.index(dtype), SCALES.index(scale), codes.view(torch.uint8), scales
        )
    return Quantized(codes, scales)


def quantize_weights(
    weight: Listed | tuple[Listed, Listed],
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scale: str = "exact",
    transposed: bool = False,
    gated: bool = False,
    interleaved: bool = False,
) -> Quantized:
    """Quantise expert weights, with a scale for every 128 x 128 elements.

    Whatever the layout of the weights, the codes have one: the rows of `out` in order, in a gated
    weight all of the gate's before all of up's. Gate and up share no block.

    Parameters
    ----------
    weight : torch.Tensor, list of torch.Tensor, or a pair of either
        (E, out, in), bfloat16, float16 or float32, with any strides; or a list of E matrices
        (out, in); or (gate, up), which is a gated weight.
    dtype, scale :
        As in `quantize`.
    transposed : bool
        Also write the codes in the other order, for products that sum over `out`.
    gated : bool
        The rows of `out` are gate and up.
    interleaved : bool
        For a gated weight in one tensor: gate and up alternate. Otherwise up follows the gate.

    Returns
    -------
    Quantized
        codes (E, out, in), contiguous, scales (E, ceil(out / 128), ceil(in / 128)), and transposed
        (E, in, out) or None. Of a gated weight, out is that of both halves and scales are
        (E, 2 * ceil(out / 2 / 128), ceil(in / 128)).

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    expect_flags(transposed=transposed, gated=gated, interleaved=interleaved)
    gate, up = _halves(weight, gated or is_pair(weight), interleaved)
    name = "weight" if up is None or not is_pair(weight) else "weight[0] (gate)"
    _expect_source(name, gate.tensor, dtype)
    expect_choice("scale", scale, SCALES)
    experts, out, inner = gate.tensor.shape
    device = gate.tensor.device
    halves = 1 if up is None else 2
    codes = torch.empty(experts, halves * out, inner, dtype=dtype, device=device)
    turned = None
    if transposed:
        turned = torch.empty(experts, inner, halves * out, dtype=dtype, device=device)
    scales = torch.empty(
        experts, halves * blocks(out), blocks(inner), dtype=torch.float32, device=device
    )
    with torch.no_grad():
        _quantize_weights_out(
            gate.tensor,
            FORMATS.index(dtype),
            SCALES.index(scale),
            codes.view(torch.uint8),
            None if turned is None else turned.view(torch.uint8),
            scales,
            None if up is None else up.tensor,
            table_of(gate) if up is None else table_of(gate, up),
        )
    return Quantized(codes, scales, turned)


def _halves(weight: object, gated: bool, interleaved: bool) -> tuple[Placed, Placed | None]:
    """The weight as (E, out, in), and the second half of a gated one."""
    if is_pair(weight):
        if len(weight) != 2:
            raise ValueError(f"weight: expected a pair (gate, up), got {len(weight)} of them")
        if interleaved:
            raise ValueError("interleaved: expected False for a pair (gate, up), got True")
        gate, up = joined_halves("weight", weight, attached=False)
        expect_dims("weight[0] (gate)", gate.tensor, 3)
        expect_shape("weight[1] (up)", up.tensor, tuple(gate.tensor.shape), "the gate's shape")
        expect_like("weight[1] (up)", up.tensor, gate.tensor, "weight[0] (gate)")
        return gate, up
    whole = joined("weight", weight, attached=False)
    expect_dims("weight", whole.tensor, 3)
    if not gated:
        if interleaved:
            raise ValueError("interleaved: expected False for a weight without a gate, got True")
        return whole, None
    rows = whole.tensor.shape[1]
    if rows % 2:
        raise ValueError(f"weight: expected an even number of rows (gate and up), got {rows}")
    half, step = (1, 2) if interleaved else (rows // 2, 1)
    halves = whole.tensor[:, : rows - half : step], whole.tensor[:, half::step]
    return Placed(halves[0], whole.at), Placed(halves[1], whole.at)


def _expect_source(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise unless it can be quantised to codes of `dtype`."""
    expect_elements(name, tensor)
    if 0 in tensor.shape[1:] or (tensor.dim() == 3 and tensor.shape[0] == 0):
        raise ValueError(f"{name}: expected sizes of at least 1, got shape {tuple(tensor.shape)}")
    if tensor.dim() == 2:
        expect_rows(name, tensor)
    expect_format("dtype", dtype)
