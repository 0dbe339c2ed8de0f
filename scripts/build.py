"""Configures and builds one of the project's build folders.

    build/run        what this machine can run: CUDA kernels only with nvcc and a Hopper GPU
    build/test       everything that compiles here, with the C++ tests
    build/sanitize   the CPU backend and its tests under AddressSanitizer and UBSan

Run by the Python of .venv. CMake is run again each time, so a second build takes no time.
Extra CMake options come from $GUILD_CMAKE_ARGS.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from machine import (
    GTEST,
    ROOT,
    VENV,
    VENV_PYTHON,
    find_gtest,
    find_nvcc,
    has_supported_gpu,
    say,
    stop,
)


def on(flag: object) -> str:
    return "ON" if flag else "OFF"


def options(kind: str) -> dict[str, str]:
    """CMake options of one build folder."""
    nvcc = find_nvcc()
    chosen = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_PREFIX_PATH": str(GTEST) if GTEST.exists() else "",
        "Python3_EXECUTABLE": str(VENV_PYTHON),
        "GUILD_TORCH": on(kind != "sanitize"),
        "GUILD_TESTS": on(kind != "run" and find_gtest()),
        "GUILD_WERROR": on(kind != "run"),
    }
    with_cuda = nvcc and (kind == "test" or (kind == "run" and has_supported_gpu()))
    chosen["GUILD_CUDA"] = on(with_cuda)
    if with_cuda:
        chosen["CMAKE_CUDA_COMPILER"] = nvcc
        chosen["GUILD_CUTLASS_DIR"] = os.environ.get("GUILD_CUTLASS_DIR", "")
    if with_cuda and kind == "test":
        launcher = (VENV_PYTHON, ROOT / "scripts/check_ptxas.py", "run")
        chosen["CMAKE_CUDA_COMPILER_LAUNCHER"] = ";".join(map(str, launcher))
    if kind == "sanitize":
        chosen["GUILD_SANITIZE"] = "address,undefined"
        chosen["CMAKE_BUILD_TYPE"] = "RelWithDebInfo"
    return chosen


def run_cmake(*arguments: str, quiet: bool = False) -> bool:
    """Run CMake, .venv's own if it has one; quiet: show its output only if it fails."""
    path = f"{VENV / 'bin'}:{os.environ['PATH']}"
    pipe = subprocess.PIPE if quiet else None
    done = subprocess.run(
        ["/usr/bin/env", "cmake", *arguments],
        env=os.environ | {"PATH": path},
        stdout=pipe,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        cwd=ROOT,
    )
    if quiet and done.returncode:
        print(done.stdout)
    return done.returncode == 0


def main() -> None:
    if sys.argv[1:] not in (["run"], ["test"], ["sanitize"]):
        stop("usage: build.py run|test|sanitize")
    kind = sys.argv[1]
    chosen = options(kind)
    say(f"== build/{kind} (CUDA {chosen['GUILD_CUDA']}, tests {chosen['GUILD_TESTS']})")
    folder = str(ROOT / "build" / kind)
    defines = [f"-D{name}={value}" for name, value in chosen.items()]
    extra = shlex.split(os.environ.get("GUILD_CMAKE_ARGS", ""))
    configure = ["-G", "Ninja", "-S", str(ROOT), "-B", folder, *defines, *extra]
    configure += ["-U", "SKBUILD*"]  # the wheel's layout, if one was built from this folder
    if not run_cmake(*configure, quiet=True):
        stop(f"build/{kind} could not be configured: see CMake's message above.")
    jobs = os.environ.get("JOBS", str(os.cpu_count() or 1))
    if not run_cmake("--build", folder, "-j", jobs):
        stop(f"build/{kind} failed: see the compiler's message above.")


if __name__ == "__main__":
    main()
