"""Layers for `guild bench --decode`: several sets of weights, and tokens for each of many layers.

At decode a layer reads little more than the chosen experts' weights, and must not find them in the
GPU's L2 cache, as in a model of many layers it would not. So the layers of a graph cycle through
several sets of weights, and each has its own tokens and routing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from guild.bench.form import LayerForm
from guild.bench.presets import Shape
from guild.bench.problem import (
    Weights,
    expect_memory,
    expect_routable,
    expert_weights,
    orthonormal_router,
    routed_tokens,
)

_LEAST_LAYERS, _MOST_LAYERS = 10, 48
_GRAPH_US = 2000.0  # layers are added up to this time, so that launching a graph is negligible
_CPU_LAYERS = 2
_MEMORY_SHARE = 0.6  # of the free memory, at most, for weights


@dataclass(frozen=True)
class DecodeLayer:
    """A layer's weights and one batch of tokens, routed.

    Attributes
    ----------
    weights : Weights
        Shared with other layers of the graph.
    x : torch.Tensor
        (tokens, hidden).
    ids, scores : torch.Tensor
        int32 and float32 (tokens, top_k): from softmax over the chosen logits x router^T.
    """

    weights: Weights
    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor

    @property
    def router(self) -> torch.Tensor:
        """(experts, hidden)."""
        return self.weights.router

    @property
    def w_up(self) -> torch.Tensor:
        """(experts, 2 * intermediate, hidden), gate above up, unless `form` says otherwise."""
        return self.weights.w_up

    @property
    def w_down(self) -> torch.Tensor:
        """(experts, hidden, intermediate), unless `form` says otherwise."""
        return self.weights.w_down

    @property
    def form(self) -> LayerForm:
        """Other options; w_up and w_down are stored as it says."""
        return self.weights.form


def expert_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of one expert's weights."""
    return 3 * shape.hidden * shape.intermediate * dtype.itemsize


def set_count(shape: Shape, dtype: torch.dtype, device: torch.device) -> int:
    """Number of sets of weights, enough to evict a set from L2 before its next use by one token.

    Raises
    ------
    ValueError
        If a CPU run would not fit in memory.
    """
    each = shape.experts * expert_bytes(shape, dtype)
    if device.type != "cuda":
        expect_memory(shape, 2 * _CPU_LAYERS * each)
        return _CPU_LAYERS
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = 1 + math.ceil(4 * cache / (shape.top_k * expert_bytes(shape, dtype)))
    room = int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0] // each)
    return max(1, min(wanted, room))


def layer_count(sets: int, floor_us: float, device: torch.device) -> int:
    """Layers in a graph, a multiple of the sets of weights; a layer takes about `floor_us`."""
    least = _CPU_LAYERS
    if device.type == "cuda":
        least = min(_MOST_LAYERS, max(_LEAST_LAYERS, math.ceil(_GRAPH_US / floor_us)))
    return sets * math.ceil(least / sets)


def expected_hits(shape: Shape) -> float:
    """How many experts uniformly random routing hits on average."""
    return shape.experts * (1 - (1 - shape.top_k / shape.experts) ** shape.tokens)


def make_weights(
    shape: Shape,
    form: LayerForm,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> list[Weights]:
    """All sets of one shape.

    Raises
    ------
    ValueError
        If hidden is smaller than experts, or if a CPU run would not fit in memory.
    """
    expect_routable(shape)
    made = []
    for _ in range(set_count(shape, dtype, device)):
        router = nn.Parameter(orthonormal_router(shape, dtype, device, generator))
        experts = expert_weights(shape, form, dtype, device, generator)
        for weight in (router, *experts.values()):
            weight.requires_grad_(False)
        made.append(Weights(shape=shape, form=form, router=router, **experts))
    return made


def make_layers(
    weights: list[Weights], shape: Shape, routing: str, count: int, generator: torch.Generator
) -> list[DecodeLayer]:
    """`count` layers with the shape's tokens, over the sets of weights in turn."""
    made = []
    for number in range(count):
        given = weights[number % len(weights)]
        x = routed_tokens(shape, routing, given.router, generator)
        logits = x.float() @ given.router.float().mT
        top, ids = logits.topk(shape.top_k, -1)
        made.append(DecodeLayer(given, x, ids.int(), top.softmax(-1)))
    return made


def experts_hit(layers: list[DecodeLayer]) -> float:
    """Distinct experts of a layer's tokens, on average."""
    return sum(layer.ids.unique().numel() for layer in layers) / len(layers)
