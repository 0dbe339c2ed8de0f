"""What new users meet in their first hour: bad checkpoints, unwritable folders, full disks.

Each is reported in one line with exit status 2, and nothing already there is lost. Also: runs that
are finished, stopped, or in the way of another. Commands that build: test_first_build.py.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import torch

import guild
from guild.cli import train_command
from guild.cli.main import main
from guild.train.interrupt import INTERRUPTED
from guild.train.run_folder import RunFolder
from training import StopAfter, write_corpus

SMALL = (
    "--batch 4 --context 32 --hidden 32 --layers 1 --heads 2 --experts 4 --intermediate 16 "
    "--warmup 2 --steps 10"
).split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def call_train(corpus: Path, out: Path, *words: str) -> int:
    fixed = ["--corpus", str(corpus), "--device", "cpu", "--threads", "1", "--out", str(out)]
    return main(["train", *fixed, *words])


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Callable[..., int]:
    """`guild train` on the small corpus into tmp_path/run, unless options say otherwise."""
    return lambda *words, out=tmp_path / "run": call_train(corpus, out, *words)


@pytest.fixture(scope="module")
def ten_steps(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert call_train(corpus, folder, *SMALL) == 0
    return folder


@pytest.fixture
def finished(ten_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> Path:
    """The folder of a finished run, copied for each test."""
    capsys.readouterr()
    return shutil.copytree(ten_steps, tmp_path / "run")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(status: int, capsys: pytest.CaptureFixture) -> str:
    """The single line printed with exit status 2."""
    printed = capsys.readouterr().err
    assert status == 2, printed
    assert re.fullmatch(r"guild (train|bench): [^\n]+\n", printed), printed
    return printed


# ---- checkpoints that are none -----------------------------------------------------------------


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


# ---- folders that cannot be written ------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "bench"])
@pytest.mark.parametrize("where", ["under a file", "in /proc"])
def test_impossible_out(
    command: str,
    where: str,
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "deeper" if where == "under a file" else Path("/proc/guild")
    if command == "train":
        printed = refused(run(*SMALL, out=out), capsys)
    else:
        printed = refused(main(["bench", "--device", "cpu", "--out", str(out)]), capsys)
    assert "out: " in printed and str(out) in printed


@pytest.mark.parametrize("opens", [True, False], ids=["existing", "new"])
def test_read_only_out(
    opens: bool,
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Root may write into folders of mode 0555, so the system's error is simulated."""

    def deny(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "open" if opens else "mkdir", deny)
    assert "Read-only file system" in refused(run(*SMALL), capsys)
    assert list(tmp_path.glob("run/*")) == []


# ---- a full disk -------------------------------------------------------------------------------


@pytest.mark.parametrize("full", ["checkpoint.pt", "metrics.jsonl"])
def test_disk_fills(
    full: str, run: Callable[..., int], finished: Path, capsys: pytest.CaptureFixture
) -> None:
    """In the middle of a file: the last checkpoint survives, and the run resumes from it."""
    before = files_of(finished)
    room = len(before["metrics.jsonl"]) + 100  # half a row
    if full == "checkpoint.pt":
        room = len(before["checkpoint.pt"]) // 2
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        status = run("--resume", "--steps", "20")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{full}: File too large" in refused(status, capsys)
    after = files_of(finished)
    assert after.keys() == before.keys()  # no unfinished files
    assert after["checkpoint.pt"] == before["checkpoint.pt"]
    assert run("--resume", "--steps", "20") == 0
    assert [r["step"] for r in RunFolder(finished).rows() if "loss" in r] == list(range(1, 21))


