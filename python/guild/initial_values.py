"""Initial values of weights, whole or sharded over ranks."""

from __future__ import annotations

from torch import Tensor, nn


def fill_normal_(weight: Tensor, std: float) -> None:
    """Fill a weight with normal values; shards of a DTensor get different ones on each rank."""
    if hasattr(weight, "to_local"):
        from guild.distributed.filling import fill_shard

        fill_shard(weight, std)
    else:
        nn.init.normal_(weight, std=std)
