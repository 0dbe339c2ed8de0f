"""The FP8 recipe in plain torch: the same quantisers at the same points, products in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .experts import Experts, activate

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCK = 128


def rounded(
    x: Tensor, rows: int, dtype: torch.dtype = torch.float8_e4m3fn, scales: str = "exact"
) -> Tensor:
    """(..., m, n) in float64, rounded to codes with a scale for every `rows` x 128 elements."""
    m, n = x.shape[-2:]
    down, across = -(-m // rows), -(-n // BLOCK)
    padded = x.new_zeros(*x.shape[:-2], down * rows, across * BLOCK, dtype=torch.float32)
    padded[..., :m, :n] = x.float()
    tiles = padded.reshape(*x.shape[:-2], down, rows, across, BLOCK)
    limit = LARGEST[dtype]
    scale = tiles.abs().amax((-3, -1), keepdim=True).clamp(min=2.0**-100) / limit
    if scales == "power_of_two":
        scale = torch.exp2(torch.log2(scale).ceil())
    codes = (tiles / scale).clamp(-limit, limit).to(dtype).double()
    return (codes * scale.double()).reshape(padded.shape)[..., :m, :n]


@dataclass(frozen=True)
class Recipe:
    """A guild.FP8."""

    fp8: Any
    dtype: torch.dtype  # of the layer's 16-bit values

    def rows(self, x: Tensor) -> Tensor:
        """Rows of activations."""
        return rounded(x, 1, scales=self.fp8.scales)

    def gradient(self, x: Tensor) -> Tensor:
        """Rows of gradients."""
        return rounded(x, 1, FORMATS[self.fp8.gradients], self.fp8.scales)

    def weight(self, w: Tensor) -> Tensor:
        """(E, out, in)."""
        return rounded(w, BLOCK, scales=self.fp8.scales)

    def kept(self, h: Tensor) -> Tensor:
        """Pre-activations as backward finds them."""
        return self.rows(h) if self.fp8.save == "fp8" else self.short(h)

    def chunks(self, x: Tensor, gradient: bool) -> Tensor:
        """An expert's rows as the sums of the weight gradients read them."""
        if self.fp8.wgrad == "bf16":
            return x
        name = self.fp8.gradients if gradient else "e4m3"
        return rounded(x, BLOCK, FORMATS[name], self.fp8.scales)

    def short(self, x: Tensor) -> Tensor:
        """Rounded to the layer's dtype."""
        return x.to(self.dtype).double()


class _Routed(torch.autograd.Function):
    """`routed_in_fp8` with tensor arguments only, expert by expert in a plain loop."""

    @staticmethod
    def forward(ctx, recipe, activation, token, ids, x, scores, *weights):
        ctx.save_for_backward(token, ids, x, scores, *weights)
        ctx.recipe, ctx.activation = recipe, activation
        out = torch.zeros_like(x)
        for slots, expert in _by_expert(recipe, activation, token, ids, x, *weights):
            y = expert.down(recipe.rows(expert.activated(expert.h())))
            out.index_add_(0, token[slots], scores[slots, None] * recipe.short(y))
        return out

    @staticmethod
    def backward(ctx, dout):
        recipe = ctx.recipe
        token, ids, x, scores, *weights = ctx.saved_tensors
        dx, dscores = torch.zeros_like(x), torch.zeros_like(scores)
        dweights = [None if w is None else torch.zeros_like(w) for w in weights]
        codes = recipe.gradient(dout)
        for slots, expert in _by_expert(recipe, ctx.activation, token, ids, x, *weights):
            rows, s = token[slots], scores[slots, None]
            h = [recipe.kept(t).requires_grad_() for t in expert.h()]
            with torch.enable_grad():
                a = expert.activated(h)
            g = codes[rows] @ expert.down_codes
            dh = torch.autograd.grad(a, h, s * g)
            a, by_row = a.detach(), dout[rows]
            dscores[slots] = (g * a).sum(1) + by_row @ expert.down_bias
            turned = recipe.chunks(by_row, True), recipe.chunks(recipe.short(s * a), False)
            made = [*(None,) * (2 - len(dh)), *(recipe.short(d) for d in dh)]
            x_rows = recipe.chunks(x[rows], False)
            found = [None if d is None else recipe.chunks(d, True).T @ x_rows for d in made]
            found += [turned[0].T @ turned[1], *(None if d is None else d.sum(0) for d in made)]
            for to, value in zip(dweights, [*found, (s * by_row).sum(0)], strict=True):
                if to is not None:
                    to[expert.index] = value
            dx_rows = sum(recipe.gradient(d) @ w for d, w in zip(dh, expert.up_codes, strict=True))
            dx.index_add_(0, rows, recipe.short(dx_rows))
        return None, None, None, None, dx, dscores, *dweights


@dataclass
class _Expert:
    """One expert's rows and weights as the recipe has them."""

    index: int
    activation: Any
    rows: Tensor
    up_codes: list[Tensor]  # gate, if there is one, and up
    up_biases: list[Tensor | float]
    down_codes: Tensor
    down_bias: Tensor

    def h(self) -> list[Tensor]:
        """Pre-activations."""
        both = zip(self.up_codes, self.up_biases, strict=True)
        return [self.rows @ w.T + b for w, b in both]

    def activated(self, h: list[Tensor]) -> Tensor:
        """A"""
        return activate(self.activation, h[0], h[1] if len(h) > 1 else None)

    def down(self, a: Tensor) -> Tensor:
        """Y"""
        return a @ self.down_codes.T + self.down_bias


def _by_expert(
    recipe: Recipe,
    activation: Any,
    token: Tensor,
    ids: Tensor,
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    *biases: Tensor | None,
) -> Iterator[tuple[Tensor, _Expert]]:
    """Each expert that has slots, with its slots."""
    halves = [recipe.weight(w) for w in (gate, up) if w is not None]
    codes, down = recipe.rows(x), recipe.weight(down)
    hidden_zeros = x.new_zeros(down.shape[:2])
    gate_bias, up_bias, down_bias = biases
    down_bias = hidden_zeros if down_bias is None else down_bias
    for e in range(down.shape[0]):
        slots = torch.nonzero(ids == e).flatten()
        if slots.numel():
            of_up = [b for b in (gate_bias, up_bias) if b is not None] or [None] * len(halves)
            yield (
                slots,
                _Expert(
                    e,
                    activation,
                    codes[token[slots]],
                    [w[e] for w in halves],
                    [0.0 if b is None else b[e] for b in of_up],
                    down[e],
                    down_bias[e],
                ),
            )


def routed_in_fp8(
    experts: Experts, x: Tensor, token: Tensor, ids: Tensor, scores: Tensor, recipe: Recipe
) -> Tensor:
    """`oracle.experts.routed` by a recipe, with its gradients."""
    names = "gate", "up", "down", "gate_bias", "up_bias", "down_bias"
    weights = (getattr(experts, name) for name in names)
    return _Routed.apply(recipe, experts.activation, token, ids, x, scores, *weights)
