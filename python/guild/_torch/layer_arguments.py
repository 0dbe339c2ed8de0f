"""The arguments of a layer of experts: checked, cast under autocast, in the order of the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.checks import (
    dtype_name,
    expect_device,
    expect_dims,
    expect_experts,
    expect_flag,
    expect_floating,
    expect_free,
    expect_indices,
    expect_like,
    expect_operand,
    expect_rows,
    expect_shape,
    expect_tensor,
)
from guild._torch.joining import cat, stack
from guild._torch.operators import LayerFlags, autocast
from guild.activations import Activation, as_activation, is_interleaved, to_concatenated

Halves = tuple[Tensor, Tensor]  # gate, up

_NAMES = ("x", "w_up", "w_up[0] (gate)", "w_down", "b_up", "b_down")


def layer_arguments(
    x: Tensor,
    w_up: Tensor | Halves,
    w_down: Tensor,
    b_up: Tensor | Halves | None,
    b_down: Tensor | None,
    activation: Activation | str,
    order: str,
    transposed: bool,
    x_name: str = "x",
    routed: bool = False,
    masters: bool = False,
) -> tuple:
    """Checked, cast arguments of an op, followed by whether any of them wants a gradient.

    masters: only a quantiser reads the weights, so they are not cast and may be float32.
    """
    activation = as_activation(activation)
    interleaved = is_interleaved(order)
    expect_flag("transposed", transposed)
    w_gate = None
    if isinstance(w_up, tuple | list):
        if not activation.gated or len(w_up) != 2:
            wanted = "a pair (gate, up)" if activation.gated else "one tensor without a gate"
            wanted += " or a list of one tensor per expert"
            raise ValueError(f"w_up: expected {wanted}, got {len(w_up)} tensors")
        for name, half in zip(("w_up[0] (gate)", "w_up[1] (up)"), w_up, strict=True):
            expect_tensor(name, half)
        w_gate, w_up = w_up
        if interleaved and isinstance(b_up, Tensor) and b_up.dim() == 2:
            b_up = to_concatenated(b_up)
        interleaved = False  # the layout of pre-activations from two tensors
    if isinstance(b_up, tuple | list):
        b_up = joined_bias(b_up, activation, interleaved)
    expect_tensor("w_up", w_up)
    expect_dims("w_down", w_down, 3, what="(experts, hidden, intermediate)")
    expect_experts("w_down", w_down, w_down.shape[0], routed, "experts")
    if not w_down.numel():
        raise ValueError(f"w_down: expected sizes of at least 1, got shape {tuple(w_down.shape)}")
    _expect_weights(x, w_up, w_gate, w_down, b_up, b_down, activation, transposed, x_name)
    operands = autocast(x, w_up, w_gate, w_down, b_up, b_down)
    if masters:
        weights = (
            w if w is None or w.dtype == torch.float32 else o
            for w, o in zip((w_up, w_gate, w_down), operands[1:4], strict=True)
        )
        operands = operands[0], *weights, *operands[4:]
    x, w_up, w_gate, w_down, b_up, b_down = operands
    expect_operand(x_name, x)
    gradient = False
    for name, tensor in zip(_NAMES, operands, strict=True):
        if tensor is not None:
            if masters and name.startswith("w_"):
                _expect_master(name, tensor, x, x_name)
            else:
                expect_like(name, tensor, x, x_name)
            gradient = gradient or tensor.requires_grad
    if masters and w_gate is not None:
        _expect_alike(w_gate, w_up)
    expect_rows(x_name, x)
    flags = LayerFlags(*activation.scalars, interleaved, transposed)
    return x, w_up, w_gate, w_down, b_up, b_down, *flags, gradient


def _expect_master(name: str, weight: Tensor, x: Tensor, x_name: str) -> None:
    """Raise unless a quantiser beside x can read it."""
    if weight.dtype not in (x.dtype, torch.float32):
        wanted = dict.fromkeys(map(dtype_name, (x.dtype, torch.float32)))
        raise TypeError(
            f"{name}: expected dtype {' or '.join(wanted)} with fp8, got {dtype_name(weight.dtype)}"
        )
    expect_device(name, weight, x, x_name)


def _expect_alike(gate: Tensor, up: Tensor) -> None:
    """Raise TypeError unless one call of a quantiser can read both."""
    if up.dtype != gate.dtype:
        raise TypeError(
            f"w_up[1] (up): expected dtype {dtype_name(gate.dtype)} like w_up[0] (gate), got "
            f"{dtype_name(up.dtype)}"
        )


def _expect_weights(
    x: Tensor,
    w_up: Tensor,
    w_gate: Tensor | None,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation: Activation,
    transposed: bool,
    x_name: str,
) -> None:
    """The shapes of a layer: E and I follow from w_down, H from x."""
    hidden = x.shape[1]
    experts, first, second = w_down.shape
    intermediate = first if transposed else second
    own = second if transposed else first
    if own != hidden:
        inner = own if intermediate == hidden else intermediate  # I is the size that is not H
        shape = (experts, inner, hidden) if transposed else (experts, hidden, inner)
        hint = "pass transposed=True if the checkpoint stores (E, I, H)"
        if first != hidden and second != hidden:
            hint = f"hidden is {hidden} in {x_name}"
        elif transposed:
            hint = "leave transposed out if the checkpoint stores (E, H, I)"
        raise ValueError(f"w_down: expected shape {shape}, got {tuple(w_down.shape)}; {hint}")
    out = intermediate if w_gate is not None else activation.width(intermediate)
    shape = (experts, hidden, out) if transposed else (experts, out, hidden)
    kind = "with a gate" if activation.gated else "without a gate"
    for name, tensor in (("w_up", w_up), ("w_up[0] (gate)", w_gate)):
        if tensor is not None and tensor.shape != shape:
            hint = f"intermediate is {intermediate} in w_down, {kind}"
            if tensor.shape[:1] != (experts,):
                hint = f"w_down has {experts} experts"
            if tensor.shape == (shape[0], shape[2], shape[1]):  # where H is I, w_down fits
                hint = "leave transposed out" if transposed else "pass transposed=True"
                hint += f" if the checkpoint stores {tuple(tensor.shape)}"
            expect_shape(name, tensor, shape, hint)
    if b_up is not None:
        expect_shape("b_up", b_up, (experts, activation.width(intermediate)))
        expect_rows("b_up", b_up)
    if b_down is not None:
        expect_shape("b_down", b_down, (experts, hidden))
        expect_rows("b_down", b_down)


def local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """The indices of the slots' experts in the local weights; -1 for experts not among them."""
    if expert_map is None:
        return topk_ids
    expect_dims("expert_map", expert_map, 1, what="(experts of all ranks,)")
    expect_indices("expert_map", expert_map, topk_ids, torch.int32, x_name="topk_ids")
    if not expert_map.numel():
        raise ValueError("expert_map: expected at least one expert, got shape (0,)")
    known = topk_ids.clamp(0, expert_map.numel() - 1)
    return expert_map[known].masked_fill(topk_ids != known, -1)


