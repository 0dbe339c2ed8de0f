"""Gradients that autograd passes on may be parts of something larger and begin at any address.

`torch.cat` and `torch.split` make such gradients. A GPU's kernels read rows at multiples of 16
bytes, so there they are copied; results have the bits of those with a gradient of its own memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import guild
from guild import FP8, LoRA, WeightGradients
from guild._torch.operators import WANT_ROWS, WANT_SCORES, LayerFlags, ops
from layers import ACTIVATIONS, Case, Layer, make_layer, moved
from op_steps import Steps
from oracle.steps import compute_rounded

SMALL = Case("small", 40, 64, 48, 4, 2, "random", frozenset())
ENDS = [11, 11, 30, 38]  # of sorted rows; the last two belong to no expert


def in_columns(t: Tensor) -> Tensor:
    """A copy in the columns of wider rows, an odd number of elements apart."""
    wide = t.new_empty(t.shape[0], t.shape[1] + 3)
    wide[:, 1 : 1 + t.shape[1]] = t
    return wide[:, 1 : 1 + t.shape[1]]


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "2 bytes on": lambda t: moved(t, 1),
    "8 bytes on": lambda t: moved(t, 4),
    "in columns": in_columns,
    "row stride": lambda t: torch.cat((t, t[:, :4]), 1)[:, : t.shape[1]],
}


def small(device: str, bias: bool = True) -> Layer:
    return make_layer(SMALL, ACTIVATIONS["swiglu"], torch.bfloat16, device, bias)


def normal(*shape: int, device: str, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=draw) * shape[-1] ** -0.5
    return values.to(device, torch.bfloat16).requires_grad_()


def rows(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorted rows, their gradient, where experts' rows end, and offsets."""
    x, dout = (normal(SMALL.tokens, SMALL.hidden, device=device, seed=s) for s in (5, 6))
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    return x, dout.detach(), ends, torch.nn.functional.pad(ends, (1, 0))


Made = tuple[Tensor, list[Tensor], Tensor]  # output, what gets a gradient, the output's gradient


def routed(device: str, **how: Any) -> Made:
    layer = small(device, bias="fp8" not in how)
    arguments = layer.arguments("concatenated")
    x, scores = layer.x.requires_grad_(), layer.scores.requires_grad_()
    weights = [t for t in arguments.values() if isinstance(t, Tensor)]
    how |= {"residual": torch.zeros_like(x)}
    leaves = [x, scores, *weights, *(how.pop("terms", ()))]
    return guild.routed_experts(x, layer.ids, scores, **arguments, **how), leaves, layer.dout


def with_lists(device: str) -> Made:
    """Tokens with lists of experts of any length."""
    layer = small(device)
    arguments = layer.arguments("interleaved_transposed")
    slots = layer.ids.flatten()[3:]
    scores = layer.scores.flatten()[3:].clone().requires_grad_()
    offsets = torch.arange(SMALL.tokens + 1, device=device) * 2 - 3
    offsets = offsets.clamp(min=0).to(torch.int32)
    x = layer.x.requires_grad_()
    out = guild.routed_experts(x, slots, scores, **arguments, token_offsets=offsets)
    weights = [t for t in arguments.values() if isinstance(t, Tensor)]
    return out, [x, scores, *weights], layer.dout


def low_rank(device: str) -> Made:
    sizes = {"device": device}
    experts, hidden, inner = SMALL.experts, SMALL.hidden, SMALL.intermediate
    up = LoRA(normal(experts, 3, hidden, **sizes), normal(experts, 2 * inner, 3, **sizes), 0.5)
    down = LoRA(normal(experts, 8, inner, **sizes), normal(experts, hidden, 8, **sizes), 2.0)
    return routed(device, lora_up=up, lora_down=down, terms=(up.a, up.b, down.a, down.b))


def sorted_rows(device: str, **how: Any) -> Made:
    x, dout, _, offsets = rows(device)
    given = small(device).arguments("concatenated")
    weights = [t for t in given.values() if isinstance(t, Tensor)]
    return guild.experts_mlp(x, offsets, **given, **how), [x, *weights], dout


def module(device: str, **how: Any) -> Made:
    """The whole layer, with router and shared experts."""
    torch.manual_seed(2)
    kind = {"device": device, "dtype": torch.bfloat16}
    layer = guild.MoE(64, 48, 4, 2, bias=True, shared_experts=1, **kind, **how)
    x = small(device).x.requires_grad_()
    return layer(x), [x, *layer.parameters()], small(device).dout


def pair(device: str, fused: bool) -> Made:
    x, dout, ends, _ = rows(device)
    experts, hidden, inner = SMALL.experts, SMALL.hidden, SMALL.intermediate
    shapes = (experts, hidden, 2 * inner), (experts, 2 * inner), (experts, inner, hidden)
    weights = [normal(*shape, device=device) for shape in (*shapes, (experts, hidden))]
    w_up, b_up, w_down, b_down = weights
    a, aux = guild.grouped_mm_swiglu(x, w_up, ends, b_up)
    if not fused:  # the gradient of `a` is then a product of its own: see `test_grouped_mm`
        a = a.detach()
    out = guild.grouped_mm_downproj(a, w_down, ends, b_down, aux if fused else None)
    return out, [x, *weights] if fused else [w_down, b_down], dout


