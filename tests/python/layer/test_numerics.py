"""The tables of docs/numerics.md: no step is more than twice as far off as rounding alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import numerics
from guild.bench.presets import PRESETS, Shape


def expect_table(device: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
    """numerics.main() itself raises where a line is too far off."""
    numerics.main(["--device", device, *arguments])
    printed = capsys.readouterr().out
    for label in (*numerics.STEPS, *numerics.WHOLE):
        assert f"\n| {label} | " in printed


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
def test_table(activation: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A small layer."""
    expect_table(device, capsys, "--activation", activation, "--sizes=96,64,48,4,2")


def scaled_down(shape: Shape) -> Shape:
    """Widths and experts of a preset over 16, and a 64th of its tokens."""
    t, h, i, e, k = shape
    return Shape(t // 64, h // 16 // 8 * 8, i // 16 // 8 * 8, max(e // 16, k), k)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_scaled_down(name: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step and the gradients of X, W1, b1, W2, b2 and the scores."""
    expect_table(device, capsys, f"--sizes={scaled_down(PRESETS[name])}")


def test_full_size_preset(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One preset as it is timed, against float64 on the same GPU."""
    if device != "cuda":
        pytest.skip("for a GPU: minutes on a CPU")
    expect_table(device, capsys, f"--sizes={PRESETS['fine7b']}", "--reference=cuda")


DOCUMENT = Path(__file__).resolve().parents[3] / "docs/numerics.md"
SMALL = "--sizes=96,64,48,4,2"


def test_the_document_has_these_lines() -> None:
    """The document has all these lines, in this order."""
    text = DOCUMENT.read_text().partition(numerics.DOCUMENTED)[2]
    titles = ("step", *numerics.STEPS, "whole layer", *numerics.WHOLE)
    assert re.findall(r"^\| (.+?) \|", text, re.MULTILINE) == list(titles)


def test_tables_are_written_into_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed takes the place of the old tables; what stands before them stays."""
    file = tmp_path / "numerics.md"
    file.write_text(DOCUMENT.read_text())
    numerics.main([SMALL, f"--document={file}"])
    kept, found, written = file.read_text().partition(numerics.DOCUMENTED)
    assert DOCUMENT.read_text().startswith(kept + found)
    assert written == capsys.readouterr().out
    file.write_text("another document\n")
    with pytest.raises(SystemExit, match="document: expected 'writes what follows:' in"):
        numerics.main([SMALL, f"--document={file}"])
    assert file.read_text() == "another document\n"


class SpoiledBiases:
    """The library's ops, the first bias gradient of an expert 1 % off where `op` makes them."""

    def __init__(self, op: str) -> None:
        self._op = op

    def __getattr__(self, name: str) -> object:
        real = getattr(torch.ops.guild, name)
        if name != self._op:
            return real

        def spoiled(*arguments: object) -> object:
            results = real(*arguments)
            biases = arguments[-2:] if name == "down_gradient" else arguments[-2:-1]
            for db in biases:
                db[0] *= 1.01
            return results

        return spoiled


@pytest.mark.parametrize("op", ["down_gradient", "bias_gradient_out"])
def test_each_op_has_its_own_lines(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong db1 or db2 shows in the lines of the op that made it, and in no other."""
    monkeypatch.setattr("op_steps.ops", SpoiledBiases(op))
    with pytest.raises(SystemExit) as wrong:
        numerics.main([SMALL])
    lines = [line.split(":")[0] for line in str(wrong.value).splitlines()]
    label = op.removesuffix("_out").replace("_", " ")
    assert lines == [f"step, {label}, db1", f"step, {label}, db2"]
