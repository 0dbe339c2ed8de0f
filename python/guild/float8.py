"""FP8: quantisation by blocks, and the grouped product of quantised operands.

Scales multiply, as torch's do: an element is its code times the scale of its block. Rows have a
scale for every 128 columns, weights for every 128 x 128 elements (DeepSeek-V3, arXiv:2412.19437,
section 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guild._torch.checks import (
    dtype_name,
    expect_choice,
    expect_device,
    expect_dims,
    expect_flag,
    expect_shape,
    expect_tensor,
)
from guild._torch.operators import ops

_quantize_rows_out = ops.quantize_rows_out.default
_quantize_weights_out = ops.quantize_weights_out.default
_scaled_grouped_mm_out = ops.scaled_grouped_mm_out.default

# In the order of guild::Float8 and guild::ScaleKind.
_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("exact", "power_of_two")
_ELEMENTS = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 128


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
    scales = torch.empty(rows, _blocks(columns), dtype=torch.float32, device=x.device)
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
    scales = torch.empty(experts, _blocks(out), _blocks(inner), dtype=torch.float32, device=device)
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


def scaled_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The grouped product of quantised rows and quantised weights.

    In the shape of torch.nn.functional.scaled_grouped_mm with the recipes BlockWise1x128 and
    BlockWise128x128. Every 128 products along K are summed apart and added in float32, scaled.

    Parameters
    ----------
    mat_a : torch.Tensor
        (M, K), float8_e4m3fn or float8_e5m2, columns contiguous.
    mat_b : torch.Tensor
        (E, K, N), float8_e4m3fn (e5m2 too on the CPU), K contiguous: ``weights.mT``.
    scale_a : torch.Tensor
        float32 (M, ceil(K / 128)), any strides.
    scale_b : torch.Tensor
        float32 (E, ceil(K / 128), ceil(N / 128)), any strides.
    offs : torch.Tensor
        int32 (E,): where each group of rows ends.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.

    Returns
    -------
    torch.Tensor
        (M, N). Rows at or past offs[-1] are zeros. Has no gradient.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, and on CUDA if K is no multiple of 16 or an operand
        does not lie on 16-byte boundaries; the message names it.
    """
    expect_dims("mat_a", mat_a, 2)
    expect_dims("mat_b", mat_b, 3)
    for name, tensor in (("mat_a", mat_a), ("mat_b", mat_b)):
        if tensor.dtype not in _FORMATS:
            raise TypeError(
                f"{name}: expected dtype float8_e4m3fn or float8_e5m2, got "
                f"{dtype_name(tensor.dtype)}"
            )
    (rows, inner), (experts, depth, columns) = mat_a.shape, mat_b.shape
    if depth != inner:
        raise ValueError(f"mat_b: expected {inner} rows as mat_a has columns, got {depth}")
    if experts == 0 or inner == 0 or columns == 0:
        raise ValueError(f"mat_b: expected sizes of at least 1, got shape {tuple(mat_b.shape)}")
    if (mat_b.stride(1) != 1 and inner > 1) or (mat_a.stride(1) != 1 and inner > 1):
        raise ValueError(
            f"mat_a, mat_b: expected K contiguous, got strides {mat_a.stride()} and "
            f"{mat_b.stride()}"
        )
    blocks = _blocks(inner)
    for name, tensor, shape in (
        ("scale_a", scale_a, (rows, blocks)),
        ("scale_b", scale_b, (experts, blocks, _blocks(columns))),
    ):
        expect_shape(name, tensor, shape)
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name}: expected dtype float32, got {dtype_name(tensor.dtype)}")
    expect_shape("offs", offs, (experts,))
    if offs.dtype != torch.int32 or not offs.is_contiguous():
        raise TypeError(f"offs: expected contiguous int32, got {dtype_name(offs.dtype)}")
    for name, tensor in (
        ("mat_b", mat_b),
        ("scale_a", scale_a),
        ("scale_b", scale_b),
        ("offs", offs),
    ):
        expect_device(name, tensor, mat_a, "mat_a")
    if out_dtype not in _ELEMENTS:
        raise TypeError(
            f"out_dtype: expected bfloat16, float16 or float32, got {dtype_name(out_dtype)}"
        )
    out = torch.empty(rows, columns, dtype=out_dtype, device=mat_a.device)
    with torch.no_grad():
        _scaled_grouped_mm_out(
            mat_a.view(torch.uint8),
            scale_a,
            _FORMATS.index(mat_a.dtype),
            mat_b.mT.view(torch.uint8),
            scale_b.mT,
            _FORMATS.index(mat_b.dtype),
            offs,
            out,
        )
    return out


def _blocks(size: int) -> int:
    return (size + _BLOCK - 1) // _BLOCK


def _settings(name: str, tensor: Tensor, dtype: torch.dtype, scale: str) -> tuple[int, int]:
    """The op's numbers for a format and a kind of scale, checked with what they are for."""
    expect_tensor(name, tensor)
    if tensor.dtype not in _ELEMENTS:
        raise TypeError(
            f"{name}: expected dtype bfloat16, float16 or float32, got {dtype_name(tensor.dtype)}"
        )
    if 0 in tensor.shape[1:] or (tensor.dim() == 3 and tensor.shape[0] == 0):
        raise ValueError(f"{name}: expected sizes of at least 1, got shape {tuple(tensor.shape)}")
    if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name}: expected contiguous columns, got strides {tensor.stride()}")
    if dtype not in _FORMATS:
        raise TypeError(
            f"dtype: expected float8_e4m3fn or float8_e5m2, got {dtype_name(dtype)}"
            if isinstance(dtype, torch.dtype)
            else f"dtype: expected a torch.dtype, got {dtype!r}"
        )
    expect_choice("scale", scale, _SCALES)
    return _FORMATS.index(dtype), _SCALES.index(scale)
