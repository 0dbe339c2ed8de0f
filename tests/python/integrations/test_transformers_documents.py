"""The page on Transformers works as it stands, and its list of families is that of the package."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from families import PAGE, table, written_table  # noqa: E402
from guild.integrations.transformers.block_families import FAMILIES  # noqa: E402

BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_code_runs() -> None:
    assert len(BLOCKS) == 5
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the page's example would choose a GPU that Guild has no kernels for")
    options = ["-W", "error:Guild:UserWarning"]
    with_peft = importlib.util.find_spec("peft") is not None
    code = "\n".join(b for b in BLOCKS if with_peft or not b.startswith("# needs: PEFT"))
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_that_go_on_say_so(block: str) -> None:
    tree = ast.parse(block)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    made = {name.id for name in names if isinstance(name.ctx, ast.Store)} | set(dir(builtins))
    made |= {alias.name.split(".")[0] for node in imports for alias in node.names}
    borrowed = {name.id for name in names} - made
    assert bool(borrowed) == block.startswith("# needs: "), borrowed


@pytest.mark.skipif(
    not transformers.__version__.startswith("5.17."), reason="the table is that of 5.17"
)
def test_table_of_families_is_up_to_date() -> None:
    assert written_table() == table(), "run tests/python/integrations/families.py"


def test_table_of_blocks_is_up_to_date() -> None:
    text = re.search(r"<!-- blocks -->(.*?)<!-- end", PAGE.read_text(), re.DOTALL)[1]
    rows = [set(re.findall("`(.*?)`", line)) for line in text.splitlines()]
    plain, in_one, llama4 = (row for row in rows if row)
    assert llama4 == {"llama4"}
    assert in_one == {family.model for family in FAMILIES if family.in_one}
    assert plain == {family.model for family in FAMILIES} - in_one - llama4
