"""Installs a torch: the CPU build, a tenth of the size, where there is no NVIDIA GPU.

Standard library only, since the set-up calls it before anything is installed.
"""

from __future__ import annotations

import shutil
import subprocess

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def install_torch(install: list[str], pin: str, seconds: float | None = None) -> bool:
    """Install `pin` ("torch==2.13.0") by pip's command `install`.

    Returns False if it is not available, or if pip's own index takes longer than `seconds`.
    """
    if not shutil.which("nvidia-smi"):
        quiet = {"stderr": subprocess.DEVNULL}
        cpu = [*install, "--retries", "0", "--timeout", "20", f"{pin}+cpu"]
        if subprocess.run(cpu, **quiet).returncode == 0:
            return True
        if subprocess.run([*cpu, "--extra-index-url", TORCH_CPU_INDEX], **quiet).returncode == 0:
            return True
    try:
        return subprocess.run([*install, pin], timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        return False
