"""Checkpoints and metrics that are none, or not of this run: one line says so, nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from guild.cli import train_command
from guild.cli.main import main
from guild.train.loop import Plan
from short_runs import SMALL, refused


def change_state(path: Path, **changes: object) -> None:
    torch.save({**torch.load(path), **changes}, path)


def change_setting(path: Path, name: str, value: object) -> None:
    settings = torch.load(path)["settings"]
    change_state(path, settings={**settings, name: value})


def change_learner(path: Path, change: Callable[[dict], object]) -> None:
    learners = torch.load(path)["learners"]
    change(learners["guild"])
    change_state(path, learners=learners)


def change_moments(path: Path, change: Callable[[dict], object]) -> None:
    """Change the optimiser's state of the first weight."""
    change_learner(path, lambda learner: change(learner["optimizer"]["state"][0]))


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:count])


BAD_CHECKPOINTS = {
    "empty": (lambda p: p.write_bytes(b""), "checkpoint.pt' is empty"),
    "cut short": (lambda p: cut(p, 20_000), "is damaged or not a checkpoint"),
    "without its last bytes": (lambda p: cut(p, -10), "is damaged or not a checkpoint"),
    "text": (lambda p: p.write_text("hello " * 99), "is damaged or not a checkpoint"),
    "a module": (lambda p: torch.save(torch.nn.Linear(2, 2), p), "is damaged or not a checkpoint"),
    "a list": (lambda p: torch.save([1, 2], p), "is not a checkpoint of guild train"),
    "another's weights": (lambda p: torch.save({"w": torch.ones(2)}, p), "is not a checkpoint of"),
    "a later format": (lambda p: change_state(p, format=2), "has format 2, expected 1"),
    "no step": (lambda p: change_state(p, step=None), "guild train: no step in it"),
    "a step below 0": (lambda p: change_state(p, step=-5), "step: expected 0 or more, got -5"),
    "a step that is a flag": (lambda p: change_state(p, step=True), "guild train: no step in it"),
    "a format of two": (lambda p: change_state(p, format=torch.ones(2)), "not a checkpoint of"),
    "experts in words": (
        lambda p: change_setting(p, "experts", "four"),
        "experts: expected int, got 'four'",
    ),
    "half a layer": (lambda p: change_setting(p, "layers", 1.5), "layers: expected int, got 1.5"),
    "no rate": (lambda p: change_setting(p, "lr", None), "lr: expected float, got None"),
    "a rate that is a flag": (lambda p: change_setting(p, "lr", True), "expected float, got True"),
    "a router by number": (
        lambda p: change_setting(p, "router", 3),
        "router: expected str, got 3",
    ),
    "a decay that is no number": (
        lambda p: change_setting(p, "weight_decay", float("nan")),
        "weight_decay: expected a finite number of 0 or more, got nan",
    ),
    "no expert": (lambda p: change_setting(p, "experts", 0), "experts: expected at least 1, got 0"),
    "a later setting": (lambda p: change_state(p, settings={"depth": 1}), "by another version"),
    "no learner": (lambda p: change_state(p, learners={}), "by another version"),
    "a learner by number": (lambda p: change_state(p, learners={1: {}, 2: {}}), "by another vers"),
    "a later dtype": (lambda p: change_state(p, dtype="torch.float8"), "by another version"),
    "another model": (
        lambda p: change_state(p, learners={"guild": {"model": {}, "optimizer": {}}}),
        "do not fit this guild model",
    ),
    "another weight's moments": (
        lambda p: change_moments(p, lambda state: state.update(exp_avg=torch.ones(3))),
        "do not fit this guild model",
    ),
    "half the moments": (
        lambda p: change_moments(p, lambda state: state.pop("exp_avg_sq")),
        "do not fit this guild model",
    ),
    "moments in words": (
        lambda p: change_moments(p, lambda state: state.update(exp_avg="ones")),
        "do not fit this guild model",
    ),
    "moments of no weight": (
        lambda p: change_learner(p, lambda learner: learner["optimizer"].update(state={})),
        "do not fit this guild model",
    ),
    "one byte changed": (lambda p: flip_byte(p, 60_000), "is damaged or not a checkpoint"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "checkpoint.pt: Is a directory"),
}


@pytest.mark.parametrize("kind", BAD_CHECKPOINTS)
def test_bad_checkpoint(
    kind: str, run: Callable[..., int], finished: Path, capsys: pytest.CaptureFixture
) -> None:
    spoil, message = BAD_CHECKPOINTS[kind]
    spoil(finished / "checkpoint.pt")
    metrics = (finished / "metrics.jsonl").read_bytes()
    printed = refused(run("--resume", "--steps", "12"), capsys)
    assert message in printed and "checkpoint" in printed
    assert (finished / "metrics.jsonl").read_bytes() == metrics


