"""The script that times a Transformers model runs on a toy model and writes its record."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers", reason="Transformers is not installed")

SCRIPT = Path(__file__).resolve().parents[3] / "bench/transformers_step.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("preset", ["qwen30b", "glm45air"])
def test_toy_model_is_measured_and_recorded(
    preset: str, script: ModuleType, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "record.json"
    options = [
        "--preset",
        preset,
        "--toy",
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--seconds",
        "0.001",
    ]
    monkeypatch.setattr(sys, "argv", ["transformers_step.py", *options, "--out", str(out)])
    monkeypatch.setattr(script, "calls_per_round", lambda *call: 1)
    script.main()
    record = json.loads(out.read_text())
    measured = [name for name in script.CANDIDATES if name not in record["failures"]]
    assert {"six_lines", "guild", "blocks", "grouped_mm"} <= set(measured)
    for what in ("step", "block", "experts", "experts forward"):
        assert list(record["milliseconds"][what]) == measured
        assert record["over_six_lines"][what]["six_lines"]["median"] == 1
    printed = capsys.readouterr().out
    assert all(name in printed for name in script.CANDIDATES)


def test_candidates_with_other_results_are_not_timed(script: ModuleType, monkeypatch) -> None:
    right = script.six_lines
    monkeypatch.setattr(script, "six_lines", lambda *call: right(*call) * 1.1)
    args = argparse.Namespace(preset="qwen30b", toy=True, device="cpu", rounds=1, seconds=0.001)
    with pytest.raises(SystemExit, match="six_lines: its result is 10"):
        script.measure(args)
