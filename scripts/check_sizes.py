"""Checks the size and naming norms of the house style over the project's source.

Files under 400 lines, functions under 60 (not counting a Python docstring), lines of at most 100
columns, and none of the names that say nothing: impl, base, manager, helper, utils, common, misc,
v2. Prints one line per breach and fails if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cpp_functions import Definition, definitions

FILE_LINES, FUNCTION_LINES, COLUMNS = 400, 60, 100
BANNED = {"impl", "base", "manager", "helper", "utils", "common", "misc", "v2"}
FOLDERS = ("include", "src", "python", "tests", "examples", "scripts", "cmake", "bench", ".ci")
CPP = {".h", ".cpp", ".cu", ".cuh"}
OTHER = {".py", ".cmake", ".sh", ".txt", ".in", ""}
NOT_SOURCE = {"__pycache__"}


def source_files(root: Path) -> Iterator[Path]:
    """Yield every source file of the tree at root, in order."""
    yield from (p for p in (root / "CMakeLists.txt", root / "Makefile") if p.exists())
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            hidden = NOT_SOURCE & set(path.parts)
            if path.is_file() and not hidden and path.suffix in CPP | OTHER:
                yield path


def words(name: str) -> set[str]:
    """The words a name is made of, in lower case: GemmBase and gemm_base both hold "base"."""
    spaced = re.sub(r"([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3 \2\4", name)
    return set(re.split(r"[^a-z0-9]+", spaced.lower()))


def python_definitions(text: str) -> Iterator[Definition]:
    """Yield a Python file's functions and classes; a function's docstring takes no lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield Definition("type", node.name, node.lineno, node.lineno)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            documented = is_text and isinstance(first.value.value, str)
            skipped = first.end_lineno - first.lineno + 1 if documented else 0
            yield Definition("function", node.name, node.lineno, node.end_lineno - skipped)


def breaches(path: Path, text: str) -> Iterator[str]:
    """Yield what is wrong with one file, as `path:line: message`."""
    lines = text.splitlines()
    if len(lines) >= FILE_LINES:
        yield f"{path}:1: {len(lines)} lines; files stay under {FILE_LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > COLUMNS:
            yield f"{path}:{number}: {len(line)} columns; lines have at most {COLUMNS}"
    for part in path.parts:
        if found := words(part) & BANNED:
            yield f"{path}:1: the path says {', '.join(sorted(found))}; name what it holds"
    for item in list_definitions(path, text):
        where = f"{path}:{item.first_line}: {item.kind} {item.name}"
        if item.kind == "function" and item.lines >= FUNCTION_LINES:
            yield f"{where} has {item.lines} lines; functions stay under {FUNCTION_LINES}"
        is_macro = item.name.isupper()
        if not is_macro and (found := words(item.name) & BANNED):
            yield f"{where} says {', '.join(sorted(found))}; name what it is for"


def list_definitions(path: Path, text: str) -> list[Definition]:
    """The functions and types of a C++ or Python file; none of any other."""
    if path.suffix in CPP:
        return list(definitions(text))
    return list(python_definitions(text)) if path.suffix == ".py" else []


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    files = functions = 0
    found: list[str] = []
    for path in source_files(root):
        text = path.read_text()
        files += 1
        functions += sum(d.kind == "function" for d in list_definitions(path, text))
        found += breaches(path.relative_to(root), text)
    for line in found:
        print(line)
    print(f"sizes and names: {files} files, {functions} functions, {len(found)} breaches")
    return 1 if found or not functions else 0


if __name__ == "__main__":
    sys.exit(main())
