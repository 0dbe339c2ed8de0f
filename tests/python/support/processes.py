"""Runs checks in several processes that are started once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Check = Callable[[int], object]  # anything but None: a rank is lost, nobody waits for it


def run_on_ranks(checks: Sequence[Check], ranks: int, folder: Path, backend: str = "gloo") -> None:
    """Run every check on every rank; raise what one of them raised.

    Parameters
    ----------
    checks : sequence of callable
        Functions of a module that take their rank.
    ranks : int
        How many processes.
    folder : Path
        An empty one, for what they tell each other and for notes of what is done.
    backend : {"gloo", "nccl"}
        How they reach each other; with NCCL each rank has a GPU.
    """
    folder.mkdir(exist_ok=True)
    mp.spawn(run_one, (list(checks), ranks, str(folder), backend), nprocs=ranks)
    done = {path.name for path in folder.iterdir() if path.suffix == ".done"}
    expected = {f"{check.__name__}.{rank}.done" for check in checks for rank in range(ranks)}
    assert done == expected, expected - done


def run_one(rank: int, checks: list[Check], ranks: int, folder: str, backend: str) -> None:
    """One rank's part of `run_on_ranks`."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{folder}/ranks", rank=rank, world_size=ranks)
    lost = False
    for check in checks:
        lost = check(rank) is not None or lost
        (Path(folder) / f"{check.__name__}.{rank}.done").touch()
    if dist.is_initialized() and not lost:
        dist.barrier()
        dist.destroy_process_group()


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Every rank's, whatever their sizes."""
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, tensor.detach(), group=group)
    return everyone
