"""Layers over ranks and models under FSDP2, in four processes that are started once."""

from __future__ import annotations

from pathlib import Path

import pytest

import guild
import layer_checks
import placement_checks
from processes import run_on_ranks


def test_four_ranks(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check on all ranks; the last one takes their process group down."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    monkeypatch.setenv("GUILD_TEST_FOLDER", str(tmp_path))
    run_on_ranks([*layer_checks.CHECKS, *placement_checks.CHECKS], 4, tmp_path / "ranks")


def test_without_process_group() -> None:
    """An error says what is missing."""
    with pytest.raises(RuntimeError, match="torch.distributed to be initialised"):
        guild.ExpertParallel()
