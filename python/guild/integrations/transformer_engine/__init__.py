"""`GroupedLinear` with the calling convention of Transformer Engine's, on Guild's products.

    from guild.integrations.transformer_engine import GroupedLinear

Transformer Engine itself is not needed.
"""

from guild.integrations.transformer_engine.grouped_linear import GroupedLinear

__all__ = ["GroupedLinear"]
