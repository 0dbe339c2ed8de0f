"""Runs that end early: by a signal, or as they have diverged."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from guild.train.interrupt import INTERRUPTED, Interruption, StopRequest
from guild.train.run_folder import RunFolder
from short_runs import call_train
from training import small_settings, train


def test_stops_at_a_loss_that_is_no_number(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"guild: .* of step .* is nan"):
        train(small_settings(lr=1e30, clip=1e30), tmp_path, corpus)


def _lose_biases(model: nn.Module, *_: object) -> None:
    for bias in model.buffers():
        bias.fill_(math.inf)


@pytest.mark.parametrize(
    ("steps", "patched", "text"),
    [
        (4, {"settings.Settings.lr_at": lambda *_: 1e30}, "the gradient's norm of step 4 is nan"),
        (3, {"settings.Settings.lr_at": lambda *_: math.inf}, "step 3 left weights that are"),
        (3, {"learner.Learner.validate": lambda *_: math.nan}, "the held-out loss after step 3"),
        (3, {"model.LanguageModel.move_selection_biases": _lose_biases}, "step 3 left selection"),
    ],
    ids=["gradient", "weight", "loss", "bias"],
)
def test_diverged_run_keeps_its_last_checkpoint(
    steps: int, patched: dict, text: str, corpus: Path, tmp_path: Path
) -> None:
    """Losses of all steps are finite, but not what comes after them: nothing of it is saved."""
    options = {"router": "deepseek_v3", "experts": 16} if _lose_biases in patched.values() else {}
    training, _ = train(small_settings(steps=2, warmup=0, **options), tmp_path, corpus)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patched.items():
            patch.setattr(f"guild.train.{name}", value)
        with pytest.raises(FloatingPointError, match=f"^guild: {text}"):
            settings = small_settings(steps=steps, warmup=0, **options)
            train(settings, tmp_path, corpus, resume=True)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert "NaN" not in after.pop("metrics.jsonl").decode()
    assert after == {name: before[name] for name in after} and "checkpoint.pt" in after


def test_speed_is_that_of_the_last_call(corpus: Path, tmp_path: Path) -> None:
    """A run that goes on, perhaps elsewhere, does not count earlier steps as its own."""
    train(small_settings(steps=8), tmp_path, corpus)
    folder = RunFolder(tmp_path)
    rows = [{**row, "seconds": 1e6} if "seconds" in row else row for row in folder.rows()]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, summary = train(small_settings(steps=16), tmp_path, corpus, resume=True)
    assert summary["tokens_per_second"] > 1 and summary["training_seconds"] > 8e6 - 1


def test_stopped_before_its_first_step(corpus: Path, tmp_path: Path) -> None:
    training, _ = train(small_settings(), tmp_path, corpus, polls=0)
    assert training.saved is None and not training.folder.checkpoint.exists()


def test_first_ctrl_c_asks_and_the_second_interrupts() -> None:
    usual = signal.default_int_handler
    before = signal.signal(signal.SIGINT, usual)  # a shell's background job ignores Ctrl-C
    try:
        with StopRequest() as stop:
            assert not stop.asked
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.asked
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()
        assert signal.getsignal(signal.SIGINT) is usual
        with StopRequest() as stop:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_is_remembered(number: int) -> None:
    """torch loses an exception that is raised while it imports NumPy."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interruption() as interruption:
            signal.raise_signal(number)
            assert interruption.came
            with pytest.raises(KeyboardInterrupt):
                interruption.imported()
        with Interruption() as interruption:
            signal.raise_signal(number)
            with pytest.raises(KeyboardInterrupt):  # the second one does not wait
                signal.raise_signal(number)
        with Interruption() as interruption:
            interruption.imported()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_that_ends_ignores_more_sigterms() -> None:
    """Which come while torch tidies up: its exit status is to say that it was interrupted."""
    code = (
        "import os, signal, sys, guild.cli.main as command\n"
        "command.command_of = lambda *_, **__: lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.argv = ['guild', 'info']\n"
        "status = command.main()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(status)"
    )
    place = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=place).returncode == INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("raises", [KeyboardInterrupt, ValueError])
def test_interrupted_at_the_start(
    number: int,
    raises: type[BaseException],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Before the first step, a signal leaves nothing behind, whatever it is turned into."""

    def interrupted(*_: object) -> None:
        try:
            for _ in range(2 if number == signal.SIGTERM else 1):
                signal.raise_signal(number)
        except KeyboardInterrupt:
            raise raises("too many values to unpack") from None

    monkeypatch.setattr("guild.train.loop.load_corpus", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        assert call_train(corpus, tmp_path / "run") == INTERRUPTED
        assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "guild train: interrupted\n"
    assert not (tmp_path / "run").exists()
