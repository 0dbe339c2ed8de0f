"""FSDP2's communication on one host by copy engines; here, its sums of gradients.

    parts of gradients for each other rank to a buffer | barrier | copies of this rank's parts from
    the others' buffers | their mean with its own part, in float32

NCCL's kernels take up to a fifth of a GPU as long as they run, and products that run beside them
slow down by more than that. Here all of it runs on a stream of its own, and only the mean uses
multiprocessors. FSDP2 itself first copies the gradients to a buffer, overlapping with nothing.

Two buffers are used in turns. One may be written to again after the barrier of the sum in between,
where a rank arrives only after it has read what it needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from guild.train.gathered import Copies, GatheredWeights, count_of, parameters_of, starts_of
from guild.train.mapped import TIMEOUT_MS, MakeBuffers, mapped_buffers, others
from guild.train.reduction import add_up
from guild.train.shard_adamw import norm_of

_BUFFERS = 2

Gradients = list[tuple[Any, Tensor]]  # FSDP2's record of a parameter, and its whole gradient


class SummedGradients:
    """Averages the gradients of modules under FSDP2 over the ranks, by copies.

    Parameters
    ----------
    modules, group, dtype, device, make
        As `GatheredWeights` takes them; dtype: of the gradients.

    Attributes
    ----------
    mapped_bytes : int
        Memory that torch's own count does not include.
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        make: MakeBuffers = mapped_buffers,
    ) -> None:
        of_modules = [parameters_of(module) for module in modules]
        sizes = (starts_of(map(count_of, p.fsdp_params))[1] for p in of_modules)
        self.mapped_bytes = _BUFFERS * max(sizes) * group.size() * dtype.itemsize
        buffers = make(_BUFFERS, self.mapped_bytes // _BUFFERS, group, device)
        self._buffers = [(buffer.view(dtype), mapped) for buffer, mapped in buffers]
        self._dtype, self._device = dtype, of_modules[0].device_handle
        self._stream = self._device.Stream(priority=-1)
        self._norms: list[Tensor] = []  # of means, on this rank
        self._under_way: tuple[Any, Gradients] | None = None  # its end event, and what it reads
        for parameters in of_modules:
            _ReducedModule(parameters, self)

    def wait(self) -> None:
        """Make the current stream wait for all sums, and free what they read."""
        if self._under_way is not None:
            self._device.current_stream().wait_event(self._under_way[0])
            self._under_way = None

    def norm(self) -> Tensor:
        """Norm of this rank's part of all means since the last call; computed during backward."""
        norms, self._norms = self._norms, []
        return norm_of(norms)

    def add(self, gradients: Gradients) -> None:
        """Start to sum a module's gradients; each parameter's gradient then becomes the mean."""
        self.wait()
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            self._add(gradients)
            event = self._device.Event()
            event.record(self._stream)
        self._under_way = event, gradients

    def _add(self, gradients: Gradients) -> None:
        buffer, mapped = self._buffers[0]
        self._buffers.reverse()
        counts = [count_of(own) for own, _ in gradients]
        starts, total = starts_of(counts)
        mine, copies, waiting = [], Copies(), []
        for (_, gradient), count, start in zip(gradients, counts, starts, strict=True):
            pieces = [_piece(gradient, rank, count) for rank in range(mapped.world_size)]
            mine.append(pieces[mapped.rank])
            for rank in others(mapped):
                at = rank * total + start
                copies.add(buffer[at : at + pieces[rank].numel()], pieces[rank])
        copies.make()
        mapped.barrier(timeout_ms=TIMEOUT_MS)
        of_ranks = self._parts_of_ranks(mapped, total)
        out, means, parts = torch.empty(total, device=buffer.device), [], []
        for (own, _), piece, start in zip(gradients, mine, starts, strict=True):
            here = slice(start, start + piece.numel())
            mean = out[here]
            if piece.numel():
                means.append(mean)
                ranks = range(mapped.world_size)
                parts.append([of_ranks[r][here] if r in of_ranks else piece for r in ranks])
            waiting.append((own, mean))
        if means:
            add_up(parts, 1 / mapped.world_size, means)
            self._norms += torch._foreach_norm(means)
        for own, mean in waiting:
            _accumulate(own, mean)

    def _parts_of_ranks(self, mapped: Any, total: int) -> dict[int, Tensor]:
        """The other ranks' parts for this rank, by rank."""
        found = {}
        for peer in others(mapped):
            theirs = mapped.get_buffer(peer, (total,), self._dtype, mapped.rank * total)
            found[peer] = torch.empty_like(theirs).copy_(theirs)
        return found


class _ReducedModule:
    """Replaces FSDP2's code that follows a module's backward."""

    def __init__(self, parameters: Any, sums: SummedGradients) -> None:
        self._parameters, self._sums = parameters, sums
        self._finalize = parameters.finalize_backward
        parameters.post_backward = self.reduce
        parameters.finalize_backward = self.finish

    @torch.no_grad()
    def reduce(self, *unused: Any) -> None:
        """Release the weights, and start to sum their gradients."""
        parameters = self._parameters
        state = type(parameters._training_state)  # torch's TrainingState
        parameters._training_state = state.POST_BACKWARD
        gradients: Gradients = []
        for own in parameters.fsdp_params:
            weight = own.unsharded_param
            if weight.grad is not None:
                gradients.append((own, weight.grad))
                weight.grad = None
        parameters.reshard()
        if gradients:
            self._sums.add(gradients)

    def finish(self) -> None:
        """Called after backward, before the optimiser reads the sums."""
        self._sums.wait()
        self._finalize()


def use_copies(
    modules: Sequence[FSDPModule],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    make: MakeBuffers = mapped_buffers,
) -> tuple[GatheredWeights, SummedGradients]:
    """Make modules communicate by copies; they are under `fully_shard` over a group's ranks."""
    how = modules, group, dtype, device, make
    return GatheredWeights(*how), SummedGradients(*how)


def _piece(gradient: Tensor, rank: int, count: int) -> Tensor:
    """A rank's part, flat; the last parts may be shorter, or empty."""
    return gradient.flatten()[rank * count : (rank + 1) * count]


def _accumulate(own: Any, mean: Tensor) -> None:
    """Add to the gradient of this rank's part, or create it."""
    if own.sharded_param.grad is None:
        own.sharded_param.grad = own.to_sharded_dtensor(mean.view(own.sharded_size))
    else:
        own.sharded_param.grad._local_tensor += mean.view(own.sharded_size)
