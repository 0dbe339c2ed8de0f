"""FSDP2's sum of gradients over ranks: they travel in 16 bits and are added in float32.

    all_to_all:  rank r gets part r of every rank's gradients, in their own dtype
    mean:        of the parts, in rank order, in float32

A reduce-scatter in float32 gives the same sums, but copies and sends twice the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class NarrowReduceScatter(ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`, with a policy whose reduce_dtype is float32.

    Parameters
    ----------
    dtype : torch.dtype
        Of the gradients.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._has_input = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Called by FSDP2 in turns for the buffer of the gradients and for the result."""
        self._has_input = not self._has_input
        if self._has_input:
            return self._input(size, device)
        return torch.empty(*size, dtype=dtype, device=device)

    def _input(self, size: Sequence[int | torch.SymInt], device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=self._dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Write the mean, or the sum if asked for, of this rank's part."""
        dtypes = input_tensor.dtype, output_tensor.dtype
        if async_op or op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise NotImplementedError(f"expected a mean or sum to wait for, got {op}")
        if dtypes != (self._dtype, torch.float32):
            raise RuntimeError(f"expected {self._dtype} and a result in float32, got {dtypes}")
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        share = 1 / group.size() if op == dist.ReduceOp.AVG else 1.0
        add_up([list(parts.view(group.size(), -1))], share, [output_tensor])


def add_up(parts: list[list[Tensor]], share: float, out: list[Tensor]) -> None:
    """Set each of out to share times the sum of its parts, added in order and in float32."""
    (_compiled() if out[0].is_cuda else _add_up)(parts, share, out)


def _add_up(parts: list[list[Tensor]], share: float, out: list[Tensor]) -> None:
    for (first, *rest), result in zip(parts, out, strict=True):
        total = first.float()
        for part in rest:
            total = total + part.float()
        result.copy_(total * share)


@functools.cache
def _compiled() -> Callable[[list[list[Tensor]], float, list[Tensor]], None]:
    """Kernels that read each part once; torch.mean takes twice as long."""
    return torch.compile(_add_up, dynamic=False)
