"""Activations, experts and the sums over slots, one expert after another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def activate(activation: Any, gate: Tensor, up: Tensor | None) -> Tensor:
    """act(gate) * (up + up_offset), clamped as the activation's fields say; up: None ungated."""
    limit = activation.limit
    g = gate if activation.clamp_after else gate.clamp(max=limit)
    value = {
        "silu": lambda: g * torch.sigmoid(activation.alpha * g),
        "gelu": lambda: torch.nn.functional.gelu(g),
        "gelu_tanh": lambda: torch.nn.functional.gelu(g, approximate="tanh"),
        "relu": lambda: g.relu(),
        "relu2": lambda: g.relu().square(),
    }[activation.kind]()
    if activation.clamp_after:
        value = value.clamp(max=limit)
    return value if up is None else value * (up.clamp(-limit, limit) + activation.up_offset)


def halves(both: Tensor, dim: int, order: str, gated: bool = True) -> tuple[Tensor | None, Tensor]:
    """Gate (None without one) and up of a weight or bias that holds both along `dim`."""
    if not gated:
        return None, both
    count = both.shape[dim] // 2
    if order == "concatenated":
        return both.narrow(dim, 0, count), both.narrow(dim, count, count)
    pairs = both.unflatten(dim, (count, 2))
    return pairs.select(dim + 1, 0), pairs.select(dim + 1, 1)


@dataclass
class Experts:
    """Weights of all experts, gate and up separate, outputs first in every matrix."""

    activation: Any
    gate: Tensor | None  # (E, I, H)
    up: Tensor  # (E, I, H)
    down: Tensor  # (E, H, I)
    gate_bias: Tensor | None  # (E, I)
    up_bias: Tensor | None  # (E, I)
    down_bias: Tensor | None  # (E, H)

    @staticmethod
    def of(leaves: dict[str, Tensor], activation: Any, order: str, transposed: bool) -> Experts:
        """From tensors as Guild takes them: w_up, w_gate if apart, w_down, b_up, b_gate, b_down."""
        up, gate, down = leaves["w_up"], leaves.get("w_gate"), leaves["w_down"]
        if transposed:
            up, down = up.mT, down.mT
            gate = None if gate is None else gate.mT
        if gate is None:
            gate, up = halves(up, 1, order, activation.gated)
        gate_bias, up_bias = leaves.get("b_gate"), leaves.get("b_up")
        if up_bias is not None and gate_bias is None:
            gate_bias, up_bias = halves(up_bias, 1, order, activation.gated)
        return Experts(activation, gate, up, down, gate_bias, up_bias, leaves.get("b_down"))

    def mlp(self, e: int, rows: Tensor) -> Tensor:
        """One expert's MLP on rows (n, H)."""
        up = affine(rows, self.up[e], self.up_bias, e)
        gate = None if self.gate is None else affine(rows, self.gate[e], self.gate_bias, e)
        a = activate(self.activation, up if gate is None else gate, None if gate is None else up)
        return affine(a, self.down[e], self.down_bias, e)


def affine(rows: Tensor, weight: Tensor, bias: Tensor | None, e: int) -> Tensor:
    """rows weight^T, plus the bias of expert e if there is one."""
    out = rows @ weight.t()
    return out if bias is None else out + bias[e]


def routed(experts: Experts, x: Tensor, token: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """Sums over slots: token, ids and scores are (slots,); ids outside [0, E) are skipped."""
    out = torch.zeros_like(x, requires_grad=False)
    for e in range(experts.down.shape[0]):
        slots = torch.nonzero(ids == e).flatten()
        rows = token.index_select(0, slots)
        y = experts.mlp(e, x.index_select(0, rows))
        out = out.index_add(0, rows, y * scores.index_select(0, slots)[:, None])
    return out


def by_rows(experts: Experts, x: Tensor, offsets: list[int]) -> Tensor:
    """Rows sorted by expert; zero before offsets[0] and from offsets[E] on."""
    parts = [x.new_zeros(offsets[0], x.shape[1])]
    for e, (begin, end) in enumerate(pairwise(offsets)):
        parts.append(experts.mlp(e, x[begin:end]))
    return torch.cat([*parts, x.new_zeros(x.shape[0] - offsets[-1], x.shape[1])])