def pre_activations(device: str) -> Made:
    """The gradient of the pair's second output."""
    x, _, ends, _ = rows(device)
    width = 2 * SMALL.intermediate
    w_up = normal(SMALL.experts, SMALL.hidden, width, device=device)
    _, aux = guild.grouped_mm_swiglu(x.detach(), w_up, ends)
    return aux, [w_up], normal(x.shape[0], width, device=device, seed=9).detach()


CALLS: dict[str, Callable[[str], Made]] = {
    "routed_experts": routed,
    "recomputed": lambda device: routed(device, recompute=True),
    "lists": with_lists,
    "FP8": lambda device: routed(device, fp8=FP8()),
    "FP8, all of it": lambda device: routed(device, fp8=FP8("fp8", "e5m2", "power_of_two", "fp8")),
    "LoRA": low_rank,
    "experts_mlp": sorted_rows,
    "MoE": module,
    "MoE in FP8": lambda device: module(device, fp8=FP8()),
    "fused pair": lambda device: pair(device, True),
    "plain pair": lambda device: pair(device, False),
    "pre-activations": pre_activations,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CALLS)
def test_backward(name: str, place: str, device: str) -> None:
    """The same bits as with a gradient that begins where an allocation does."""
    out, leaves, dout = CALLS[name](device)
    wanted = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    found = torch.autograd.grad(out, leaves, PLACES[place](dout))
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), (i, one.shape)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("make", [routed, sorted_rows])
@pytest.mark.parametrize("place", PLACES)
def test_weight_gradients(
    place: str, make: Callable[..., Made], low: bool, delayed: bool, device: str
) -> None:
    """They read the gradient too, perhaps long after backward."""

    def run(move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        sink = WeightGradients(delayed=delayed)
        shapes = (SMALL.experts, 8, SMALL.intermediate), (SMALL.experts, SMALL.hidden, 8)
        terms = [normal(*shape, device=device) for shape in shapes] if low else []
        how = {"lora_down": LoRA(*terms)} if low else {}
        out, leaves, dout = make(device, weight_gradients=sink, **how)
        out.backward(move(dout))
        sink.compute()
        return [leaf.grad for leaf in (*leaves, *terms)]

    wanted = run(lambda dout: dout)
    for i, (one, other) in enumerate(zip(run(PLACES[place]), wanted, strict=True)):
        assert torch.equal(one, other), (i, one.shape)


@pytest.mark.parametrize("place", PLACES)
def test_grouped_mm(place: str, device: str) -> None:
    """A product of its own reads the gradient where it lies, with other kernels."""
    x, dout, ends, _ = rows(device)
    weight = normal(SMALL.experts, SMALL.hidden, SMALL.hidden, device=device)
    out = guild.grouped_mm(x, weight, ends)
    wanted = torch.autograd.grad(out, (x, weight), dout, retain_graph=True)
    found = torch.autograd.grad(out, (x, weight), PLACES[place](dout))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("place", PLACES)
def test_steps(place: str, device: str) -> None:
    """Each op by itself, past Python's `rows_of`: rows need not even follow each other."""
    layer = small(device)
    stored = compute_rounded(layer)
    wanted = Steps(layer, stored)
    layer.dout = PLACES[place](layer.dout)
    found = Steps(layer, stored)
    assert wanted.results.keys() == found.results.keys()
    for name, value in wanted.results.items():
        assert torch.equal(found.results[name], value), name
    for name, value in wanted.biases.items():
        assert torch.equal(found.biases[name], value), name


@pytest.mark.parametrize("place", PLACES)
def test_passes(place: str, device: str) -> None:
    """The ops of a whole backward, likewise, and the step whose gradient is that of H."""
    layer = small(device)
    given = layer.arguments("concatenated")
    w_up, w_down, b_up, b_down = (
        given[name].detach() for name in ("w_up", "w_down", "b_up", "b_down")
    )
    flags = LayerFlags(*layer.activation.scalars, False, False)
    weights = w_up, None, w_down
    _, h, *routing = ops.moe_forward(
        layer.x, layer.ids, layer.scores, None, None, *weights, b_up, b_down, *flags, True
    )
    offsets, row_token, _, _ = routing
    starts = rows(device)[-1]
    h_sorted = ops.experts_forward(layer.x, starts, *weights, b_up, b_down, *flags, True)[1]

    def run(move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        dout = move(layer.dout)
        every = WANT_ROWS | WANT_SCORES
        part = ops.data_gradients(dout, h, *routing, None, *weights, b_down, *flags, every)
        dx, dscores, dh, a = part
        dw_up, dw_down, dw = (torch.zeros_like(w) for w in (w_up, w_down, w_up))
        operands = layer.x, dout, dh, a, offsets, row_token
        ops.weight_gradients_out(*operands, dw_up, None, dw_down, *flags.up_weight(), False)
        ops.up_weight_gradient_out(
            layer.x, move(dh), offsets, row_token, dw, None, *flags.up_weight(), False
        )
        whole = ops.moe_backward(dout, layer.x, h, *routing, None, *weights, b_down, *flags, 63)
        of_rows = ops.experts_backward(dout, layer.x, h_sorted, starts, *weights, *flags, 61)
        return [dx, dscores, dh, a, dw_up, dw_down, dw, *whole, *of_rows]

    wanted = run(lambda t: t)
    for i, (one, other) in enumerate(zip(run(PLACES[place]), wanted, strict=True)):
        assert torch.equal(one, other), (i, one.shape)
