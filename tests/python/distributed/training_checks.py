"""`guild train --fsdp` on four ranks: the losses of one process, checkpoints that anyone continues.

Run by test_four_ranks.py, whose process has trained the same model before.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import io
import itertools
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from guild.cli.main import main
from guild.train.corpus import load_corpus
from guild.train.gathered import knows_fsdp, parameters_of
from guild.train.peer_copies import SummedGradients, use_copies
from guild.train.reduction import NarrowReduceScatter
from guild.train.run_folder import RunFolder
from guild.train.settings import Settings
from guild.train.sharded import ShardedLearner
from guild.train.world import SharedStop, on_all_ranks
from training import small_settings, train

STEPS = 20
CPU = torch.device("cpu")
_FEW = {"FINAL_WINDOWS": 32, "_CHECK_WINDOWS": 16}
OPTIONS = {
    "plain": {"router": "softmax_renormalized", "shared": 16},
    "biased": {"router": "sigmoid", "round": "nearest", "tile": 4},
}


def settings_of(kind: str, **changes: Any) -> Settings:
    """Settings of a small model."""
    return small_settings(**{"steps": STEPS, "batch": 8, "layers": 1} | OPTIONS[kind] | changes)


def typed(*words: str) -> int:
    """The exit status of `guild train` with these arguments and few validation windows."""
    with mock.patch.multiple("guild.train.loop", **_FEW):
        return main(["train", "--device", "cpu", "--threads", "1", *words])


def run(settings: Settings, out: Path, polls: int | None = None, **plan: Any) -> dict | None:
    """The summary of `guild train` on the corpus beside `out`, with few validation windows."""
    with mock.patch.multiple("guild.train.loop", **_FEW):
        return train(settings, out, out.parent / "corpus", polls, check_every=10, **plan)[1]


def losses_in(folder: Path) -> list[float]:
    """Training losses, then validation losses."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return losses + [row["validation_loss"] for row in rows if "validation_loss" in row]


def losses_of_training(rank: int) -> None:
    """With experts gathered and with experts shared; also from a checkpoint of one process."""
    folder = Path(os.environ["GUILD_TEST_FOLDER"])
    for kind, experts in (("plain", 1), ("plain", 2)):
        out = folder / f"{kind}-{experts}"
        settings = settings_of(kind)
        polls = 2 if experts == 2 else None  # interrupted after two rounds; one process goes on
        summary = run(settings, out, polls, fsdp=True, expert_parallel=experts)
        if rank == 0 and polls is None:
            expect_close(losses_in(out), losses_in(folder / kind))
            assert "tokens_per_second_per_gpu" not in summary
            assert (
                summary["sample"]
                == json.loads((folder / kind / "summary.json").read_text())["sample"]
            )
    out = folder / "halfway"  # by one process, in the test
    run(settings_of("plain"), out, fsdp=True, resume=True, expert_parallel=2)
    if rank == 0:
        expect_close(losses_in(out), losses_in(folder / "plain"))


def other_trainings(rank: int) -> None:
    """A selection bias; token rounding, whose tiles are per rank; bfloat16; plain layers."""
    folder = Path(os.environ["GUILD_TEST_FOLDER"])
    settings = settings_of("biased", steps=3)
    summary = run(settings, folder / "a", fsdp=True, expert_parallel=2)
    half = {"dtype": torch.bfloat16, "fsdp": True, "checkpoints": False}
    run(settings_of("plain", steps=3), folder / "b", expert_parallel=2, **half)
    run(settings_of("plain", steps=3, balance=0.0), folder / "c", moe="plain", **half)
    if rank == 0:
        assert 3 < summary["final_train_loss"] < 6
        b, c = (losses_in(folder / name)[:3] for name in "bc")
        assert max(abs(x - y) for x, y in zip(b, c, strict=True)) < 0.05
        assert not (folder / "b" / "checkpoint.pt").exists()


def incomplete_checkpoints(rank: int) -> None:
    """What is missing or has another shape is refused, not left as it was drawn."""
    file = Path(os.environ["GUILD_TEST_FOLDER"]) / "a" / "checkpoint.pt"  # of `other_trainings`
    whole = torch.load(file)
    for spoil in (
        lambda learner: learner["model"].pop("blocks.0.attention.qkv.weight"),
        lambda learner: learner["model"].pop("blocks.0.moe.router.selection_bias"),
        lambda learner: learner["model"].update(more=torch.ones(3)),
        lambda learner: learner["optimizer"]["state"].clear(),
        lambda learner: learner["optimizer"]["state"].pop(1),
        lambda learner: learner["optimizer"]["state"][0].update(exp_avg=torch.ones(1)),
        lambda learner: learner["optimizer"]["state"][0].update(step=torch.ones(2)),
    ):
        dist.barrier()
        if rank == 0:
            state = copy.deepcopy(whole)
            spoil(state["learners"]["guild"])
            torch.save(state, file)
        dist.barrier()
        with pytest.raises(ValueError, match="do not fit this guild model"):
            run(settings_of("biased", steps=4), file.parent, fsdp=True, resume=True)


