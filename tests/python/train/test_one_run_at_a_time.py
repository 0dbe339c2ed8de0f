"""Two runs into one folder: the second is refused; a run that has ended, however, blocks none."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import guild
from guild.cli import train_command
from guild.cli.main import main
from guild.train.run_folder import RunFolder
from training import StopAfter, write_corpus

SMALL = (
    "--batch 4 --context 32 --hidden 32 --layers 1 --heads 2 --experts 4 --intermediate 16 "
    "--warmup 2 --steps 10"
).split()
REFUSAL = r"guild train: out: another run is writing to '.*run'; wait [^\n]+\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def words(corpus: Path, tmp_path: Path) -> list[str]:
    """The arguments of `guild train` on the small corpus into tmp_path/run."""
    where = ["--corpus", str(corpus), "--out", str(tmp_path / "run")]
    return ["train", *where, "--device", "cpu", "--threads", "1"]


@pytest.mark.parametrize("second", [SMALL, ["--resume", "--steps", "30"]], ids=["new", "resumed"])
@pytest.mark.parametrize("first", [SMALL, ["--resume", "--steps", "20"]], ids=["new", "resumed"])
def test_second_run_is_refused(
    first: list[str],
    second: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second run is a separate process, started between two rounds of the first."""
    assert main([*words, *SMALL]) == 0
    folder = tmp_path / "run"
    checkpoint = shutil.copy(folder / "checkpoint.pt", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(guild.__file__).parents[1])}
    refused: list[subprocess.CompletedProcess] = []

    class Meanwhile(StopAfter):
        @property
        def asked(self) -> bool:
            if not refused:
                shutil.copy(checkpoint, folder)  # a new run has none yet to resume from
                before = {file.name: file.read_bytes() for file in folder.iterdir()}
                command = [sys.executable, "-m", "guild", *words, *second]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                refused.append(done)
                assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
            return False

    monkeypatch.setattr(train_command, "StopRequest", lambda: Meanwhile(0))
    assert main([*words, *first]) == 0
    assert refused[0].returncode == 2, refused[0].stdout
    assert re.fullmatch(REFUSAL, refused[0].stderr)
    assert not (tmp_path / "run.2").exists()
    assert not (folder / "run.lock").exists()
    rows = RunFolder(folder).rows()
    last = 20 if "--resume" in first else 10
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, last + 1))


def test_killed_run_holds_nothing(words: list[str], tmp_path: Path) -> None:
    """A lock ends with its process, though the lock file stays."""
    folder = tmp_path / "run"
    code = (
        "import os, sys\n"
        "from guild.train.run_folder import RunFolder\n"
        "with RunFolder(sys.argv[1]).claimed():\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(guild.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=environment)
    assert done.returncode == -9
    assert (folder / "run.lock").exists()
    assert main([*words, *SMALL]) == 0
    assert not (folder / "run.lock").exists()


def test_lock_that_its_owner_just_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before the first run ended and locked afterwards, it would exclude nobody."""
    folder, flock = RunFolder(tmp_path), fcntl.flock
    with monkeypatch.context() as patch:

        def late(file: object, how: int) -> None:
            patch.setattr(fcntl, "flock", flock)
            folder.lock.unlink()
            flock(file, how)

        patch.setattr(fcntl, "flock", late)
        with folder.claimed():
            assert folder.lock.exists()
            with pytest.raises(ValueError, match="another run is writing"), folder.claimed():
                pass


def test_folder_that_was_deleted_and_made_anew(tmp_path: Path) -> None:
    """The end of the first run does not let a third run start while the second is running."""
    folder = RunFolder(tmp_path / "run")
    with folder.claimed():
        shutil.rmtree(folder.path)
        second = folder.claimed()
        second.__enter__()
        (folder.path / "notes.txt").touch()
    with pytest.raises(ValueError, match="another run is writing"), folder.claimed():
        pass
    second.__exit__(None, None, None)
    with folder.claimed():
        pass


def test_file_system_without_locks(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", deny)
    assert main([*words, *SMALL]) == 0
    assert not (tmp_path / "run" / "run.lock").exists()


def test_run_that_never_began_leaves_no_folder(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    assert main([*words, *SMALL, "--corpus", str(tmp_path / "empty")]) == 2
    assert "corpus" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert main([*words, *SMALL, "--corpus", str(tmp_path / "empty")]) == 2
    assert list((tmp_path / "run").iterdir()) == []  # whoever made it keeps it
