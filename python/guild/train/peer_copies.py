"""FSDP2's communication on one host by copy engines: no multiprocessor moves a byte.

Ranks map each other's buffers (torch's symmetric memory). A collective is a barrier, a kernel of
one block, and a copy from each peer; NCCL's kernels take up to a fifth of a GPU as long as they
run, and products beside them slow down by more than that.

    gather:  copy-in writes this rank's part of a buffer | barrier | copies of the others' parts
    reduce:  copy-in writes gradients, a part for each rank | barrier | copies of this rank's parts,
             their mean in float32

Buffers are used in turns. What makes it safe to write to one again is the next collective's
barrier, where a rank arrives only after it has read what it needed. FSDP2 lets a reduction's
copy-in wait for the reduction before; with one module gathered ahead, a gather's copy-in waits for
the second gather before it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from guild.train.reduction import NarrowReduceScatter

_TIMEOUT_MS = 600_000
_GATHERS, _REDUCTIONS = 3, 2  # buffers of each


Buffers = list[tuple[Tensor, Any]]


def mapped_buffers(
    count: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Buffers:
    """`count` buffers of `size` bytes, each with what maps the other ranks'; made by all ranks."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # objects that nothing here uses
    from torch.distributed import _symmetric_memory as symmetric

    own = [symmetric.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
    return [(buffer, symmetric.rendezvous(buffer, group)) for buffer in own]


class Turns:
    """Buffers that all ranks have mapped, used one after the other."""

    def __init__(self, buffers: Buffers) -> None:
        self._own = [own for own, _ in buffers]
        self._mapped = {own.data_ptr(): mapped for own, mapped in buffers}
        self._next = 0

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A view of the next buffer."""
        own = self._own[self._next]
        self._next = (self._next + 1) % len(self._own)
        return own[: math.prod(size) * dtype.itemsize].view(dtype).view(*size)

    def meet(self, buffer: Tensor) -> Any:
        """Wait for all ranks, whose buffers are filled then; what maps theirs."""
        mapped = self._mapped[buffer.data_ptr()]
        mapped.barrier(timeout_ms=_TIMEOUT_MS)
        return mapped


def _others(mapped: Any) -> list[int]:
    """Each rank begins with the one after it, so that no two read from the same."""
    return [(mapped.rank + step) % mapped.world_size for step in range(1, mapped.world_size)]


class CopiedGather(AllGather):
    """For `FSDPModule.set_custom_all_gather`: one for all modules, whose gathers take turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """What all parts are gathered in; FSDP2 writes this rank's."""
        return self._turns.take(size, dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Copy the other ranks' parts."""
        if async_op:
            raise NotImplementedError("expected a gather to wait for, got an asynchronous one")
        mapped, count = self._turns.meet(output_tensor), input_tensor.numel()
        for peer in _others(mapped):
            part = mapped.get_buffer(peer, (count,), output_tensor.dtype, peer * count)
            output_tensor[peer * count : (peer + 1) * count].copy_(part)


class CopiedReduceScatter(NarrowReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`: one for all modules; reduce_dtype is float32.

    Parameters
    ----------
    turns : Turns
        Buffers for gradients.
    dtype : torch.dtype
        Of the gradients.
    """

    def __init__(self, turns: Turns, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._turns = turns

    def _input(self, size: Sequence[int | torch.SymInt], device: torch.device) -> Tensor:
        return self._turns.take(size, self._dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Write the mean of this rank's part."""
        if async_op or op != dist.ReduceOp.AVG:
            raise NotImplementedError(f"expected a mean to wait for, got {op}")
        mapped, count = self._turns.meet(input_tensor), output_tensor.numel()
        parts = torch.empty_like(input_tensor).view(-1, count)
        at = mapped.rank * count
        parts[mapped.rank].copy_(input_tensor[at : at + count])
        for peer in _others(mapped):
            parts[peer].copy_(mapped.get_buffer(peer, (count,), input_tensor.dtype, at))
        torch.mean(parts, 0, dtype=torch.float32, out=output_tensor)


def can_copy(device: torch.device) -> bool:
    """Whether all ranks are on this host and reach each other's memory; all get the same answer."""
    ranks, visible = dist.get_world_size(), torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == ranks > 1 and visible >= ranks
    if here:
        others = (i for i in range(visible) if i != device.index)
        here = all(torch.cuda.can_device_access_peer(device.index, i) for i in others)
    flag = torch.tensor([here], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def gathered_bytes(parameters: Iterable[Tensor], ranks: int, dtype: torch.dtype) -> int:
    """What FSDP2 gathers of them, each padded to a multiple of the ranks."""
    shapes = (p.shape for p in parameters)
    return sum(math.ceil(s[0] / ranks) * ranks * math.prod(s[1:]) * dtype.itemsize for s in shapes)


def use_copies(
    modules: Sequence[FSDPModule],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    make: Callable[..., Buffers] = mapped_buffers,
) -> int:
    """Let modules communicate by copies; the bytes that this takes of each rank's memory.

    modules: after fully_shard, the one around the others last.
    """
    inside = {id(p) for module in modules[:-1] for p in module.parameters()}
    of_modules = [list(module.parameters()) for module in modules[:-1]]
    of_modules.append([p for p in modules[-1].parameters() if id(p) not in inside])
    size = max(gathered_bytes(own, group.size(), dtype) for own in of_modules)
    gather = CopiedGather(Turns(make(_GATHERS, size, group, device)))
    reduce = CopiedReduceScatter(Turns(make(_REDUCTIONS, size, group, device)), dtype)
    for module in modules:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
    return (_GATHERS + _REDUCTIONS) * size
