"""The script that times LoRA training runs on a toy model and writes its record."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

SCRIPT = Path(__file__).resolve().parents[3] / "bench/lora_step.py"


def test_toy_model_is_measured_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from guild.integrations.transformers import experts

    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("lora_step", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(experts, "adopt", experts.adopt)  # put back afterwards
    out = tmp_path / "record.json"
    options = ["--toy", "--device", "cpu", "--rounds", "1", "--seconds", "0.001", "--rank", "4"]
    monkeypatch.setattr(sys, "argv", ["lora_step.py", *options, "--out", str(out)])
    monkeypatch.setattr(script, "calls_per_round", lambda *call: 1)
    script.main()
    record = json.loads(out.read_text())
    for what in ("step", "experts"):
        assert tuple(record["milliseconds"][what]) == script.CANDIDATES
        assert record["over_sums"][what]["sums"]["median"] == 1
    printed = capsys.readouterr().out
    assert all(name in printed for name in script.CANDIDATES)
