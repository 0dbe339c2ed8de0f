"""Random shapes that nothing was tuned for: `guild bench --sweep N`.

Sizes are drawn log-uniformly (top_k uniformly) from a range that covers published models; tokens
and experts are any whole numbers, so that tiles, chunks and clusters end anywhere.
"""

from __future__ import annotations

import math
import random

from guild.bench.presets import Shape

Range = tuple[int, int]
GPU_RANGES: dict[str, Range] = {
    "tokens": (2048, 65536),
    "hidden": (768, 7168),
    "intermediate": (256, 4096),
    "experts": (8, 384),
    "top_k": (1, 10),
}
CPU_RANGES: dict[str, Range] = {
    "tokens": (64, 1024),
    "hidden": (64, 512),
    "intermediate": (32, 256),
    "experts": (4, 32),
    "top_k": (1, 4),
}
_WIDTH_STEP = 64  # hidden and intermediate of every published model are multiples of it


def needed_bytes(shape: Shape, element_bytes: int) -> int:
    """Approximate memory for timing a layer and the bound, check included."""
    t, h, i, e, k = shape
    weights = 3 * (3 * e * i * h)  # themselves, their gradients, the bound's results
    return element_bytes * (weights + t * k * (4 * h + 9 * i) + 14 * t * h)


def random_shapes(
    count: int, seed: int, ranges: dict[str, Range], element_bytes: int, limit_bytes: int
) -> dict[str, Shape]:
    """`count` different shapes by name "T,H,I,E,K"; the same seed gives the same shapes.

    Parameters
    ----------
    count, seed : int
        How many shapes, and the seed of the random numbers.
    ranges : dict
        Least and greatest size by name.
    element_bytes : int
        Size of an element.
    limit_bytes : int
        Memory that no shape may exceed.

    Raises
    ------
    ValueError
        If too few shapes of these ranges fit in the memory.
    """
    draw = random.Random(seed)
    shapes: dict[str, Shape] = {}
    for _ in range(1000 * count):
        shape = _draw_shape(draw, ranges)
        fits = needed_bytes(shape, element_bytes) <= limit_bytes
        # The routing is written into x, which needs one dimension per expert.
        if fits and shape.top_k <= shape.experts <= shape.hidden:
            shapes[str(shape)] = shape
        if len(shapes) == count:
            return shapes
    raise ValueError(
        f"sweep: expected {count} shapes within {limit_bytes / 2**30:.1f} GiB, found {len(shapes)}"
    )


def _draw_shape(draw: random.Random, ranges: dict[str, Range]) -> Shape:
    def size(name: str, step: int) -> int:
        least, most = ranges[name]
        drawn = math.exp(draw.uniform(math.log(least), math.log(most)))
        return min(most // step * step, max(-(-least // step) * step, round(drawn / step) * step))

    def width(name: str) -> int:
        return size(name, min(_WIDTH_STEP, ranges[name][0]))

    tokens, experts = size("tokens", 1), size("experts", 1)
    return Shape(
        tokens, width("hidden"), width("intermediate"), experts, draw.randint(*ranges["top_k"])
    )