def on_the_command_line(rank: int) -> None:
    """Only the first rank uses console and folder; a finished run says so."""
    folder = Path(os.environ["GUILD_TEST_FOLDER"])
    settings = settings_of("plain", steps=3).as_dict()
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    where = "--fsdp", "--corpus", str(folder / "corpus"), "--out", str(folder / "e")
    assert typed(*where, "--expert-parallel", "4", *sizes) == 0
    assert typed(*where, "--resume") == 0
    if rank == 0:
        assert losses_in(folder / "e")[:3] == pytest.approx(losses_in(folder / "b")[:3], rel=0.05)
    assert typed(*where, "--expert-parallel", "3", *sizes) == 2


def full_disk(rank: int) -> None:
    """The first rank says in one line what it could not write; the others end without a word."""
    folder = Path(os.environ["GUILD_TEST_FOLDER"])
    sizes = "--hidden 16 --layers 1 --heads 2 --experts 4 --intermediate 8 --batch 4 --context 16"
    where = [
        "--fsdp",
        "--corpus",
        str(folder / "corpus"),
        "--steps",
        "2",
        "--out",
        str(folder / "f"),
    ]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for name in ("start", "append", "save_checkpoint"):
        said = io.StringIO()
        with mock.patch.object(RunFolder, name, side_effect=full), contextlib.redirect_stderr(said):
            assert typed(*where, *sizes.split()) == 2
        expected = "guild train: No space left on device\n" if rank == 0 else ""
        assert said.getvalue() == expected, name
    said = io.StringIO()
    (folder / "file").touch()
    with contextlib.redirect_stderr(said):
        assert typed(*where[:-1], str(folder / "file"), *sizes.split()) == 2
    assert said.getvalue().startswith("guild train: out: expected a folder") == (rank == 0)


def one_stops_all(rank: int) -> None:
    """A signal to any rank stops all of them in the same round."""
    with SharedStop(torch.device("cpu")) as stop:
        assert not stop.asked
        if rank == 2:
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked


def what_all_ranks_say(rank: int) -> None:
    assert on_all_ranks(True)
    assert not on_all_ranks(rank != 2)


def refused_trainings(rank: int) -> None:
    """Wrong settings are refused before anything is written."""
    folder = Path(os.environ["GUILD_TEST_FOLDER"])
    for text, changes, plan in (
        ("^batch: expected a multiple of 4", {"batch": 6}, {}),
        (r"^batch: expected a multiple of 16 \(4 ranks, accumulate 4\)", {"accumulate": 4}, {}),
        ("^expert_parallel: expected a divisor of 4", {}, {"expert_parallel": 3}),
        ("^experts: expected a multiple of 4", {"experts": 6}, {"expert_parallel": 4}),
        ("^moe: expected --balance 0", {}, {"moe": "plain"}),
        ("^moe: expected a layer in 16 bits", {}, {"moe": "fp8"}),
        ("^capacity: ", {"capacity": 1.0}, {}),
    ):
        with pytest.raises(ValueError, match=text):
            run(settings_of("plain", **changes), folder / "d", fsdp=True, **plan)
    assert not (folder / "d" / "checkpoint.pt").exists()


def gradients_are_added_in_float32(rank: int) -> None:
    """bfloat16 gradients, whose sums in bfloat16 would be off by 4e-3; means and sums."""
    comm, place = NarrowReduceScatter(torch.bfloat16), {"device": torch.device("cpu")}
    for op, share in ((dist.ReduceOp.AVG, 4), (dist.ReduceOp.SUM, 1)):
        given = comm.allocate((4 * 50,), dtype=torch.float32, **place)
        out = comm.allocate((50,), dtype=torch.float32, **place)
        assert (given.dtype, out.dtype) == (torch.bfloat16, torch.float32)
        given.copy_(torch.randn(200, generator=torch.Generator().manual_seed(rank)))
        comm(out, given, dist.group.WORLD, op)
        of_ranks = [torch.empty_like(given) for _ in range(4)]
        dist.all_gather(of_ranks, given)
        truth = sum(g.view(4, 50)[rank].double() for g in of_ranks) / share
        torch.testing.assert_close(out.double(), truth, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="expected a mean or sum"):
        comm(out, given, dist.group.WORLD, dist.ReduceOp.MAX)
    with pytest.raises(RuntimeError, match=r"expected torch.bfloat16 and a result in float32"):
        comm(out, out, dist.group.WORLD, dist.ReduceOp.SUM)


