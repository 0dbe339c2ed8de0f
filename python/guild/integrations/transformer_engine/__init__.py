"""`GroupedLinear` with the calling convention of Transformer Engine's, on Guild's products.

    from guild.integrations.transformer_engine import GroupedLinear

It needs no Transformer Engine.
"""

from guild.integrations.transformer_engine.grouped_linear import GroupedLinear

__all__ = ["GroupedLinear"]
