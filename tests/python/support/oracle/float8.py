"""The FP8 recipe in plain torch: the same quantisers at the same points, products in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracle.experts import Experts, activate

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCK = 128


def rounded(
    x: Tensor, rows: int, dtype: torch.dtype = torch.float8_e4m3fn, scales: str = "exact"
) -> Tensor:
    """(..., m, n) as codes with a scale for every `rows` x 128 elements have it, in float64."""
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
    """A guild.FP8, or None of it: then float64 all along."""

    fp8: Any
    dtype: torch.dtype  # of the layer's 16-bit values

    def rows(self, x: Tensor) -> Tensor:
        """Rows of activations."""
        return x if self.fp8 is None else rounded(x, 1, scales=self.fp8.scales)

    def gradient(self, x: Tensor) -> Tensor:
        """Rows of gradients."""
        if self.fp8 is None:
            return x
        return rounded(x, 1, FORMATS[self.fp8.gradients], self.fp8.scales)

    def weight(self, w: Tensor) -> Tensor:
        """(E, out, in)."""
        return w if self.fp8 is None else rounded(w, BLOCK, scales=self.fp8.scales)

    def kept(self, h: Tensor) -> Tensor:
        """Pre-activations as backward finds them."""
        if self.fp8 is None:
            return h
        return self.rows(h) if self.fp8.save == "fp8" else self.short(h)

    def chunks(self, x: Tensor, gradient: bool) -> Tensor:
        """An expert's rows as the weight gradients' sums over them read them."""
        if self.fp8 is None or self.fp8.wgrad == "bf16":
            return x
        name = self.fp8.gradients if gradient else "e4m3"
        return rounded(x, BLOCK, FORMATS[name], self.fp8.scales)

    def short(self, x: Tensor) -> Tensor:
        """As the layer's dtype has it."""
        return x if self.fp8 is None else x.to(self.dtype).double()


def layer_in_fp8(
    x: Tensor, ids: Tensor, scores: Tensor, experts: Experts, dout: Tensor, recipe: Recipe
) -> dict[str, Tensor]:
    """Output and gradients of a layer of float64 tensors, by expert in a plain loop.

    ids outside [0, E) are skipped. Weight gradients are those of an `Experts`, by its names.
    """
    weights = {n: getattr(experts, n) for n in ("gate", "up", "down")}
    coarse = {n: None if w is None else recipe.weight(w) for n, w in weights.items()}
    made = {n: torch.zeros_like(w) for n, w in weights.items() if w is not None}
    for name in ("gate_bias", "up_bias", "down_bias"):
        if getattr(experts, name) is not None:
            made[name] = torch.zeros_like(getattr(experts, name))
    made |= {n: torch.zeros_like(t) for n, t in (("o", x), ("dx", x), ("dscores", scores))}
    x_codes, dout_codes = recipe.rows(x), recipe.gradient(dout)
    for e in range(experts.down.shape[0]):
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        s = scores[tokens, slots][:, None]
        h = {n: x_codes[tokens] @ coarse[n][e].T for n in ("gate", "up") if n in made}
        for n in h:
            if f"{n}_bias" in made:
                h[n] = h[n] + getattr(experts, f"{n}_bias")[e]
        a = activate(experts.activation, h.get("gate", h["up"]), h["up"] if "gate" in h else None)
        y = recipe.rows(a) @ coarse["down"][e].T
        if experts.down_bias is not None:
            y = y + experts.down_bias[e]
        made["o"].index_add_(0, tokens, s * recipe.short(y))
        kept = {n: recipe.kept(t).requires_grad_() for n, t in h.items()}
        g = dout_codes[tokens] @ coarse["down"][e]
        a = activate(
            experts.activation, kept.get("gate", kept["up"]), kept["up"] if "gate" in h else None
        )
        dh = dict(zip(kept, torch.autograd.grad(a, list(kept.values()), s * g), strict=True))
        a = a.detach()
        dscores = (g * a).sum(1)
        if experts.down_bias is not None:
            dscores = dscores + dout[tokens] @ experts.down_bias[e]
            made["down_bias"][e] = (s * dout[tokens]).sum(0)
        made["dscores"][tokens, slots] = dscores
        turned = recipe.chunks(dout[tokens], True), recipe.chunks(recipe.short(s * a), False)
        made["down"][e] = turned[0].T @ turned[1]
        dx = 0
        for n, d in dh.items():
            turned = recipe.chunks(recipe.short(d), True), recipe.chunks(x[tokens], False)
            made[n][e] = turned[0].T @ turned[1]
            if f"{n}_bias" in made:
                made[f"{n}_bias"][e] = recipe.short(d).sum(0)
            dx = dx + recipe.gradient(d) @ coarse[n][e]
        made["dx"].index_add_(0, tokens, recipe.short(dx))
    return made
