"""What this machine offers: an nvcc, a GPU for the kernels, packages through apt.

Standard library only, so that it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
GTEST = VENV / "googletest" / "usr"  # where a plain user's GoogleTest is unpacked


def say(text: str) -> None:
    """Print one line of progress immediately, also into a pipe."""
    print(text, flush=True)


def stop(text: str) -> None:
    """End the program with a message that says what is missing and what to do."""
    sys.exit(f"\n{text}\n")


def find_nvcc() -> str | None:
    """The CUDA compiler's path: $CUDACXX, the PATH's nvcc, or the toolkit's usual place."""
    candidates = (os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc")
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def compute_capability() -> str:
    """The architecture that the kernels are built for, as CMakeLists.txt says."""
    return re.search(r"set\(compute_capability (\S+)\)", (ROOT / "CMakeLists.txt").read_text())[1]


def has_supported_gpu() -> bool:
    """Whether there is a GPU that the kernels run on."""
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return compute_capability() in output(*query).split()


def output(*command: str) -> str:
    """Standard output of a command, or nothing if it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def root_prefix() -> list[str] | None:
    """What to put before a command that needs root: nothing, or sudo; None if neither works."""
    if os.geteuid() == 0:
        return []
    if (
        shutil.which("sudo")
        and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0
    ):
        return ["sudo", "-n"]
    return None


def apt_install(*packages: str) -> bool:
    """Install Debian packages for the whole machine; False if that is not possible."""
    prefix = root_prefix()
    if prefix is None or not shutil.which("apt-get"):
        return False
    say(f"  installing {' '.join(packages)} through apt")
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    apt += ["-o", "DPkg::Lock::Timeout=300"]
    install = [*apt, "install", "-y", "--no-install-recommends", *packages]
    if subprocess.run(install, stdout=subprocess.DEVNULL).returncode == 0:
        return True
    subprocess.run([*apt, "update"], stdout=subprocess.DEVNULL)  # a new machine has no lists yet
    return subprocess.run(install, stdout=subprocess.DEVNULL).returncode == 0


def apt_unpack(folder: Path, *packages: str) -> bool:
    """Unpack Debian packages into a folder, which does not need root; False if apt is absent.

    apt gets lists and a cache of its own there, since the machine's may be missing or old.
    """
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return False
    say(f"  unpacking {' '.join(packages)} into {folder.relative_to(ROOT)}")
    for sub in ("lists/partial", "cache/archives/partial"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State::lists={folder}/lists"]
    apt += ["-o", f"Dir::Cache={folder}/cache", "-o", "Debug::NoLocking=1"]
    apt += ["-o", "APT::Sandbox::User=root"]  # else apt, if run by root, cannot write here
    quiet = {"cwd": folder, "stdout": subprocess.DEVNULL}
    subprocess.run([*apt, "update"], **quiet)
    done = subprocess.run([*apt, "download", *packages], **quiet).returncode == 0
    for archive in folder.glob("*.deb"):
        done = done and subprocess.run(["dpkg-deb", "-x", archive, folder]).returncode == 0
        archive.unlink()
    for sub in ("lists", "cache"):
        shutil.rmtree(folder / sub, ignore_errors=True)
    return done


def find_gtest() -> Path | None:
    """The prefix under which GoogleTest is installed, or None."""
    prefixes = (GTEST, Path("/usr"), Path("/usr/local"))
    return next((p for p in prefixes if (p / "include/gtest/gtest.h").exists()), None)
