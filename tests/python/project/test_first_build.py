"""The guide's C++ commands, the set-up and the wheel, where something they need is missing.

From a clean source tree and a Python without packages: each says what to install, and then the
same command finds it. Also: README's C++ program builds against an installed Guild and prints.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import guild
from guild._torch import library
from test_documents import code_blocks

ROOT = Path(__file__).resolve().parents[3]


def guide_commands() -> list[str]:
    """The lines of the guide that configure, build and install the C++ library."""
    text = (ROOT / "docs/guide.md").read_text().partition("\n## C++\n")[2]
    lines = re.search(r"^```\n(cmake -S .*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    return [part for line in lines.splitlines() for part in line.split(" && ")]


def shell(command: str, folder: Path, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, re.sub(r"\s+", " ", done.stdout)


@pytest.fixture(scope="module")
def clean_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources without .venv and build, next to a Python without packages."""
    tree = tmp_path_factory.mktemp("clean") / "guild"
    for part in ("cmake", "include", "src", "scripts"):
        shutil.copytree(ROOT / part, tree / part)
    for part in ("CMakeLists.txt", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / part, tree)
    package = tree / "python/guild"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "python/guild/__init__.py", package)  # has the version
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tree.with_name("bare")])
    return tree


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


@pytest.fixture
def cmake() -> str:
    found = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("no CMake on this machine")
    return found


