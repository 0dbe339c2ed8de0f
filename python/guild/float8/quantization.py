"""Rows and expert weights as codes of one byte and a scale a block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guild._torch.checks import (
    dtype_name,
    expect_choice,
    expect_dims,
    expect_flag,
    expect_tensor,
)
from guild._torch.operators import ops
from guild.float8.formats import ELEMENTS, FORMATS, SCALES, blocks

_quantize_rows_out = ops.quantize_rows_out.default
_quantize_weights_out = ops.quantize_weights_out.default


class Quantized(NamedTuple):
    """A quantised matrix, or one per expert.

    Parameters
    ----------
    codes : torch.Tensor
        Of the matrix's shape, float8_e4m3fn or float8_e5m2.
    scales : torch.Tensor
        float32: (rows, ceil(columns / 128)) of rows, (E, ceil(out / 128), ceil(in / 128)) of
        weights.
    transposed : torch.Tensor, optional
        Of weights, where asked for: the codes as (E, in, out), contiguous. Their scales are
        ``scales.mT``.
    """

    codes: Tensor
    scales: Tensor
    transposed: Tensor | None = None


def quantize(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, scale: str = "exact"
) -> Quantized:
    """Quantise rows, with a scale for every 128 columns of each.

    A scale is the block's largest absolute value over the largest of `dtype`, and codes are
    rounded to the nearest even. In a block below 2**-100 that value counts as 2**-100; a block
    that holds an infinity or a NaN gets NaN for its scale and its codes. The CPU and CUDA give the
    same bits.

    Parameters
    ----------
    x : torch.Tensor
        (rows, columns), bfloat16, float16 or float32, columns contiguous.
    dtype : torch.dtype
        float8_e4m3fn or float8_e5m2.
    scale : {"exact", "power_of_two"}
        Whether scales are rounded up to powers of two (UE8M0).

    Returns
    -------
    Quantized
        codes (rows, columns) and scales (rows, ceil(columns / 128)).

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    expect_dims("x", x, 2)
    format_, kind = _settings("x", x, dtype, scale)
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scales = torch.empty(rows, blocks(columns), dtype=torch.float32, device=x.device)
    with torch.no_grad():
        _quantize_rows_out(x, format_, kind, codes.view(torch.uint8), scales)
    return Quantized(codes, scales)


def quantize_weights(
    weight: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scale: str = "exact",
    transposed: bool = False,
) -> Quantized:
    """Quantise expert weights, with a scale for every 128 x 128 elements.

    Parameters
    ----------
    weight : torch.Tensor
        (E, out, in), bfloat16, float16 or float32, with any strides.
    dtype, scale :
        As in `quantize`.
    transposed : bool
        Write the codes in the other order as well, for products that sum over `out`.

    Returns
    -------
    Quantized
        codes (E, out, in), contiguous, scales (E, ceil(out / 128), ceil(in / 128)), and transposed
        (E, in, out) or None.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    expect_dims("weight", weight, 3)
    expect_flag("transposed", transposed)
    format_, kind = _settings("weight", weight, dtype, scale)
    experts, out, inner = weight.shape
    device = weight.device
    codes = torch.empty(experts, out, inner, dtype=dtype, device=device)
    turned = torch.empty(experts, inner, out, dtype=dtype, device=device) if transposed else None
    scales = torch.empty(experts, blocks(out), blocks(inner), dtype=torch.float32, device=device)
    with torch.no_grad():
        _quantize_weights_out(
            weight,
            format_,
            kind,
            codes.view(torch.uint8),
            None if turned is None else turned.view(torch.uint8),
            scales,
        )
    return Quantized(codes, scales, turned)


def _settings(name: str, tensor: Tensor, dtype: torch.dtype, scale: str) -> tuple[int, int]:
    """The op's numbers for a format and a kind of scale, checked with what they are for."""
    expect_tensor(name, tensor)
    if tensor.dtype not in ELEMENTS:
        raise TypeError(
            f"{name}: expected dtype bfloat16, float16 or float32, got {dtype_name(tensor.dtype)}"
        )
    if 0 in tensor.shape[1:] or (tensor.dim() == 3 and tensor.shape[0] == 0):
        raise ValueError(f"{name}: expected sizes of at least 1, got shape {tuple(tensor.shape)}")
    if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name}: expected contiguous columns, got strides {tensor.stride()}")
    if dtype not in FORMATS:
        raise TypeError(
            f"dtype: expected float8_e4m3fn or float8_e5m2, got {dtype_name(dtype)}"
            if isinstance(dtype, torch.dtype)
            else f"dtype: expected a torch.dtype, got {dtype!r}"
        )
    expect_choice("scale", scale, SCALES)
    return FORMATS.index(dtype), SCALES.index(scale)
