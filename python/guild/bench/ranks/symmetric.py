"""A layer over ranks on torch's all-to-all in symmetric memory, to be timed beside Guild's engines.

`torch.ops.symm_mem.all_to_all_vdev` sends rows sorted by rank, with counts from a tensor on the
GPU, and the host waits for nothing. A token's row goes once for each of its experts, with the
expert's number and score. (all_to_all_vdev_2d, which sorts by expert on the way, supports fewer
than 16 experts per rank.) It needs torch's NVSHMEM backend, one for the whole process, so Guild's
peer engine, which needs another, is timed in a separate run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

import guild
from guild._torch.operators import ops
from guild.bench.presets import Shape
from guild.bench.ranks.dispatchers import DispatchedLayer

TORCH = "torch"  # the engine's name


def expect_nvshmem(device: torch.device) -> None:
    """Raise ValueError if this torch has no NVSHMEM backend, or the device is not a GPU."""
    from torch.distributed import _symmetric_memory as symmetric

    found = hasattr(symmetric, "is_nvshmem_available") and symmetric.is_nvshmem_available()
    if device.type != "cuda" or not found:
        raise ValueError(
            "engine: expected GPUs and a torch with its NVSHMEM backend for torch's all-to-all"
        )


def use_nvshmem(device: torch.device) -> None:
    """Choose torch's NVSHMEM backend; called before any symmetric memory is allocated."""
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # multicast is not used here
    from torch.distributed import _symmetric_memory as symmetric

    expect_nvshmem(device)
    symmetric.set_backend("NVSHMEM")


class SymmetricLayer(DispatchedLayer):
    """A layer with torch's all-to-all, and memory for twice the rows of balanced routing.

    One forward pass is kept for backward: a later one of other tokens overwrites its rows.
    """

    def __init__(self, shape: Shape, layer: guild.MoE) -> None:
        super().__init__(shape, layer)
        slots, ranks = shape.tokens * shape.top_k, dist.get_world_size()
        most, device, dtype = 2 * slots, layer.w_down.device, layer.w_down.dtype
        self.sent, self.back = (_shared(device, dtype, slots, shape.hidden) for _ in range(2))
        # Rows received, gradients of the output received, results to be sent.
        self.rows, self.gradients, self.made = (
            _shared(device, dtype, most, shape.hidden) for _ in range(3)
        )
        # The expert's number on this rank and the score, or its gradient.
        self.notes_sent, self.notes_back = (
            _shared(device, torch.int32, slots, 4) for _ in range(2)
        )
        self.notes, self.notes_made = (_shared(device, torch.int32, most, 4) for _ in range(2))
        self.counts = _shared(device, torch.int64, ranks)
        self.came, self.returned, self.again = (
            _shared(device, torch.int64, 2, ranks) for _ in range(3)
        )

    def routed(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """As `DispatchedLayer.routed`."""
        trip = _Trip(self)
        rows, ids, scores = _Dispatch.apply(x, scores, ids, trip)
        results = guild.routed_experts(rows, ids, scores, self.layer.w_up, self.layer.w_down)
        return _Combine.apply(results, trip)


def _shared(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    from torch.distributed import _symmetric_memory as symmetric

    made = symmetric.empty(*size, device=device, dtype=dtype)
    symmetric.rendezvous(made, dist.group.WORLD)
    return made


@dataclass
class _Trip:
    """Where one forward pass's rows go; a row of `sent` for each slot, sorted by expert."""

    layer: SymmetricLayer
    row_token: Tensor | None = None  # (slots)
    slot_row: Tensor | None = None  # (tokens, top_k)

    def there(self, tokens: Tensor, to: Tensor) -> None:
        """Send rows of tokens to the ranks of their experts."""
        layer = self.layer
        torch.index_select(tokens, 0, self.row_token, out=layer.sent)
        _send(layer.sent, to, layer.counts, layer.came)

    def and_back(self, results: Tensor) -> Tensor:
        """Send results back, and sum those of a token's rows."""
        layer = self.layer
        layer.made.copy_(results)
        _send(layer.made, layer.back, layer.came[0], layer.returned)
        return ops.combine(layer.back, self.slot_row, None, None, None)


def _send(rows: Tensor, out: Tensor, counts: Tensor, places: Tensor) -> None:
    name = dist.group.WORLD.group_name
    torch.ops.symm_mem.all_to_all_vdev(rows, out, counts, places, name)


class _Dispatch(torch.autograd.Function):
    """Tokens to rows here, with the number of their expert here and their score."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, scores: Tensor, ids: Tensor, trip: _Trip
    ) -> tuple[Tensor, Tensor, Tensor]:
        layer, local = trip.layer, trip.layer.layer.w_down.shape[0]
        sorted_slots = ops.sort_by_expert(ids, scores, layer.shape.experts)
        offsets, trip.row_token, trip.slot_row, _ = sorted_slots
        layer.counts.copy_(offsets[::local].diff())
        ctx.places = places = trip.slot_row.flatten().long()
        layer.notes_sent[places, 0] = ids.flatten() % local
        layer.notes_sent.view(torch.float32)[places, 1] = scores.flatten()
        layer.notes.fill_(-1)  # rows that are not received have no expert
        trip.there(x, layer.rows)
        _send(layer.notes_sent, layer.notes, layer.counts, layer.again)
        ctx.trip = trip
        here = layer.notes[:, :1].clone()
        ctx.mark_non_differentiable(here)
        return layer.rows.detach(), here, layer.notes.view(torch.float32)[:, 1:2].clone()

    @staticmethod
    def backward(ctx: Any, drows: Tensor, _: None, dscores: Tensor) -> tuple:
        layer = ctx.trip.layer
        layer.notes_made.view(torch.float32)[:, 1:2] = dscores
        dx = ctx.trip.and_back(drows)
        _send(layer.notes_made, layer.notes_back, layer.came[0], layer.again)
        dscores = layer.notes_back.view(torch.float32)[ctx.places, 1]
        return dx, dscores.view(ctx.trip.slot_row.shape), None, None


class _Combine(torch.autograd.Function):
    """Rows here to their tokens, where they are added."""

    @staticmethod
    def forward(ctx: FunctionCtx, results: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.and_back(results)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        layer = ctx.trip.layer
        ctx.trip.there(dout, layer.gradients)
        return layer.gradients.detach(), None
