"""A call of every FP8 op, for tests of what all ops have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Activation and order of gate and up: LayerFlags without the last.
_FLAGS = (0, True, 1.0, float("inf"), 0.0, False, False)
_ROWS, _HIDDEN, _INTERMEDIATE, _EXPERTS = 12, 32, 16, 2


class Operands:
    """Quantised operands of a layer without gathering, random codes and scales."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.offsets = torch.tensor([0, 5, _ROWS], dtype=torch.int32, device=device)
        self.x = self.elements(_ROWS, _HIDDEN)
        self.h = self.elements(_ROWS, 2 * _INTERMEDIATE)

    def elements(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(torch.bfloat16)

    def codes(self, *shape: int) -> Tensor:
        """Of values, none of which is NaN."""
        return torch.randint(0, 0x70, shape, dtype=torch.uint8, device=self.device)

    def scales(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device) + 0.5

    def out(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def bytes(self, *shape: int) -> Tensor:
        return self.out(*shape, dtype=torch.uint8)

    def floats(self, *shape: int) -> Tensor:
        return self.out(*shape, dtype=torch.float32)


# By the op's name, and what is special about the call where an op has several.
FLOAT8_CALLS: dict[str, Callable[[Operands], tuple]] = {
    "chunk_product_out": lambda o: (
        *(o.codes(2, 32, 128), o.scales(2, 1), 0, o.codes(2, 16, 128), o.scales(2, 1)),
        *(o.offsets, _ROWS, o.floats(2, 32, 16), True),
    ),
    "quantize_chunks_out": lambda o: (
        *(o.x, None, o.offsets, None, 2, 0, 1, o.bytes(2, 32, 128), o.floats(2, 2)),
    ),
    "quantize_chunks_out of codes": lambda o: (
        *(o.codes(_ROWS, 32), torch.ones_like(o.scales(_ROWS, 1)), o.offsets, None, 1, 0, 1),
        *(o.bytes(2, 32, 128), o.floats(2, 1)),
    ),
    "quantize_micro_out": lambda o: (
        *(o.x, 2, 0, 1, o.bytes(_ROWS, 16), o.bytes(128 * 4), o.floats(1), False),
    ),
    "quantize_rows_out": lambda o: (o.x, 0, 0, o.bytes(_ROWS, 32), o.floats(_ROWS, 1)),
    "quantize_weights_out": lambda o: (
        *(o.elements(2, 16, 32), 0, 1, o.bytes(2, 32, 32), o.bytes(2, 32, 32), o.floats(2, 2, 1)),
        o.elements(2, 16, 32),
    ),
    "regroup_micro_out": lambda o: (
        *(o.codes(_ROWS, 32), o.codes(_ROWS, 1), 0, o.bytes(_ROWS, 32), o.floats(_ROWS, 1)),
    ),
    "scaled_down_gradient_out": lambda o: (
        *(o.codes(_ROWS, _HIDDEN), o.scales(_ROWS, 1), 0, o.offsets, None, None),
        *(o.codes(_EXPERTS, _INTERMEDIATE, _HIDDEN).mT, o.scales(_EXPERTS, 1, 1), o.h, None, None),
        *(*_FLAGS, 0, 0, o.bytes(_ROWS, 2 * _INTERMEDIATE), o.floats(_ROWS, 2)),
        *(o.out(_ROWS, 2 * _INTERMEDIATE), o.out(_ROWS, _INTERMEDIATE), None),
    ),
    "scaled_grouped_mm_out": lambda o: (
        *(o.codes(_ROWS, 32), o.scales(_ROWS, 1), 0, o.codes(2, 16, 32), o.scales(2, 1, 1), 0),
        *(o.offsets[1:], o.out(_ROWS, 16)),
    ),
    "scaled_up_out": lambda o: (
        *(o.codes(_ROWS, _HIDDEN), o.scales(_ROWS, 1), 0, o.offsets, None),
        *(o.codes(_EXPERTS, _INTERMEDIATE, _HIDDEN), o.scales(_EXPERTS, 1, 1)),
        *(o.codes(_EXPERTS, _INTERMEDIATE, _HIDDEN), o.scales(_EXPERTS, 1, 1), None),
        *(*_FLAGS, 0, 0, o.out(_ROWS, 2 * _INTERMEDIATE), None, None),
        *(o.bytes(_ROWS, _INTERMEDIATE), o.floats(_ROWS, 1)),
    ),
}
