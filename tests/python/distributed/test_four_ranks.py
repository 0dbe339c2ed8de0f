"""Layers over ranks and models under FSDP2, in four processes that are started once."""

from __future__ import annotations

from pathlib import Path

import pytest

import call_checks
import guild
import layer_checks
import own_experts_checks
import peer_checks
import placement_checks
import shard_checks
import training_checks
from processes import run_on_ranks
from training import write_corpus


def test_four_ranks(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check on all ranks; the last check destroys their process group."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    monkeypatch.setenv("GUILD_TEST_FOLDER", str(tmp_path))
    write_corpus(tmp_path / "corpus")
    settings = training_checks.settings_of("plain")
    training_checks.run(settings, tmp_path / "plain")
    training_checks.run(settings, tmp_path / "halfway", polls=2)
    modules = (
        layer_checks,
        peer_checks,
        call_checks,
        training_checks,
        own_experts_checks,
        shard_checks,
        placement_checks,
    )
    checks = [check for module in modules for check in module.CHECKS]
    run_on_ranks(checks, 4, tmp_path / "ranks")
    # Runs that four ranks have begun, finished by one process.
    begun = tmp_path / "plain-2"
    assert len(training_checks.losses_in(begun)) < training_checks.STEPS
    training_checks.run(settings, begun, resume=True)
    losses = map(training_checks.losses_in, (begun, tmp_path / "plain"))
    training_checks.expect_close(*losses)


def test_without_process_group() -> None:
    """Without a process group the error says what is missing."""
    with pytest.raises(RuntimeError, match=r"torch.distributed to be initialised"):
        guild.ExpertParallel()
