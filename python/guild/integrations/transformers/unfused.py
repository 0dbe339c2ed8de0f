"""Experts with a gate that Guild's kernels do not compute: two grouped products around PyTorch's.

out[t] = sum over k of topk_weights[t, k] * (gate(x[t] W1[e]^T + b1[e]) W2[e]^T + b2[e])

A projection may have a low-rank term, whose two products are added to that of its weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from guild import LoRA, grouped_mm


def unfused_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    gate: Callable[[Tensor], Tensor],
    transposed: bool,
    lora_up: LoRA | None = None,
    lora_down: LoRA | None = None,
) -> Tensor:
    """The layer with any gate; arguments and result as in `guild.routed_experts`.

    The gate gets one row for each pair of token and expert, and zeros for ids out of range.
    """
    tokens, top_k = topk_ids.shape
    experts = w_down.shape[0]
    # Ids out of range come last, past the last expert's end, where the products leave zeros.
    ids, order = topk_ids.masked_fill(topk_ids < 0, experts).flatten().sort(stable=True)
    numbers = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(ids, numbers, right=True).int()

    rows = x[order // top_k]
    pre = _projected(rows, w_up if transposed else w_up.mT, ends, b_up, lora_up)
    a = gate(pre).to(pre.dtype)
    out = _projected(a, w_down if transposed else w_down.mT, ends, b_down, lora_down)

    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=order.device)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    weighted = out[slots].view(tokens, top_k, out.shape[1]) * topk_weights.to(wide).unsqueeze(-1)
    return weighted.sum(1).to(out.dtype)


def _projected(
    rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, lora: LoRA | None
) -> Tensor:
    """rows times (E, inputs, outputs), with the bias and the low-rank term."""
    out = grouped_mm(rows, weight, ends, bias)
    if lora is None:
        return out
    experts, inputs, outputs = weight.shape
    a, b = lora.operands("lora", experts, outputs, inputs, rows)
    return out + grouped_mm(grouped_mm(rows, a.mT, ends), b.mT, ends)
