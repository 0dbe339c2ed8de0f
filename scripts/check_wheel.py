"""Checks that the wheel in dist/ and an sdist, built beside it, work away from the source tree.

    check_wheel.py                  the installed torch, and the oldest that Guild supports
    check_wheel.py --all-torches    the last release of every torch from 2.10 on

Checked are README's quick start and a layer with each torch, and the C++ example against the CMake
package inside the wheel. The sdist must hold every file of the repository that it should, and a
wheel without CUDA must build from it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_wheel import DIST, FOLDER, HEAD, IN_GIT, PIP, build_wheel, check_contents, run
from machine import ROOT, VENV_PYTHON, output, say, stop
from wheel_torches import run_programs, try_torches

NOT_IN_SDIST = (".ci/", ".gitignore")
BUILD_SDIST = "import sys; sys.path.insert(0, 'cmake'); import wheel_backend as build\n"
BUILD_SDIST += "build.build_sdist(sys.argv[1])"


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
        # Python 3.10.12 and 3.11.4 brought the filter; Debian 12 has 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(FOLDER)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all-torches", action="store_true", help="every torch from 2.10 on")
    arguments = parser.parse_args()
    wheel = next(DIST.glob("guild-*.whl"), None)
    if wheel is None:
        stop("dist/ has no wheel: build_wheel.py builds it")
    with_cuda = check_contents(wheel, wants_cuda=False)
    shutil.rmtree(FOLDER, ignore_errors=True)

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
