"""Layers whose weights are lists of one tensor per expert, in all kinds of memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from guild import CopiedWeightsWarning, experts_mlp, routed_experts

EXPERTS, HIDDEN, INNER = 4, 16, 8
SHAPES = {
    "w_up": (EXPERTS, 2 * INNER, HIDDEN),
    "w_down": (EXPERTS, HIDDEN, INNER),
    "b_up": (EXPERTS, 2 * INNER),
    "b_down": (EXPERTS, HIDDEN),
}
Layer = dict[str, Tensor]
Lists = dict[str, list[Tensor]]


@pytest.fixture(autouse=True)
def copies_are_errors() -> Iterator[None]:
    """Makes an unexpected copy fail the test; for modules that import this."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CopiedWeightsWarning)
        yield


def dtype_of(device: str) -> torch.dtype:
    return torch.float64 if device == "cpu" else torch.bfloat16


def whole_layer(device: str) -> Layer:
    torch.manual_seed(0)
    return {n: torch.randn(s, device=device, dtype=dtype_of(device)) for n, s in SHAPES.items()}


def views(t: Tensor) -> list[Tensor]:
    """Parameters in one storage, one after the other."""
    return [torch.nn.Parameter(part) for part in t.clone()]


def with_gaps(t: Tensor) -> list[Tensor]:
    """In one storage, with a gap of the same size between each two."""
    return [torch.nn.Parameter(part) for part in t.repeat_interleave(2, 0)[::2]]


def through_data(t: Tensor) -> list[Tensor]:
    """Parameters made separately, whose memory then becomes a part of one buffer."""
    made = [torch.nn.Parameter(torch.empty_like(part)) for part in t]
    buffer = torch.cat([t.new_full((8,), torch.nan), t.flatten()])
    for i, parameter in enumerate(made):
        begin = 8 + i * parameter.numel()
        parameter.data = buffer[begin : begin + parameter.numel()].view(parameter.shape)
    return made


def apart(t: Tensor) -> list[Tensor]:
    return [torch.nn.Parameter(part.clone()) for part in t]


def backwards(t: Tensor) -> list[Tensor]:
    return views(t.flip(0))[::-1]


def scattered(t: Tensor) -> list[Tensor]:
    """In one storage, in a random order, at distances whose common divisor is 16 bytes."""
    width = 16 // t.element_size()
    number = t[0].numel()
    gaps = [(0, 3, 1, 7, 2, 5)[e % 6] * width for e in range(len(t))]
    buffer = t.new_full((sum(gaps) + t.numel(),), torch.nan)
    made, end = {}, 0
    for e in torch.randperm(len(t)).tolist():
        begin = end + gaps[e]
        end = begin + number
        buffer[begin:end] = t[e].flatten()
        made[e] = torch.nn.Parameter(buffer[begin:end].view(t.shape[1:]))
    return [made[e] for e in range(len(t))]


EVEN = [views, with_gaps, through_data]
UNEVEN = [apart, backwards, scattered]


def inputs(device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(24, HIDDEN, device=device, dtype=dtype_of(device), requires_grad=True)
    ids = torch.arange(48, device=device).view(24, 2) * 7 % 5  # one expert too many: skipped
    return x, ids, torch.rand(24, 2, device=device)


def sorted_call(layer: dict, device: str, **more: object) -> tuple[Tensor, Tensor]:
    x, _, _ = inputs(device)
    offsets = torch.tensor([0, 9, 9, 14, 22], device=device, dtype=torch.int32)
    return x, experts_mlp(x, offsets, **layer, **more)


def routed_call(layer: dict, device: str, **more: object) -> tuple[Tensor, Tensor]:
    x, ids, scores = inputs(device)
    return x, routed_experts(x, ids, scores, **layer, **more)


CALLS = [sorted_call, routed_call]


def expected(call: Callable, layer: Layer, device: str) -> tuple[Tensor, Tensor, Layer]:
    """Result, x's gradient and the layer's from tensors of all experts."""
    layer = {n: t.clone().requires_grad_() for n, t in layer.items()}
    x, out = call(layer, device)
    out.square().sum().backward()
    return out.detach(), x.grad, {n: t.grad for n, t in layer.items()}


def expect_gradients(lists: dict[str, list[Tensor]], gradients: Layer) -> None:
    """Expect each tensor to have its own gradient, with the same bits as all experts' at once."""
    for name, parts in lists.items():
        assert torch.equal(torch.stack([p.grad for p in parts]), gradients[name]), name