def test_options_of_the_optimiser_come_from_the_settings(
    run: Callable[..., int], finished: Path, capsys: pytest.CaptureFixture
) -> None:
    def spoil(learner: dict) -> None:
        for group in learner["optimizer"]["param_groups"]:
            del group["eps"]
            group.update(amsgrad=True, weight_decay="a", betas="x")

    straight = finished.parent / "straight"
    shutil.copytree(finished, straight)
    change_learner(finished / "checkpoint.pt", spoil)
    for folder in (finished, straight):
        assert run("--resume", "--steps", "12", "--out", str(folder)) == 0
    weights = [
        torch.load(folder / "checkpoint.pt")["learners"]["guild"]["model"]
        for folder in (finished, straight)
    ]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_unreadable_checkpoint(
    run: Callable[..., int],
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    opened = Path.open

    def deny(path: Path, *arguments: object, **options: object) -> object:
        if path.name == "checkpoint.pt":  # root can read any file
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", deny)
    assert "checkpoint.pt: Permission denied" in refused(run("--resume"), capsys)


def test_bad_metrics(
    run: Callable[..., int], finished: Path, capsys: pytest.CaptureFixture
) -> None:
    with (finished / "metrics.jsonl").open("a") as file:
        file.write("half a li\n")
    assert "line 12 of" in refused(run("--resume", "--steps", "12"), capsys)


@pytest.mark.parametrize("first", [1, 10], ids=["all", "last"])
def test_metrics_of_another_layer(
    first: int, run: Callable[..., int], finished: Path, capsys: pytest.CaptureFixture
) -> None:
    """Refused at the start, not where the finished run is drawn."""
    metrics = finished / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    if first == 10:  # a second layer, which the checkpoint does not hold
        rows += [row | {"moe": "plain"} for row in rows if row["step"] == first]
    else:
        rows = [row | {"moe": "plain"} for row in rows]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = refused(run("--resume", "--steps", "12"), capsys)
    expected = "has no row of guild for step 10" if first == 1 else "has rows of plain, which"
    assert expected in printed


def test_a_folder_whose_name_is_not_utf8(
    run: Callable[..., int], finished: Path, capsys: pytest.CaptureFixture
) -> None:
    named = finished.with_name(os.fsdecode(b"r\xff"))
    finished.rename(named)
    assert run("--resume", "--steps", "12", "--out", str(named)) == 0
    assert main(["generate", str(named), "--tokens", "3", "--device", "cpu"]) == 0


def test_metrics_of_one_layer_of_two(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Steps of both layers are paired, so each must be there twice."""
    assert run(*SMALL, "--compare") == 0
    capsys.readouterr()
    metrics = tmp_path / "run/metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"step": 1, ' not in line or "pl" in line))
    printed = refused(run("--resume", "--steps", "12"), capsys)
    assert "has other steps of guild than of plain" in printed
    for moe in ("plain", "guild"):
        printed = refused(run("--resume", "--moe", moe), capsys)
        assert f"the checkpoint holds guild and plain, this run trains {moe};" in printed


def test_validation_of_one_layer_of_two(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Both are validated again, and the summary is written."""
    assert run(*SMALL, "--compare") == 0
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    cut(folder / "metrics.jsonl", -30)
    assert run("--resume") == 0
    again = json.loads((folder / "summary.json").read_text())
    name = "final_validation_loss"
    assert (again[name], again["compare"]) == (summary[name], summary["compare"])


@pytest.mark.parametrize(
    ("options", "saved", "layers"),
    [
        ({}, [], ("guild",)),
        ({}, ["plain"], ("plain",)),
        ({}, ["guild", "plain"], ("guild", "plain")),
        ({}, ["fp8", "guild"], ("fp8", "guild")),
        ({"moe": "fp8"}, ["fp8", "guild"], ("fp8",)),
        ({"moe": "plain"}, ["guild", "plain"], ("plain",)),
        ({"compare": True}, ["fp8", "guild"], ("guild", "plain")),
        ({"fp8": True}, ["guild", "plain"], ("fp8", "guild")),
    ],
    ids=str,
)
def test_layers_of_a_resumed_run(options: dict, saved: list[str], layers: tuple) -> None:
    """What is typed counts, so that a checkpoint of something else is refused."""
    moe, compare, fp8 = train_command._trained(options, saved)
    how = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    assert Plan(Path(), **how, moe=moe, compare=compare, fp8=fp8).layers == layers


def test_resumed_without_checkpoints(
    run: Callable[..., int], finished: Path, capsys: pytest.CaptureFixture
) -> None:
    """A summary of steps that no checkpoint has could not be continued."""
    printed = refused(run("--resume", "--steps", "12", "--no-checkpoint"), capsys)
    assert "--no-checkpoint: cannot be used with --resume" in printed
