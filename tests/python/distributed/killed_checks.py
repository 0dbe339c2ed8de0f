"""The peer engine when a rank is killed, on CPU ranks or a GPU each; run by test_peer_gpus.py."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import guild
from peer_checks import MOST_TOKENS, Step, raised

LATE = 1.5  # seconds


def lost(
    rank: int,
    last: Callable[[guild.ExpertParallel, Step], object],
    captured: bool = False,
) -> str:
    """The last rank is killed right after it has begun `last`: the others find out in time.

    captured: they are replaying a graph of the step, else they go on with steps.
    """
    group = guild.ExpertParallel(engine="peer", max_tokens=MOST_TOKENS, timeout=LATE)
    step = Step(7, 16)
    step.run(group)
    run = functools.partial(step.run, group)
    if captured:
        run = captured_step(group, step).replay
    gone = dist.get_world_size() - 1
    dist.barrier()
    if rank == gone:
        run() if captured else last(group, step)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()

    def until_noticed() -> None:
        for _ in itertools.count():
            run()
            group.check()

    text = raised(RuntimeError, until_noticed)
    assert f"no answer from rank {gone} (rank {gone} of all)" in text, text
    assert time.monotonic() - began < LATE + 5
    assert text == raised(RuntimeError, lambda: step.run(group))
    return text


def killed(rank: int) -> str:
    """A rank is killed between two steps."""
    return lost(rank, lambda *_: None)


def forward(group: guild.ExpertParallel, step: Step) -> Tensor:
    """The forward pass of a step."""
    return group.routed_experts(step.x, step.ids, step.scores, *step.weights)


def killed_in_forward(rank: int) -> str:
    """A rank is killed while its forward kernels may still run on the GPU."""
    return lost(rank, forward)


def killed_in_backward(rank: int) -> str:
    """A rank is killed in backward, after its forward pass has finished."""

    def backward(group: guild.ExpertParallel, step: Step) -> None:
        out = forward(group, step)
        torch.cuda.synchronize()
        out.backward(step.dout)

    return lost(rank, backward)


def killed_in_replay(rank: int) -> str:
    """A rank is killed while a graph of the step is replayed."""
    return lost(rank, lambda *_: None, captured=True)


def captured_step(group: guild.ExpertParallel, step: Step) -> torch.cuda.CUDAGraph:
    """A graph of a step, captured on a stream of its own."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()  # a group's calls run one after the other
    with torch.cuda.stream(side):
        step.run(group)
    side.synchronize()
    with torch.cuda.graph(graph, stream=side):
        step.run(group)
    return graph


CHECKS = (killed, killed_in_forward, killed_in_backward, killed_in_replay)
