"""The code in the documents on torchtitan, Megatron-Core and Transformer Engine runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs/integrations"


BLOCKS = [
    (document, code)
    for document in ("megatron", "torchtitan")
    for code in re.findall(
        r"^```python\n(.*?)^```", (DOCS / f"{document}.md").read_text(), re.DOTALL | re.MULTILINE
    )
]


@pytest.mark.parametrize(
    ("document", "code"), BLOCKS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BLOCKS)]
)
def test_python_code_runs(document: str, code: str) -> None:
    """Each block by itself."""
    for name in set(re.findall(r"^from (megatron|torchtitan)\b", code, re.MULTILINE)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_overrides_named_in_the_document_exist() -> None:
    source = DOCS.parents[1] / "python/guild/integrations/torchtitan/__init__.py"
    named = set(
        re.findall(r"guild\.integrations\.torchtitan\.(\w+)", (DOCS / "torchtitan.md").read_text())
    )
    assert named == set(re.findall(r"^def (\w+)\(cfg", source.read_text(), re.MULTILINE))
