"""Memory of each rank of one host, mapped by all ranks: torch's symmetric memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_MS = 600_000

Buffers = list[tuple[Tensor, Any]]
MakeBuffers = Callable[[int, int, dist.ProcessGroup, torch.device], Buffers]


def mapped_buffers(
    count: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Buffers:
    """`count` buffers of `size` bytes, each with its mappings on other ranks; made by all ranks."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # multicast objects are not used here
    from torch.distributed import _symmetric_memory as symmetric

    own = [symmetric.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
    return [(buffer, symmetric.rendezvous(buffer, group)) for buffer in own]


def others(mapped: Any) -> list[int]:
    """The other ranks, starting after this one, so that no two ranks read from the same one."""
    return [(mapped.rank + step) % mapped.world_size for step in range(1, mapped.world_size)]


def can_map(device: torch.device) -> bool:
    """Whether all ranks are on this host and reach each other's memory; all get the same answer."""
    if device.type != "cuda":
        return False
    ranks, visible = dist.get_world_size(), torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == ranks > 1 and visible >= ranks
    if here:
        reached = (i for i in range(visible) if i != device.index)
        here = all(torch.cuda.can_device_access_peer(device.index, i) for i in reached)
    flag = torch.tensor([here], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())
