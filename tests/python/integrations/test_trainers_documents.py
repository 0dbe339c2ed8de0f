"""The code in the documents on torchtitan, Megatron-Core and Transformer Engine runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs/integrations"


@pytest.mark.parametrize("document", ["megatron", "torchtitan"])
def test_python_code_runs(document: str) -> None:
    """Each block runs by itself; blocks that need a library that is not installed are skipped."""
    text = (DOCS / f"{document}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    for code in blocks:
        needs = set(re.findall(r"^from (megatron|torchtitan)\b", code, re.MULTILINE))
        if all(importlib.util.find_spec(name) for name in needs):
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_overrides_named_in_the_document_exist() -> None:
    source = DOCS.parents[1] / "python/guild/integrations/torchtitan/__init__.py"
    named = set(
        re.findall(r"guild\.integrations\.torchtitan\.(\w+)", (DOCS / "torchtitan.md").read_text())
    )
    assert named == set(re.findall(r"^def (\w+)\(cfg", source.read_text(), re.MULTILINE))
