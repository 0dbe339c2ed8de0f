"""The documents' site: links that leave docs/, and the references made from the source."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import guild

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import cpp_reference  # noqa: E402
import docs_site  # noqa: E402
import python_reference  # noqa: E402

needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None and sys.version_info < (3, 11),
    reason="Sphinx 9 needs Python 3.11",
)


@pytest.mark.parametrize(
    ("document", "link", "expected"),
    [
        ("docs/guide.md", "[n](numerics.md#x)", "[n](numerics.md#x)"),
        ("docs/measured/layers.md", "[k](../kernel.md)", "[k](../kernel.md)"),
        ("docs/guide.md", "[s](../include/guild/steps.h)", "[s](api/cpp/steps.md)"),
        ("docs/guide.md", "[h](../CONTRIBUTING.md#tests)", "[h](contributing.md#tests)"),
        ("docs/guide.md", "[l](../LICENSE)", "[l](source/LICENSE)"),
        ("docs/guide.md", "in [`src/cpu`](../src/cpu) it", "in `src/cpu` it"),
        ("docs/guide.md", "[x](nowhere.md)", "[x](nowhere.md)"),
        ("docs/guide.md", "[a](https://arxiv.org)", "[a](https://arxiv.org)"),
        ("docs/guide.md", "`w[e](../LICENSE)` of", "`w[e](../LICENSE)` of"),
        ("docs/guide.md", "```\nw[e](../LICENSE)\n```", "```\nw[e](../LICENSE)\n```"),
        ("README.md", "[g](docs/guide.md)", "[g](guide.md)"),
        ("README.md", "[g](docs/index.md) [c](#b)", "[g](index.md) [c](#b)"),
    ],
)
def test_links_lead_to_pages(
    document: str, link: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs_site, "STAGE", tmp_path)
    page = document.removeprefix("docs/") if document != "README.md" else "readme.md"
    assert docs_site.lead_links(link, ROOT / document, page) == expected
    copied = re.search(r"\((source/\S+)\)", expected)
    assert not copied or (tmp_path / copied[1]).is_file()


HEADER = """\
// First line, a * b.
//
// Second paragraph of p[0].
#pragma once
#include <vector>

namespace guild {

// What it is.
struct One {
  int a = 0;

  int rows() const { return a; }
};
template <class T>
struct Two {
  T b;
};

// ---- a part ----------

enum class Kind : int { left, right };

int64_t bytes(One const& one,
              bool more = true);
void* place(One one);

}  // namespace guild
"""


def test_header_becomes_a_page(tmp_path: Path) -> None:
    header = tmp_path / "one.h"
    header.write_text(HEADER)
    page = cpp_reference.page(header, "guild/one.h")
    assert page.startswith(
        "# `guild/one.h`\n\nFirst line, a \\* b.\n\nSecond paragraph of p\\[0\\].\n"
    )
    headings = re.findall(r"^#+ .*", page, re.MULTILINE)[1:]
    assert headings == ["## `One`, `Two`", "## A part", "### `Kind`", "### `bytes`, `place`"]
    assert "// What it is.\nstruct One {\n  int a = 0;\n\n  int rows()" in page
    assert "include" not in page and "namespace" not in page


def test_every_declaration_of_the_headers_has_a_place() -> None:
    """Counted in another way: by lines that begin the declaration of a type or function."""
    for header in sorted((ROOT / "include/guild").glob("*.h")):
        text = re.sub(r"//[^\n]*", "", header.read_text())
        types = re.findall(r"^(?:struct|enum class) (\w+)[^;]*?\{", text, re.MULTILINE)
        functions = re.findall(r"^(?!using|namespace)\w[\w:<> ]*[ *&](\w+)\(", text, re.MULTILINE)
        shown = {name for b in cpp_reference.blocks_of(header.read_text()) for name in b.names}
        assert set(types) | set(functions) <= shown, header


PACKAGE = {
    "__init__.py": '"""House."""\nif X:\n    from house.door import Door, knock\n'
    '__all__ = ["Door", "knock"]\n',
    "door.py": '"""Doors.\n\nMore."""\nclass Door:\n    """A door."""\n'
    "    def __init__(self, wide: int, *, open: bool = False) -> None: ...\n"
    '    def shut(self, hard: bool = True) -> None:\n        """Shut it, after `knock`."""\n'
    '    @property\n    def wide(self) -> int:\n        """Of the frame."""\n'
    '    @staticmethod\n    def named(name: str) -> Door:\n        """One."""\n'
    "    def silent(self): ...\n"
    'def knock(times=1):\n    """Knock.\n\n    Parameters\n    ----------\n'
    '    times : int\n        How often: `2 * x`.\n    """\n',
    "_hidden/__init__.py": '__all__ = ["secret"]\n',
    "guests/__init__.py": "from house.guests.list import come\nLIMIT = 3\n"
    '__all__ = ["come", "LIMIT"]\n',
    "guests/list.py": 'async def come(): """Come."""\n',
}


