"""The layer in plain torch, step by step and expert by expert: what the ops are compared with.

In float64 it is the truth; rounded wherever the algorithm stores a tensor, it has the error that
the storage type costs by itself, and an op may have twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from guild import Activation, Router
from layers import Layer


@dataclass
class Rows:
    """The sort of a layer's slots, by plain means. Rows past `offsets[E]` are left out."""

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


def apply_activation(activation: Activation, gate: Tensor, up: Tensor | None) -> Tensor:
    """The activation from torch's own functions; gradients come from autograd."""
    limit = activation.limit
    g = gate if activation.clamp_after else gate.clamp(max=limit)
    if activation.kind == "silu":
        value = F.silu(g * activation.alpha) / activation.alpha
    elif activation.kind.startswith("gelu"):
        value = F.gelu(g, approximate="tanh" if activation.kind == "gelu_tanh" else "none")
    else:
        value = F.relu(g) if activation.kind == "relu" else F.relu(g).square()
    if activation.clamp_after:
        value = value.clamp(max=limit)
    return value if up is None else value * (up.clamp(-limit, limit) + activation.up_offset)


class Computation:
    """Forward and backward of one layer, every tensor kept by name in `kept`.

    Parameters
    ----------
    layer : Layer
        Inputs.
    dtype : torch.dtype
        Of the arithmetic.
    store : callable
        Applied to what the algorithm keeps in the layer's dtype.
    feed : dict, optional
        Take every step's inputs from here instead of from the steps before it, so that each result
        holds that step's error alone.
    device : str
        Where to compute.
    """

    def __init__(
        self,
        layer: Layer,
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
        self.spans = [slice(*pair) for pair in zip(offsets, offsets[1:], strict=False)]
        self._forward()
        self._backward()

    def _keep(self, name: str, value: Tensor, stored: bool = True) -> Tensor:
        self.kept[name] = self.store(value) if stored else value
        return (self.feed or self.kept)[name].to(self.dtype)

    def _product(self, a: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = [a[span] @ w[e] for e, span in enumerate(self.spans)]
        if bias is not None:
            parts = [part + bias[e] for e, part in enumerate(parts)]
        return torch.cat(parts)

    def _outer(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a[span].mT @ b[span] for span in self.spans])

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
        a = self._keep("a", apply_activation(self.activation, *pre))
        y = self._keep("y", self._product(a, self.down.mT, self.down_bias))
        self._keep("o", self._by_token(y * self.score[:, None]))

    def _backward(self) -> None:
        dout, score = self.dout[self.rows.token], self.score[:, None]
        g = self._product(dout, self.down)
        h = [t.detach().requires_grad_() for t in self.h]
        with torch.enable_grad():
            a = apply_activation(self.activation, h[0], h[1] if len(h) > 1 else None)
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
    layer: Layer, feed: dict[str, Tensor] | None = None, device: str = "cpu"
) -> dict[str, Tensor]:
    """Every tensor of forward and backward, in float64."""
    return Computation(layer, torch.float64, feed=feed, device=device).kept


def compute_rounded(layer: Layer, device: str = "cpu") -> dict[str, Tensor]:
    """The same in float32 (float64 in float64), rounded where the layer's dtype is stored."""
    dtype = layer.x.dtype
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    return Computation(layer, arithmetic, lambda t: t.to(dtype).to(arithmetic), device=device).kept


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth||, or ||value|| where the truth is zero; infinite with NaN."""
    if value.shape != truth.shape:
        raise ValueError(f"value: expected shape {tuple(truth.shape)}, got {tuple(value.shape)}")
    truth = truth.double()
    difference = (value.detach().to(truth.device).double() - truth).norm()
    if difference.isnan():
        return float("inf")
    size = truth.norm()
    return float(difference / size) if size > 0 else float(difference)


def allowed_error(rounded: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Twice the rounded computation's error, and what sums cost in another order.

    `dtype` is the layer's: tensor cores cut the last bits off the fp32 sums of 16-bit operands.
    """
    few_ulps = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 5e-6)
    return 2 * relative_error(rounded, truth) + few_ulps


SCORES = {
    "softmax": lambda logits: logits.softmax(1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits, threshold=40).sqrt(),
}


def restated(router: Router, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """p and what experts are chosen by (-inf: may not be), in float64."""
    p = SCORES[router.score](logits)
    key = p if bias is None else p + bias.double()
    if router.groups > 1:
        parts = key.unflatten(1, (router.groups, -1))
        counted = min(2 if router.group_score == "top2_sum" else 1, parts.shape[2])
        best = parts.topk(counted, 2).values.sum(2)
        keep = torch.zeros_like(best, dtype=torch.bool)
        keep.scatter_(1, best.topk(router.top_groups, 1).indices, True)
        key = parts.masked_fill(~keep[:, :, None], -torch.inf).flatten(1)
    return p, key


def weights_of(router: Router, p: Tensor, ids: Tensor) -> Tensor:
    """The weights of chosen experts, in float64."""
    weights = p.gather(1, ids.long())
    if router.renormalize:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=router.sum_floor)
    return weights * router.scale
