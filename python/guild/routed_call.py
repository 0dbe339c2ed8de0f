"""The arguments of a call of `guild.routed_experts`, on one process or over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from guild._torch.checks import expect_dims
from guild._torch.expert_lists import Listed
from guild._torch.layer_arguments import Halves, layer_arguments, local_ids
from guild._torch.low_rank import LowRank
from guild._torch.operators import score_dtype
from guild.activations import Activation
from guild.expert_arguments import (
    expect_later,
    expect_routing,
    low_rank_terms,
    residual_of,
    whole_of,
)
from guild.lora import LoRA, LoRAHalves
from guild.weight_gradients import WeightGradients


class RoutedCall(NamedTuple):
    """Arguments that are checked, cast, and in the order of the ops."""

    x: Tensor  # (T, H)
    ids: Tensor  # (T, K), or (slots,) with token_offsets
    scores: Tensor  # as ids, in the dtype of scores
    token_offsets: Tensor | None
    residual: Tensor | None
    layer: list[Any]  # weights, biases and flags
    low: LowRank | None
    given: tuple  # weights and biases as the caller gave them
    order: str
    gradient: bool  # x, a weight or a bias wants one
    experts_at: Tensor | None  # where lists lie, of those that lie at no one distance

    @property
    def wants_gradient(self) -> bool:
        """Whether backward needs anything of the layer; a residual's gradient does not."""
        low = self.low is not None and self.low.wants_gradient
        return self.gradient or self.scores.requires_grad or low


def routed_call(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Listed | Halves,
    w_down: Listed,
    b_up: Listed | Halves | None,
    b_down: Listed | None,
    activation: Activation | str,
    order: str,
    transposed: bool,
    token_offsets: Tensor | None,
    residual: Tensor | None,
    recompute: bool,
    weight_gradients: WeightGradients | None,
    lora_up: LoRA | LoRAHalves | None,
    lora_down: LoRA | None,
    expert_map: Tensor | None = None,
) -> RoutedCall:
    """Check the arguments as `guild.routed_experts` does."""
    expect_dims("x", x, 2, what="(tokens, hidden)")
    expect_later(recompute, weight_gradients)
    expect_routing(x, topk_ids, topk_weights, token_offsets)
    topk_ids = local_ids(topk_ids, expert_map)
    given = w_up, w_down, b_up, b_down
    whole, experts_at = whole_of(*given, weight_gradients)
    x, *layer, gradient = layer_arguments(x, *whole, activation, order, transposed, routed=True)
    residual = residual_of(residual, x)
    scores = topk_weights.to(score_dtype(x.dtype)).contiguous()
    low = low_rank_terms(lora_up, lora_down, x, layer)
    routing = topk_ids.contiguous(), scores, token_offsets
    return RoutedCall(x, *routing, residual, layer, low, given, order, gradient, experts_at)
