"""Guild under the MoE layers of Megatron-Core: replaces the experts in a layer's spec.

    from guild.integrations.megatron import use_guild

    spec = use_guild(get_gpt_decoder_block_spec(config, use_transformer_engine=True))

Router, token dispatcher, shared experts and checkpoints stay Megatron-Core's.
"""

from __future__ import annotations

try:
    import megatron.core.transformer.moe.moe_layer  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"guild.integrations.megatron needs megatron-core 0.16 or later: {error}"
    ) from error

from guild.integrations.megatron.grouped_mlp import GroupedMLP
from guild.integrations.megatron.specs import use_guild

__all__ = ["GroupedMLP", "use_guild"]
