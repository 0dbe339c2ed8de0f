"""The table of docs/numerics.md: no step is more than twice as far off as rounding alone."""

from __future__ import annotations

import pytest

import numerics


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
def test_table(activation: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs on a small layer; main() itself raises where a line is too far off."""
    sizes = "--sizes=96,64,48,4,2"
    numerics.main(["--device", device, "--activation", activation, sizes])
    printed = capsys.readouterr().out
    for label in (*numerics.STEPS, *numerics.WHOLE):
        assert f"\n| {label} | " in printed
