"""The router: from logits to the experts of each token and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from guild._torch import gradients  # noqa: F401 - registers the gradients
from guild._torch.checks import (
    dtype_name,
    expect_choice,
    expect_count,
    expect_device,
    expect_experts,
    expect_flag,
    expect_float32,
    expect_floating,
    expect_logits,
    expect_shape,
)
from guild._torch.operators import ops, score_dtype

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")  # in the order of guild::Score
GROUP_SCORES = ("top2_sum", "max")  # of guild::GroupScore
APPLIED_TO = ("output", "input")
ROUNDINGS = ("nearest", "up", "down", "stochastic", "balanced")  # of guild::Rounding
MOST_TILE = 1 << 20

_MOST_GROUPS = 32

_route, _route_tokens = ops.route.default, ops.route_tokens.default


@dataclass(frozen=True)
class Router:
    """How a layer's router turns logits into ids and weights.

    `Router.named` has the routers of well-known models.

    Parameters
    ----------
    score : {"softmax", "sigmoid", "sqrtsoftplus"}
        p of the logits: softmax over all experts, sigmoid of each, or sqrt(softplus) of each
        (DeepSeek-V4).
    renormalize : bool
        Divide a token's weights by their sum. With softmax this equals a softmax over the top-k
        logits. If all that are chosen have p = 0, sigmoid and sqrtsoftplus give weights of 0.
    scale : float
        Multiplies the weights; 0 or in float32's normal range, as sum_floor is.
    selection_bias : bool
        Keep a bias per expert that is added to p for the choice only and that `MoE.balance` adjusts
        (DeepSeek-V3's auxiliary-loss-free load balancing, arXiv:2408.15664). A module of your own
        in place of `MoE.router` then needs it as a buffer `selection_bias` (experts,).
    groups, top_groups : int
        Choose from the best `top_groups` of `groups` equal, consecutive parts of the experts. At
        most 32 groups; 1 and 1: no groups.
    applied_to : {"output", "input"}
        What the weights multiply: each expert's output or, for top_k = 1, the token that goes into
        the expert (Llama 4).
    rounding : {None, "nearest", "up", "down", "stochastic", "balanced"}
        In training, round each expert's tokens to whole tiles; see `guild.round_tokens`. Tokens may
        be added to experts of any group.
    tile : int
        Rows of a tile; an expert's mean count of tokens should be several tiles.
    group_score : {"top2_sum", "max"}
        How groups are ranked: by the sum of their two largest p + bias (DeepSeek-V3,
        arXiv:2412.19437, section 2.1.2), or by the largest (DeepSeek-V2, arXiv:2405.04434, section
        2.2.2).
    sum_floor : float
        Lower bound of the sum that `renormalize` divides by (ERNIE 4.5: 1e-12).

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """

    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    applied_to: str = "output"
    rounding: str | None = None
    tile: int = 128
    group_score: str = "top2_sum"
    sum_floor: float = 0.0

    def __post_init__(self) -> None:
        expect_choice("score", self.score, SCORES)
        expect_choice("applied_to", self.applied_to, APPLIED_TO)
        expect_choice("rounding", self.rounding, (None, *ROUNDINGS))
        expect_count("tile", self.tile, 1, MOST_TILE)
        if self.rounding is not None and self.applied_to == "input":
            raise ValueError(
                "rounding: expected None where the router's weights are applied to the input, got "
                f"{self.rounding!r}"
            )
        expect_weighing(self.renormalize, self.scale, self.sum_floor)
        for name in ("scale", "sum_floor"):  # torch.compile makes tensors of NumPy's scalars
            object.__setattr__(self, name, float(getattr(self, name)))
        expect_flag("selection_bias", self.selection_bias)
        _expect_groups(self.groups, self.top_groups, self.group_score)

    @staticmethod
    def named(name: str) -> Router:
        """The router of a well-known model.

        Parameters
        ----------
        name : str
            "softmax" (softmax, then top-k: OLMoE, Qwen2-MoE), "softmax_renormalized" (Qwen3-MoE),
            "topk_softmax" (Mixtral, gpt-oss: the same under another name), "sigmoid" (sigmoid with
            a selection bias, renormalised), "deepseek_v2" (softmax in the 3 of 8 groups with the
            largest p, times 16), "deepseek_v3" ("sigmoid" in 4 of 8 groups, times 2.5),
            "deepseek_v4" (sqrtsoftplus with a selection bias, renormalised, times 1.5), "ernie4_5"
            (softmax with a selection bias, renormalised with a floor), "llama4" (top-1 sigmoid on
            the input).

        Returns
        -------
        Router

        Raises
        ------
        ValueError
            If there is no router of that name.
        """
        expect_choice("name", name, ROUTERS)
        return _NAMED[name]

    def expect_sizes(self, experts: int, top_k: int) -> None:
        """Check that K of E experts can be chosen this way.

        Parameters
        ----------
        experts, top_k : int
            E and K.

        Raises
        ------
        ValueError
            If they cannot; the message names the argument.
        """
        _expect_candidates(experts, top_k, self.groups, self.top_groups)
        if self.applied_to == "input" and top_k != 1:
            raise ValueError(
                f"top_k: expected 1 where the router's weights are applied to the input, "
                f"got {top_k}"
            )


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    selection_bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    token_mask: Tensor | None = None,
    group_score: str = "top2_sum",
    sum_floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and compute their weights.

    An expert's p is its part of a softmax over all experts or, with another `score`, that function
    of its logit. The experts with the top_k largest p + selection_bias are chosen, ties going to
    the smaller id, NaN last. Unless a bias or a sum over a group needs p itself, logits are
    compared instead: the same order without p's rounding. Weights are p of the chosen, divided by
    their sum if `renormalize`, times `scale`.

    With softmax a NaN logit, chosen or not, makes all weights of its token NaN. With the other
    scores a NaN that is not chosen changes nothing; one that is, because too few logits are
    numbers, makes its own weight NaN, and with `renormalize` all of its token's. Ids are distinct
    and in range whatever the logits are.

    Parameters
    ----------
    logits : torch.Tensor
        (tokens, experts), any floating dtype; computed in float32 (float64 in float64).
    top_k : int
        Experts per token, 1 to experts.
    score : {"softmax", "sigmoid", "sqrtsoftplus"}
        What p is.
    renormalize : bool
        Whether a token's weights sum to `scale`; they are 0 where all that are chosen have p = 0
        and `score` is not softmax.
    scale : float
        Multiplies the weights; 0 or in float32's normal range, as sum_floor is.
    selection_bias : torch.Tensor, optional
        (experts,), any floating dtype: added to p for the choice; gets no gradient.
    groups, top_groups : int
        Choose from the best `top_groups` of `groups` parts of the experts; see `Router`.
    token_mask : torch.Tensor, optional
        bool (tokens,): False marks padding, which gets ids -1, scores 0 and no gradient. The layer
        skips such ids.
    group_score, sum_floor
        As in `Router`.

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
    expect_logits(logits)
    experts = logits.shape[1]
    expect_count("top_k", top_k, 1, experts)
    expect_choice("score", score, SCORES)
    expect_weighing(renormalize, scale, sum_floor)
    _expect_groups(groups, top_groups, group_score)
    _expect_candidates(experts, top_k, groups, top_groups)
    if logits.dtype != torch.float64:
        logits = logits.float()
    logits = logits.contiguous()
    if selection_bias is not None:
        expect_shape("selection_bias", selection_bias, (experts,))
        expect_device("selection_bias", selection_bias, logits, "logits")
        expect_floating("selection_bias", selection_bias)
        selection_bias = selection_bias.detach().to(logits.dtype).contiguous()
    token_mask = token_flags(token_mask, logits, "logits")
    scores, ids, _ = _route(
        logits,
        selection_bias,
        token_mask,
        top_k,
        SCORES.index(score),
        renormalize,
        scale,
        groups,
        top_groups,
        sum_floor,
        GROUP_SCORES.index(group_score),
    )
    return ids, scores


def route_logits(
    logits: Tensor,
    top_k: int,
    router: Router,
    selection_bias: Tensor | None,
    token_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`route` with the options of a Router."""
    return route(
        logits,
        top_k,
        score=router.score,
        renormalize=router.renormalize,
        scale=router.scale,
        selection_bias=selection_bias,
        groups=router.groups,
        top_groups=router.top_groups,
        token_mask=token_mask,
        group_score=router.group_score,
        sum_floor=router.sum_floor,
    )


def route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    router: Router,
    selection_bias: Tensor | None,
    token_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`route` of the logits x weight^T + bias, which are not kept for backward.

    Parameters
    ----------
    x, weight, bias : torch.Tensor
        (tokens, hidden), (experts, hidden) and None or (experts,) as `router_operands` returns
        them; the logits are float32 (float64 in float64).
    top_k, router, selection_bias, token_mask
        As `route` takes them; sizes checked.

    Returns
    -------
    ids, scores : torch.Tensor
        As `route` returns them.

    Raises
    ------
    TypeError, ValueError
        If the mask does not fit; the message names the argument.
    """
    arguments = token_arguments(x, weight, bias, top_k, router, selection_bias, token_mask)
    scores, ids, _ = _route_tokens(*arguments)
    return ids, scores


def token_arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    router: Router,
    selection_bias: Tensor | None,
    token_mask: Tensor | None,
) -> tuple:
    """Checked arguments of the ops that route x; see `route_tokens`."""
    expect_experts("router.weight", weight, weight.shape[0], True, "experts")
    if selection_bias is not None:
        selection_bias = selection_bias.detach().to(score_dtype(x.dtype)).contiguous()
    token_mask = token_flags(token_mask, x, "x")
    return x, weight, bias, selection_bias, token_mask, *router_scalars(top_k, router)


def router_scalars(top_k: int, router: Router) -> tuple[int | float, ...]:
    """K and a Router's options in the order of the ops' arguments."""
    return (
        top_k,
        SCORES.index(router.score),
        router.renormalize,
        router.scale,
        router.groups,
        router.top_groups,
        router.sum_floor,
        GROUP_SCORES.index(router.group_score),
    )


def token_flags(token_mask: Tensor | None, rows: Tensor, name: str) -> Tensor | None:
    """token_mask as the ops take it, checked against the argument that has a row per token."""
    if token_mask is None:
        return None
    expect_shape("token_mask", token_mask, (rows.shape[0],))
    expect_device("token_mask", token_mask, rows, name)
    if token_mask.dtype != torch.bool:
        raise TypeError(f"token_mask: expected dtype bool, got {dtype_name(token_mask.dtype)}")
    return token_mask.contiguous()


def expect_weighing(renormalize: bool, scale: float, sum_floor: float) -> None:
    """Raise unless the options for weights are valid; a floor needs a sum to divide by."""
    expect_flag("renormalize", renormalize)
    expect_float32("scale", scale)
    expect_float32("sum_floor", sum_floor)
    if sum_floor < 0:
        raise ValueError(f"sum_floor: expected a number of at least 0, got {sum_floor}")
    if sum_floor > 0 and not renormalize:
        raise ValueError(f"sum_floor: expected 0 without renormalize, got {sum_floor}")


def _expect_groups(groups: int, top_groups: int, group_score: str) -> None:
    expect_count("groups", groups, 1, _MOST_GROUPS)
    expect_count("top_groups", top_groups, 1, groups)
    expect_choice("group_score", group_score, GROUP_SCORES)


def _expect_candidates(experts: int, top_k: int, groups: int, top_groups: int) -> None:
    if experts % groups:
        raise ValueError(f"groups: expected a divisor of {experts} (experts), got {groups}")
    if experts // groups * top_groups < top_k:
        raise ValueError(
            f"top_groups: expected groups of at least {top_k} experts (top_k), got {top_groups} "
            f"of {experts // groups}"
        )


_NAMED = {
    "softmax": Router(renormalize=False),
    "softmax_renormalized": Router(),
    "topk_softmax": Router(),
    "sigmoid": Router("sigmoid", selection_bias=True),
    "deepseek_v2": Router(renormalize=False, scale=16.0, groups=8, top_groups=3, group_score="max"),
    "deepseek_v3": Router("sigmoid", scale=2.5, selection_bias=True, groups=8, top_groups=4),
    "deepseek_v4": Router("sqrtsoftplus", scale=1.5, selection_bias=True),
    "ernie4_5": Router(selection_bias=True, sum_floor=1e-12),
    "llama4": Router("sigmoid", renormalize=False, applied_to="input"),
}
ROUTERS = tuple(_NAMED)
