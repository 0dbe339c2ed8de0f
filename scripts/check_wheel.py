"""Builds the wheel and the sdist into dist/ and checks that each works away from the source tree.

    check_wheel.py                  the installed torch, and the oldest that Guild supports
    check_wheel.py --all-torches    the last release of every torch from 2.10 on

The wheel reuses the objects of build/test, so that nothing is compiled twice. It is named after the
oldest glibc that it runs on, as auditwheel finds. Checked are its contents, README's quick start
and a layer with each torch, and the C++ example against the CMake package inside it. The sdist must
hold every file of the repository that it should, and a wheel without CUDA must build from it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import ROOT, VENV_PYTHON, find_nvcc, output, say, stop
from wheel_torches import run_programs, try_torches

FOLDER = ROOT / "build/wheel"
DIST = ROOT / "dist"
IN_GIT = (ROOT / ".git").exists()
HEAD = output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip() if IN_GIT else ""
PACKAGE = ROOT / "python"
PIP = (VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "-q")
OF_TORCH = {"libtorch.so", "libtorch_cpu.so"}
NOT_IN_SDIST = (".ci/", ".gitignore")
PYTHON_FILES = [p.relative_to(PACKAGE).as_posix() for p in sorted(PACKAGE.rglob("guild/**/*.py"))]
EXPECTED = (
    *PYTHON_FILES,
    "guild/libguild_torch.so",
    "guild/bench/quack_h200.json",
    *(["guild/commit.txt"] if HEAD else []),
    "guild/include/guild/guild.h",
    "guild/lib/libguild.a",
    "guild/lib/cmake/guild/guildConfig.cmake",
)
CONFIG = "guild/lib/cmake/guild/guildConfig.cmake"
BUILD_SDIST = "import sys; sys.path.insert(0, 'cmake'); import wheel_backend as build\n"
BUILD_SDIST += "build.build_sdist(sys.argv[1])"


def run(*command: object, **options) -> None:
    if subprocess.run([str(part) for part in command], **options).returncode:
        stop(f"the wheel check failed at: {' '.join(str(part) for part in command)[:300]}")


def build_wheel(source: Path, folder: Path, build: Path, **environment: str) -> Path:
    """Build a wheel from a source tree into a folder, with the objects of a build folder."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-w", folder)
    here = {"cwd": source, "env": os.environ | environment}
    run(*PIP, "wheel", source, *options, "-C", f"build-dir={build}", **here)
    return next(folder.glob("guild-*.whl"))


def audit(wheel: Path) -> str:
    """The platform tag of the oldest systems that a wheel runs on, judged by the symbols it needs.

    Stops at a library that neither belongs to torch nor is on every Linux of that tag.
    """
    report = output(VENV_PYTHON.as_posix(), "-m", "auditwheel", "show", "--json", wheel.as_posix())
    if not report:
        stop(f"auditwheel cannot read {wheel}")
    found = json.loads(report)
    if strange := set(found["external_libs"]) - OF_TORCH:
        stop(f"{wheel.name} needs {', '.join(sorted(strange))}, which not every Linux has")
    symbols = {name for versions in found["versioned_symbols"].values() for name in versions}
    newest = {}
    for name in sorted(symbols, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        newest[name.partition("_")[0]] = name
    say(f"{found['sym_tag']}: the library needs symbols up to {', '.join(newest.values())}")
    return found["sym_tag"]


def name_by_tag(wheel: Path, tag: str) -> Path:
    """Put the tag into the wheel's name and metadata and move it to dist/."""
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("guild-*"):
        old.unlink()
    tags = (VENV_PYTHON, "-m", "wheel", "tags", "--remove", "--platform-tag", tag)
    run(*tags, wheel, stdout=subprocess.DEVNULL)
    return Path(shutil.move(next(wheel.parent.glob("guild-*.whl")), DIST))


def check_contents(wheel: Path, wants_cuda: bool) -> bool:
    """Stop if a wheel lacks a file or wanted CUDA kernels; returns whether it has kernels."""
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    if missing := [name for name in EXPECTED if name not in names]:
        stop(f"{wheel.name} lacks {', '.join(missing)}")
    with_cuda = "set(guild_WITH_CUDA ON)" in archive.read(CONFIG).decode()
    if wants_cuda and not with_cuda:
        stop(f"{wheel.name} has no CUDA kernels, though nvcc is on this machine")
    size = wheel.stat().st_size / 2**20
    kernels = "with" if with_cuda else "without"
    say(f"{wheel.name}: {size:.1f} MiB, {len(names)} files, {kernels} CUDA kernels")
    return with_cuda


def check_example(site: Path) -> None:
    """Build the C++ example against the CMake package of an installed wheel."""
    example = FOLDER / "example"
    configure = ("cmake", "-G", "Ninja", "-S", ROOT / "examples/cpp", "-B", example)
    quiet = {"stdout": subprocess.DEVNULL}
    run(*configure, f"-DCMAKE_PREFIX_PATH={site / 'guild'}", **quiet)
    run("cmake", "--build", example, **quiet)
    say("the C++ example builds against the wheel's CMake package")


def check_sdist() -> None:
    """Build the sdist, compare its files with the repository's, and build a wheel from it."""
    run(VENV_PYTHON, "-c", BUILD_SDIST, DIST, cwd=ROOT, stdout=subprocess.DEVNULL)
    sdist = next(DIST.glob("guild-*.tar.gz"))
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
        archive.extractall(FOLDER, filter="data")
    if IN_GIT:
        listing = ("ls-files", "--cached", "--others", "--exclude-standard")
        files = output("git", "-C", str(ROOT), *listing).splitlines()
        wanted = {p for p in files if not p.startswith(NOT_IN_SDIST) and (ROOT / p).exists()}
        if missing := wanted - held:
            stop(f"{sdist.name} lacks {', '.join(sorted(missing)[:9])}")
        if strange := held - wanted - {"PKG-INFO", ".gitignore"}:
            stop(f"{sdist.name} holds {', '.join(sorted(strange)[:9])}, which git does not know")
    tree = FOLDER / sdist.name.removesuffix(".tar.gz")
    options = {"CMAKE_ARGS": "-DGUILD_CUDA=OFF", "GUILD_COMMIT": HEAD}
    wheel = build_wheel(tree, FOLDER / "from-sdist", FOLDER / "sdist-build", **options)
    check_contents(wheel, wants_cuda=False)
    say(f"{sdist.name}: {len(held)} files, builds a wheel")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all-torches", action="store_true", help="every torch from 2.10 on")
    parser.add_argument("--build", default="build/test", help="folder whose objects are used")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheel = build_wheel(ROOT, FOLDER, (ROOT / arguments.build).resolve())
    wheel = name_by_tag(wheel, audit(wheel))
    cuda_is_off = "GUILD_CUDA=OFF" in os.environ.get("GUILD_CMAKE_ARGS", "")
    with_cuda = check_contents(wheel, wants_cuda=bool(find_nvcc()) and not cuda_is_off)

    site = FOLDER / "site"
    run(*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel)
    version = wheel.name.split("-")[1]
    facts = [os.environ.get("GUILD_COMMIT", HEAD), version, str(with_cuda)]
    if not run_programs(VENV_PYTHON, site, facts, PYTHONPATH=str(site)):
        stop("the wheel does not work with the torch of .venv: see above")
    # pip downloads and unpacks on one core while the compiler has the other.
    with ThreadPoolExecutor(1) as beside:
        torches = beside.submit(try_torches, wheel, FOLDER, facts, arguments.all_torches)
        check_example(site)
        check_sdist()
        torches.result()


if __name__ == "__main__":
    sys.exit(main())
