"""Token rounding: whole tiles of tokens for every expert."""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch import gradients  # noqa: F401 - registers the gradients
from guild._torch.checks import (
    dtype_name,
    expect_choice,
    expect_choices_of,
    expect_count,
    expect_device,
    expect_logits,
    expect_shape,
)
from guild._torch.operators import ops
from guild.routing import MOST_TILE, ROUNDINGS, SCORES, expect_weighing

_round_tokens = ops.round_tokens.default


def round_tokens(
    logits: Tensor,
    ids: Tensor,
    *,
    rounding: str = "nearest",
    tile: int = 128,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    seed: int | Tensor | None = None,
    sum_floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make each expert's count of tokens a multiple of `tile` (SonicMoE's token rounding).

    An expert drops the tokens of lowest p that chose it, or gets those of highest p that did not;
    ties go to the smaller token. Each expert changes by less than a tile, and a choice always ranks
    above an added token. Where too few tokens are left, fewer are added. Tokens then have lists of
    experts of any length, for `guild.routed_experts(..., token_offsets=...)`.

    Meant for training: evaluate with plain top-k (arXiv:2512.14080).

    Parameters
    ----------
    logits : torch.Tensor
        (tokens T, experts E), as given to `guild.route`.
    ids : torch.Tensor
        int32 (T, top_k): each token's choices, distinct, from `guild.route`. Tokens whose
        first id is outside [0, E) are padding.
    rounding : {"nearest", "up", "down", "stochastic", "balanced"}
        "nearest": half a tile goes up. "stochastic": up with probability remainder / tile.
        "balanced": running sums over the experts are rounded to nearest, so that the number of all
        rows changes by at most half a tile, or by more where an expert's multiple is larger than T.
    tile : int
        Rows of a tile. T top_k / E should be several tiles: with "nearest", experts that fewer
        than half a tile of tokens chose get none.
    score, renormalize, scale, sum_floor
        As `guild.route` takes them; a token's weights are those of its list.
    seed : int or torch.Tensor, optional
        For "stochastic": an int, or int64 (1,) on the logits' device, which a CUDA graph reads at
        each replay. Default: drawn from torch's generator.

    Returns
    -------
    ids : torch.Tensor
        int32 (slots,): each token's experts, ascending; -1 past the last list. The number of slots
        follows from the sizes alone: at most T * top_k + E * (tile - 1).
    scores : torch.Tensor
        (slots,): float32, float64 for float64 logits; 0 past the last list. Differentiable.
    token_offsets : torch.Tensor
        int32 (T + 1): where each token's list begins, and where the last one ends.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    expect_logits(logits)
    expect_choices_of(logits, ids)
    expect_choice("rounding", rounding, ROUNDINGS)
    expect_count("tile", tile, 1, MOST_TILE)
    expect_choice("score", score, SCORES)
    expect_weighing(renormalize, scale, sum_floor)
    if logits.dtype != torch.float64:
        logits = logits.float()
    scores, list_ids, _, token_offsets = _round_tokens(
        logits.contiguous(),
        ids.contiguous(),
        _seed(seed, logits) if rounding == "stochastic" else None,
        SCORES.index(score),
        renormalize,
        scale,
        ROUNDINGS.index(rounding),
        tile,
        sum_floor,
    )
    return list_ids, scores, token_offsets


def _seed(seed: int | Tensor | None, logits: Tensor) -> Tensor:
    """int64 (1,) on the device, without waiting for it."""
    if isinstance(seed, Tensor):
        expect_shape("seed", seed, (1,))
        if seed.dtype != torch.int64:
            raise TypeError(f"seed: expected dtype int64, got {dtype_name(seed.dtype)}")
        expect_device("seed", seed, logits, "logits")
        return seed
    if seed is None:
        return torch.randint(2**62, (1,), device=logits.device)
    expect_count("seed", seed, 0, 2**63 - 1)
    return torch.full((1,), seed, dtype=torch.int64, device=logits.device)
