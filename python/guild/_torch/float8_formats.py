"""What the ops call formats, kinds of scale and element types."""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.checks import dtype_name, expect_not_negated

# In the order of guild::Float8 and guild::ScaleKind.
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
E4M3 = 0  # its index in FORMATS
SCALES = ("exact", "power_of_two")
ELEMENTS = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 128

LEAST_WIDTH, LEAST_ROWS = 512, 256  # of an expert, for FP8 to pay off


def blocks(size: int) -> int:
    """Blocks along a dimension, one scale each."""
    return (size + BLOCK - 1) // BLOCK


def expect_format(name: str, dtype: object) -> None:
    """Raise TypeError unless it is one of the FP8 formats."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: expected a torch.dtype, got {dtype!r}")
    if dtype not in FORMATS:
        raise TypeError(f"{name}: expected float8_e4m3fn or float8_e5m2, got {dtype_name(dtype)}")


def as_bytes(name: str, codes: Tensor) -> Tensor:
    """Codes as uint8; ValueError for a view of their negatives, which are other bytes."""
    expect_not_negated(name, codes)
    return codes.view(torch.uint8)


def expect_elements(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless its elements can be quantised."""
    if tensor.dtype not in ELEMENTS:
        raise TypeError(
            f"{name}: expected dtype bfloat16, float16 or float32, got {dtype_name(tensor.dtype)}"
        )


def expect_scales(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless it is float32."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype float32, got {dtype_name(tensor.dtype)}")
