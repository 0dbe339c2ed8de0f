"""The wheel's audit and its choice of torches, without building one: `make wheel` does that."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import guild
from guild._torch import library

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import build_wheel  # noqa: E402
import missing_packages  # noqa: E402
import torch_install  # noqa: E402
import wheel_torches  # noqa: E402


def test_library_names_no_openmp_of_its_own() -> None:
    """It uses torch's: one of its own would add a second thread pool, or not be installed."""
    if shutil.which("readelf") is None:
        pytest.skip("no readelf on this machine")
    done = subprocess.run(["readelf", "-d", library.find()], capture_output=True, text=True)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", done.stdout))
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert not {name for name in needed if "omp" in name or "cuda" in name}


def report(*libraries: str) -> str:
    symbols = {"libc.so.6": ["GLIBC_2.2.5", "GLIBC_2.34", "GLIBC_2.4"], "libm": ["GLIBC_2.29"]}
    symbols["libstdc++.so.6"] = ["GLIBCXX_3.4.29", "GLIBCXX_3.4.9"]
    found = {"sym_tag": "manylinux_2_34_x86_64", "versioned_symbols": symbols}
    return json.dumps(found | {"external_libs": dict.fromkeys(libraries)})


def test_audit_claims_what_the_symbols_allow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(build_wheel, "output", lambda *_: report("libtorch.so", "libtorch_cpu.so"))
    assert build_wheel.audit(Path("x.whl")) == "manylinux_2_34_x86_64"
    assert "symbols up to GLIBC_2.34, GLIBCXX_3.4.29\n" in capsys.readouterr().out


def test_audit_stops_at_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_wheel, "output", lambda *_: report("libtorch.so", "libgomp.so.1"))
    with pytest.raises(SystemExit, match=r"x.whl needs libgomp.so.1, which not every Linux has"):
        build_wheel.audit(Path("x.whl"))


@pytest.mark.parametrize(
    ("left_out", "config", "wants_cuda", "message"),
    [
        ("", "ON", True, ""),
        ("", "OFF", False, ""),
        ("", "OFF", True, "has no CUDA kernels, though nvcc"),
        ("guild/moe.py", "ON", True, "lacks guild/moe.py"),
    ],
)
def test_contents(
    left_out: str, config: str, wants_cuda: bool, message: str, tmp_path: Path
) -> None:
    wheel = tmp_path / "guild.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in build_wheel.EXPECTED:
            if name != left_out:
                archive.writestr(name, f"set(guild_WITH_CUDA {config})")
    if message:
        with pytest.raises(SystemExit, match=message):
            build_wheel.check_contents(wheel, wants_cuda)
    else:
        assert build_wheel.check_contents(wheel, wants_cuda) == (config == "ON")


def test_torches_are_the_last_of_each_minor_version() -> None:
    offered = "2.15.0 2.14.1 2.14.0 2.13.0+cpu 2.13.0 2.10.1 2.10.0 2.9.1 1.13.1 3.0.0rc1".split()
    chosen = wheel_torches.newest_of_each_minor(offered)
    assert chosen == ["2.10.1", "2.13.0", "2.14.1", "2.15.0"]


def test_torch_that_takes_too_long_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_install.shutil, "which", lambda _: "nvidia-smi")
    assert torch_install.install_torch(["true"], "torch==2.10.0", 30)
    assert not torch_install.install_torch(["false"], "torch==2.10.0", 30)
    assert not torch_install.install_torch(["sh", "-c", "sleep 30"], "torch==2.10.0", 0.1)


def test_quick_start_is_a_program() -> None:
    assert "guild.MoE(" in wheel_torches.quick_start()


def test_options_are_for_one_step() -> None:
    command = [sys.executable, ROOT / "scripts/steps.py", "packages", "style", "--all-torches"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "expected one step that --all-torches is for" in done.stdout


def test_requirements_of_other_pythons_are_not_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    wanted = ["absent-here", "absent-too; python_version < '3'"]
    package = {"dependencies": [], "optional-dependencies": {"cli": []}}
    project = {"project": package, "dependency-groups": {"docs": wanted}}
    monkeypatch.setattr(missing_packages.tomllib, "loads", lambda _: project)
    monkeypatch.setattr(sys, "argv", ["missing_packages.py", "docs"])
    missing_packages.main()
    assert capsys.readouterr().out == "absent-here\n"


def test_version_is_one() -> None:
    """The version is defined in the package alone; CMake, pip and the changelog agree with it."""
    version = re.escape(guild.__version__)
    for name in ("CMakeLists.txt", "pyproject.toml", "docs/conf.py"):
        assert not re.search(rf"\b{version}\b", (ROOT / name).read_text()), name
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(.*?)\]", changes, re.MULTILINE)[1] == guild.__version__
    cache = library.find().with_name("CMakeCache.txt")
    if cache.exists():  # absent where the library is that of an installed package
        assert f"CMAKE_PROJECT_VERSION:STATIC={guild.__version__}\n" in cache.read_text()
