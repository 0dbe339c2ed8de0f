"""What new users meet in their first hour: unwritable folders, full disks.

Each is reported in one line with exit status 2, and nothing already there is lost. Also: runs that
are finished, stopped, or in the way of another. Damaged runs are in test_damaged_runs.py, commands
that build in test_first_build.py.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

import guild
from guild.cli import train_command
from guild.cli.main import main
from guild.train.interrupt import INTERRUPTED
from guild.train.run_folder import RunFolder
from short_runs import SMALL, files_of, refused
from training import StopAfter

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


# ---- output that nobody reads ------------------------------------------------------------------


def test_closed_output(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """As after `| head`: the run goes on, and says so once."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert run(*SMALL, "--check-every", "2") == 0
    assert capsys.readouterr().err.count("\n") == 1
    assert RunFolder(tmp_path / "run").load_checkpoint()["step"] == 10
    assert (tmp_path / "run" / "summary.json").exists()


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


@pytest.mark.parametrize("name", ["guild", "torchrun"])
@pytest.mark.parametrize("on_path", [True, False])
def test_commands_by_their_names(
    on_path: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printed commands have names only where the shell finds this environment's own."""
    script = tmp_path / "env/bin" / name
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", str(script.parent) if on_path else "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert train_command.command_of(name, "module") == [name if on_path else f"env/bin/{name}"]
    script.unlink()
    assert train_command.command_of(name, "module") == [sys.executable, "-m", "module"]
    resumed = train_command.resume_command({"fsdp": True}, Path("a"))
    assert resumed.startswith(f"{sys.executable} -m torch.distributed.run --nproc-per-node ")


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
