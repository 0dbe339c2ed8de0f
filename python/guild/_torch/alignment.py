"""Operands as GPU kernels read them: rows and matrices that begin at multiples of 16 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = 16
_ELEMENTS = 8  # of 16 bits


def needs_alignment(t: Tensor) -> bool:
    """Whether the kernels of its device require alignment."""
    return t.is_cuda


def missing(size: int, beside: Tensor) -> int:
    """How many zeros pad a dimension of this size on the device of `beside`."""
    return -size % _ELEMENTS if needs_alignment(beside) else 0


def aligned(t: Tensor) -> Tensor:
    """Rows (m, n) or matrices (E, m, n) themselves where kernels can read them, else a packed copy.

    n is a multiple already. `contiguous` alone is not enough: it allows any stride in a dimension
    of size 1, which kernels read all the same, and any start in a part of something larger. This
    reads an address, so it is not for tensors that are traced.
    """
    rows, columns = t.shape[-2:]
    packed = t.stride() == (rows * columns, columns, 1)[-t.dim() :]
    if not needs_alignment(t) or (packed and t.data_ptr() % _BYTES == 0):
        return t
    return t.clone(memory_format=torch.contiguous_format)
