"""Run the quick C++ tests of the CUDA kernels under compute-sanitizer: `make sanitize` for GPUs.

    python scripts/sanitize_gpu.py build/test/tests/cpp/guild_tests
    python scripts/sanitize_gpu.py TESTS --filter 'Quick/LowRank*cuda*:Quick/ExpertLists*cuda*'

compute-sanitizer comes with the CUDA toolkit, and in the package nvidia-cuda-sanitizer-api.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
QUICK = "Quick/*cuda*"  # the cases marked `quick` in tests/cases.csv


def find_sanitizer() -> str:
    """compute-sanitizer's path: on PATH, in a toolkit, or in the Python package."""
    if found := shutil.which("compute-sanitizer"):
        return found
    folders = [Path("/usr/local"), Path(sysconfig.get_path("purelib")) / "nvidia"]
    for folder in folders:
        for path in sorted(folder.glob("*/**/compute-sanitizer"), reverse=True):
            if path.is_file():
                return str(path)
    sys.exit("compute-sanitizer: expected it on PATH, in /usr/local/cuda* or from pip, found none")


def main() -> None:
    """Every tool over the same tests; fails if one of them finds something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, help="the program guild_tests")
    parser.add_argument("--filter", default=QUICK, help=f"which tests (default: {QUICK})")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    options = parser.parse_args()
    sanitizer, failed = find_sanitizer(), []
    tests = [str(options.tests.resolve()), "--gtest_brief=1", f"--gtest_filter={options.filter}"]
    for tool in options.tool or TOOLS:
        print(f"== {tool}", flush=True)
        if subprocess.run([sanitizer, "--tool", tool, "--error-exitcode", "1", *tests]).returncode:
            failed.append(tool)
    if failed:
        sys.exit(f"compute-sanitizer: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
