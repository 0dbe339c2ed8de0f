"""The layer step by step: every tensor that forward and backward leave in memory.

In float64 it is the truth. Rounded wherever the algorithm stores a tensor, it has the error that
the storage type alone causes, and an op may have twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import activate
from .products import grouped_mm


@dataclass
class Rows:
    """The sort of a layer's slots, in plain torch. Rows past `offsets[E]` are left out."""

    offsets: Tensor  # (E + 1)
    token: Tensor  # (rows in use)
    slot: Tensor  # (rows in use): the flat slot of each row


def sort_slots(ids: Tensor, experts: int) -> Rows:
    """Stable sort of the slots whose id is an expert's."""
    flat = ids.flatten().cpu()
    slots = torch.nonzero((flat >= 0) & (flat < experts)).flatten()
    slots = slots[flat[slots].argsort(stable=True)]
    counts = torch.bincount(flat[slots], minlength=experts)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    return Rows(offsets, slots // ids.shape[1], slots)


class Computation:
    """Forward and backward of one layer, every tensor kept by name in `kept`.

    Parameters
    ----------
    layer : layers.Layer
        Inputs.
    dtype : torch.dtype
        Of the arithmetic.
    store : callable
        Applied to what the algorithm keeps in the layer's dtype.
    feed : dict, optional
        Take every step's inputs from here instead of from the steps before it, so that each result
        holds only that step's error.
    device : str
        Where to compute.
    """

    def __init__(
        self,
        layer: Any,
        dtype: torch.dtype,
        store: Callable[[Tensor], Tensor] = lambda t: t,
        feed: dict[str, Tensor] | None = None,
        device: str = "cpu",
    ) -> None:
        def of(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.detach().to(device).to(dtype)

        self.dtype, self.store, self.feed = dtype, store, feed
        self.kept: dict[str, Tensor] = {}
        self.activation = layer.activation
        self.x, self.dout, self.scores = of(layer.x), of(layer.dout), of(layer.scores)
        self.gate, self.up, self.down = of(layer.gate), of(layer.up), of(layer.down)
        self.gate_bias, self.up_bias = of(layer.gate_bias), of(layer.up_bias)
        self.down_bias = of(layer.down_bias)
        rows = sort_slots(layer.ids, layer.case.experts)
        self.rows = Rows(rows.offsets, rows.token.to(device), rows.slot.to(device))
        self.score = self.scores.flatten()[self.rows.slot]
        offsets = self.rows.offsets.tolist()
        self.ends, self.spans = offsets[1:], [slice(*pair) for pair in pairwise(offsets)]
        self._forward()
        self._backward()

    def _keep(self, name: str, value: Tensor, stored: bool = True) -> Tensor:
        self.kept[name] = self.store(value) if stored else value
        return (self.feed or self.kept)[name].to(self.dtype)

    def _product(self, a: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return grouped_mm(a, w, self.ends, bias)

    def _outer(self, a: Tensor, b: Tensor) -> Tensor:
        return grouped_mm(a.mT, b, self.ends, None)

    def _sums(self, a: Tensor) -> Tensor:
        return torch.stack([a[span].sum(0) for span in self.spans])

    def _by_token(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.x).index_add(0, self.rows.token, values)

    def _forward(self) -> None:
        x = self.x[self.rows.token]
        second = self._product(x, self.up.mT, self.up_bias)
        pre = (second, None)
        if self.gate is not None:
            pre = (self._product(x, self.gate.mT, self.gate_bias), second)
        self.h = [self._keep(f"h_{i}", t) for i, t in enumerate(pre) if t is not None]
        # From the sums themselves, not from h: the kernels apply it before they store.
        a = self._keep("a", activate(self.activation, *pre))
        y = self._keep("y", self._product(a, self.down.mT, self.down_bias))
        self._keep("o", self._by_token(y * self.score[:, None]))

    def _backward(self) -> None:
        dout, score = self.dout[self.rows.token], self.score[:, None]
        g = self._product(dout, self.down)
        h = [t.detach().requires_grad_() for t in self.h]
        with torch.enable_grad():
            a = activate(self.activation, h[0], h[1] if len(h) > 1 else None)
            dh = torch.autograd.grad(a, h, g * score)
        a = a.detach()
        self._keep("dscores", self._score_gradient(g, a, dout), stored=False)
        a_scaled = self._keep("a_scaled", a * score)
        dh = [self._keep(f"dh_{i}", t) for i, t in enumerate(dh)]
        self._keep("dw_down", self._outer(dout, a_scaled))
        self._keep("db_down", self._sums(dout * score))
        weights = [self.up] if self.gate is None else [self.gate, self.up]
        x = self.x[self.rows.token]
        for i, t in enumerate(dh):
            self._keep(f"dw_{i}", self._outer(t, x))
            self._keep(f"db_{i}", self._sums(t))
        dx_rows = sum(self._product(t, w) for t, w in zip(dh, weights, strict=True))
        self._keep("dx", self._by_token(self._keep("dx_rows", dx_rows)))

    def _score_gradient(self, g: Tensor, a: Tensor, dout: Tensor) -> Tensor:
        dscores = self.scores.new_zeros(self.scores.numel())
        dscores[self.rows.slot] = (g * a).sum(1)
        if self.down_bias is not None:
            bias = torch.cat(
                [self.down_bias[e].expand_as(dout[span]) for e, span in enumerate(self.spans)]
            )
            dscores[self.rows.slot] += (dout * bias).sum(1)
        return dscores.view_as(self.scores)


def compute(
    layer: Any, feed: dict[str, Tensor] | None = None, device: str = "cpu"
) -> dict[str, Tensor]:
    """Every tensor of forward and backward, in float64."""
    return Computation(layer, torch.float64, feed=feed, device=device).kept


def compute_rounded(layer: Any, device: str = "cpu") -> dict[str, Tensor]:
    """The same in float32 (float64 in float64), rounded where the layer's dtype is stored."""
    dtype = layer.x.dtype
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    return Computation(layer, arithmetic, lambda t: t.to(dtype).to(arithmetic), device=device).kept
