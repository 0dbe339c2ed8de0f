"""The whole layer, router to sum over slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .experts import Experts, affine, routed
from .float8 import Recipe, routed_in_fp8
from .routing import (
    Balance,
    balance,
    choice_keys,
    choose,
    log_probabilities,
    round_to,
    rounded_counts,
    weigh,
)


@dataclass
class Layer:
    """Results of `moe`."""

    out: Tensor  # (T, H)
    counts: Tensor  # (E): rows of each expert
    scores: Tensor  # (slots,)
    balance: Balance
    margin: float  # by how much every choice was the best
    rounded: tuple[Tensor, Tensor]  # (E) each: the least and greatest counts allowed


def router_logits(leaves: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """(tokens, experts)."""
    logits = tokens @ leaves["router.weight"].t()
    return logits + leaves["router.bias"] if "router.bias" in leaves else logits


def moe(
    leaves: dict[str, Tensor],
    x: Tensor,
    real: Tensor,
    experts: Experts,
    top_k: int,
    router: Any,
    bias: Tensor | None,
    sequences: int,
    rounding: bool,
    order: str,
    counts: Tensor | None = None,
    recipe: Recipe | None = None,
) -> Layer:
    """guild.MoE on tokens x (T, H), of which those numbered `real` are not padding.

    leaves: by the module's names; order: of gate and up; counts: the result of "stochastic" and
    "balanced" rounding.
    """
    tokens = x.index_select(0, real)
    logits = router_logits(leaves, tokens)
    key, group_margin = choice_keys(router, logits.detach(), bias)
    ids, margin = choose(key, top_k)
    margins = [group_margin, margin]
    sequence = real // max(x.shape[0] // sequences, 1)
    sums = balance(router.score, logits, ids, sequence, sequences)
    members = torch.zeros_like(logits, dtype=torch.bool, requires_grad=False)
    members.scatter_(1, ids, True)
    bounds = (before := members.sum(0)), before
    if rounding:
        bounds = rounded_counts(before, router.rounding, router.tile, len(real))
        log_p = log_probabilities(router.score, logits.detach())
        members, margin = round_to(members, log_p, bounds[0] if counts is None else counts)
        margins.append(margin[None])
    token, slot_ids = torch.nonzero(members, as_tuple=True)
    scores = weigh(router, logits, token, slot_ids)
    if router.applied_to == "input":  # one slot per token, in order
        slots = tokens * scores[:, None], token, slot_ids, torch.ones_like(scores)
    else:
        slots = tokens, token, slot_ids, scores
    out = routed(experts, *slots) if recipe is None else routed_in_fp8(experts, *slots, recipe)
    if "shared.w_up" in leaves:
        out = out + shared_experts(leaves, experts.activation, order, tokens)
    out = torch.zeros_like(x, requires_grad=False).index_add(0, real, out)
    least = torch.cat(margins).min().item() if len(real) else torch.inf
    return Layer(out, members.sum(0), scores, sums, least, bounds)


def shared_experts(leaves: dict[str, Tensor], activation: Any, order: str, x: Tensor) -> Tensor:
    """One dense MLP that every token goes through, times the sigmoid of a gate if there is one."""
    names = {"w_up": "shared.w_up", "w_down": "shared.w_down"}
    weights = {name: leaves[full][None] for name, full in names.items()}
    out = Experts.of(weights, activation, order, False).mlp(0, x)
    gate = leaves.get("shared.gate.weight")
    return out if gate is None else out * torch.sigmoid(affine(x, gate, None, 0))


def of_module(module: Any, x: Tensor) -> Tensor:
    """The output of a guild.MoE with these parameters for x (..., H) in evaluation, in float64."""
    leaves = {name: value.double() for name, value in module.named_parameters()}
    flat = x.double().reshape(-1, module.hidden)
    return moe(
        leaves,
        flat,
        torch.arange(flat.shape[0]),
        Experts.of(leaves, module.activation, module.order, module.transposed),
        module.top_k,
        module.routing,
        getattr(module.router, "selection_bias", None),
        sequences=1,
        rounding=False,
        order=module.order,
    ).out.view(x.shape)
