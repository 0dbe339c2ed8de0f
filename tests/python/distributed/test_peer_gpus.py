"""The peer engine on two or more GPUs of one host, and without one of its ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import graph_checks
import killed_checks
import peer_checks
from processes import run_on_ranks, run_one, start_ranks


def ranks_of(gpu: str) -> int:
    """The number of ranks to start; each has a GPU and equally many experts."""
    count = min(torch.cuda.device_count(), 4)
    if count < 2:
        pytest.skip("one GPU: the peer engine needs two")
    return count if peer_checks.SMALL.experts % count == 0 else 2


def test_gpus(gpu: str, tmp_path: Path) -> None:
    """Every check runs on all ranks."""
    checks = *peer_checks.CHECKS, *graph_checks.CHECKS
    run_on_ranks(checks, ranks_of(gpu), tmp_path / "ranks", "nccl")


@pytest.mark.parametrize("killed", killed_checks.CHECKS)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_killed_rank(
    backend: str,
    killed: Callable[[int], str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    gpu_reason: str,
) -> None:
    """The other rank stops with an error that names the killed one."""
    if backend == "nccl" and (gpu_reason or torch.cuda.device_count() < 2):
        pytest.skip(f"no two GPUs: {gpu_reason}")
    if backend == "gloo" and request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    if backend == "gloo" and killed is not killed_checks.killed:
        pytest.skip("on the CPU a pass is over when the call is")
    how = "spawn" if backend == "nccl" else "forkserver"
    arguments = [killed], 2, str(tmp_path), backend
    processes = start_ranks(run_one, 2, *arguments, how=how).processes
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [0, -signal.SIGKILL]
    assert (tmp_path / f"{killed.__name__}.0.done").exists()
