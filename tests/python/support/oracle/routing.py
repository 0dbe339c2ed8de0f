"""Routers, token rounding and balancing.

Padding is left out by index before anything is computed, so its contents cannot matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def log_probabilities(score: str, logits: Tensor) -> Tensor:
    """log p of every expert."""
    return {
        "softmax": lambda: logits.log_softmax(1),
        "sigmoid": lambda: F.logsigmoid(logits),
        "sqrtsoftplus": lambda: log_softplus(logits) / 2,
    }[score]()


def log_softplus(logits: Tensor) -> Tensor:
    """log(log(1 + e^x)), which is x so far below 0 that e^x may be no number."""
    near = logits.clamp(min=-40)
    return softplus(near).log() + (logits - near)


def softplus(logits: Tensor) -> Tensor:
    """log(1 + e^x) without torch's threshold, past which it returns x."""
    return torch.logaddexp(logits, torch.zeros_like(logits))


def choice_keys(router: Any, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The keys by which experts are chosen, -inf outside the best groups, and the groups' margin.

    router: anything with the fields of guild.Router; a group's key is the sum of its two best, or
    its best if router.group_score is "max".
    """
    groups = router.groups
    key = logits
    if bias is not None or groups > 1:
        key = log_probabilities(router.score, logits).exp()
    key = key if bias is None else key + bias
    margin = logits.new_full((logits.shape[0],), torch.inf)
    if groups == 1 or logits.shape[0] == 0:
        return key, margin
    parts = key.unflatten(1, (groups, -1))
    best = parts.topk(min(1 if router.group_score == "max" else 2, parts.shape[2]), 2).values.sum(2)
    ranked = best.sort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, ranked.indices[:, : router.top_groups], True)
    if (top := router.top_groups) < groups:
        margin = ranked.values[:, top - 1] - ranked.values[:, top]
    return parts.masked_fill(~kept[:, :, None], -torch.inf).flatten(1), margin


def choose(key: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best top_k by token, and by how much the last is better than the best of the others."""
    ranked = key.sort(dim=1, descending=True, stable=True)
    margin = key.new_full((key.shape[0],), torch.inf)
    if top_k < key.shape[1]:
        margin = ranked.values[:, top_k - 1] - ranked.values[:, top_k]
    return ranked.indices[:, :top_k], margin


def weigh(router: Any, logits: Tensor, token: Tensor, ids: Tensor) -> Tensor:
    """The weights of slots: token and ids are (slots,), each pair once.

    In logarithms, so that p may be smaller than any float64.
    """
    log_p = log_probabilities(router.score, logits)
    chosen = torch.zeros_like(logits, dtype=torch.bool, requires_grad=False)
    chosen[token, ids] = True
    weights = log_p[token, ids]
    if router.renormalize:
        filled = torch.nonzero(chosen.any(1)).flatten()
        sums = log_p.masked_fill(~chosen, -torch.inf).index_select(0, filled).logsumexp(1)
        if router.sum_floor:
            sums = sums.clamp(min=math.log(router.sum_floor))
        weights = weights - logits.new_zeros(logits.shape[0]).index_copy(0, filled, sums)[token]
    return weights.exp() * router.scale


def weights_of(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """(tokens, top_k): the weights of as many chosen experts for each token."""
    token = torch.arange(ids.shape[0]).repeat_interleave(ids.shape[1])
    return weigh(router, logits, token, ids.flatten().long()).view(ids.shape)


def rounded_counts(before: Tensor, rounding: str, tile: int, most: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest count that each expert may end with; `most`: real tokens."""
    down = before // tile * tile
    up = (down + tile * (before % tile > 0)).clamp(max=most)
    if rounding == "nearest":
        down = up = torch.where(2 * (before % tile) >= tile, up, down)
    elif rounding in ("up", "down"):
        down = up = up if rounding == "up" else down
    return down, up


def round_to(chosen: Tensor, key: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """bool (T, E) with these counts, the best kept or added, and by how much they are best."""
    members, margin = chosen.clone(), torch.inf
    for e, count in enumerate(counts.tolist()):
        now = int(chosen[:, e].sum())
        if count == now:
            continue
        candidates = torch.nonzero(chosen[:, e] == (count < now)).flatten()
        ranked = candidates[key[candidates, e].argsort(dim=0, descending=True, stable=True)]
        taken = count if count < now else count - now
        if 0 < taken < len(ranked):
            margin = min(margin, float(key[ranked[taken - 1], e] - key[ranked[taken], e]))
        members[ranked[:taken] if count > now else ranked[taken:], e] = count > now
    return members, key.new_tensor(margin)


@dataclass
class Balance:
    """counts (S, E), shares (S, E), squares (S), tokens (S), as guild.BalanceSums has them."""

    counts: Tensor
    shares: Tensor
    squares: Tensor
    tokens: Tensor

    def load_balancing_loss(self) -> Tensor:
        """E sum of f P, averaged over sequences."""
        chosen = self.counts / self.counts.sum(1, keepdim=True).clamp(min=1)
        mean = self.shares / self.tokens[:, None].clamp(min=1)
        return self.counts.shape[1] * (chosen * mean).sum(1).mean()

    def z_loss(self) -> Tensor:
        """Mean of logsumexp^2."""
        return self.squares.sum() / self.tokens.sum().clamp(min=1)


def balance(score: str, logits: Tensor, ids: Tensor, sequence: Tensor, sequences: int) -> Balance:
    """Sums over real tokens, each of which has its sequence; ids outside [0, E) do not count."""
    tokens, experts = logits.shape
    p = (log_p := log_probabilities(score, logits)).exp()
    if score != "softmax":
        p = log_p.softmax(1)  # p by its sum
    zeros = logits.new_zeros(sequences, experts)
    counts = zeros.clone().detach()
    for t in range(tokens):
        for e in ids[t].tolist():
            if 0 <= e < experts:
                counts[sequence[t], e] += 1
    return Balance(
        counts,
        zeros.index_add(0, sequence, p),
        zeros.new_zeros(sequences).index_add(0, sequence, logits.logsumexp(1).square()),
        torch.bincount(sequence, minlength=sequences).to(logits.dtype),
    )
