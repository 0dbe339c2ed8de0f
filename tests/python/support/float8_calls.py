"""A call of every FP8 op, for tests of what all ops share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from guild._torch.gradients import ops  # registers every op

# Activation and order of gate and up: LayerFlags without the last.
_FLAGS = (0, True, 1.0, float("inf"), 0.0, False, False)
_ROWS, _HIDDEN, _INTERMEDIATE, _EXPERTS = 12, 32, 16, 2


class Operands:
    """Quantised operands of a layer without a gather: random codes and scales."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.offsets = torch.tensor([0, 5, _ROWS], dtype=torch.int32, device=device)
        self.x = self.elements(_ROWS, _HIDDEN)
        self.h = self.elements(_ROWS, 2 * _INTERMEDIATE)

    def elements(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(torch.bfloat16)

    def codes(self, *shape: int) -> Tensor:
        """Random codes, none of which is NaN."""
        return torch.randint(0, 0x70, shape, dtype=torch.uint8, device=self.device)

    def scales(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device) + 0.5

    def out(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def masters(self) -> tuple[Tensor, None, Tensor]:
        """w_up, no w_gate, w_down."""
        up = self.elements(_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN)
        return up, None, self.elements(_EXPERTS, _HIDDEN, _INTERMEDIATE)

    def layer(self) -> tuple[tuple, tuple]:
        """Masters, and their codes."""
        masters = self.masters()
        return masters, ops.float8_weights(*masters, True, False, False, None, 0)

    def routed(self) -> tuple[Tensor, Tensor]:
        """ids and scores of two experts per token."""
        ids = torch.tensor([[0, 1]], dtype=torch.int32, device=self.device).repeat(_ROWS, 1)
        return ids, self.scales(_ROWS, 2)

    def bytes(self, *shape: int) -> Tensor:
        return self.out(*shape, dtype=torch.uint8)

    def floats(self, *shape: int) -> Tensor:
        return self.out(*shape, dtype=torch.float32)


# After the flags: transposed, then the recipe, and whether H is kept.
_SETTINGS = (*_FLAGS, False, 0, 0, False, False, True, True)


def experts_arguments(o: Operands) -> tuple:
    """The arguments of a layer without residual and biases."""
    masters, codes = o.layer()
    return (o.x, *o.routed(), None, None, *masters, None, None, *codes, *_SETTINGS, None)


def backward_arguments(o: Operands) -> tuple:
    """The same for all gradients except those of biases."""
    arguments = experts_arguments(o)
    masters, codes = arguments[5:8], arguments[10:16]
    _, *kept = ops.float8_experts(*arguments)
    wanted = [True] * 4 + [False] * 2
    dout = o.elements(_ROWS, _HIDDEN)
    given = dout, o.x, None, *kept, *codes, None, None, *masters
    return (*given, *_SETTINGS, False, False, wanted)


# By the op's name, and the call's special feature if an op has several.
FLOAT8_CALLS: dict[str, Callable[[Operands], tuple]] = {
    "chunk_product_out": lambda o: (
        *(o.codes(2, 32, 128), o.scales(2, 1), 0, o.codes(2, 16, 128), o.scales(2, 1)),
        *(o.offsets, _ROWS, o.floats(2, 32, 16), True),
    ),
    "float8_backward": backward_arguments,
    "float8_experts": experts_arguments,
    "float8_moe": lambda o: (
        *(o.x, o.elements(_EXPERTS, _HIDDEN), o.elements(_EXPERTS), None, None),
        *(2, 0, True, 1.0, 1, 1, 0.0, 0, None),
        *experts_arguments(o)[5:-1],
    ),
    "float8_weights": lambda o: (*o.masters(), True, False, False, None, 0),
    "float8_weights_out": lambda o: (
        *(*o.masters(), True, False, False, None, 0),
        *(torch.zeros_like(t) for t in o.layer()[1]),
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
        *(*_FLAGS, 0, 1, o.bytes(_ROWS, 2 * _INTERMEDIATE), o.floats(_ROWS, 2)),
        *(o.out(_ROWS, 2 * _INTERMEDIATE), o.out(_ROWS, _INTERMEDIATE), None),
        *(o.bytes(2, 2 * _INTERMEDIATE, 128), o.floats(2, 2)),
        *(o.bytes(2, _INTERMEDIATE, 128), o.floats(2, 1)),
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
