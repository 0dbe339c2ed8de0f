"""A layer over ranks on torch's own all-to-all in symmetric memory, to time beside Guild's engines.

`torch.ops.symm_mem.all_to_all_vdev` sends rows sorted by rank, as many to each as a tensor on the
GPU says, and the host waits for nothing. A token's row goes once for each of its experts, with the
expert's number. (all_to_all_vdev_2d, which sorts by expert on the way, takes 16 experts a rank at
most.) It needs torch's NVSHMEM backend, one for the whole process, so Guild's peer engine, which
needs another, is timed in a run of its own.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

import guild
from guild._torch.operators import ops
from guild.routing import route_tokens

from .presets import Shape

TORCH = "torch"  # the engine's name


def use_nvshmem() -> None:
    """Choose torch's NVSHMEM backend, before any symmetric memory is asked for.

    Raises
    ------
    RuntimeError
        If this torch has none.
    """
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # multicast, which nothing here uses
    from torch.distributed import _symmetric_memory as symmetric

    if not (hasattr(symmetric, "is_nvshmem_available") and symmetric.is_nvshmem_available()):
        raise RuntimeError("engine: torch's all-to-all needs its NVSHMEM backend, which is missing")
    symmetric.set_backend("NVSHMEM")


class SymmetricLayer:
    """Forward of a layer with torch's all-to-all and Guild's router, experts and sum.

    Parameters
    ----------
    shape : Shape
        Tokens of this rank, and the whole layer's sizes.
    layer : guild.MoE
        Whose router and weights it has: this rank's experts.
    x : torch.Tensor
        (tokens, hidden).
    """

    def __init__(self, shape: Shape, layer: guild.MoE, x: Tensor) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.layer, self.x = layer, x
        self._group, self._ranks = dist.group.WORLD, dist.get_world_size()
        self._experts, slots = shape.experts, shape.tokens * shape.top_k
        place = {"device": x.device, "dtype": x.dtype}

        def shared(*sizes: int, **how: object) -> Tensor:
            made = symmetric.empty(*sizes, **how)
            symmetric.rendezvous(made, self._group)
            return made

        numbers = {"device": x.device, "dtype": torch.int32}
        counts = {"device": x.device, "dtype": torch.int64}
        most = 2 * slots  # room for uneven routing
        self._sent, self._came = (
            shared(slots, shape.hidden, **place),
            shared(most, shape.hidden, **place),
        )
        self._made, self._back = (
            shared(most, shape.hidden, **place),
            shared(slots, shape.hidden, **place),
        )
        self._ids_sent, self._ids_came = shared(slots, 4, **numbers), shared(most, 4, **numbers)
        self._counts = shared(self._ranks, **counts)
        self._came_at, self._back_at, self._ids_at = (
            shared(2, self._ranks, **counts) for _ in range(3)
        )
        self._ones = torch.ones(most, 1, device=x.device)

    @torch.no_grad()
    def forward(self) -> Tensor:
        """(tokens, hidden)."""
        layer, send = self.layer, torch.ops.symm_mem.all_to_all_vdev
        name, local = self._group.group_name, layer.w_down.shape[0]
        router = layer.router.weight, layer.top_k, layer.routing, None, None
        ids, scores = route_tokens(self.x, *router)
        offsets, row_token, slot_row, _ = ops.sort_by_expert(ids, scores, self._experts)
        torch.index_select(self.x, 0, row_token, out=self._sent)
        self._counts.copy_(offsets[::local].diff())
        self._ids_sent[slot_row.flatten().long()] = ids.view(-1, 1) % local
        self._ids_came.fill_(-1)
        send(self._sent, self._came, self._counts, self._came_at, name)
        send(self._ids_sent, self._ids_came, self._counts, self._ids_at, name)
        here = self._ids_came[:, :1].contiguous()
        rows = guild.routed_experts(self._came, here, self._ones, layer.w_up, layer.w_down)
        self._made.copy_(rows)
        send(self._made, self._back, self._came_at[0], self._back_at, name)
        return ops.combine(self._back, slot_row, scores, None, None)
