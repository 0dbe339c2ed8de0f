"""The table of docs/numerics.md: no step is more than twice as far off as rounding alone."""

from __future__ import annotations

import pytest

import numerics
from guild.presets import PRESETS, Shape


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
