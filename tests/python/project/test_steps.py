"""The order in which `make test` runs its steps, and what it does where one fails."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import steps  # noqa: E402

# Succeeds once the other file exists, and creates its own.
WAITS_FOR = """
import pathlib, sys, time
for _ in range(500):
    if pathlib.Path(sys.argv[1]).exists():
        break
    time.sleep(0.01)
else:
    sys.exit("nobody came")
print("after", sys.argv[1])
pathlib.Path(sys.argv[2]).touch()
"""


@pytest.fixture
def three_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """`slow` ends after `quick`, and `slower` after both: all three run at once."""

    def commands(awaited: str, own: str) -> list[list[str]]:
        return [[sys.executable, "-c", WAITS_FOR, str(tmp_path / awaited), str(tmp_path / own)]]

    (tmp_path / "there").touch()
    made = {
        "slower": steps.Step("", lambda: commands("slow", "slower"), beside=True),
        "slow": steps.Step("", lambda: commands("quick", "slow"), beside=True),
        "quick": steps.Step("", lambda: commands("there", "quick")),
    }
    monkeypatch.setattr(steps, "STEPS", made)
    monkeypatch.setattr(steps, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(steps, "has_supported_gpu", lambda: False)
    monkeypatch.setattr(steps.os, "cpu_count", lambda: 2)
    return list(made)


def test_steps_run_beside_those_after_them(
    three_steps: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Their output is shown in one piece each, after that of the others."""
    results = steps.run_steps(three_steps, [])
    assert {name: result for name, (result, _) in results.items()} == dict.fromkeys(
        three_steps, "passed"
    )
    shown = capsys.readouterr().out
    places = [shown.index(f"after {tmp_path / name}") for name in ("there", "slow", "quick")]
    assert places == sorted(places)
    assert (tmp_path / "logs/slow.log").read_text() == f"after {tmp_path / 'quick'}\n"


def test_a_failure_beside_others_counts(
    three_steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = steps.Step("", lambda: [["false"], ["true"]], beside=True)
    monkeypatch.setitem(steps.STEPS, "slow", failing)
    results = steps.run_steps(three_steps[1:], [])
    assert [results[name][0] for name in three_steps[1:]] == ["FAILED", "passed"]


@pytest.mark.parametrize(("cores", "gpu"), [(1, False), (2, True)])
def test_one_after_the_other(
    cores: int, gpu: bool, three_steps: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a machine with one core, and where tests measure a GPU."""
    monkeypatch.setattr(steps.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(steps, "has_supported_gpu", lambda: gpu)
    begun = []
    for name, step in steps.STEPS.items():
        quick = replace(step, commands=lambda name=name: begun.append(name) or [["true"]])
        monkeypatch.setitem(steps.STEPS, name, quick)
    results = steps.run_steps(three_steps, [])
    assert begun == list(results) == three_steps