def expect_out(out: Tensor, x: Tensor, layer: list, x_name: str, **operands: Tensor | None) -> None:
    """Raise unless the layer's output can be written to out."""
    expect_shape("out", out, tuple(x.shape), f"the shape of {x_name}")
    expect_like("out", out, x, x_name)
    expect_rows("out", out, written=True)
    names = "w_up", "w_up[0] (gate)", "w_down", "b_up", "b_down"
    expect_free(out, {x_name: x, **dict(zip(names, layer, strict=False)), **operands})


def joined_bias(halves: Halves, activation: Activation, interleaved: bool) -> Tensor:
    """The biases of gate and up as one (E, 2I), checked beside each other, in autocast's dtype."""
    if not activation.gated or len(halves) != 2:
        wanted = "a pair (gate, up)" if activation.gated else "one tensor without a gate"
        raise ValueError(f"b_up: expected {wanted}, got {len(halves)} tensors")
    names = "b_up[0] (gate)", "b_up[1] (up)"
    for name, half in zip(names, halves, strict=True):
        expect_dims(name, half, 2, what="(experts, intermediate)")
        expect_floating(name, half)
    gate, up = autocast(*halves)
    expect_shape(names[0], gate, tuple(up.shape))
    expect_like(names[1], up, gate, names[0])
    return stack((gate, up), -1).flatten(1) if interleaved else cat((gate, up), 1)
