"""A layer over ranks on torch's own all-to-all in symmetric memory, to time beside Guild's engines.

`torch.ops.symm_mem.all_to_all_vdev_2d` takes rows sorted by expert, with as many for each expert as
a tensor on the GPU says, and leaves them sorted by expert where the experts are; the host waits for
nothing. A token's row goes once for each of its experts. It needs torch's NVSHMEM backend, one for
the whole process, so Guild's peer engine, which needs another, is timed in a run of its own.
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

        whole = {"device": x.device, "dtype": torch.int64}
        self._sent = shared(slots, shape.hidden, **place)
        self._came = shared(2 * slots, shape.hidden, **place)  # with room for uneven routing
        self._made = shared(2 * slots, shape.hidden, **place)
        self._back = shared(slots, shape.hidden, **place)
        self._counts = shared(shape.experts, **whole)
        self._places = shared(2, shape.experts, **whole)
        self._back_places = shared(2, shape.experts, **whole)

    @torch.no_grad()
    def forward(self) -> Tensor:
        """(tokens, hidden)."""
        layer, name = self.layer, self._group.group_name
        router = layer.router.weight, layer.top_k, layer.routing, None, None
        ids, scores = route_tokens(self.x, *router)
        offsets, row_token, slot_row, _ = ops.sort_by_expert(ids, scores, self._experts)
        torch.index_select(self.x, 0, row_token, out=self._sent)
        self._counts.copy_(offsets.diff())
        to_experts = self._sent, self._came, self._counts, self._places, name
        torch.ops.symm_mem.all_to_all_vdev_2d(*to_experts)
        ends = self._places[0].view(-1, self._ranks).sum(1).cumsum(0)
        starts = torch.nn.functional.pad(ends, (1, 0)).int()
        weights = layer.w_up, layer.w_down, None, None, layer.activation
        guild.experts_mlp(self._came, starts, *weights, out=self._made)
        to_tokens = self._made, self._back, self._places, self._back_places, name
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(*to_tokens)
        return ops.combine(self._back, slot_row, scores, None, None)
