"""The grouped product of quantised operands, in the shape of torch's scaled_grouped_mm."""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.checks import (
    dtype_name,
    expect_device,
    expect_dims,
    expect_dtype,
    expect_rows,
    expect_shape,
)
from guild._torch.float8_formats import ELEMENTS, FORMATS, as_bytes, blocks
from guild._torch.operators import ops

_scaled_grouped_mm_out = ops.scaled_grouped_mm_out.default


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
    BlockWise128x128. Each 128 products along K are summed separately, scaled and added in float32.

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
        If an argument is not as described, and on CUDA if K is not a multiple of 16 or an operand
        is not 16-byte aligned; the message names it.
    """
    _check(mat_a, mat_b, scale_a, scale_b, offs)
    expect_dtype("out_dtype", out_dtype)
    if out_dtype not in ELEMENTS:
        raise TypeError(
            f"out_dtype: expected bfloat16, float16 or float32, got {dtype_name(out_dtype)}"
        )
    out = torch.empty(mat_a.shape[0], mat_b.shape[2], dtype=out_dtype, device=mat_a.device)
    with torch.no_grad():
        _scaled_grouped_mm_out(
            as_bytes("mat_a", mat_a),
            scale_a,
            FORMATS.index(mat_a.dtype),
            as_bytes("mat_b", mat_b.mT),
            scale_b.mT,
            FORMATS.index(mat_b.dtype),
            offs,
            out,
        )
    return out


def _check(mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> None:
    """Dtypes, shapes and devices of operands, as `scaled_grouped_mm` describes them."""
    expect_dims("mat_a", mat_a, 2)
    expect_dims("mat_b", mat_b, 3)
    for name, tensor in (("mat_a", mat_a), ("mat_b", mat_b)):
        if tensor.dtype not in FORMATS:
            raise TypeError(
                f"{name}: expected dtype float8_e4m3fn or float8_e5m2, got "
                f"{dtype_name(tensor.dtype)}"
            )
    (rows, inner), (experts, depth, columns) = mat_a.shape, mat_b.shape
    if depth != inner:
        raise ValueError(f"mat_b: expected {inner} rows to match mat_a's columns, got {depth}")
    if experts == 0 or inner == 0 or columns == 0:
        raise ValueError(f"mat_b: expected sizes of at least 1, got shape {tuple(mat_b.shape)}")
    expect_rows("mat_a", mat_a)
    if mat_b.stride(1) != 1 and inner > 1:
        raise ValueError(f"mat_b: expected K contiguous, got strides {mat_b.stride()}")
    depth_blocks = blocks(inner)
    for name, tensor, shape in (
        ("scale_a", scale_a, (rows, depth_blocks)),
        ("scale_b", scale_b, (experts, depth_blocks, blocks(columns))),
    ):
        expect_shape(name, tensor, shape)
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name}: expected dtype float32, got {dtype_name(tensor.dtype)}")
    expect_shape("offs", offs, (experts,))
    if offs.dtype != torch.int32:
        raise TypeError(f"offs: expected contiguous int32, got {dtype_name(offs.dtype)}")
    if not offs.is_contiguous():
        raise ValueError(f"offs: expected contiguous int32, got strides {offs.stride()}")
    for name, tensor in (
        ("mat_b", mat_b),
        ("scale_a", scale_a),
        ("scale_b", scale_b),
        ("offs", offs),
    ):
        expect_device(name, tensor, mat_a, "mat_a")
