"""Rows as chunks, 128 rows of a group transposed, and weight gradients as products of chunks.

Chunk j of group e, whose rows begin at o, is in slot o // 128 + e + j: no group is padded and no
count leaves the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guild._torch.checks import (
    dtype_name,
    expect_choice,
    expect_count,
    expect_device,
    expect_dims,
    expect_flag,
    expect_own_elements,
    expect_rows,
    expect_shape,
)
from guild._torch.expert_lists import Placed, table_of
from guild._torch.float8_formats import (
    BLOCK,
    FORMATS,
    SCALES,
    as_bytes,
    blocks,
    expect_elements,
    expect_format,
    expect_scales,
)
from guild._torch.operators import ops
from guild.float8.quantization import Quantized

_quantize_chunks_out = ops.quantize_chunks_out.default
_chunk_product_out = ops.chunk_product_out.default


class Chunks(NamedTuple):
    """Quantised rows in chunks of 128 rows of a group, transposed.

    Parameters
    ----------
    codes : torch.Tensor
        (slots, columns, 128), float8_e4m3fn or float8_e5m2, contiguous; slots = rows // 128 +
        groups. A group's last chunk is padded with zeros; slots without a chunk hold arbitrary
        values.
    scales : torch.Tensor
        float32 (slots, halves * ceil(columns / halves / 128)).
    """

    codes: Tensor
    scales: Tensor

    def columns(self, first: int, count: int) -> Chunks:
        """A range of columns that begins at a multiple of 128, or where the second half does."""
        codes, block = self.codes[:, first : first + count], blocks(first)
        return Chunks(codes, self.scales[:, block : block + blocks(count)])


def quantize_chunks(
    x: Tensor | Quantized,
    offsets: Tensor,
    row_token: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scale: str = "power_of_two",
    halves: int = 1,
) -> Chunks:
    """Quantise rows as chunks, with a scale for each 128 rows x 128 columns.

    Parameters
    ----------
    x : torch.Tensor or Quantized
        (rows, columns), bfloat16, float16 or float32, columns contiguous. Or what `guild.quantize`
        made of it with scale="power_of_two": a block then gets the largest scale of its rows and
        the codes are shifted, exactly unless they become subnormal. The result is that of the
        codes' values.
    offsets : torch.Tensor
        int32 (groups + 1): group e has the rows offsets[e] .. offsets[e + 1].
    row_token : torch.Tensor, optional
        int32 (rows): which row of x each row is; x then has one row per token. Rows of tokens that
        do not exist are zeros.
    dtype, scale :
        As in `guild.quantize`; for codes, those that they were made with.
    halves : int
        2 if the columns are gate and up, which then share no block.

    Returns
    -------
    Chunks

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    scales = None
    if isinstance(x, Quantized):
        codes, scales = x[:2]
        expect_dims("x.codes", codes, 2)
        dtype = codes.dtype
        expect_format("x.codes", dtype)
        expect_shape("x.scales", scales, (codes.shape[0], _width_in_blocks(codes, halves)))
        expect_scales("x.scales", scales)
        expect_device("x.scales", scales, codes, "x.codes")
        x = as_bytes("x.codes", codes)
    elif not isinstance(x, Tensor):
        raise TypeError(f"x: expected a torch.Tensor or guild.Quantized, got {type(x).__name__}")
    else:
        expect_dims("x", x, 2)
        expect_elements("x", x)
    expect_format("dtype", dtype)
    expect_choice("scale", scale, SCALES)
    width = _width_in_blocks(x, halves)
    rows = _expect_rows(x, offsets, row_token)
    slots = chunk_slots(rows, offsets.shape[0] - 1)
    codes = torch.empty(slots, x.shape[1], BLOCK, dtype=dtype, device=x.device)
    made = torch.empty(slots, width, dtype=torch.float32, device=x.device)
    with torch.no_grad():
        _quantize_chunks_out(
            x,
            scales,
            offsets,
            row_token,
            halves,
            FORMATS.index(dtype),
            SCALES.index(scale),
            codes.view(torch.uint8),
            made,
        )
    return Chunks(codes, made)


