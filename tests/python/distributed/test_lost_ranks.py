"""If a rank is late or killed, the others stop within the limit with an error that names it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import guild
from processes import start_ranks

_RANKS, _LOST, _LIMIT = 3, 1, 1.0
_MOST_SECONDS = _LIMIT + 12  # includes finding out who is missing, on a busy machine


def expect_error(group: guild.ExpertParallel, layer: guild.MoE, text: str) -> None:
    """Expect the error now, and at once in every later call."""
    x = torch.randn(4, 16)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=text):
        layer(x)
    assert time.monotonic() - began < _MOST_SECONDS
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=text):
        layer(x)
    assert time.monotonic() - began < 0.5


def late(rank: int) -> None:
    """A rank sleeps past the limit; then its own call fails too."""
    group = guild.ExpertParallel(dist.new_group(list(range(_RANKS))), timeout=_LIMIT)
    layer = guild.MoE(16, 8, 6, 2, expert_group=group)
    layer(torch.randn(4, 16)).sum().backward()
    if rank == _LOST:
        time.sleep(_LIMIT + 3)
        with pytest.raises(RuntimeError, match=r"^expert_group: "):
            layer(torch.randn(4, 16))
    else:
        expect_error(group, layer, rf"no answer from rank {_LOST} .*limit is {_LIMIT:g} s")


def late_for_memory(rank: int) -> None:
    """A rank comes late to the first call of the peer engine: its limit holds there too."""
    ranks = dist.new_group(list(range(_RANKS)))
    group = guild.ExpertParallel(ranks, engine="peer", timeout=_LIMIT)
    layer = guild.MoE(16, 8, 6, 2, expert_group=group)
    if rank == _LOST:
        time.sleep(_LIMIT + 3)
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=rf"^expert_group: .* of call 1; .*limit is {_LIMIT:g} s"
    ):
        layer(torch.randn(4, 16))
    assert time.monotonic() - began < _MOST_SECONDS


def killed(rank: int) -> None:
    """A rank is killed in the middle of a step, while the others are in backward.

    The others know each other though one is in another group as well, and so made more of them.
    """
    pair = dist.new_group([0, _LOST])
    if rank in (0, _LOST):
        guild.ExpertParallel(pair, timeout=_LIMIT)
    group = guild.ExpertParallel(dist.new_group(list(range(_RANKS))), timeout=_LIMIT)
    layer = guild.MoE(16, 8, 6, 2, expert_group=group)
    out = layer(torch.randn(4, 16))
    if rank == _LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    alone = rf"no answer from rank {_LOST} \(rank {_LOST} of all\), in the backward of call 1"
    with pytest.raises(RuntimeError, match=alone):
        out.sum().backward()
    assert time.monotonic() - began < _MOST_SECONDS
    expect_error(group, layer, alone)


def run(rank: int, folder: str) -> None:
    """Run the checks on one rank."""
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=_RANKS)
    for check in (late, late_for_memory, killed):
        check(rank)
        (Path(folder) / f"{check.__name__}.{rank}").touch()


def test_three_ranks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """All checks run on all three ranks, and the processes end."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    processes = start_ranks(run, _RANKS, str(tmp_path)).processes
    for process in processes:
        process.join(120)
    assert [p.exitcode for p in processes] == [
        -signal.SIGKILL if rank == _LOST else 0 for rank in range(_RANKS)
    ]
    done = {path.name for path in tmp_path.iterdir()} - {"ranks"}
    late_ones = {f"{check}.{r}" for check in ("late", "late_for_memory") for r in range(_RANKS)}
    assert done == late_ones | {"killed.0", "killed.2"}
