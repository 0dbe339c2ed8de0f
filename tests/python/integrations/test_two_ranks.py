"""Expert parallelism with the libraries' own dispatchers, over two processes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("two_ranks.py")


@pytest.mark.parametrize("library", ["torchtitan", "megatron"])
def test_experts_on_two_ranks(library: str, tmp_path: Path) -> None:
    pytest.importorskip({"megatron": "megatron.core"}.get(library, library))
    command = [sys.executable, str(PROGRAM), library, str(tmp_path / "store")]
    both = []
    for rank in ("0", "1"):
        environment = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        both.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        said = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
