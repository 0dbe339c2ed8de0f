"""FSDP2's sums of gradients on one host by copy engines: no multiprocessor moves a byte.

    copy-in writes gradients, a part for each rank | barrier | copies of this rank's parts from the
    others, their mean in float32

NCCL's kernels take up to a fifth of a GPU as long as they run, and products beside them slow down
by more than that. Buffers are used in turns. What makes it safe to write to one again is the next
reduction's barrier, where a rank arrives only after it has read what it needed: FSDP2 lets a
reduction's copy-in wait for the reduction before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from .gathered import GatheredWeights, parameters_of
from .mapped import TIMEOUT_MS, Buffers, MakeBuffers, mapped_buffers, others
from .reduction import NarrowReduceScatter, add_up

_REDUCTIONS = 2  # buffers


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
        mapped.barrier(timeout_ms=TIMEOUT_MS)
        return mapped


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
        at, ranks = mapped.rank * count, mapped.world_size
        theirs = iter(input_tensor.new_empty((ranks - 1, count)))
        parts = {mapped.rank: input_tensor[at : at + count]}
        for peer in others(mapped):
            part = mapped.get_buffer(peer, (count,), input_tensor.dtype, at)
            parts[peer] = next(theirs).copy_(part)
        add_up([parts[rank] for rank in range(ranks)], 1 / ranks, output_tensor)


def use_copies(
    modules: Sequence[FSDPModule],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    make: MakeBuffers = mapped_buffers,
) -> tuple[GatheredWeights, int]:
    """Let modules communicate by copies.

    modules: after fully_shard, the one around the others last.

    Returns
    -------
    tuple
        The weights, and the bytes of this rank's memory that torch's own count leaves out.
    """
    of_modules = [[p._sharded_param_data for p in parameters_of(m).fsdp_params] for m in modules]
    size = max(sum(p.numel() for p in own) for own in of_modules) * group.size() * dtype.itemsize
    reduce = CopiedReduceScatter(Turns(make(_REDUCTIONS, size, group, device)), dtype)
    for module in modules:
        module.set_custom_reduce_scatter(reduce)
    weights = GatheredWeights(modules, group, dtype, device, make)
    return weights, weights.mapped_bytes + _REDUCTIONS * size
