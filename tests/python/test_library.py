"""Finding and loading the compiled library, and what is said where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import guild
from guild import _library


def test_the_named_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GUILD_LIBRARY is the only candidate where it is set."""
    monkeypatch.setenv("GUILD_LIBRARY", str(tmp_path / "other.so"))
    assert _library.candidates() == [tmp_path / "other.so"]
    assert _library.find() is None


def test_the_newer_build_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own folder, then build/run and build/test by age."""
    package = tmp_path / "python/guild/_library.py"
    monkeypatch.delenv("GUILD_LIBRARY", raising=False)
    monkeypatch.setattr(_library, "__file__", str(package))
    built = {kind: tmp_path / "build" / kind / _library.NAME for kind in ("run", "test")}
    for age, kind in enumerate(("test", "run")):
        built[kind].parent.mkdir(parents=True)
        built[kind].touch()
        stamp = time.time() - age
        os.utime(built[kind], (stamp, stamp))
    assert _library.candidates() == [package.parent / _library.NAME, built["test"], built["run"]]
    assert _library.find() == built["test"]
    package.parent.mkdir(parents=True)
    (package.parent / _library.NAME).touch()
    assert _library.find() == package.parent / _library.NAME


def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, a file that is no library, a torch that is too old."""
    file = tmp_path / "x.so"
    monkeypatch.setenv("GUILD_LIBRARY", str(file))
    with pytest.raises(ImportError, match=r"libguild_torch.so was not found .*x.so.*make build"):
        _library.load()
    file.write_text("no library")
    with pytest.raises(ImportError, match=r"x.so does not load into torch"):
        _library.load()
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match=r"torch: expected 2.10 or later, got 2.9.1"):
        _library.load()


def test_the_package_imports_without_a_library() -> None:
    """`guild info` must be able to say what is missing."""
    code = "import guild, guild._library; assert 'MoE' in dir(guild)\nguild.MoE"
    environment = {**os.environ, "GUILD_LIBRARY": "/nowhere/libguild_torch.so"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "ImportError: Guild's compiled library libguild_torch.so was not found" in result.stderr


def test_public_names() -> None:
    """Every name of __all__ is there; others are not."""
    for name in guild.__all__:
        assert getattr(guild, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = guild.Nothing