def test_disk_fills_after_the_last_step(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Missing results are written later, and no row is written twice."""

    def fail(rows: object, title: str, file: IO[bytes]) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("guild.train.loop.plot_run", fail)
        assert "loss.png: No space left on device" in refused(run(*SMALL), capsys)
    folder = tmp_path / "run"
    assert not [path.name for path in folder.iterdir() if path.stem == "loss"]
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert run("--resume") == 0
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert json.loads((folder / "summary.json").read_text())["steps"] == 10
    assert (folder / "loss.png").exists()


# ---- runs that are over, stopped, or in the way ------------------------------------------------


def test_resume_after_the_end(
    run: Callable[..., int], finished: Path, capsys: pytest.CaptureFixture
) -> None:
    before = files_of(finished)
    for _ in range(2):
        assert run("--resume") == 0
        assert "is finished: all of its 10 steps are done" in capsys.readouterr().out
    assert files_of(finished) == before
    assert run("--resume", "--steps", "15") == 0
    rows = RunFolder(finished).rows()
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 16))
    assert [row["step"] for row in rows if "validation_loss" in row] == [10, 15]
    assert json.loads((finished / "summary.json").read_text())["steps"] == 15
    assert run("--resume") == 0  # the checkpoint has the new number of steps
    assert "all of its 15 steps" in capsys.readouterr().out
    message = "steps: the checkpoint is already at step 15, got 12"
    assert message in refused(run("--resume", "--steps", "12"), capsys)


def test_printed_commands_work_as_typed(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """In a shell without .venv on its PATH, with a folder name that needs quotes."""
    out = tmp_path / "my [red] run"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(train_command, "StopRequest", lambda: StopAfter(1))
    assert run(*SMALL, out=out) == INTERRUPTED
    printed = capsys.readouterr().out
    assert "stopped at step 5 of 10; to continue:" in printed
    command = next(line for line in printed.splitlines() if "--resume" in line)
    environment = {**os.environ, "PYTHONPATH": str(Path(guild.__file__).parents[1])}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "summary.json").read_text())["steps"] == 10
    monkeypatch.undo()
    assert run("--resume", out=out) == 0  # already finished; the same command with more steps works
    command = capsys.readouterr().out.partition("to go on: ")[2]
    words = shlex.split(command)
    assert main(words[words.index("train") :]) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 20


@pytest.mark.parametrize("on_path", [True, False])
def test_guild_by_its_name(on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed commands say `guild` only where the shell finds this environment's own."""
    script = tmp_path / "env/bin/guild"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", str(script.parent) if on_path else "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert train_command.guild_command() == ["guild" if on_path else "env/bin/guild"]


def test_new_run_moves_the_old_one_aside(
    run: Callable[..., int], finished: Path, capsys: pytest.CaptureFixture
) -> None:
    old = files_of(finished)
    (finished / "notes.txt").write_text("mine")
    (finished / "checkpoint.unfinished").write_text("of a run that was killed")
    for count in (1, 2):
        assert run(*SMALL, "--seed", str(count)) == 0
        printed = capsys.readouterr().out
        assert f"moved the run that was in {finished} to {finished}.{count}\n" in printed
        seed = RunFolder(finished).load_checkpoint()["settings"]["seed"]
        assert seed == count
    assert files_of(finished.with_name("run.1")) == old
    assert files_of(finished.with_name("run.2")).keys() == old.keys()
    assert files_of(finished).keys() == old.keys() | {"notes.txt"}


@pytest.mark.parametrize("refuses", ["the folder above", "the second file"])
def test_run_that_cannot_be_moved_stays(
    refuses: str,
    run: Callable[..., int],
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    before = files_of(finished)
    make, rename = Path.mkdir, os.rename

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        if path.name == "run.1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        make(path, *arguments, **options)

    def move(old: Path, new: Path) -> None:
        if Path(new) == finished.with_name("run.1") / "checkpoint.pt":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(old))
        rename(old, new)

    if refuses == "the folder above":
        monkeypatch.setattr(Path, "mkdir", mkdir)
    else:
        monkeypatch.setattr(os, "rename", move)
    assert "cannot be moved to" in refused(run(*SMALL), capsys)
    assert files_of(finished) == before
    assert not finished.with_name("run.1").exists()
