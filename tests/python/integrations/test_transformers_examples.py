"""The examples for Transformers run at toy size and do what they promise."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

import tokenizers  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/python"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Run an example's main as from the command line, on the CPU."""
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


def checkpoint(folder: Path) -> str:
    """A tiny model that another package might have made, and a tokenizer of single letters."""
    example("generate_transformers").TINY.save_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    letters = {"<pad>": 0} | {chr(code): code for code in range(32, 127)}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_checkpoints_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A checkpoint is fine-tuned, saved and loaded again."""
    folder, tuned, text = tmp_path / "model", tmp_path / "tuned", tmp_path / "text"
    text.write_text("to be or not to be " * 10)
    options = ["--model", checkpoint(folder), "--text", str(text), "--out", str(tuned)]
    finetune = example("finetune_transformers")
    run(finetune, monkeypatch, *options, "--steps", "2", "--length", "16")
    with pytest.raises(SystemExit):
        run(finetune, monkeypatch, *options, "--length", "200")
    assert "--text: expected more than 200 tokens" in capsys.readouterr().err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tuned)
    prompts = ["be", "not to be"]
    run(
        example("generate_transformers"), monkeypatch, "--model", str(tuned), *prompts, "--tokens=3"
    )
    said, *texts = capsys.readouterr().out.splitlines()
    assert said == "2 MoE blocks on Guild" and len(texts) == 2


def test_generate_pads_prompts_without_changing_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("generate_transformers")
    torch.manual_seed(0)
    model, tokenizer = module.load(None, "cpu")
    together = module.generate(model, tokenizer, ["One", "A longer prompt"], 5)
    assert together == [
        module.generate(model, tokenizer, [prompt], 5)[0] for prompt in ("One", "A longer prompt")
    ]
