"""MXFP8 and NVFP4: rows of narrow codes with a narrow scale for every 32 or 16 of them."""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.checks import (
    dtype_name,
    expect_device,
    expect_dims,
    expect_rows,
    expect_shape,
)
from guild._torch.float8_formats import FORMATS, as_bytes, blocks, expect_format, expect_scales
from guild._torch.operators import ops

_quantize_micro_out = ops.quantize_micro_out.default
_regroup_micro_out = ops.regroup_micro_out.default

# In the order of guild::MicroRounding and guild::ScaleOrder.
ROUNDINGS = ("floor", "ceil")
ORDERS = ("rows", "swizzled")
_NVFP4 = 2  # guild::Microscaling, after MXFP8 in the order of FORMATS
_BLOCK_OF = {"mxfp8": 32, "nvfp4": 16}
_LEAST_GLOBAL = 2.0**-100 / (6 * 448)


def quantize_micro(
    x: Tensor, dtype: torch.dtype, format: str, scale: str, order: str, global_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and NVFP4's global scale of rows whose dtype and layout are checked."""
    rows, columns = x.shape
    nvfp4 = format == "nvfp4"
    if nvfp4 and columns % 2:
        raise ValueError(f"x: expected an even number of columns for NVFP4, got {columns}")
    if global_scale is not None:
        expect_shape("global_scale", global_scale, (1,))
        expect_scales("global_scale", global_scale)
        expect_device("global_scale", global_scale, x, "x")
        global_scale = global_scale.resolve_neg()
    width = -(-columns // _BLOCK_OF[format])
    shape = (rows, width) if order == "rows" else (-(-rows // 128) * 128, -(-width // 4) * 4)
    device = x.device
    codes = torch.empty(rows, columns // 2 if nvfp4 else columns, dtype=torch.uint8, device=device)
    scales = torch.empty(shape, dtype=torch.uint8, device=device)
    made = global_scale
    if nvfp4 and made is None:
        made = torch.full((1,), _LEAST_GLOBAL, dtype=torch.float32, device=device)
    with torch.no_grad():
        _quantize_micro_out(
            x,
            _NVFP4 if nvfp4 else FORMATS.index(dtype),
            0 if nvfp4 else ROUNDINGS.index(scale),
            ORDERS.index(order),
            codes,
            scales.flatten(),
            made if global_scale is None else made.clone(),  # which the op says it writes
            global_scale is not None,
        )
    if nvfp4:
        return codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn), made
    return codes.view(dtype), scales.view(torch.float8_e8m0fnu), None


def regroup(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Turn MXFP8 rows into what Guild's products take: a float32 scale for every 128 columns.

    The new scale is the largest of four. Codes of the others are multiplied by the ratio of the two
    scales, a power of two, and rounded to the nearest even: this is exact unless they become
    subnormal. In float8_e4m3fn elements of at least 2**-14 of the largest value that their new
    scale allows lose nothing.

    Parameters
    ----------
    codes : torch.Tensor
        (rows, columns), float8_e4m3fn or float8_e5m2, columns contiguous.
    scales : torch.Tensor
        float8_e8m0fnu (rows, ceil(columns / 32)), contiguous: row by row, not swizzled.

    Returns
    -------
    tuple of torch.Tensor
        codes (rows, columns) and float32 scales (rows, ceil(columns / 128)).

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    expect_dims("codes", codes, 2)
    expect_format("codes", codes.dtype)
    rows, columns = codes.shape
    if columns == 0:
        raise ValueError(f"codes: expected columns, got shape {tuple(codes.shape)}")
    expect_rows("codes", codes)
    expect_shape("scales", scales, (rows, -(-columns // 32)))
    if scales.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"scales: expected dtype float8_e8m0fnu, got {dtype_name(scales.dtype)}")
    if not scales.is_contiguous():
        raise ValueError(f"scales: expected a contiguous tensor, got strides {scales.stride()}")
    expect_device("scales", scales, codes, "codes")
    wide = torch.empty(rows, columns, dtype=codes.dtype, device=codes.device)
    made = torch.empty(rows, blocks(columns), dtype=torch.float32, device=codes.device)
    with torch.no_grad():
        _regroup_micro_out(
            as_bytes("codes", codes),
            as_bytes("scales", scales),
            FORMATS.index(codes.dtype),
            wide.view(torch.uint8),
            made,
        )
    return wide, made
