"""The router: from logits to the experts of each token and their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from guild import _gradients  # noqa: F401 - registers the gradients
from guild._checks import dtype_name, expect_count, expect_device, expect_dims, expect_shape
from guild._operators import ops

SCORES = ("softmax", "sigmoid")  # in the order of guild::Score

_route = ops.route.default


@dataclass(frozen=True)
class Router:
    """How a layer's router turns logits into ids and weights.

    Parameters
    ----------
    score : {"softmax", "sigmoid"}
        p of the logits: softmax over all experts, or sigmoid of each.
    renormalize : bool
        Divide a token's weights by their sum. With softmax that equals top-k first, softmax over
        the chosen after.
    scale : float
        Multiplies the weights.
    selection_bias : bool
        Keep a bias per expert that is added to p for the choice alone, and that
        `MoE.balance` moves (DeepSeek-V3's balancing without a loss, arXiv:2408.15664).
    """

    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    selection_bias: bool = False

    def __post_init__(self) -> None:
        _score_index(self.score)
        _expect_scale(self.scale)


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    selection_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and weigh them.

    Chosen are the top_k largest of p + selection_bias, ties to the smaller id, NaN last; weights
    are p of the chosen, divided by their sum if `renormalize`, times `scale`.

    Parameters
    ----------
    logits : torch.Tensor
        (tokens, experts), any floating dtype; computed in float32 (float64 in float64).
    top_k : int
        Experts per token, 1 to experts.
    score : {"softmax", "sigmoid"}
        What p is.
    renormalize : bool
        Whether a token's weights sum to `scale`.
    scale : float
        Multiplies the weights.
    selection_bias : torch.Tensor, optional
        (experts,): added to p for the choice; gets no gradient.

    Returns
    -------
    ids : torch.Tensor
        int32 (tokens, top_k), best first.
    scores : torch.Tensor
        float32 (tokens, top_k), float64 for float64 logits. Differentiable.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    expect_dims("logits", logits, 2, what="(tokens, experts)")
    if not logits.is_floating_point():
        raise TypeError(f"logits: expected a floating dtype, got {dtype_name(logits.dtype)}")
    experts = logits.shape[1]
    expect_count("top_k", top_k, 1, experts)
    index = _score_index(score)
    _expect_scale(scale)
    if logits.dtype != torch.float64:
        logits = logits.float()
    logits = logits.contiguous()
    if selection_bias is not None:
        expect_shape("selection_bias", selection_bias, (experts,))
        expect_device("selection_bias", selection_bias, logits, "logits")
        selection_bias = selection_bias.detach().to(logits.dtype).contiguous()
    scores, ids = _route(logits, selection_bias, top_k, index, renormalize, scale)
    return ids, scores


def _score_index(score: str) -> int:
    if score not in SCORES:
        raise ValueError(f"score: expected 'softmax' or 'sigmoid', got {score!r}")
    return SCORES.index(score)


def _expect_scale(scale: float) -> None:
    if not -math.inf < scale < math.inf:  # isfinite cannot be traced
        raise ValueError(f"scale: expected a finite number, got {scale}")
