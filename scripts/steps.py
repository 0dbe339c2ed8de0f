"""Runs the steps of `make test`, all of them or those named, and prints a summary.

    steps.py all          every step but format, in order; a failed one does not stop the others
    steps.py style cpp    these steps, after a build if one needs it
    steps.py packages --all-torches    options go on to the one step named
    steps.py format       formats the files that style checks

Each step's output goes to the screen and to build/logs/STEP.log. A step that this machine cannot
run is reported as skipped, with the reason. The Python tests keep one core busy and the
packages mostly wait for the network: the steps after them run beside them, and their output
follows when they are done.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from machine import (
    ROOT,
    VENV,
    VENV_PYTHON,
    compute_capability,
    find_gtest,
    find_nvcc,
    has_supported_gpu,
    say,
)

PYTHON = str(VENV_PYTHON)
LOGS = ROOT / "build/logs"
LIBRARY = ROOT / "build/test/libguild_torch.so"
# The last lines of test runners: pytest's and ctest's.
_CLOSING = re.compile(r"^=+ .*\d+ (?:passed|failed|skipped).* =+$|^\d+% tests passed.*$")


@dataclass(frozen=True)
class Step:
    """One step: what it proves, its commands, and why it may not run here."""

    title: str
    commands: Callable[[], list[list[str]]]
    needs_build: bool = False
    obstacle: Callable[[], str] = lambda: ""
    independent: bool = False  # run every command even if an earlier one fails
    has_gpu_cases: bool = False
    beside: bool = False  # leaves a core to the steps after it, which may run beside it


def cpp_files() -> list[str]:
    """Every C++ and CUDA file that clang-format checks."""
    folders = ("include", "src", "tests", "examples", "bench")
    files = (p for folder in folders for p in sorted((ROOT / folder).rglob("*")))
    return [str(p.relative_to(ROOT)) for p in files if p.suffix in (".h", ".cpp", ".cu", ".cuh")]


PYTHON_SOURCES = ("python", "scripts", "tests", "examples", "bench", "cmake", "docs/conf.py")


def style() -> list[list[str]]:
    return [
        ["clang-format", "--dry-run", "-Werror", *cpp_files()],
        ["ruff", "check", "--quiet", *PYTHON_SOURCES],
        ["ruff", "format", "--check", "--quiet", *PYTHON_SOURCES],
        [PYTHON, "scripts/check_sizes.py"],
    ]


def format_sources() -> list[list[str]]:
    return [
        ["clang-format", "-i", *cpp_files()],
        ["ruff", "check", "--quiet", "--fix", *PYTHON_SOURCES],
        ["ruff", "format", "--quiet", *PYTHON_SOURCES],
    ]


def headers() -> list[list[str]]:
    compiler = os.environ.get("CXX", "g++")
    command = f"echo '#include \"%s\"' | {compiler} -std=c++20 -fsyntax-only -Wall -Wextra -Werror"
    names = [p.relative_to(ROOT / "include") for p in sorted((ROOT / "include").rglob("*.h"))]
    return [["sh", "-c", f"{command % name} -I include -x c++ -"] for name in names]


def ctest(kind: str) -> list[str]:
    return ["ctest", "--test-dir", f"build/{kind}", "--output-on-failure", "--no-tests=error"]


def sanitize() -> list[list[str]]:
    return [[PYTHON, "scripts/build.py", "sanitize"], ctest("sanitize")]


def example() -> list[list[str]]:
    prefix = ROOT / "build/install"
    configure = ["cmake", "-G", "Ninja", "-S", "examples/cpp", "-B", "build/example"]
    return [
        ["cmake", "--install", "build/test", "--prefix", str(prefix)],
        [*configure, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", "build/example"],
        ctest("example"),
    ]


def no_gtest() -> str:
    return "" if find_gtest() else "GoogleTest is not installed"


def no_nvcc() -> str:
    return "" if find_nvcc() else "no nvcc on this machine"


def old_python() -> str:
    return "" if sys.version_info >= (3, 11) else "Sphinx 9 needs Python 3.11"


STEPS = {
    "style": Step("clang-format, ruff, sizes and names", style, independent=True),
    "headers": Step("every public header compiles alone", headers, independent=True),
    "docs": Step(
        "the documents' site builds without a warning",
        lambda: [[PYTHON, "scripts/docs_site.py"]],
        obstacle=old_python,
    ),
    "build": Step("everything that compiles here", lambda: [[PYTHON, "scripts/build.py", "test"]]),
    "ptxas": Step(
        "no CUDA kernel spills or serialises wgmma",
        lambda: [[PYTHON, "scripts/check_ptxas.py", "show", "build/test"]],
        needs_build=True,
        obstacle=no_nvcc,
    ),
    "example": Step("C++ example through find_package(guild)", example, needs_build=True),
    "wheel": Step(
        "the wheel builds and has what it should",
        lambda: [[PYTHON, "scripts/build_wheel.py"]],
        needs_build=True,
    ),
    "packages": Step(
        "the wheel and the sdist work on their own",
        lambda: [[PYTHON, "scripts/check_wheel.py"]],
        beside=True,
    ),
    "python": Step(
        "Python tests",
        lambda: [[PYTHON, "-m", "pytest", "--durations=5"]],
        needs_build=True,
        has_gpu_cases=True,
        beside=True,
    ),
    "cpp": Step(
        "C++ tests",
        lambda: [ctest("test")],
        needs_build=True,
        obstacle=no_gtest,
        has_gpu_cases=True,
    ),
    "sanitize": Step("C++ tests under ASan and UBSan", sanitize, obstacle=no_gtest),
    "format": Step("the sources, formatted", format_sources, independent=True),
}
ALL = [name for name in STEPS if name != "format"]


def run(name: str, options: list[str], show: Callable[[str], object]) -> str:
    """Run one step, its last command with the options; returns "passed", "FAILED" or "skipped"."""
    step = STEPS[name]
    show(f"\n== {name}: {step.title}\n")
    if reason := step.obstacle():
        show(f"SKIPPED: {reason}\n")
        return "skipped"
    if step.has_gpu_cases and not has_supported_gpu():
        capability = compute_capability()
        show(f"no GPU of compute capability {capability} here: the GPU cases are skipped\n")
    environment = os.environ | {
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
        "GUILD_LIBRARY": str(LIBRARY),
        "ASAN_OPTIONS": "detect_leaks=0",  # tests without torch: all that leaks at exit is OpenMP's
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    LOGS.mkdir(parents=True, exist_ok=True)
    result = "passed"
    with open(LOGS / f"{name}.log", "w") as log:
        *before, last = step.commands()
        for command in [*before, [*last, *options]]:
            if run_command(command, environment, log, show):
                result = "FAILED"
                if not step.independent:
                    break
    return result


def run_command(
    command: list[str], environment: dict[str, str], log: IO[str], show: Callable[[str], object]
) -> int:
    """Run a command, showing and logging its output; return its exit status."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
        for line in process.stdout:
            show(line)
            log.write(line)
    if process.returncode:
        show(f"exit status {process.returncode}: {' '.join(command)[:200]}\n")
    return process.returncode


