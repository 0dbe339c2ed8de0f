"""Invalid rows of metrics.jsonl: each error names the line and what is wrong in it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from guild.train.run_folder import RunFolder

STEP_ROW = {"step": 10, "moe": "guild", "loss": 3.0, "seconds": 0.1, "load": [1.0]}
NEXT_ROW = {**STEP_ROW, "step": 11}
WRONG_ROWS = {
    "half a li": "is not a row of a training run",
    "[1]": "is not a row of a training run",
    "[" * 100_000: "is not a row of a training run",
    '{"moe": "guild"}': "no step in it",
    '{"step": true, "moe": "guild"}': "step: expected an integer of at least 0, got True",
    '{"step": 1.5, "moe": "guild"}': "step: expected an integer of at least 0, got 1.5",
    '{"step": 1, "moe": ["guild"]}': "moe: expected one of guild, plain, fp8, got ['guild']",
    '{"step": 1, "moe": "guild"}': "no validation_loss in it",
    '{"step": 1, "moe": "guild", "validation_loss": "low"}': "expected a number, got 'low'",
    f'{{"step": 1, "moe": "guild", "validation_loss": 1{400 * "0"}}}': "expected a number, got 1",
    **{
        json.dumps(
            {**STEP_ROW, "step": 11, name: value}
        ): f"{name}: expected {expected}, got {value!r}"
        for name, value, expected in (
            ("loss", "low", "a finite number"),
            ("loss", math.nan, "a finite number"),
            ("loss", 10**400, "a finite number"),
            ("seconds", 0, "a positive number"),
            ("seconds", None, "a positive number"),
            ("load", 1.0, "a list of numbers"),
            ("load", [], "a list of numbers"),
            ("load", ["1"], "a list of numbers"),
            ("load", [1.0] * 9, "a list of length 1 as before"),
            ("step", 10, "11 as the next"),
            ("step", 12, "11 as the next"),
        )
    },
}


def test_rows_that_runs_write(tmp_path: Path) -> None:
    """Also with a truncated last line, and with fields that nothing reads."""
    folder = RunFolder(tmp_path)
    assert folder.rows() == []
    validation = {"step": 10, "moe": "plain", "validation_loss": 2.5, "windows": 8}
    rows = [STEP_ROW, validation, {**NEXT_ROW, "colour": "blue"}]
    folder.append(rows)
    with folder.metrics.open("a") as file:
        file.write('{"step": 12, "mo')
    assert folder.rows() == rows


@pytest.mark.parametrize("line", WRONG_ROWS, ids=lambda line: line[:60])
def test_wrong_rows_are_named(line: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append([STEP_ROW])
    with folder.metrics.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"^resume: line 2 of .*metrics\.jsonl") as caught:
        folder.rows()
    assert WRONG_ROWS[line] in str(caught.value)
