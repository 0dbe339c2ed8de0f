"""The same layer as `guild.MoE` in plain PyTorch: the baseline of `--compare` and `guild bench`.

It is what people write when they want it quickly: sort the slots by expert, gather, one matrix
product per expert on the CPU or `torch._grouped_mm` on a GPU, scatter-add. Parameter names and
layouts are those of `guild.MoE`, so a state dict loads into either.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class PlainMoE(nn.Module):
    """Router, SwiGLU experts and combine in plain PyTorch.

    Parameters
    ----------
    hidden, intermediate, experts, top_k : int
        Sizes of the layer.
    compiled : bool
        Run the layer through `torch.compile` (worth it on a GPU, where it fuses the small steps).

    Attributes
    ----------
    expert_counts : torch.Tensor or None
        int64 (experts,), rows per expert of the last forward.
    """

    def __init__(
        self, hidden: int, intermediate: int, experts: int, top_k: int, compiled: bool = False
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k: expected 1 .. {experts} (experts), got {top_k}")
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.w_up = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.w_down = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.expert_counts: torch.Tensor | None = None
        self._layer = torch.compile(plain_moe, dynamic=False) if compiled else plain_moe
        for weight in (self.w_up, self.w_down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., hidden) -> (..., hidden)."""
        flat = x.reshape(-1, x.shape[-1])
        weights = (self.router.weight, self.w_up, self.w_down)
        if torch.is_autocast_enabled(x.device.type):
            # Autocast has no rule for _grouped_mm, so the cast is made here for every product.
            dtype = torch.get_autocast_dtype(x.device.type)
            flat, *weights = (tensor.to(dtype) for tensor in (flat, *weights))
        out, self.expert_counts = self._layer(flat, *weights, self.top_k)
        return out.view(x.shape)


def swiglu(pre_activation: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of (..., gate|up)."""
    gate, up = pre_activation.chunk(2, -1)
    return F.silu(gate) * up


def plain_moe(
    x: torch.Tensor,
    router: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: int,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activate: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer on flat tokens.

    Parameters
    ----------
    x : torch.Tensor
        (tokens, hidden).
    router, w_up, w_down : torch.Tensor
        (experts, hidden), (experts, 2 * intermediate, hidden) gate|up, and
        (experts, hidden, intermediate).
    b_up, b_down : torch.Tensor, optional
        (experts, 2 * intermediate) and (experts, hidden).
    activate : callable
        Of pre-activations (rows, 2 * intermediate).

    Returns
    -------
    out, counts : torch.Tensor
        (tokens, hidden) in x's dtype and int64 (experts,) rows per expert.
    """
    probabilities = F.linear(x, router).float().softmax(-1)
    scores, ids = probabilities.topk(top_k, -1)
    experts = w_up, w_down, b_up, b_down, activate
    return plain_experts(x, ids, scores / scores.sum(-1, keepdim=True), *experts)


def plain_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activate: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`plain_moe` after its router: ids and scores are (tokens, top_k)."""
    experts, top_k = w_up.shape[0], ids.shape[1]
    expert_of_row, order = ids.flatten().sort(stable=True)
    # Where each expert's rows end; bincount would copy its size to the host on a GPU.
    bounds = torch.arange(experts, device=x.device, dtype=ids.dtype)
    ends = torch.searchsorted(expert_of_row, bounds, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    token = order // top_k
    if x.is_cuda:  # compiled, the gradient of x[token] takes half the time of index_select's
        # Each row's biases: in float32, or their gradients would be sums in 16 bits.
        biases = (b if b is None else b.float()[expert_of_row] for b in (b_up, b_down))
        rows = _grouped_products(x[token], w_up, w_down, *biases, ends.int(), activate)
    else:
        weights = w_up, w_down, b_up, b_down
        rows = _products_in_turn(x.index_select(0, token), *weights, counts.tolist(), activate)
    weighted = rows * scores.flatten().index_select(0, order).to(rows.dtype)[:, None]
    out = torch.zeros_like(x)
    if x.is_cuda:  # compiled, half the time of index_add and a tenth less than a gather and a sum
        return out.scatter_add(0, token[:, None].expand(-1, x.shape[1]), weighted), counts
    return out.index_add(0, token, weighted), counts


def plain_expert(
    rows: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activate: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> torch.Tensor:
    """One expert's gated MLP.

    Parameters
    ----------
    rows : torch.Tensor
        (rows, hidden).
    w_up, w_down, b_up, b_down : torch.Tensor
        (2 * intermediate, hidden) gate|up, (hidden, intermediate), and their biases, (outputs,)
        each.
    activate : callable
        As `plain_moe` takes it.

    Returns
    -------
    torch.Tensor
        (rows, hidden).
    """
    return F.linear(activate(F.linear(rows, w_up, b_up)), w_down, b_down)


def _grouped_products(
    rows: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    b_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
    ends: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    # One name for all, so that a call without gradients keeps none of them.
    y = torch._grouped_mm(rows, w_up.mT, offs=ends)
    y = activate(y if b_up is None else (y + b_up).to(y.dtype))
    y = torch._grouped_mm(y, w_down.mT, offs=ends)
    return y if b_down is None else (y + b_down).to(y.dtype)


def _products_in_turn(
    rows: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    b_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
    counts: list[int],
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    # unbind, not w_up[e]: the gradient of a selection is a zero-filled copy of all the experts.
    none = [None] * len(counts)
    weights = (none if w is None else w.unbind() for w in (w_up, w_down, b_up, b_down))
    parts = zip(rows.split(counts), *weights, strict=True)
    return torch.cat([plain_expert(*part, activate=activate) for part in parts])
