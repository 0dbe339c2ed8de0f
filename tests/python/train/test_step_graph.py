"""Steps as replays of a CUDA graph: the same bits as steps launched kernel by kernel."""

from __future__ import annotations

import copy

import pytest
import torch

from guild.train.corpus import Corpus
from guild.train.learner import Learner, set_lr
from guild.train.step_graph import StepQueue
from training import small_settings

ROUNDS = 1, 1, 3, 5  # steps; the third round captures
CASES = {
    "plain layer": ("plain", {"balance": 0.0}),
    "softmax": ("guild", {}),
    "selection bias": (
        "guild",
        {"router": "deepseek_v3", "experts": 8, "shared": 64, "accumulate": 2},
    ),
    "rounding": ("guild", {"router": "sigmoid", "round": "stochastic", "tile": 16}),
    "capacity": ("guild", {"capacity": 1.25}),
    "FP8": ("fp8", {}),
}


def corpus() -> Corpus:
    draw = torch.Generator().manual_seed(0)
    train, held_out = (
        torch.randint(0, 256, (n,), dtype=torch.uint8, generator=draw) for n in (9000, 3000)
    )
    return Corpus(train, held_out, files=2, digest="00000000")


def trained(device: str, kind: str, changes: dict, graphs: bool) -> tuple[Learner, list]:
    """A learner after all rounds, each followed by a validation, and what they measured."""
    settings = small_settings(**{"hidden": 128, "intermediate": 128} | changes)
    learner = Learner(kind, settings, torch.device(device), torch.bfloat16, graphs)
    found, first = [], 0
    for count in ROUNDS:
        rows = learner.round(corpus(), first, count)
        for row in rows:
            del row["seconds"]
        found += [rows, learner.validate(corpus(), settings.batch)]
        first += count
    return learner, found


@pytest.mark.filterwarnings("ignore::guild.SlowFP8Warning")
@pytest.mark.parametrize("case", CASES)
def test_replays_are_steps(case: str, device: str) -> None:
    """Losses, norms, loads and weights; a validation in between sees the weights of its time.

    On the CPU there are no graphs, and the second run repeats the first.
    """
    runs = [trained(device, *CASES[case], graphs) for graphs in (False, True)]
    (launched, found), (replayed, others) = runs
    assert not launched.steps.captured and replayed.steps.captured == (device == "cuda")
    assert found == others
    assert len({row["loss"] for rows in found[::2] for row in rows}) == sum(ROUNDS)
    weights = (learner.model.state_dict().values() for learner in (launched, replayed))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    replayed.steps.release()
    assert replayed.round(corpus(), 10, 1)[0]["loss"] == launched.round(corpus(), 10, 1)[0]["loss"]


def test_continued_from_a_state(device: str) -> None:
    """Whichever way the steps ran, the state continues either way."""
    learner, _ = trained(device, "guild", {}, graphs=True)
    losses = []
    state = copy.deepcopy(learner.state())  # it holds the learner's own tensors
    assert all(isinstance(group["lr"], float) for group in state["optimizer"]["param_groups"])
    for graphs in (False, True):
        other = Learner("guild", learner.settings, learner.device, learner.dtype, graphs)
        other.load(copy.deepcopy(state))
        rows = other.round(corpus(), 10, 2) + other.round(corpus(), 12, 2)
        losses.append([row["loss"] for row in rows])
    rows = learner.round(corpus(), 10, 4)
    assert losses == [[row["loss"] for row in rows]] * 2


def test_no_room_for_a_graph(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on without one, and the learner says why."""
    monkeypatch.setattr("guild.train.step_graph._ROOM", 1e9)
    learner, found = trained("cuda", "guild", {}, graphs=True)
    assert learner.steps.refusal.startswith("no CUDA graph of the step: it may need ")
    assert found == trained("cuda", "guild", {}, graphs=False)[1]


def test_no_graph_on_the_cpu() -> None:
    """A queue calls the step; a learning rate stays a number."""
    queue = StepQueue(lambda x, y: x + y, torch.device("cpu"), graphs=True)
    with queue.round():
        assert queue.run(torch.tensor(2), torch.tensor(3)) == 5
    queue.release()
    with queue.round():
        assert queue.run(torch.tensor(4), torch.tensor(5)) == 9
    group = {"lr": 1.0}
    set_lr(group, 0.5, torch.device("cpu"))
    assert group == {"lr": 0.5}
