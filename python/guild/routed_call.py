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
    expect_backward_options,
    expect_routing,
    low_rank_terms,
    residual_of,
    whole_of,
)
from guild.lora import LoRA, LoRAHalves
from guild.weight_gradients import WeightGradients


class RoutedArguments(NamedTuple):
    """The arguments of `guild.routed_experts`, as its caller gave them.

    For a layer whose router is still to choose the experts, ids and weights are None. Methods, not
    properties: torch 2.10 does not compile properties of a NamedTuple.
    """

    x: Tensor
    topk_ids: Tensor | None
    topk_weights: Tensor | None
    w_up: Listed | Halves
    w_down: Listed
    b_up: Listed | Halves | None
    b_down: Listed | None
    activation: Activation | str
    order: str
    transposed: bool
    token_offsets: Tensor | None = None
    residual: Tensor | None = None
    recompute: bool = False
    weight_gradients: WeightGradients | None = None
    lora_up: LoRA | LoRAHalves | None = None
    lora_down: LoRA | None = None
    out: Tensor | None = None
    expert_map: Tensor | None = None
    fp8: Any = None  # guild.FP8, guild.FP8Weights or None

    def parameters(self) -> tuple[Any, Any, Any, Any]:
        """Weights and biases."""
        return self.w_up, self.w_down, self.b_up, self.b_down

    def layout(self) -> tuple[Activation | str, str, bool]:
        """What `layer_arguments` takes after the biases."""
        return self.activation, self.order, self.transposed


class RoutedCall(NamedTuple):
    """Arguments that are checked, cast, and in the order of the ops."""

    x: Tensor  # (T, H)
    ids: Tensor  # (T, K), or (slots,) with token_offsets
    scores: Tensor  # as ids, in the dtype of scores
    token_offsets: Tensor | None
    residual: Tensor | None
    layer: list[Any]  # weights, biases and flags
    low: LowRank | None
    given: tuple[Any, Any, Any, Any]  # weights and biases as the caller gave them
    order: str
    gradient: bool  # x, a weight or a bias wants one
    experts_at: Tensor | None  # where the experts of unevenly spaced lists lie

    def wants_gradient(self) -> bool:
        """Whether backward needs anything of the layer; a residual's gradient does not."""
        low = self.low is not None and self.low.wants_gradient()
        return self.gradient or self.scores.requires_grad or low


def routed_call(given: RoutedArguments) -> RoutedCall:
    """Check the arguments as `guild.routed_experts` does; fp8 and out are not looked at."""
    expect_dims("x", given.x, 2, what="(tokens, hidden)")
    expect_backward_options(given.recompute, given.weight_gradients)
    expect_routing(given.x, given.topk_ids, given.topk_weights, given.token_offsets)
    topk_ids = local_ids(given.topk_ids, given.expert_map)
    whole, experts_at = whole_of(*given.parameters(), given.weight_gradients)
    x, *layer, gradient = layer_arguments(given.x, *whole, *given.layout(), routed=True)
    return RoutedCall(
        x=x,
        ids=topk_ids.contiguous(),
        scores=given.topk_weights.to(score_dtype(x.dtype)).contiguous(),
        token_offsets=given.token_offsets,
        residual=residual_of(given.residual, x),
        layer=layer,
        low=low_rank_terms(given.lora_up, given.lora_down, x, layer),
        given=given.parameters(),
        order=given.order,
        gradient=gradient,
        experts_at=experts_at,
    )