def chunk_product(
    a: Chunks,
    b: Chunks,
    offsets: Tensor,
    rows: int,
    out: Tensor | Placed,
    *,
    accumulate: bool = False,
) -> None:
    """Sum over the rows of each group: out[e] = A^T B, a weight's gradient.

    Parameters
    ----------
    a, b : Chunks
        Of (rows, n) and (rows, k); b is float8_e4m3fn. Both were made with these offsets.
    offsets : torch.Tensor
        int32 (groups + 1).
    rows : int
        Number of rows that the offsets divide, including those of no group.
    out : torch.Tensor
        (groups, n, k), bfloat16, float16 or float32, any strides: written, or added to. Groups
        without rows get zeros, or are left alone.
    accumulate : bool
        Add to `out`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    placed = out if isinstance(out, Placed) else Placed(out)
    expect_flag("accumulate", accumulate)
    expect_count("rows", rows, 0)
    groups = _expect_offsets(offsets)
    slots = chunk_slots(rows, groups)
    for name, chunks in (("a", a), ("b", b)):
        if not isinstance(chunks, Chunks):
            raise TypeError(f"{name}: expected guild.float8.Chunks, got {type(chunks).__name__}")
        _expect_chunks(name, chunks, slots, f"{rows} rows in {groups} groups have {slots} slots")
    if b.codes.dtype != torch.float8_e4m3fn:
        raise TypeError(f"b.codes: expected dtype float8_e4m3fn, got {dtype_name(b.codes.dtype)}")
    shape = (groups, a.codes.shape[1], b.codes.shape[1])
    expect_shape("out", placed.tensor, shape)
    expect_elements("out", placed.tensor)
    if isinstance(out, Tensor):
        expect_own_elements("out", out)
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError("out: expected a tensor that wants no gradient, got one that does")
    for name, tensor in (
        ("a.scales", a.scales),
        ("b.codes", b.codes),
        ("b.scales", b.scales),
        ("offsets", offsets),
        ("out", placed.tensor),
    ):
        expect_device(name, tensor, a.codes, "a.codes")
    with torch.no_grad():
        _chunk_product_out(
            as_bytes("a.codes", a.codes),
            a.scales,
            FORMATS.index(a.codes.dtype),
            as_bytes("b.codes", b.codes),
            b.scales,
            offsets,
            rows,
            placed.tensor,
            accumulate,
            table_of(placed),
        )


def chunk_slots(rows: int, groups: int) -> int:
    """Slots for the chunks of `rows` rows in groups of any sizes."""
    return rows // BLOCK + groups


def _expect_chunks(name: str, chunks: Chunks, slots: int, hint: str) -> None:
    codes, scales = chunks
    expect_dims(f"{name}.codes", codes, 3)
    expect_format(f"{name}.codes", codes.dtype)
    columns = codes.shape[1]
    if columns == 0:
        raise ValueError(f"{name}.codes: expected columns, got shape {tuple(codes.shape)}")
    expect_shape(f"{name}.codes", codes, (slots, columns, BLOCK), hint)
    if codes.stride()[1:] != (BLOCK, 1):
        raise ValueError(
            f"{name}.codes: expected the {BLOCK} codes of a column contiguous and columns {BLOCK} "
            f"apart, got strides {codes.stride()}"
        )
    expect_shape(f"{name}.scales", scales, (slots, blocks(columns)))
    expect_scales(f"{name}.scales", scales)


def _width_in_blocks(x: Tensor, halves: int) -> int:
    expect_count("halves", halves, 1, 2)
    if x.shape[1] % halves or not x.shape[1]:
        raise ValueError(
            f"halves: expected 1, or 2 with an even number of columns, got {halves} of "
            f"{x.shape[1]} columns"
        )
    return halves * blocks(x.shape[1] // halves)


def _expect_rows(x: Tensor, offsets: Tensor, row_token: Tensor | None) -> int:
    """The number of rows; offsets and row_token are checked."""
    expect_rows("x", x)
    _expect_offsets(offsets)
    expect_device("offsets", offsets, x, "x")
    if row_token is None:
        return x.shape[0]
    _expect_int32("row_token", row_token)
    expect_device("row_token", row_token, x, "x")
    return row_token.shape[0]


def _expect_offsets(offsets: Tensor) -> int:
    """The number of groups that they divide rows into."""
    _expect_int32("offsets", offsets)
    if offsets.shape[0] < 2:
        raise ValueError(f"offsets: expected 2 elements or more, got {offsets.shape[0]}")
    return offsets.shape[0] - 1


def _expect_int32(name: str, tensor: Tensor) -> None:
    expect_dims(name, tensor, 1)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: expected contiguous int32, got {dtype_name(tensor.dtype)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected contiguous int32, got strides {tensor.stride()}")