@needs_sphinx
def test_package_becomes_pages(tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    pages = python_reference.pages(tmp_path / "house")
    assert set(pages) == {"house.door.md", "house.guests.md"}
    door = pages["house.door.md"]
    assert door.startswith("# house.Door, knock\n\nDoors.\n")
    entries = re.findall(r"^ *\.\. (py:(?!current)\w+:: .*)", door, re.MULTILINE)
    assert entries == [
        "py:class:: Door(wide: int, *, open: bool=False)",
        "py:method:: shut(hard: bool=True) -> None",
        "py:property:: wide",
        "py:method:: named(name: str) -> Door",
        "py:function:: knock(times=1)",
    ]
    assert "Shut it, after :py:obj:`knock`." in door and "How often: ``2 * x``." in door
    assert ":type: int" in door and ":staticmethod:" in door
    assert pages["house.guests.md"].startswith("# house.guests\n")
    guests = ".. py:currentmodule:: house.guests\n\n.. py:"
    assert f"{guests}function:: come()" in pages["house.guests.md"]
    assert f"{guests}data:: LIMIT\n   :value: 3" in pages["house.guests.md"]


@needs_sphinx
def test_every_public_name_has_an_entry() -> None:
    text = "\n".join(python_reference.pages(ROOT / "python/guild").values())
    entries = r"^\.\. py:currentmodule:: ([\w.]+)\n\n\.\. py:(?:class|function|data):: (\w+)"
    shown = {".".join(found) for found in re.findall(entries, text, re.MULTILINE)}
    assert {f"guild.{name}" for name in guild.__all__} <= shown
    for init in (ROOT / "python/guild/integrations").glob("*/__init__.py"):
        names = python_reference.listed(init)
        assert names and {f"guild.integrations.{init.parent.name}.{n}" for n in names} <= shown


@needs_sphinx
def test_methods_for_guild_itself_have_no_entry() -> None:
    """Each method that is left out exists, and its class is on one of the pages without it."""
    text = "\n".join(python_reference.pages(ROOT / "python/guild").values())
    for name, methods in python_reference.INTERNAL.items():
        assert all(hasattr(getattr(guild, name), method) for method in methods)
        entries = re.findall(rf"py:class:: {name}\((.*?)(?=\n\.\. |\Z)", text, re.DOTALL)
        shown = {method for e in entries for method in re.findall(r"py:method:: (\w+)", e)}
        assert entries and not shown & methods


def test_every_page_has_one_place_in_the_navigation() -> None:
    listed = [entry for entries in docs_site.CONTENTS.values() for entry in entries]
    for page, _ in docs_site.pages():
        folder = page.rpartition("/")[0]
        named = [e for e in listed if e == page.removesuffix(".md") or e == f"{folder}/*"]
        assert len(named) == (page != "index.md"), page


@pytest.mark.parametrize("shown", ['["Door", "knock"]', "sorted(_MODULE_OF)"])
def test_list_of_names_may_be_computed(shown: str, tmp_path: Path) -> None:
    init = tmp_path / "__init__.py"
    imports = (
        "if TYPE_CHECKING:\n    from house import knock as knock\n    from house import Door\n"
    )
    init.write_text(f"from typing import TYPE_CHECKING\n{imports}__all__ = {shown}\n")
    assert python_reference.listed(init) == ["Door", "knock"]


def test_a_name_from_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('__all__ = ["gone"]\n')
    with pytest.raises(LookupError, match="__all__ lists gone, which the file neither"):
        python_reference.definition("gone", tmp_path / "__init__.py", tmp_path)


def test_equations_stay_as_they_are() -> None:
    equations = "    y = x\n\n    z = y     of x"
    docstring = f"First.\n\n{equations}\n\nThen.\n\nNotes\n-----\nPlain\n\n    quote\n"
    shown = python_reference.literal_equations(docstring)
    assert shown.startswith(f"First.\n\n::\n\n{equations}\n\nThen.")
    assert shown.count("::") == 1


def test_signature_of_a_method_leaves_self_out() -> None:
    (node,) = ast.parse("def f(self, /, a: int = 1, *b) -> str: ...").body
    assert python_reference.signature(node, bound=True) == "(a: int=1, *b) -> str"
    (node,) = ast.parse("def f(self): ...").body
    assert python_reference.signature(node, bound=True) == "()"
