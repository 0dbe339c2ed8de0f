"""The code in README.md and docs/ runs as it stands there, and files they name exist."""

from __future__ import annotations

import ast
import builtins
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md"))),
]


def code_blocks(document: str, language: str) -> str:
    text = (ROOT / document).read_text()
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize(
    "document", ["README.md", "docs/guide.md", "docs/float8.md", "docs/lora.md"]
)
def test_python_code_runs(document: str) -> None:
    code = code_blocks(document, "python")
    assert code.count("\n") > 10
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("README.md's example would choose a GPU that Guild has no kernels for")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", ["docs/guide.md", "docs/float8.md"])
def test_dependent_blocks_name_what_they_need(document: str) -> None:
    """A block that uses names from other blocks says in its first line which ones.

    So whoever copies one alone knows what is missing.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    assert len(blocks) > 3
    for block in blocks:
        names = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Name)]
        made = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        made |= set(re.findall(r"^import (\w+)", block, re.MULTILINE)) | set(dir(builtins))
        borrowed = {name.id for name in names} - made
        assert bool(borrowed) == block.startswith("# needs: "), (borrowed, block)


def test_cpp_code_compiles(tmp_path: Path) -> None:
    code = code_blocks("README.md", "cpp")
    assert "int main()" in code
    source = tmp_path / "readme.cpp"
    source.write_text(code)
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    flags = ("-std=c++20", "-Wall", "-Werror", "-fsyntax-only", f"-I{ROOT / 'include'}")
    done = subprocess.run([compiler, *flags, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    links = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", (ROOT / document).read_text())
    lost = []
    for file, anchor in links:
        target = folder / file if file else ROOT / document
        if file.startswith("http"):
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            lost.append(f"{file}#{anchor}")
    assert lost == []


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_are_there(document: str) -> None:
    folders = "src|include|python|tests|examples|scripts|bench|docs"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", (ROOT / document).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_result_is_cited() -> None:
    """By a document, or by a test that reads it."""
    citing = [*(ROOT / document for document in DOCUMENTS), *ROOT.glob("tests/python/bench/*.py")]
    text = "".join(path.read_text() for path in citing)
    results = sorted(path.name for path in (ROOT / "bench/results").iterdir())
    assert len(results) > 50
    assert [name for name in results if name not in text] == []


def test_path_to_the_instruction() -> None:
    """docs/kernel.md leads from guild.MoE.forward to wgmma in at most eight files.

    Each of them has what the table says of it.
    """
    text = (ROOT / "docs/kernel.md").read_text()
    rows = re.findall(r"^\| \d \| `([\w./-]+)` \| (.*) \|$", text, re.MULTILINE)
    assert 2 <= len(rows) <= 8
    assert (rows[0][0], rows[-1][0][-9:]) == ("python/guild/moe.py", "wgmma.cuh")
    for path, what in rows:
        source = (ROOT / path).read_text()
        names = re.findall(r"`(?:\w+\.)*(\w+)`", what)
        assert [name for name in names if not re.search(rf"\b{name}\b", source)] == [], path
