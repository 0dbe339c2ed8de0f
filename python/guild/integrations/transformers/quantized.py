"""FP8 experts have an interface of their own in Transformers, and keep its kernels."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

from guild.integrations.transformers.messages import say_left


def fp8_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Transformers' own `grouped_mm` for FP8 weights; a warning says so once."""
    say_left(
        type(self).__name__, "Transformers' grouped_mm", "it has no kernels for weights in FP8"
    )
    own = ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]
    return own(self, hidden_states, top_k_index, top_k_weights)