def test_headers_are_found_once_they_are_there(clean_tree: Path, cmake: str) -> None:
    """The guide's first command says what to install; the same command then finds it.

    In the active environment, in .venv, and in that of the PATH's python3.
    """
    bare, active = clean_tree.with_name("bare"), clean_tree.with_name("active")
    for place in (active, clean_tree / ".venv"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    # Without CUDA and without Eigen from the system: on any machine, all must come from Python.
    options = "-DGUILD_CUDA=off -DCMAKE_DISABLE_FIND_PACKAGE_Eigen3=ON"
    configure = f"{guide_commands()[0].replace('cmake', cmake, 1)} {options}"
    search = {"VIRTUAL_ENV": str(active), "PATH": f"{bare}/bin:/usr/local/bin:/usr/bin:/bin"}
    status, output = shell(configure, clean_tree, **search)
    assert status != 0
    assert "Eigen 3.4 not found: expected Eigen/Core in ''. Looked in CMake's usual" in output
    asked = [f"{place}/bin/python3" for place in (active, clean_tree / ".venv", bare)]
    assert f"in the packages of {', '.join(asked)}." in output
    assert f"{asked[0]} -m pip install --no-deps cmeel-eigen" in output
    eigen = "cmeel.prefix/include/eigen3/Eigen/Core"
    for place in (active, clean_tree / ".venv", bare):
        header = next(place.glob("lib/python3*/site-packages")) / eigen
        header.parent.mkdir(parents=True)
        header.touch()
        status, output = shell(configure, clean_tree, **search)
        assert status == 0, output
        assert "CUDA backend OFF, torch binding OFF, CPU code" in output
        header.unlink()


def test_options_that_are_no_switch(clean_tree: Path, cmake: str) -> None:
    status, output = shell(f"{cmake} -S . -B build/odd -DGUILD_TORCH=banana", clean_tree)
    assert status != 0
    assert "GUILD_TORCH: expected AUTO, ON or OFF, got 'banana'" in output


def test_missing_cutlass_is_named(clean_tree: Path, cmake: str, tmp_path: Path) -> None:
    bare = clean_tree.with_name("bare")
    (tmp_path / "Eigen").mkdir()
    (tmp_path / "Eigen/Core").touch()
    options = f"-DGUILD_CUDA=ON -DCMAKE_CUDA_COMPILER=/bin/false -DGUILD_EIGEN_DIR={tmp_path}"
    configure = f"{cmake} -S . -B build/cuda -DPython3_EXECUTABLE={bare}/bin/python {options}"
    status, output = shell(configure, clean_tree)
    assert status != 0
    assert "CUTLASS 4.2 headers not found" in output
    assert f"Looked in the packages of {bare}/bin/python. " in output
    assert f"{bare}/bin/python -m pip install --no-deps nvidia-cutlass==4.2.0.0" in output


def test_python_that_does_not_run_is_named(clean_tree: Path, cmake: str) -> None:
    configure = f"{cmake} -S . -B build/none -DPython3_EXECUTABLE=/nonexistent"
    status, output = shell(configure, clean_tree)
    assert status != 0
    assert "Python3_EXECUTABLE: expected a Python 3, '/nonexistent' does not run" in output


def test_readme_program_prints(cmake: str, tmp_path: Path) -> None:
    """Installed as the guide says, found as the guide says, README's program builds and prints."""
    build = library.find().parent
    if not (build / "CMakeCache.txt").exists():
        pytest.skip("the library is not in a build folder")
    prefix, consumer = tmp_path / "prefix", tmp_path / "consumer"
    consumer.mkdir()
    install = next(c for c in guide_commands() if "--install" in c)
    install = install.replace("$HOME/guild", str(prefix)).replace("cmake", cmake, 1)
    status, output = shell(install.replace("build/mine", str(build)), ROOT)
    assert status == 0, output
    (consumer / "engine.cpp").write_text(code_blocks("README.md", "cpp"))
    (consumer / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(engine LANGUAGES CXX)\n"
        "add_executable(engine engine.cpp)\n" + code_blocks("docs/guide.md", "cmake")
    )
    # The second is where a build folder installs that a wheel was made from.
    configure = f"{cmake} -S . -B build '-DCMAKE_PREFIX_PATH={prefix};{prefix}/guild'"
    status, output = shell(f"{configure} && {cmake} --build build && build/engine", consumer)
    assert status == 0, output
    # Softmax over the chosen of logits 1, 0, 0, ...: e / (e + 1). All weights are 0.01, x is 1.
    found = re.search(r"token 0: experts 3 and 0 with weights ([\d.]+) and ([\d.]+)", output)
    assert [float(x) for x in found.groups()] == [0.731, 0.269]


def test_one_cutlass_is_named() -> None:
    """Documents and messages tell users to install the version that the build requires."""
    files = "README.md docs/guide.md pyproject.toml scripts/pins.txt cmake/Dependencies.cmake"
    named = {
        name: set(re.findall(r"nvidia-cutlass==([\d.]+)", (ROOT / name).read_text()))
        for name in files.split()
    }
    (wanted,) = named["pyproject.toml"]
    assert named == {name: {wanted} for name in named}


@needs_make
def test_python_of_the_set_up_is_heeded(clean_tree: Path) -> None:
    status, output = shell("make build PYTHON=/nonexistent", clean_tree)
    assert status != 0
    assert "PYTHON=/nonexistent is no Python 3.10 or later that runs here" in output


@needs_make
@pytest.mark.parametrize("recorded", [True, False])
def test_other_python_than_that_of_venv_is_named(
    recorded: bool, clean_tree: Path, tmp_path: Path
) -> None:
    """A working .venv stays; PYTHON= with another Python is reported rather than ignored."""
    tree = tmp_path / "guild"
    shutil.copytree(clean_tree / "scripts", tree / "scripts")
    shutil.copy(clean_tree / "Makefile", tree)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tree / ".venv"], check=True)
    pip = next(tree.glob(".venv/lib/python3*/site-packages")) / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    (tree / ".venv/made-at").write_text(str(tree))
    if recorded:
        (tree / ".venv/made-with").write_text("Python 3.10.1 in /opt/other")
    other = clean_tree.with_name("bare") / "bin/python"
    status, output = shell(f"make build PYTHON={other}", tree)
    assert status != 0
    made_with = "Python 3.10.1 in /opt/other" if recorded else f"in {sys.base_prefix}"
    assert re.search(rf"PYTHON={other} is Python \S+ in \S+, but .venv was made with", output)
    assert f"{made_with}. Remove .venv to make it anew, or leave PYTHON out." in output


def test_wheel_without_isolation_says_what_to_install(clean_tree: Path, tmp_path: Path) -> None:
    bare = clean_tree.with_name("bare") / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(bare), "wheel", "-w", str(tmp_path)]
    words = [*pip, "--no-build-isolation", "--no-deps", "--no-index", "."]
    status, output = shell(shlex.join(words), clean_tree)
    assert status != 0
    assert "Guild's wheel cannot be built without isolation" in output
    assert f"{bare} -m pip install 'scikit-build-core>=0.11' 'cmake>=3.26'" in output


def test_installed_package_knows_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel's commit.txt takes precedence over the checkout that the program runs in."""
    monkeypatch.delenv("GUILD_COMMIT", raising=False)
    monkeypatch.chdir(ROOT)
    (tmp_path / "commit.txt").write_text("abc123+changes\n")
    source = shutil.copy(Path(guild.__file__).with_name("provenance.py"), tmp_path)
    spec = importlib.util.spec_from_file_location("installed_provenance", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.commit() == "abc123+changes"
