"""Writes the C++ API's pages from the public headers, whose comments are the reference.

A header starts with a comment. Blocks follow, separated by blank lines: declarations below the
comment that describes them. A page shows the first comment as text, and every block as it is in the
header under the names that it declares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_RULE = re.compile(r"^// -{2,} (.*?) -{2,}$")
_TYPE = re.compile(
    r"^(?:template <[^\n]*>\s*)?(?:struct|class|enum class|using) (\w+)", re.MULTILINE
)
_FUNCTION = re.compile(r"^(?:template <[^\n]*>\s*)?[\w:<>*& ]+?[ *&](\w+)\(", re.MULTILINE)
MOST_NAMES = 4  # in a heading


@dataclass(frozen=True)
class Block:
    """Declarations that belong together in a header: their names, and the lines as they are."""

    names: list[str]
    text: str
    title: str = ""  # of a part of the header, which has no declarations itself


def first_comment(text: str) -> str:
    """The comment that a header opens with, without its slashes."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].removeprefix(" "))
    return "\n".join(lines)


def names_of(block: str) -> list[str]:
    """The types and functions that a block declares, except those inside a type."""
    outside = re.sub(r"//[^\n]*", "", block)
    while (flat := re.sub(r"\{[^{}]*\}", ";", outside)) != outside:
        outside = flat
    found = [(m.start(), m[1]) for pattern in (_TYPE, _FUNCTION) for m in pattern.finditer(outside)]
    return list(dict.fromkeys(name for _, name in sorted(found)))


def blocks_of(text: str) -> list[Block]:
    """The blocks inside the namespaces of a header, in order."""
    body = text.partition("\nnamespace ")[2].partition("\n")[2]
    blocks: list[Block] = []
    lines: list[str] = []
    for line in [*body.splitlines(), ""]:
        if line.startswith(("namespace ", "}  // namespace")):
            continue
        if title := _RULE.match(line):
            blocks.append(Block([], "", title[1]))
        elif line.strip() or _is_open(lines):
            lines.append(line)
        elif lines:
            block = "\n".join(lines)
            blocks.append(Block(names_of(block), block))
            lines = []
    return blocks


def _is_open(lines: list[str]) -> bool:
    """Whether these lines end inside braces, where a blank line ends no block."""
    code = re.sub(r"//[^\n]*", "", "\n".join(lines))
    return code.count("{") > code.count("}")


def as_text(comment: str) -> str:
    """A comment as Markdown that renders as the same text: special characters are escaped."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", comment)


def page(header: Path, name: str) -> str:
    """The page of one header, which is included as `name`."""
    text = header.read_text()
    parts = [f"# `{name}`", as_text(first_comment(text))]
    level = "##"
    for block in blocks_of(text):
        if block.title:
            parts.append(f"## {block.title[0].upper()}{block.title[1:]}")
            level = "###"
            continue
        if block.names and len(block.names) <= MOST_NAMES:
            parts.append(f"{level} " + ", ".join(f"`{name}`" for name in block.names))
        parts.append(f"```cpp\n{block.text}\n```")
    return "\n\n".join(parts) + "\n"
