"""What a layer's router decides about its tokens, and what the layer may keep of that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guild.rounding import round_tokens
from guild.routing import Router


class Routing(NamedTuple):
    """What a layer's router decided: `layer(x, return_routing=True)`.

    Scores and logits are differentiable. With token rounding in training, tokens have lists of any
    length, as `guild.round_tokens` makes them.

    Attributes
    ----------
    ids : torch.Tensor
        int32 (..., top_k), best first, -1 at padding; (slots,) with lists.
    scores : torch.Tensor
        float32 (float64 in float64) of the same shape: the weights.
    logits : torch.Tensor
        (..., experts), float32 (float64 in float64) unless the router is a module of yours.
    token_offsets : torch.Tensor or None
        int32 (tokens + 1) with lists.
    """

    ids: Tensor
    scores: Tensor
    logits: Tensor
    token_offsets: Tensor | None = None


def rounded_lists(logits: Tensor, ids: Tensor, router: Router) -> tuple[Tensor, Tensor, Tensor]:
    """`guild.round_tokens` with the options of a Router."""
    return round_tokens(
        logits,
        ids,
        rounding=router.rounding,
        tile=router.tile,
        score=router.score,
        renormalize=router.renormalize,
        scale=router.scale,
        sum_floor=router.sum_floor,
    )


def outlives_call(tensor: Tensor) -> bool:
    """Whether it may be kept: a tensor of torch.func.grad or vmap ends with the function's call."""
    if torch.compiler.is_compiling():
        return True
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
