"""Devices of the tests: everything runs on the CPU, and again on a GPU where there is a usable one.

Fresh outputs are NaN throughout: torch fills what it allocates uninitialised, so a test sees every
element that a kernel forgot to write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cuda-only` leaves out what runs on the CPU, for a machine lent for its GPU."""
    parser.addoption("--cuda-only", action="store_true", help="run the tests on the GPU alone")


def missing_gpu() -> str:
    """Why there is no GPU to test on; empty where there is one."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return torch.ops.guild.cuda_reason()


@pytest.fixture(scope="session")
def gpu_reason() -> str:
    """`missing_gpu()`, asked for once."""
    import guild._operators  # noqa: F401 - loads the library

    return missing_gpu()


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, gpu_reason: str) -> str:
    """The device of a test; skips with the reason where it cannot be used."""
    if request.param == "cuda" and gpu_reason:
        pytest.skip(f"no GPU: {gpu_reason}")
    if request.param == "cpu" and request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    return request.param


@pytest.fixture
def gpu(gpu_reason: str) -> str:
    """For tests that only a GPU can run."""
    if gpu_reason:
        pytest.skip(f"no GPU: {gpu_reason}")
    return "cuda"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For thousands of tiny calls one thread is the quickest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill whatever is allocated uninitialised with NaN (integers: their largest value)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode asks for it
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
