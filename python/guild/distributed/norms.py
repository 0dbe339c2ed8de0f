"""Norms of gradients of which every rank has a part, on meshes of any kind."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from guild.distributed.own_experts import ranks_by_shard, ranks_of


class Layout(NamedTuple):
    """How a gradient is divided: along dimensions of a mesh, among ranks with other experts."""

    mesh: DeviceMesh | None = None
    dimensions: tuple[int, ...] = ()
    ranks: dist.ProcessGroup | None = None

    def groups(self) -> list[dist.ProcessGroup]:
        """The ranks that have the parts, one dimension after another."""
        groups = [self.mesh.get_group(dimension) for dimension in self.dimensions]
        return groups if self.ranks is None else [*groups, self.ranks]


def by_layout(parameters: Iterable[Tensor]) -> dict[Layout, list[Tensor]]:
    """The parameters that have a gradient, by its layout."""
    found: dict[Layout, list[Tensor]] = defaultdict(list)
    by_shard = ranks_by_shard()
    for parameter in parameters:
        if parameter.grad is not None:
            found[_layout(parameter, by_shard.get(id(parameter)))].append(parameter)
    return found


def _layout(parameter: Tensor, ranks: dist.ProcessGroup | None) -> Layout:
    """ranks: those that have the other experts of a parameter that FSDP2 shards."""
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return Layout(ranks=ranks_of(parameter))
    placements = enumerate(_summed(grad.placements))
    divided = tuple(i for i, place in placements if not place.is_replicate())
    return Layout(grad.device_mesh, divided, ranks)


def _summed(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements once sums that are left for later have been done."""
    return tuple(Replicate() if place.is_partial() else place for place in placements)


def _part(grad: Tensor) -> Tensor:
    """This rank's part of a gradient."""
    if not isinstance(grad, DTensor):
        return grad
    summed = _summed(grad.placements)
    return (grad if summed == grad.placements else grad.redistribute(placements=summed)).to_local()


def norm_of(
    grads: list[Tensor],
    groups: list[dist.ProcessGroup],
    norm_type: float,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of the whole gradients, float32, from the parts on all ranks."""
    parts = [_part(grad) for grad in grads]
    filled = [part for part in parts if part.numel()]
    norm = torch.zeros((), dtype=torch.float32, device=parts[0].device)
    if filled:
        norm = torch.nn.utils.get_total_norm(filled, norm_type, foreach=foreach).float()
    for group in groups:
        if math.isinf(norm_type):
            lost = norm.isnan().float()  # a maximum may leave NaN out
            dist.all_reduce(lost, group=group)
            dist.all_reduce(norm, dist.ReduceOp.MAX, group)
            norm = torch.where(lost > 0, torch.nan, norm)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=group)
            norm = norm ** (1 / norm_type)
    return norm
