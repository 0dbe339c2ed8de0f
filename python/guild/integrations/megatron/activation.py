"""The activation that a Megatron-Core config asks for."""

from __future__ import annotations

import math

import torch.nn.functional as F
from megatron.core import activations
from megatron.core.transformer.transformer_config import TransformerConfig

from guild import Activation

_KINDS = {
    F.silu: ("silu", 1.0),
    F.gelu: ("gelu", 1.0),
    F.relu: ("relu", 1.0),
    activations.quick_gelu: ("silu", 1.702),
    activations.squared_relu: ("relu2", 1.0),
}
if hasattr(activations, "fast_gelu"):
    _KINDS[activations.fast_gelu] = ("gelu_tanh", 1.0)


def activation_of(config: TransformerConfig) -> Activation:
    """As Megatron-Core's experts compute it; ValueError for a function that Guild lacks."""
    if config.activation_func not in _KINDS:
        name = getattr(config.activation_func, "__name__", repr(config.activation_func))
        raise ValueError(
            "activation_func: expected silu, gelu, relu, quick_gelu, fast_gelu or squared_relu, "
            f"got {name}"
        )
    kind, alpha = _KINDS[config.activation_func]
    if not config.gated_linear_unit:
        return Activation(kind, gated=False, alpha=alpha)
    limit = getattr(config, "activation_func_clamp_value", None)
    return Activation(
        kind,
        alpha=alpha,
        limit=math.inf if limit is None else limit,
        up_offset=getattr(config, "glu_linear_offset", 0.0),
    )
