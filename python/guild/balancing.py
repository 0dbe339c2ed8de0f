"""Keeping a router's experts evenly loaded: sums over tokens, and the losses made of them."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guild._torch import gradients  # noqa: F401 - registers the gradients
from guild._torch.checks import (
    expect_choice,
    expect_choices_of,
    expect_count,
    expect_finite,
    expect_indices,
    expect_logits,
    expect_shape,
    expect_tensor,
)
from guild._torch.operators import ops
from guild.routing import SCORES, token_flags

_sums = ops.balance_sums.default


class BalanceSums(NamedTuple):
    """Per-sequence sums from which losses on a router's load are computed: plain tensors.

    Attributes
    ----------
    counts : torch.Tensor
        int32 (sequences S, experts E): how often each expert was chosen.
    shares : torch.Tensor
        (S, E): sums over tokens of p; softmax, or the other scores' p divided by their sum.
        Differentiable.
    squares : torch.Tensor
        (S): sums over tokens of logsumexp(logits)^2. Differentiable.
    tokens : torch.Tensor
        (S): how many tokens were summed, padding left out.
    """

    counts: Tensor
    shares: Tensor
    squares: Tensor
    tokens: Tensor

    def __add__(self, other: BalanceSums) -> BalanceSums:
        """The sums over the tokens of both, with as many sequences and experts each."""
        if not isinstance(other, BalanceSums):
            return NotImplemented
        return BalanceSums(*(a + b for a, b in zip(self, other, strict=True)))

    def load_balancing_loss(self) -> Tensor:
        """E * sum over experts of f_e P_e, averaged over sequences: 1 for an even load.

        f_e is the expert's share of all choices, P_e the mean of its p; gradients go through P_e.
        With one sequence this is Switch Transformer's loss (arXiv:2101.03961, equations 4 to 6) and
        GShard's; with more, DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, equations 17 to
        20).

        Returns
        -------
        torch.Tensor
            A scalar in the dtype of `shares`.
        """
        counts = self.counts.to(self.shares.dtype)
        chosen = counts / counts.sum(1, keepdim=True).clamp(min=1)
        mean = self.shares / self.tokens[:, None].clamp(min=1)
        return self.counts.shape[1] * (chosen * mean).sum(1).mean()

    def z_loss(self) -> Tensor:
        """Mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, equation 5).

        Returns
        -------
        torch.Tensor
            A scalar in the dtype of `squares`.
        """
        return self.squares.sum() / self.tokens.sum().clamp(min=1)

    def over_ranks(self, group: dist.ProcessGroup | None = None) -> BalanceSums:
        """The same with the counts of all ranks of a torch.distributed group.

        Balances the load of all ranks together instead of each rank's (arXiv:2501.11873). Shares
        stay this rank's own: with equally many tokens per rank, the mean of the ranks' losses,
        which data parallelism minimises, is the loss of all their tokens. Without an initialised
        process group nothing changes.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            Default: all ranks.

        Returns
        -------
        BalanceSums

        Raises
        ------
        ValueError
            If this rank is not in the group, or the sums are those of several sequences: each is
            balanced by itself, so the mean of the ranks' losses is that of all tokens already.
        """
        if self.counts.shape[0] > 1:
            raise ValueError(
                "over_ranks: expected sums over the whole batch (balance_over='batch'), got those "
                f"of {self.counts.shape[0]} sequences, each of which is balanced by itself"
            )
        counts = counts_of_ranks(self.counts, group)
        return self if counts is self.counts else self._replace(counts=counts)


def balance_sums(
    logits: Tensor,
    ids: Tensor,
    *,
    score: str = "softmax",
    sequences: int = 1,
    token_mask: Tensor | None = None,
) -> BalanceSums:
    """Sums of a router's choices and probabilities, in one pass over its logits.

    Sums are in a fixed order: two runs give the same bits.

    Parameters
    ----------
    logits : torch.Tensor
        (tokens, experts), any floating dtype; summed in float32 (float64 in float64).
    ids : torch.Tensor
        int32 (tokens, top_k), as `guild.route` gives them; ids outside [0, experts) do not count.
    score : {"softmax", "sigmoid", "sqrtsoftplus"}
        What p is: softmax over all experts, or another score divided by its sum over them.
    sequences : int
        Number of equal, consecutive parts of the tokens; each is summed separately.
    token_mask : torch.Tensor, optional
        bool (tokens,): False marks padding, which does not count.

    Returns
    -------
    BalanceSums

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """
    expect_logits(logits)
    tokens = logits.shape[0]
    expect_choices_of(logits, ids)
    expect_choice("score", score, SCORES)
    # One sequence is always right, also where a compiler does not know the number of tokens.
    one = isinstance(sequences, int) and sequences == 1
    expect_count("sequences", sequences, 1, None if one else tokens or None)
    if tokens % sequences:
        raise ValueError(f"sequences: expected a divisor of {tokens} (tokens), got {sequences}")
    if logits.dtype != torch.float64:
        logits = logits.float()
    token_mask = token_flags(token_mask, logits, "logits")
    index = SCORES.index(score)
    shares, squares, counts = _sums(
        logits.contiguous(), ids.contiguous(), token_mask, index, sequences
    )
    if token_mask is None:
        counted = squares.new_full((sequences,), tokens // sequences)
    else:
        counted = token_mask.view(sequences, tokens // sequences).sum(1).to(squares.dtype)
    return BalanceSums(counts, shares, squares, counted)


def expected_sums(layer: nn.Module) -> BalanceSums:
    """The sums of a guild.MoE, for its losses; an AttributeError says why there are none.

    Warns where losses that should train the router have no gradient, and so train nothing.
    """
    if layer.balance_over is None:
        raise AttributeError(
            'balance_over: expected MoE(balance_over="batch" or "sequence"), got None'
        )
    sums = layer.balance_sums
    if sums is None:
        raise AttributeError(
            "balance_sums: expected a forward pass in training mode first, got none"
        )
    wanted = torch.is_grad_enabled() and any(p.requires_grad for p in layer.router.parameters())
    if wanted and not sums.shares.requires_grad:
        warnings.warn(
            "load_balancing_loss, z_loss: no gradient reaches the router because the layer's last "
            "forward ran without gradients; with torch.utils.checkpoint pass use_reentrant=False",
            stacklevel=3,
        )
    return sums


def counts_of_ranks(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Their sum over the ranks of a group, on their device; `counts` where there are no ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return counts
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group: expected one that this rank is in, got one of other ranks; every rank of the "
            "group makes this call, and no other"
        )
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total


def move_selection_bias(
    bias: Tensor, counts: Tensor, rate: float, group: dist.ProcessGroup | None
) -> None:
    """Lower the bias of experts above the mean count of all ranks by `rate`, raise the others'.

    Sums and comparisons are of integers: every rank moves its bias by the same bits. Raises
    TypeError or ValueError unless `rate` is a finite number and there is a count for each expert.
    """
    expect_finite("rate", rate)
    expect_tensor("counts", counts)
    expect_shape("counts", counts, tuple(bias.shape))
    expect_indices("counts", counts, bias, torch.int32, torch.int64, x_name="the selection bias")
    counts = counts_of_ranks(counts.long(), group)
    direction = torch.sign(counts.sum() - counts * counts.numel())
    bias += float(rate) * direction.to(bias.dtype)
