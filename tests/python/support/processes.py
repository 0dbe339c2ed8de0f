"""Runs checks in several processes that reach each other by gloo, started once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Check = Callable[[int], None]


def run_on_ranks(checks: Sequence[Check], ranks: int, folder: Path) -> None:
    """Run every check on every rank; raise what one of them raised.

    Parameters
    ----------
    checks : sequence of callable
        Functions of a module that take their rank.
    ranks : int
        How many processes.
    folder : Path
        An empty one, for what they tell each other and for notes of what is done.
    """
    folder.mkdir(exist_ok=True)
    mp.spawn(_run, (list(checks), ranks, str(folder)), nprocs=ranks)
    done = {path.name for path in folder.iterdir() if path.suffix == ".done"}
    expected = {f"{check.__name__}.{rank}.done" for check in checks for rank in range(ranks)}
    assert done == expected, expected - done


def _run(rank: int, checks: list[Check], ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=ranks)
    for check in checks:
        check(rank)
        (Path(folder) / f"{check.__name__}.{rank}.done").touch()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Every rank's, whatever their sizes."""
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, tensor.detach(), group=group)
    return everyone
