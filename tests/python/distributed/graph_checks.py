"""CUDA graphs on one GPU per rank: `guild train --fsdp` has the bits of steps without them.

Run by test_peer_gpus.py.
"""

from __future__ import annotations

from unittest import mock

import torch

from guild.bench.parallel import measure_parallel
from guild.bench.presets import Shape
from guild.train.corpus import Corpus
from guild.train.settings import Settings
from guild.train.sharded import ShardedLearner
from peer_checks import device

ROUNDS = 2, 3, 4


def corpus() -> Corpus:
    draw = torch.Generator().manual_seed(0)
    train, held_out = (
        torch.randint(0, 256, (n,), dtype=torch.uint8, generator=draw) for n in (9000, 5000)
    )
    return Corpus(train, held_out, files=2, digest="00000000")


def trained(graphs: bool, expert_parallel: int = 1, **changes: float) -> list:
    """Losses, norms, loads and validations of some rounds, and what the model then writes."""
    sizes = {"batch": 8, "context": 32, "shared": 64, "layers": 3, "steps": sum(ROUNDS)}
    settings = Settings(**sizes | changes)
    how = settings, device(), torch.bfloat16, expert_parallel
    learner = ShardedLearner("guild", *how, graphs=graphs)
    found, first = [], 0
    for count in ROUNDS:
        rows = learner.round(corpus(), first, count)
        found += [(row["loss"], row["gradient_norm"], row["load"]) for row in rows]
        found.append(learner.validate(corpus(), settings.batch))
        first += count
    assert learner.steps.captured == graphs
    found.append(learner.sample(b"def ", 4))
    learner.steps.release()
    return found


def by_copies(rank: int) -> None:
    """Weights and gradients by copy engines."""
    assert trained(graphs=True) == trained(graphs=False)


def by_collectives(rank: int) -> None:
    """By NCCL, in two parts, which hold the sum of their gradients."""
    with mock.patch("guild.train.sharded.can_map", lambda device: False):
        assert trained(True, accumulate=2) == trained(False, accumulate=2)


def with_shared_experts(rank: int) -> None:
    """Experts on two ranks each, by the peer engine."""
    assert trained(True, 2, balance=0.0) == trained(False, 2, balance=0.0)


def timed(rank: int) -> None:
    """The benchmark replays the layer's passes, and those of a share of it alone."""
    how = "random", torch.bfloat16, device(), 2, 0.001
    engine = {"engine": "peer", "graphs": True}
    few = measure_parallel({"few": Shape(4, 64, 48, 8, 2)}, *how, **engine, inference=True)
    assert set(few["cases"][0]["milliseconds"]) == {"forward", "forward alone"}
    record = measure_parallel({"toy": Shape(96, 64, 48, 8, 2)}, *how, **engine)
    (case,) = record["cases"]
    assert record["cuda_graphs"] and case["efficiency"]["backward"] > 0
    assert set(case["milliseconds"]) == {"forward", "forward alone", "backward", "backward alone"}


CHECKS = by_copies, by_collectives, with_shared_experts, timed
