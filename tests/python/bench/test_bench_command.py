"""`guild bench --out`: an unwritable path is one line and exit status 2, before any measurement."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from guild.bench.results import make_folder
from guild.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
RECORD = max((ROOT / "bench/results").glob("*-balanced.json"))
TINY = "bench --thiek 16,16,8,4,2 --device cpu".split()
QUICK = [*TINY, *"--rounds 1 --calls 1".split()]


def expect_refusal(words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    assert main(words) == 2
    assert re.fullmatch(rf"guild bench: out: {message}\n", capsys.readouterr().err)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files, so that writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("{tmp}/file", "expected a folder, got the file '.*/file'"),
        ("{tmp}/file/below", "expected a folder, got the file '.*/file/below'"),
        ("/proc/none/here", r"expected a folder to write in, got '/proc/none/here' \(.+\)"),
        # Files cannot be created there, not even by root.
        ("/proc/self", r"expected a folder to write in, got '/proc/self' \(.+\)"),
        ("/sys", r"expected a folder to write in, got '/sys' \(.+\)"),
        ("{tmp}/" + 300 * "a", r"expected a folder to write in, got '.*' \(File name too long\)"),
    ],
    ids=["file", "below", "nowhere", "process", "system", "long"],
)
@pytest.mark.parametrize(
    "mode",
    [[], ["--steps"], ["--memory"], ["--rounding"], ["--decode"], ["--fp8"], ["--report"]],
)
def test_impossible_folder(
    mode: list[str],
    out: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unusable folder is reported before anything is measured or printed."""
    for name in ("layers.measure", "steps.measure_steps", "memory.measure_memory"):
        monkeypatch.setattr(f"guild.bench.{name}", pytest.fail)
    for name in ("rounding.measure_rounding", "decode.measure.measure_decode"):
        monkeypatch.setattr(f"guild.bench.{name}", pytest.fail)
    monkeypatch.setattr("guild.bench.float8.measure.measure_float8", pytest.fail)
    monkeypatch.setattr("guild.bench.report.report", pytest.fail)
    (tmp_path / "file").write_text("")
    words = ["bench", "--report", str(RECORD)] if mode == ["--report"] else [*TINY, *mode]
    expect_refusal([*words, "--out", out.format(tmp=tmp_path)], message, capsys)


@pytest.mark.parametrize("mode", [[], ["--memory"], ["--rounding"], ["--fp8"], ["--decode"]])
def test_shapes_are_checked_before_the_first_is_measured(
    mode: list[str], capsys: pytest.CaptureFixture
) -> None:
    words = ["bench", *mode, "--device", "cpu", "--thiek", "64,64,32,4,2"]
    assert main([*words, "--thiek", "64,8,32,16,2"]) == 2
    message = "guild bench: thiek: expected hidden of at least experts = 16, got 8\n"
    assert capsys.readouterr() == ("", message)


def test_nothing_is_left_of_the_trial(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    "words", [QUICK, ["bench", "--report", str(RECORD)]], ids=["run", "report"]
)
def test_full_disk(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measurements are still printed; earlier files stay, and no partial ones are left."""
    monkeypatch.setenv("GUILD_COMMIT", "unknown")  # git would not find room for its index either
    before = {name: f"an older {name}" for name in ("bench.json", "bench.png")}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    capsys.readouterr()
    with files_of_at_most(1000):
        status = main([*words, "--out", str(tmp_path)])
    printed = capsys.readouterr()
    assert status == 2
    file = "png" if "--report" in words else "json"
    message = rf"guild bench: out: '.*/bench\.{file}' cannot be written \(File too large\)\n"
    assert re.fullmatch(message, printed.err)
    assert "Guild" in printed.out
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


def test_something_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "bench.json").mkdir()
    message = r"'.*/bench\.json' cannot be written \(Is a directory\)"
    expect_refusal([*QUICK, "--out", str(tmp_path)], message, capsys)
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


class FullDisk(io.StringIO):
    """Standard output redirected to a file with room for a line, but for no table."""

    def write(self, text: str) -> int:
        if len(text) > 200:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_printing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are there if their table cannot be printed."""
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", FullDisk())
        assert main([*QUICK, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "guild bench: No space left on device"
    assert {file.name for file in tmp_path.iterdir()} == {"bench.json", "bench.png"}


def test_results_replace_older_ones(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("bench.json", "bench.png"):
        (tmp_path / name).write_text("older")
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["mode"] == "layers"
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"bench.json", "bench.png"}
