"""Shapes that `guild bench` knows by name: the MoE layers of published models and papers."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of one MoE layer and the number of tokens it is timed with."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def flops(self) -> tuple[int, int]:
        """Useful operations of a gated layer, forward and backward: 6TKHI and 12TKHI."""
        product = self.tokens * self.top_k * self.hidden * self.intermediate
        return 6 * product, 12 * product

    def __str__(self) -> str:
        return ",".join(map(str, self))


PRESETS = {
    "fine7b": Shape(24576, 1536, 256, 128, 8),
    "sonic30b": Shape(32768, 4096, 1024, 128, 8),
    "qwen30b": Shape(32768, 2048, 768, 128, 8),
    "olmoe": Shape(32768, 2048, 1024, 64, 8),
    "gptoss": Shape(24576, 2880, 2880, 128, 4),
    "dsv3": Shape(16384, 7168, 2048, 256, 8),
    "mixtral": Shape(16384, 4096, 14336, 8, 2),
}

# More published models, timed only when named, and at decode.
MORE_PRESETS = {
    "qwen2moe": Shape(32768, 2048, 1408, 60, 4),
    "qwen3next": Shape(32768, 2048, 512, 512, 10),
}
DECODE_PRESETS = {
    name: {**PRESETS, **MORE_PRESETS}[name]
    for name in ("mixtral", "dsv3", "gptoss", "qwen30b", "qwen2moe", "qwen3next", "olmoe")
}

# What a machine without a GPU times by default: the trainer's layer, and one whose expert products
# are large enough to be compute-bound there.
CPU_SHAPES = {
    "trainer": Shape(2048, 128, 128, 8, 2),
    "small": Shape(1024, 512, 256, 16, 4),
}


NAMED = {**PRESETS, **MORE_PRESETS, **CPU_SHAPES}


def parse_shape(text: str) -> Shape:
    """Read "T,H,I,E,K".

    Raises
    ------
    ValueError
        The message names the part that is wrong.
    """
    parts = text.split(",")
    if len(parts) != 5:
        raise ValueError(f"thiek: expected five numbers T,H,I,E,K, got {text!r}")
    try:
        shape = Shape(*(int(part) for part in parts))
    except ValueError:
        raise ValueError(f"thiek: expected five whole numbers T,H,I,E,K, got {text!r}") from None
    for name, value in zip(shape._fields, shape, strict=True):
        if value < 1:
            raise ValueError(f"thiek: expected {name} of at least 1, got {value} in {text!r}")
    if shape.top_k > shape.experts:
        raise ValueError(
            f"thiek: expected top_k of at most experts = {shape.experts}, got {shape.top_k}"
        )
    for name in ("hidden", "intermediate"):
        if getattr(shape, name) % 8:
            raise ValueError(
                f"thiek: expected {name} to be a multiple of 8, got {getattr(shape, name)}"
            )
    return shape
