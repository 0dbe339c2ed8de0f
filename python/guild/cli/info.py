"""`guild info`: GPU, driver, torch, what was built, and why a path is not used."""

from __future__ import annotations

import platform

import torch

from guild import __version__
from guild._torch.float8_formats import LEAST_ROWS, LEAST_WIDTH
from guild._torch.library import load
from guild.cli.streams import write_out
from guild.provenance import commit, driver_version, processor_name


def run_info() -> int:
    """Print the facts; return 0 when Guild's layer runs on this machine, 1 when it does not."""
    library, why = library_state()
    kernels = library is not None and torch.ops.guild.cuda_built()
    threads = torch.get_num_threads()
    rows = [
        ("guild", f"{__version__}, commit {commit() or 'unknown'}"),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"),
        ("processor", f"{processor_name()}, {threads} thread{'' if threads == 1 else 's'}"),
        ("driver", driver_version() or "none found"),
        *(("GPU", line) for line in gpu_lines()),
        ("library", library or why),
        ("CUDA kernels", "built in (sm_90a)" if kernels else "not built in"),
        ("CPU path", "used for CPU tensors" if library else "not used: no library"),
        ("CUDA path", cuda_path(library is not None, kernels)),
        ("FP8", fp8_path(cuda_path(library is not None, kernels))),
    ]
    write_out("\n".join(f"{name:<13} {value}" for name, value in rows))
    return 0 if library else 1


def library_state() -> tuple[str | None, str]:
    """Path of the compiled library if it loads, else None and the reason."""
    try:
        path = str(load())
        torch.ops.guild.cuda_built  # noqa: B018 - raises if the file is not this Guild's library
    except (ImportError, AttributeError) as error:
        return None, str(error)
    return path, ""


def gpu_lines() -> list[str]:
    """One line for each GPU that torch sees."""
    lines = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index} {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, "
            f"{gpu.multi_processor_count} SMs, compute capability {gpu.major}.{gpu.minor}"
        )
    return lines or ["none visible to torch"]


def fp8_path(cuda: str) -> str:
    """Where layers in FP8 run, and from which sizes on they pay off."""
    if cuda == cuda_path(False, False):
        return cuda
    if cuda.startswith("not"):
        return "CPU tensors only, as a reference"
    return (
        "CPU and CUDA tensors; hardly faster than 16 bits with experts narrower than "
        f"{LEAST_WIDTH} or with fewer than {LEAST_ROWS} rows"
    )


def cuda_path(loaded: bool, kernels: bool) -> str:
    """Whether CUDA tensors go through Guild's kernels here, and if not, why."""
    if not loaded:
        return "not used: no library"
    if not kernels:
        return "not used: the library was built without CUDA; build where nvcc and a GPU are found"
    if torch.version.cuda is None:
        return "not used: this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "not used: torch sees no GPU" + ("" if driver_version() else ", no driver found")
    reason = torch.ops.guild.cuda_reason()
    return f"not used: {reason}" if reason else "used for CUDA tensors"
