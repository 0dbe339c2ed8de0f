"""The examples for Transformers run at toy size and do what they say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/python"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """As the command line would, on the CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [module.__name__, *options])
    module.main()


@pytest.mark.parametrize("lora", [False, True])
def test_finetune(lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if lora:
        pytest.importorskip("peft", reason="PEFT is not installed")
    module = example("finetune_transformers")
    options = ["--steps", "30", "--out", str(tmp_path), *(["--lora", "4"] if lora else [])]
    run(module, monkeypatch, *options)
    first, last = map(float, capsys.readouterr().out.splitlines()[-1].split()[1::2])
    assert last < first - (0.02 if lora else 1.0)
    assert (tmp_path / ("adapter_config.json" if lora else "config.json")).exists()


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    module = example("generate_transformers")
    run(module, monkeypatch, "--tokens", "5", "One", "A longer prompt")
    said, one, longer = capsys.readouterr().out.splitlines()
    assert said == "2 MoE blocks on Guild"
    assert one.startswith("'One") and longer.startswith("'A longer prompt")


def test_generate_pads_prompts_without_changing_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("generate_transformers")
    torch.manual_seed(0)
    model, tokenizer = module.load(None, "cpu")
    together = module.generate(model, tokenizer, ["One", "A longer prompt"], 5)
    assert together == [
        module.generate(model, tokenizer, [prompt], 5)[0] for prompt in ("One", "A longer prompt")
    ]
