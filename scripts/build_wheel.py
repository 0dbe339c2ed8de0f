"""Builds the wheel into dist/ and checks its contents.

    build_wheel.py [--build FOLDER]    the folder whose objects it reuses; default: build/test

It is named after the oldest glibc that it runs on, as auditwheel finds. check_wheel.py installs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from machine import ROOT, VENV_PYTHON, find_nvcc, output, say, stop

FOLDER = ROOT / "build/wheel"
DIST = ROOT / "dist"
IN_GIT = (ROOT / ".git").exists()
HEAD = output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip() if IN_GIT else ""
PACKAGE = ROOT / "python"
PIP = (VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "-q")
OF_TORCH = {"libtorch.so", "libtorch_cpu.so"}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build/test", help="folder whose objects are used")
    arguments = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheel = build_wheel(ROOT, FOLDER, (ROOT / arguments.build).resolve())
    wheel = name_by_tag(wheel, audit(wheel))
    given = os.environ.get("GUILD_CMAKE_ARGS", "")
    cuda_is_off = re.search(r"GUILD_CUDA(:\w+)?=(OFF|NO|N|FALSE|0)\b", given, re.IGNORECASE)
    check_contents(wheel, wants_cuda=bool(find_nvcc()) and cuda_is_off is None)


if __name__ == "__main__":
    sys.exit(main())
