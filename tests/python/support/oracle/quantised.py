"""Quantisation in plain torch, to be matched bit for bit: codes as float32 values, and scales.

Blocks of 1 x 128 and 128 x 128 (DeepSeek-V3, arXiv:2412.19437), chunks of 128 rows, MXFP8 (OCP
Microscaling Formats Specification 1.0) and NVFP4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# The values of E2M1's codes 0 to 7.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NAN = torch.tensor(float("nan"))


# ---- blocks of 128 ------------------------------------------------------------------------------


def block_scale(largest: Tensor, dtype: torch.dtype, scale: str) -> tuple[Tensor, Tensor]:
    """Factors from codes to values and from values to codes, in float32; NaN if not finite."""
    finite = torch.isfinite(largest)
    size = largest.where(finite, torch.ones(())).clamp(min=2.0**-100)
    limit = torch.finfo(dtype).max
    if scale == "exact":
        # limit / size with a number on the left is reciprocal(size) * limit in torch.
        to_value, to_code = size / limit, torch.full_like(size, limit) / size
    else:
        fraction, exponent = torch.frexp(size)  # size = fraction * 2**exponent, in [0.5, 1)
        log2_limit = 8 if dtype == torch.float8_e4m3fn else 15
        power = exponent - 1 - log2_limit + (fraction > 1.75 / 2).int()
        to_value = torch.ldexp(torch.ones_like(size), power)
        to_code = torch.ldexp(torch.ones_like(size), -power)
    return to_value.where(finite, NAN), to_code.where(finite, NAN)


def blockwise(x: Tensor, dtype: torch.dtype, scale: str, rows: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of (..., m, n) for blocks of `rows` x 128."""
    m, n = x.shape[-2:]
    down, across = -(-m // rows), -(-n // 128)
    padded = torch.zeros(*x.shape[:-2], down * rows, across * 128)
    padded[..., :m, :n] = x.float()
    blocks = padded.reshape(*x.shape[:-2], down, rows, across, 128)
    finite = torch.isfinite(blocks).all(dim=-1).all(dim=-2)
    largest = blocks.abs().amax(dim=(-3, -1)).where(finite, NAN)
    to_value, to_code = block_scale(largest, dtype, scale)
    limit = torch.finfo(dtype).max
    scaled = (blocks * to_code[..., :, None, :, None]).clamp(-limit, limit).to(dtype).float()
    return scaled.reshape(padded.shape)[..., :m, :n], to_value


# ---- chunks -------------------------------------------------------------------------------------


def slots(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(slot, first row, rows) of every chunk, for groups with these numbers of rows."""
    begin = 0
    for e, count in enumerate(counts):
        for j in range(-(-count // 128)):
            yield begin // 128 + e + j, begin + 128 * j, min(128, count - 128 * j)
        begin += count


def column_blocks(width: int, halves: int) -> list[slice]:
    """The blocks of `width` columns, none of which lies in two halves."""
    half = width // halves
    return [
        slice(h * half + c, h * half + min(c + 128, half))
        for h in range(halves)
        for c in range(0, half, 128)
    ]


def chunks(
    x: Tensor, counts: Sequence[int], dtype: torch.dtype, scale: str, halves: int
) -> Iterator[tuple[int, int, slice, Tensor, Tensor]]:
    """Slot, block, its columns, codes (columns, 128) and scale of every block of every chunk."""
    for slot, first, rows in slots(counts):
        for block, part in enumerate(column_blocks(x.shape[1], halves)):
            codes = torch.zeros(part.stop - part.start, 128)
            found, made = blockwise(x[first : first + rows, part], dtype, scale, rows=128)
            codes[:, :rows] = found.T
            yield slot, block, part, codes, made[0, 0]


# ---- microscaling -------------------------------------------------------------------------------


def _blocks(x: Tensor, size: int) -> Tensor:
    """x (rows, columns) in float32 as (rows, blocks, size), zeros behind the last column."""
    rows, columns = x.shape
    padded = torch.zeros(rows, -(-columns // size) * size)
    padded[:, :columns] = x.float()
    return padded.view(rows, padded.shape[1] // size, size)


def mxfp8(x: Tensor, dtype: torch.dtype, scale: str) -> tuple[Tensor, Tensor]:
    """Values of codes, and the bytes of E8M0 scales."""
    blocks = _blocks(x, 32)
    largest = blocks.abs().amax(-1)
    finite = torch.isfinite(blocks).all(-1)
    limit = torch.finfo(dtype).max
    mantissa, exponent = torch.frexp(largest.where(finite, torch.ones(())))
    emax = 8 if dtype == torch.float8_e4m3fn else 15  # of the format's largest value
    power = exponent - 1 - emax
    if scale == "ceil":
        power += (mantissa.double() * 2 * 2.0**emax > limit).int()
    power = power.where(largest > 0, torch.tensor(-200)).clamp(min=-127)
    values = blocks.double() / torch.ldexp(torch.ones_like(largest.double()), power)[..., None]
    codes = values.clamp(-limit, limit).float().to(dtype).float().where(finite[..., None], NAN)
    bytes_ = (power + 127).where(finite, torch.tensor(255)).to(torch.uint8)
    return codes.flatten(1)[:, : x.shape[1]], bytes_


def e2m1_codes(x: Tensor) -> Tensor:
    """The nearest codes, ties to the even one, the largest beyond 6, with the sign."""
    size = x.abs().clamp(max=6)[..., None]
    far = (size - E2M1).abs()
    nearest = far == far.amin(-1, keepdim=True)
    code = torch.where(nearest, torch.arange(8) % 2, 2).argmin(-1)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def nvfp4(x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes of two codes, bytes of scales, and the scale above."""
    blocks = _blocks(x, 16)
    finite = torch.isfinite(blocks).all(-1)
    largest = blocks.abs().amax(-1).where(finite, torch.zeros(()))
    least = torch.tensor(2.0**-100)
    above = given
    if above is None:
        most = largest.amax() if largest.numel() else torch.zeros(())
        above = most.maximum(least) / torch.tensor(2688.0)
    block = (largest / torch.tensor(6.0) / above).clamp(max=448).to(torch.float8_e4m3fn)
    scale = block.float() * above
    factor = torch.where(scale > 0, torch.ones_like(scale) / scale, 0)
    values = blocks.where(finite[..., None], torch.zeros(())) * factor[..., None]
    codes = e2m1_codes(values).where((finite & (scale > 0))[..., None], torch.tensor(0))
    codes = codes.to(torch.uint8).flatten(1)[:, : x.shape[1]]
    bytes_ = block.view(torch.uint8).where(finite, torch.tensor(0x7F, dtype=torch.uint8))
    return codes[:, ::2] | codes[:, 1::2] << 4, bytes_, above.view(1)


def swizzled(scales: Tensor) -> Tensor:
    """(rows, blocks) in the order that cuBLAS takes, as torchao's to_blocked makes it."""
    rows, width = (-(-n // m) * m for n, m in zip(scales.shape, (128, 4), strict=True))
    padded = torch.zeros(rows, width, dtype=torch.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    tiles = padded.view(rows // 128, 128, width // 4, 4).permute(0, 2, 1, 3)
    return tiles.reshape(rows * width // 512, 4, 32, 4).transpose(1, 2).reshape(rows, width)
