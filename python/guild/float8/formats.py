"""What the ops call formats, kinds of scale and element types."""

from __future__ import annotations

import torch

# In the order of guild::Float8 and guild::ScaleKind.
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("exact", "power_of_two")
ELEMENTS = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 128


def blocks(size: int) -> int:
    """Blocks of scales along a dimension."""
    return (size + BLOCK - 1) // BLOCK
