"""The ranks of a `guild train` started by torchrun: what they can train, which one writes, and when
all stop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from guild.train.failures import OtherRankError
from guild.train.interrupt import StopRequest
from guild.train.run_folder import RunFolder
from guild.train.settings import Settings

_TIMEOUT = timedelta(minutes=30)  # ranks wait that long for the one that writes a checkpoint


def is_started_by_torchrun() -> bool:
    """Whether there are other ranks, or may be."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """The process group of all ranks, NCCL on GPUs and gloo elsewhere.

    Raises
    ------
    ValueError
        If torchrun has not started this process.
    """
    if dist.is_initialized():
        yield
        return
    if not is_started_by_torchrun():
        raise ValueError(
            "fsdp: expected to be started by torchrun, as in torchrun --nproc-per-node 2 -m guild "
            "train --fsdp"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    yield  # after an error there is no waiting for the others: torchrun ends them
    dist.barrier()  # gloo ends a process whose peers are gone before it has freed its groups
    dist.destroy_process_group()


def device_of_rank(device: torch.device) -> torch.device:
    """The GPU of this rank, where GPUs are wanted.

    Raises
    ------
    ValueError
        If one GPU is asked for, and there are several ranks.
    """
    if device.type != "cuda":
        return device
    if device.index is not None:
        if local_ranks() > 1:
            raise ValueError(f"device: expected cuda, so that each rank has its own, got {device}")
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def all_ranks() -> int:
    """How many processes torchrun has started, on all nodes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks() -> int:
    """How many ranks torchrun has started on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rendezvous() -> list[str]:
    """The options with which torchrun, on every node, finds the others; none on a single node."""
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    if nodes == "1":
        return []
    first = os.environ["MASTER_ADDR"]
    return ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", first]


def writes() -> bool:
    """Whether this rank has the folder and the console: the first one, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def agreed(value: bool) -> bool:
    """The value of the rank that writes, on every rank."""
    if not dist.is_initialized():
        return value
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


@contextlib.contextmanager
def written_by_one() -> Iterator[None]:
    """What only the rank that writes does: the others wait for it, and end if it fails.

    Raises
    ------
    OtherRankError
        On the others.
    """
    try:
        yield
    except Exception:
        agreed(False)
        raise
    if not agreed(True):
        raise OtherRankError("the first rank could not write")


def on_all_ranks(value: bool) -> bool:
    """Whether it is true on every rank."""
    found: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(found)


def mean_of_ranks(values: torch.Tensor) -> torch.Tensor:
    """A tensor's mean over all ranks."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


class SharedStop(StopRequest):
    """A request that any rank may receive and that all obey, in the same round."""

    def __init__(self, device: torch.device) -> None:
        self._own, self._device = False, device
        super().__init__()

    @property
    def asked(self) -> bool:
        """Asks all ranks; every rank must call this equally often."""
        flag = torch.tensor([self._own], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    @asked.setter
    def asked(self, value: bool) -> None:
        self._own = value


class UnwrittenFolder(RunFolder):
    """A run's folder on ranks that do not write: they read, and wait to be told."""

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Nothing to claim."""
        yield

    def start(self) -> Path | None:
        """The first rank has made room."""
        return None

    def append(self, rows: list[dict[str, Any]]) -> None:
        """The first rank has the same rows."""

    def cut_after(self, step: int, layers: Collection[str]) -> None:
        """The first rank does."""

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """The first rank has all of it."""

    def write_summary(self, summary: dict[str, Any]) -> None:
        """The first rank does."""


def run_folder(path: Path) -> RunFolder:
    """The folder of a run, as this rank uses it."""
    return RunFolder(path) if writes() else UnwrittenFolder(path)


def expect_layout(name: str, s: Settings, ranks: int, expert_parallel: int) -> None:
    """Raise for what so many ranks cannot train.

    Parameters
    ----------
    name : str
        Of the layer, one of `names.LAYERS`.
    s : Settings
        Of the run.
    ranks, expert_parallel : int
        All ranks, and how many of them share the experts.

    Raises
    ------
    ValueError
        If ranks cannot divide the batch or the experts, or do not support the layer.
    """
    if s.batch % (ranks * s.accumulate):
        times = "ranks" if s.accumulate == 1 else f"{ranks} ranks, accumulate {s.accumulate}"
        raise ValueError(
            f"batch: expected a multiple of {ranks * s.accumulate} ({times}), got {s.batch}"
        )
    if ranks % expert_parallel:
        raise ValueError(
            f"expert_parallel: expected a divisor of {ranks} (ranks), got {expert_parallel}"
        )
    if s.experts % expert_parallel:
        raise ValueError(
            f"experts: expected a multiple of {expert_parallel} (expert_parallel), got {s.experts}"
        )
    if name == "fp8":
        raise ValueError("moe: expected a layer in 16 bits on several ranks, got 'fp8'")
    if name == "plain" and (expert_parallel > 1 or s.balance):
        raise ValueError(
            "moe: expected --balance 0 and no --expert-parallel with the plain layer and --fsdp"
        )
    if s.capacity:
        raise ValueError(f"capacity: expected 0 with --fsdp, got {s.capacity}")
