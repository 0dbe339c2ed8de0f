"""Devices of the tests: everything runs on the CPU, and again on a GPU if there is a usable one.

New memory is filled with huge numbers or NaN, so a test sees every element that a kernel forgot to
write.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cuda-only` leaves out what runs on the CPU; `--fuzz` sets how long test_fuzz.py runs."""
    parser.addoption("--cuda-only", action="store_true", help="run the tests on the GPU alone")
    count = int(os.environ.get("GUILD_FUZZ", "100"))
    text = "how many random layers test_fuzz.py tries on each device (default: GUILD_FUZZ or 100)"
    parser.addoption("--fuzz", type=int, default=count, metavar="N", help=text)


def missing_gpu() -> str:
    """Why there is no GPU to test on; empty if there is one."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return torch.ops.guild.cuda_reason()


@pytest.fixture(scope="session")
def gpu_reason() -> str:
    """`missing_gpu()`, called once."""
    import guild._torch.gradients  # noqa: F401 - loads the library

    return missing_gpu()


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, gpu_reason: str) -> str:
    """The device of a test; skips with the reason where it cannot be used."""
    if request.param == "cuda" and gpu_reason:
        pytest.skip(f"no GPU: {gpu_reason}")
    if request.param == "cpu" and request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    if request.param == "cuda":
        poison_gpu()
    return request.param


@pytest.fixture
def gpu(gpu_reason: str) -> str:
    """For tests that only a GPU can run."""
    if gpu_reason:
        pytest.skip(f"no GPU: {gpu_reason}")
    poison_gpu()
    return "cuda"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, which is fastest for thousands of tiny calls."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> None:
    """Make glibc fill what it allocates with 0xfe: NaN in float16, -1.7e38 in most others."""
    m_perturb, complement_of_fill = -6, 0x01
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_perturb, complement_of_fill)


def poison_gpu() -> None:
    """Leave NaN of every type in what torch's CUDA allocator hands out next, small and large."""
    torch.cuda.empty_cache()
    blocks = [torch.full((1 << 19,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    blocks.append(torch.full((1 << 28,), 255, dtype=torch.uint8, device="cuda"))
    del blocks
