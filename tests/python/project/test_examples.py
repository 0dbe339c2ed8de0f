"""The Python examples run and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/python"


def test_train_moe(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run of the training loop: the loss falls."""
    if device == "cpu":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    spec = importlib.util.spec_from_file_location("train_moe", EXAMPLES / "train_moe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses = module.train(60)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