class FilesOfRanks:
    """A buffer of each rank in a file, with the interface of torch's symmetric memory."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        paths = [folder / f"{name}-{rank}" for rank in range(self.world_size)]
        paths[self.rank].write_bytes(bytes(size))
        dist.barrier()
        self.of_ranks = [torch.from_file(str(p), True, size, dtype=torch.uint8) for p in paths]

    def barrier(self, timeout_ms: int) -> None:
        assert timeout_ms > 0
        dist.barrier()

    def get_buffer(self, peer: int, sizes: tuple, dtype: torch.dtype, offset: int) -> torch.Tensor:
        buffer = self.of_ranks[peer].view(dtype)
        return buffer[offset : offset + math.prod(sizes)].view(sizes)


def copies_in_place_of_collectives(rank: int) -> None:
    """Copies give the bits of gathers and exchanges, after a validation and a checkpoint too."""
    # Six experts and 258 rows: some ranks have less of them, or none.
    uneven = {"experts": 6, "vocabulary": 258}
    settings, found = settings_of("plain", steps=6, layers=5, **uneven), []
    corpus = load_corpus(Path(os.environ["GUILD_TEST_FOLDER"]) / "corpus", settings.context)
    for how in (contextlib.nullcontext, by_files):
        with how():
            learners = [ShardedLearner("guild", settings, CPU, torch.bfloat16) for _ in range(2)]
        first, second = learners
        rows = first.round(corpus, 0, 3)
        losses = [first.validate(corpus, 8)]
        state = [copy.deepcopy(first.state())]  # whole on the first rank
        dist.broadcast_object_list(state)
        second.load(state[0])
        rows += first.round(corpus, 3, 3) + second.round(corpus, 3, 3)
        found.append([row["loss"] for row in rows] + losses)
        assert (first.weights is None) == (how is contextlib.nullcontext)
    assert found[0] == found[1]
    assert found[0][3:6] == found[0][6:9]
    weights_in_turns(first)


def weights_in_turns(learner: ShardedLearner) -> None:
    """A buffer in use by another module is refused; a gather that nobody waited for is dropped."""
    blocks = [parameters_of(block) for block in learner.model.blocks]
    blocks[0].unshard()
    with pytest.raises(RuntimeError, match="before the module that holds their place"):
        blocks[2].unshard()
    blocks[1].unshard()
    with learner.weights.replaced():
        pass
    for block in (blocks[2], blocks[1]):
        block.unshard()
        block.wait_for_unshard()
        assert block.is_unsharded
        block.reshard()
    assert learner.weights.mapped_bytes > 0
    assert knows_fsdp()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPParamGroup, "finalize_backward")
        assert not knows_fsdp()


def by_files() -> contextlib.AbstractContextManager:
    """Learners made within communicate by copies, from memory that is mapped from files."""
    folder, number = Path(os.environ["GUILD_TEST_FOLDER"]), itertools.count()

    def make(count: int, size: int, group: dist.ProcessGroup, device: torch.device) -> list:
        found = [FilesOfRanks(folder, f"copies{next(number)}", size) for _ in range(count)]
        return [(files.of_ranks[files.rank], files) for files in found]

    copies = functools.partial(use_copies, make=make)
    return mock.patch.multiple(
        "guild.train.sharded", can_map=lambda device: True, use_copies=copies
    )


def parts_of_a_batch(rank: int) -> None:
    """Its losses; exchanges send their sum in float32 once a step, copies each part as it is."""
    corpus = load_corpus(Path(os.environ["GUILD_TEST_FOLDER"]) / "corpus", 32)
    alone, half, wide = contextlib.nullcontext, torch.bfloat16, torch.float32
    truth: dict[torch.dtype, list[float]] = {}
    for dtype, parts, how, sent in (
        (wide, 1, alone, []),  # by FSDP2's own reductions
        (wide, 2, alone, []),
        (half, 1, alone, [half] * 6),
        (half, 2, alone, [wide] * 6),
        (half, 2, by_files, [half] * 12),
    ):
        settings = settings_of("plain", steps=3, balance=0.0, accumulate=parts)
        with how():
            learner = ShardedLearner("guild", settings, CPU, dtype)
        with reductions() as seen:
            losses = [row["loss"] for row in learner.round(corpus, 0, 3)]
        assert seen == sent
        limit = 2e-5 if dtype == wide else 2e-3
        for one, other in zip(losses, truth.setdefault(dtype, losses), strict=True):
            assert abs(one / other - 1) < limit, (parts, losses, truth)


@contextlib.contextmanager
def reductions() -> Iterator[list[torch.dtype]]:
    """The dtypes in which gradients of a module are sent within."""
    seen: list[torch.dtype] = []
    exchange, copies = NarrowReduceScatter._input, SummedGradients.add

    def exchanged(own: NarrowReduceScatter, *arguments: Any) -> torch.Tensor:
        seen.append(own._dtype)
        return exchange(own, *arguments)

    def copied(own: SummedGradients, gradients: list) -> None:
        seen.append(gradients[0][1].dtype)
        copies(own, gradients)

    with (
        mock.patch.object(NarrowReduceScatter, "_input", exchanged),
        mock.patch.object(SummedGradients, "add", copied),
    ):
        yield seen


def expect_close(losses: list[float], truth: list[float]) -> None:
    assert len(losses) == len(truth) > STEPS
    for one, other in zip(losses, truth, strict=True):
        assert abs(one / other - 1) < 2e-5, (one, other)


CHECKS = (
    losses_of_training,
    other_trainings,
    on_the_command_line,
    full_disk,
    one_stops_all,
    what_all_ranks_say,
    gradients_are_added_in_float32,
    copies_in_place_of_collectives,
    parts_of_a_batch,
    refused_trainings,
)
