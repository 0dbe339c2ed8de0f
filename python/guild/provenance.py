"""Where a figure comes from: commit, versions, processor and GPU, for every JSON written."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

MOST_THREADS = 4096


def commit() -> str | None:
    """Commit of Guild's sources, or None where it is not known.

    With "+changes" if they were edited since, "+unknown" if git cannot say.

    The environment variable GUILD_COMMIT goes first, for copies without git; then the commit that
    an installed wheel records, then the checkout's.
    """
    if stated := os.environ.get("GUILD_COMMIT"):
        return stated
    if (of_wheel := Path(__file__).with_name("commit.txt")).exists():
        return of_wheel.read_text().strip()
    for folder in (Path(__file__).parent, Path.cwd()):
        top = _output("git", "-C", str(folder), "rev-parse", "--show-toplevel")
        # An installed copy may lie inside another repository, whose commit says nothing.
        if top is None or not (Path(top) / "python" / "guild" / Path(__file__).name).exists():
            continue
        head = _output("git", "-C", top, "rev-parse", "HEAD")
        if head is not None:
            # Without locks, so as not to block another git command of the user's.
            status = ("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
            edited = _output("git", "-C", top, *status)
            return head + ("+unknown" if edited is None else "+changes" if edited else "")
    return None


def short_commit(full: str | None) -> str:
    """The first seven digits of what `commit` returns, and what it says of changes."""
    if full is None:
        return "unknown"
    digits, plus, changes = full.partition("+")
    return digits[:7] + plus + changes


def processor_name() -> str:
    """The CPU's name as the kernel gives it, or the machine's architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def driver_version() -> str | None:
    """Version of the NVIDIA driver, or None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def device_name(device: torch.device) -> str:
    """Name of the GPU or the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def provenance(device: torch.device) -> dict[str, Any]:
    """Facts that identify a measurement: date, commit, device, driver, versions, threads."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device_name(device),
        "device_type": device.type,
        "driver": driver_version() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def set_threads(count: int) -> None:
    """Let torch use `count` CPU threads.

    Raises
    ------
    ValueError
        If count is less than 1 or more than any processor has.
    """
    if not 1 <= count <= MOST_THREADS:
        raise ValueError(f"threads: expected 1 to {MOST_THREADS}, got {count}")
    torch.set_num_threads(count)


def pick_device(name: str) -> torch.device:
    """The device that a command line asks for: "auto", "cpu", "cuda" or "cuda:1".

    Raises
    ------
    ValueError
        For an unknown name, or a GPU that this machine or this build of torch does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or (device.type, device.index) != ("cpu", None) and device.type != "cuda":
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:<index>, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            why = (
                "torch is built without CUDA" if torch.version.cuda is None else "as torch sees it"
            )
            raise ValueError(f"device: {name!r} asked for, this machine has {count} GPUs ({why})")
    return device


def make_current(device: torch.device) -> None:
    """Make a GPU given by its index the current one, which events, graphs and memory are of."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
