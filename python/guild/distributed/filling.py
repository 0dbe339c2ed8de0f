"""Initial values of experts that are spread over ranks: different for every expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def fill_part(weight: Tensor, std: float, mine: range, experts: int) -> None:
    """Normal values for this rank's part of the experts, from generators seeded alike on all ranks.

    Generators stay alike: what is drawn after this, such as the router, is the same on all ranks.

    Parameters
    ----------
    weight : torch.Tensor
        (experts of this rank, ...), or a DTensor (experts, ...).
    std : float
        Standard deviation.
    mine, experts : range, int
        Indices of the experts in the tensor, and the number of all experts.
    """
    if not isinstance(weight, DTensor):
        one = torch.empty_like(weight[0])
        for expert in range(experts):  # draw all of them, keep this rank's
            one.normal_(std=std)
            if expert in mine:
                weight[expert - mine.start].copy_(one)
    elif weight.device.type == "cuda":
        nn.init.normal_(weight, std=std)  # torch draws the whole tensor's numbers and keeps a part
    else:  # torch would draw the same numbers for every part
        seed = int(torch.randint(2**62, (), device="cpu"))
        coordinates = weight.device_mesh.get_coordinate()
        for coordinate, place in zip(coordinates, weight.placements, strict=True):
            seed = (seed * 4093 + (0 if place.is_replicate() else coordinate + 1)) % 2**62
        draw = torch.Generator(weight.device).manual_seed(seed)
        weight.to_local().normal_(std=std, generator=draw)
