"""Runs checks in several processes that are started once for all of them.

On the CPU they are forks of one process that has imported whatever takes long, so that it is
imported once. With GPUs each is a new process: CUDA does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Check = Callable[[int], object]  # anything but None: a rank is lost, nobody waits for it

_IMPORTED_ONCE = "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "guild"


def start_ranks(
    function: Callable[..., None], ranks: int, *arguments: Any, how: str = "forkserver"
) -> torch.multiprocessing.ProcessContext:
    """Processes that run function(rank, *arguments) with this one's environment variables."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_IMPORTED_ONCE))
    given = function, dict(os.environ), arguments
    return mp.start_processes(_call, given, ranks, join=False, start_method=how)


def _call(rank: int, function: Callable[..., None], environment: dict, arguments: tuple) -> None:
    os.environ.update(environment)  # the forked process has older ones
    torch.set_num_threads(1)
    function(rank, *arguments)


def run_on_ranks(checks: Sequence[Check], ranks: int, folder: Path, backend: str = "gloo") -> None:
    """Run every check on every rank; raise what one of them raised.

    Parameters
    ----------
    checks : sequence of callable
        Functions of a module that take their rank.
    ranks : int
        How many processes.
    folder : Path
        An empty one, for messages between the ranks and notes of finished checks.
    backend : {"gloo", "nccl"}
        How they reach each other; with NCCL each rank has a GPU.
    """
    folder.mkdir(exist_ok=True)
    how = "forkserver" if backend == "gloo" else "spawn"
    processes = start_ranks(run_one, ranks, list(checks), ranks, str(folder), backend, how=how)
    while not processes.join():
        pass
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
    """Every rank's tensor, whatever the sizes."""
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, tensor.detach(), group=group)
    return everyone
