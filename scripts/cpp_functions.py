"""Finds functions and types in C++ and CUDA source by its braces, without a compiler.

Made for one house style, not for all of C++: strings and comments are blanked, then every brace
outside a function opens a namespace, a type, a function or an initialiser, depending on the
text between it and the previous statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Comments, raw strings, strings, characters and preprocessor lines, whose braces do not count.
_BLANKED = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"
    |(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.VERBOSE | re.MULTILINE,
)
# Parts of a function's head that look like calls: their parentheses hold no parameters.
_ANNOTATION = re.compile(
    r"(?:__launch_bounds__|__attribute__|alignas|decltype|noexcept|explicit|requires)"
    r"\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
)
_NAME = re.compile(r"(operator\s*\S+?|~?\w+)\s*(?:<[^()]*>)?\s*$")
_TYPE = re.compile(r"^(?:class|struct|union|enum(?:\s+(?:class|struct))?)\s+(\w+)")
_CONSTRUCTOR_MEMBER = re.compile(r"\)\s*(?:noexcept\s*)?:[^:].*[\w>]$", re.DOTALL)


@dataclass(frozen=True)
class Definition:
    """A function or a type: what it is called and the lines it takes, both inclusive, from 1."""

    kind: str  # "function", "type" or "namespace"
    name: str
    first_line: int
    last_line: int

    @property
    def lines(self) -> int:
        return self.last_line - self.first_line + 1


def definitions(text: str) -> Iterator[Definition]:
    """Yield the functions, types and namespaces of a source file, innermost first."""
    text = _blank(text)
    head_start, parentheses = 0, 0
    open_blocks: list[tuple[str, str, int, int]] = []  # kind, name, head's start, parentheses
    for match in re.finditer(r"[{}();]", text):
        sign, at = match[0], match.start()
        if sign in "()":
            parentheses += 1 if sign == "(" else -1
        elif sign == ";" and not parentheses:
            head_start = at + 1
        elif sign == "{":
            inside = open_blocks and open_blocks[-1][0] in ("function", "initialiser")
            opaque = inside or parentheses > 0
            kind, name = ("initialiser", "") if opaque else _classify(text[head_start:at])
            open_blocks.append((kind, name, head_start, parentheses))
            parentheses = 0
            if kind != "initialiser":
                head_start = at + 1
        elif sign == "}" and open_blocks:
            kind, name, start, parentheses = open_blocks.pop()
            if kind != "initialiser":
                head_start = at + 1
                start += len(text[start:]) - len(text[start:].lstrip())
                yield Definition(kind, name, _line(text, start), _line(text, at))


def _blank(text: str) -> str:
    """Replace comments, strings and preprocessor lines by spaces; lines stay where they are."""
    return _BLANKED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _classify(head: str) -> tuple[str, str]:
    """What the brace after this text opens, and its name."""
    head = _strip_annotations(head)
    if match := re.match(r"(?:inline\s+)?namespace\s*([\w:]*)|extern\s*$", head):
        return "namespace", match[1] or ""
    if match := _TYPE.match(head):
        return "type", match[1]
    if re.match(r"(?:class|struct|union|enum)\b", head):  # without a name
        return "type", ""
    before, parenthesis, _ = head.partition("(")
    if not parenthesis or ("=" in before and "operator" not in before):
        return "initialiser", ""
    if _CONSTRUCTOR_MEMBER.search(head):
        return "initialiser", ""
    name = _NAME.search(before)
    return ("function", name[1]) if name else ("initialiser", "")


def _strip_annotations(head: str) -> str:
    """Drop template parameter lists, attributes and access labels from the front of a head."""
    head = _ANNOTATION.sub(" ", head).strip()
    while match := re.match(r"(?:public|private|protected)\s*:(?!:)|\[\[.*?\]\]", head):
        head = head[match.end() :].strip()
    while head.startswith("template"):
        depth = 0
        for match in re.finditer(r"[<>]", head):
            depth += 1 if match[0] == "<" else -1
            if depth == 0:
                break
        else:
            return head
        head = head[match.end() :].strip()
    return re.sub(r"^(typedef|static|friend|inline)\s+(?=class|struct|enum|union)", "", head)
