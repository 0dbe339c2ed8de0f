"""Ops called past Python's checks with arguments that do not fit touch no memory but their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CALLS = 40  # of each op
FOLDER = Path(__file__).parent


def test_no_op_leaves_its_memory() -> None:
    """Correct and wrong calls, whose tensors lie between inaccessible pages."""
    paths = [FOLDER, FOLDER.parent / "support", *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", FOLDER / "memory_checks.py", str(CALLS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, (run.stdout.splitlines()[-1:], run.stderr[-2000:])
    assert len(run.stdout.splitlines()) > 70 * CALLS
