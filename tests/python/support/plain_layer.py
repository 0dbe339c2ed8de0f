"""guild.MoE in plain torch: what the module is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import guild
from layers import unpack
from reference import apply_activation, restated, weights_of


def plain_logits(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """(tokens, experts) of (tokens, hidden)."""
    return F.linear(x, parameters["router.weight"], parameters.get("router.bias"))


def plain(moe: guild.MoE, x: Tensor) -> Tensor:
    """The module's function in float64, one expert after another, with autograd."""
    p = {name: value.double() for name, value in moe.named_parameters()}
    w_up, w_down = (p[k].mT if moe.transposed else p[k] for k in ("w_up", "w_down"))
    flat = x.double().reshape(-1, moe.hidden)
    logits = plain_logits(p, flat)
    score, key = restated(moe.routing, logits, getattr(moe.router, "selection_bias", None))
    ids = key.topk(moe.top_k, 1).indices
    weights = weights_of(moe.routing, score, ids)
    routed = flat
    if moe.routing.applied_to == "input":
        routed, weights = flat * weights, torch.ones_like(weights)

    def mlp(rows: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None):
        halves = unpack(F.linear(rows, w_up, b_up), 1, moe.order, moe.activation.gated)
        gate, up = halves if moe.activation.gated else halves[::-1]
        return F.linear(apply_activation(moe.activation, gate, up), w_down, b_down)

    out = torch.zeros_like(flat)
    for e in range(moe.experts):
        token, k = torch.nonzero(ids == e, as_tuple=True)
        biases = [p[name][e] if name in p else None for name in ("b_up", "b_down")]
        rows = mlp(routed[token], w_up[e], w_down[e], *biases)
        out = out.index_add(0, token, rows * weights[token, k][:, None])
    if moe.shared is not None:
        shared = mlp(flat, p["shared.w_up"], p["shared.w_down"], None, None)
        if "shared.gate.weight" in p:
            shared = torch.sigmoid(flat @ p["shared.gate.weight"].t()) * shared
        out = out + shared
    return out.view(x.shape)
