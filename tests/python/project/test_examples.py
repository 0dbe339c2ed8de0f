"""The Python examples run and do what they promise."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import guild

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/python"
RUNS = [  # file, function, steps
    ("train_moe", "train", 60, 0.8),
    ("train_main_grad", "train", 30, 0.8),
    ("train_sharded_experts", "run", 30, 0.8),
]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run() -> None:
    """Either here or in tests/python/integrations/test_transformers_examples.py."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert {name for name in names if not name.endswith("_transformers")} == {n for n, *_ in RUNS}


@pytest.mark.parametrize(("name", "start", "steps", "share"), RUNS)
def test_the_loss_falls(
    device: str, monkeypatch: pytest.MonkeyPatch, name: str, start: str, steps: int, share: float
) -> None:
    """In a short run the loss falls below this share of its first value."""
    if device == "cpu":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", guild.CopiedWeightsWarning)
        losses = getattr(example(name), start)(steps)
    assert len(losses) == steps
    assert sum(losses[-5:]) < share * sum(losses[:5])


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_prints_the_losses(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    module = example("train_sharded_experts")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(module, "train", lambda steps: [2.0, 1.0])
    monkeypatch.setattr(module.distributed, "get_rank", lambda: rank)
    assert module.run(2) == [2.0, 1.0]
    assert capsys.readouterr().out == ("" if rank else "loss 2.0000 -> 1.0000\n")
