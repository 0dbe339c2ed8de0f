"""Initial values of experts that are spread over ranks: different for every expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def fill_part(weight: Tensor, std: float, rank: int, everyone: list[int]) -> None:
    """Normal values for this rank's part of the experts, from generators seeded alike on all ranks.

    Generators stay alike: what is drawn after this, such as the router, is the same on all ranks.

    Parameters
    ----------
    weight : torch.Tensor
        (experts of this rank, ...); or a DTensor, of these or of all experts.
    std : float
        Standard deviation.
    rank : int
        This rank's number among those that share the experts.
    everyone : list of int
        The numbers of these among all ranks.
    """
    if isinstance(weight, DTensor):
        is_whole = {*everyone} <= {*weight.device_mesh.mesh.flatten().tolist()}
        fill_shard(weight, std, 0 if is_whole else rank + 1)
        return
    count, one = len(weight), torch.empty_like(weight[0])
    for expert in range(count * len(everyone)):  # draw all of them, keep this rank's
        one.normal_(std=std)
        if expert // count == rank:
            weight[expert % count].copy_(one)


@torch.no_grad()
def fill_shard(weight: DTensor, std: float, part: int = 0) -> None:
    """Normal values for this rank's shard, from generators seeded alike on all ranks.

    part: 0, or which of several tensors this is that ranks with the same coordinates fill.
    """
    if weight.device.type == "cuda" and part == 0:
        nn.init.normal_(weight, std=std)  # torch draws the whole tensor's numbers and keeps a part
        return
    # torch would draw the same numbers for every shard.
    seed = (int(torch.randint(2**62, (), device="cpu")) * 4093 + part) % 2**62
    coordinates = weight.device_mesh.get_coordinate()
    for coordinate, place in zip(coordinates, weight.placements, strict=True):
        seed = (seed * 4093 + (0 if place.is_replicate() else coordinate + 1)) % 2**62
    draw = torch.Generator(weight.device).manual_seed(seed)
    weight.to_local().normal_(std=std, generator=draw)