def to_screen(text: str) -> None:
    print(text, end="", flush=True)


def timed(name: str, options: list[str], show: Callable[[str], object]) -> tuple[str, float]:
    """The result of `run`, and how many seconds it took."""
    began = time.monotonic()
    return run(name, options, show), time.monotonic() - began


def run_steps(names: list[str], options: list[str]) -> dict[str, tuple[str, float]]:
    """Run steps in order, some of them beside those after them if there are cores for both.

    Tests on a GPU have the machine to themselves, as they measure memory and time.
    """
    company = (os.cpu_count() or 1) > 1 and not has_supported_gpu()
    results: dict[str, tuple[str, float]] = {}
    begun: dict[str, tuple[Future, list[str]]] = {}
    with ThreadPoolExecutor() as pool:
        for name in names:
            given = options if name == names[-1] else []
            if company and STEPS[name].beside and name != names[-1]:
                say(f"\n== {name} runs beside the next steps")
                lines: list[str] = []
                begun[name] = pool.submit(timed, name, given, lines.append), lines
            else:
                results[name] = timed(name, given, to_screen)
        for name, (future, lines) in begun.items():
            results[name] = future.result()
            to_screen("".join(lines))
    return {name: results[name] for name in names}


def closing_lines(name: str) -> list[str]:
    log = LOGS / f"{name}.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if _CLOSING.match(line)]


def main() -> int:
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    names = [word for word in sys.argv[1:] if word not in options]
    if options and len(names) != 1 or options and names == ["all"]:
        say(f"steps.py: expected one step that {' '.join(options)} is for, got {names}")
        return 2
    names = ALL if names == ["all"] else names
    unknown = [name for name in names if name not in STEPS]
    if unknown or not names:
        wrong = f"unknown step {', '.join(unknown)}" if unknown else "expected a step"
        say(f"steps.py: {wrong}; there are {', '.join(STEPS)}, all")
        return 2
    if "build" not in names and any(STEPS[n].needs_build for n in names):
        names = ["build", *names]
    # A shell's background job ignores Ctrl-C, and so would the tests of what Ctrl-C does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    results = run_steps(names, options)
    say(f"\n== summary, {(time.monotonic() - start) / 60:.1f} min")
    for name, (result, seconds) in results.items():
        say(f"{name:10} {result:8} {seconds:6.0f} s  {STEPS[name].title}")
    for name in results:
        for line in closing_lines(name) if results[name][0] != "skipped" else ():
            say(line)
    counts = [sum(r == kind for r, _ in results.values()) for kind in ("passed", "FAILED")]
    skipped = len(results) - sum(counts)
    say(f"steps: {counts[0]} passed, {counts[1]} failed, {skipped} skipped")
    return 1 if counts[1] else 0


if __name__ == "__main__":
    sys.exit(main())
