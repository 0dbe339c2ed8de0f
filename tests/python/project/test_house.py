"""The shape of the source tree: which modules may import which, and how full a folder may be."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python/guild"
CODE = {".py", ".h", ".cpp", ".cu", ".cuh"}
MOST_FILES = 30

# The package's folders outside the library, each above those that it may import.
ABOVE = {"cli": {"bench", "train"}, "bench": {"train"}, "train": set(), "integrations": set()}


def modules_of(package: Path) -> dict[str, Path]:
    """The package's files by the name that they are imported under."""
    named = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imports_of(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The package's own modules that a file imports, also inside functions and for types."""
    found = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*(start if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                module = f"{source}.{alias.name}"
                found.add(module if module in known else source)
    return found & known.keys()


def imports_in(package: Path) -> dict[str, set[str]]:
    """What each module of a package imports from that package."""
    known = modules_of(package)
    return {name: imports_of(name, path, known) for name, path in known.items()}


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, in order; empty where none do."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def folder_of(module: str) -> str:
    """The folder of the package that a module lies in; "" for modules directly in the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ""


def strangers_in(imports: dict[str, set[str]]) -> list[str]:
    """Imports that lead from a folder to one above it."""
    return [
        f"{name} imports {other}"
        for name, imported in imports.items()
        for other in sorted(imported)
        if (above := folder_of(other)) in ABOVE
        and above != folder_of(name)
        and above not in ABOVE.get(folder_of(name), set())
    ]


def overfull(top: Path) -> list[str]:
    """Folders of too many files of code."""
    counts = Counter(p.parent for p in top.rglob("*") if p.suffix in CODE and p.is_file())
    assert counts, top
    return [f"{folder}: {n} files" for folder, n in sorted(counts.items()) if n > MOST_FILES]


def test_no_circular_imports() -> None:
    assert circle_in(imports_in(PACKAGE)) == []


def test_the_library_imports_nothing_above_it() -> None:
    """The library stands alone; training and integrations use it, the benchmark uses training."""
    imports = imports_in(PACKAGE)
    assert {folder_of(name) for name in imports} == {"", "_torch", "distributed", "float8", *ABOVE}
    assert strangers_in({n: i for n, i in imports.items() if n != "guild.__main__"}) == []


@pytest.mark.parametrize("top", ["src", "include", "python/guild"])
def test_folders_are_small_enough_to_look_through(top: str) -> None:
    assert overfull(ROOT / top) == []


def test_circles_are_found(tmp_path: Path) -> None:
    """However the import is written, and wherever in the file it is."""
    package = tmp_path / "house"
    (package / "rooms").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "door.py": "import house.rooms.hall\n",
        "rooms/__init__.py": "",
        "rooms/hall.py": "def enter():\n    from .stairs import up\n",
        "rooms/stairs.py": "from ..door import knock\n",
        "roof.py": "from house.rooms import stairs\nfrom house import door\nimport os\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    imports = imports_in(package)
    assert imports["house.roof"] == {"house.rooms.stairs", "house.door"}
    circle = circle_in(imports)
    assert set(circle) == {"house.door", "house.rooms.hall", "house.rooms.stairs"}


@pytest.mark.parametrize(
    ("importing", "imported"),
    [
        ("guild.moe", "guild.bench.timing"),
        ("guild._torch.gradients", "guild.cli.main"),
        ("guild.train.learner", "guild.bench.names"),
        ("guild.bench.plan", "guild.cli"),
    ],
)
def test_imports_from_below_are_found(importing: str, imported: str) -> None:
    imports = {importing: {imported, "guild.provenance"}, "guild.cli.main": {"guild.bench"}}
    assert strangers_in(imports) == [f"{importing} imports {imported}"]


def test_overfull_folders_are_found(tmp_path: Path) -> None:
    for number in range(MOST_FILES + 1):
        (tmp_path / f"step{number}.cu").touch()
    (tmp_path / "notes.md").touch()
    assert overfull(tmp_path) == [f"{tmp_path}: {MOST_FILES + 1} files"]
    (tmp_path / "step7.cu").unlink()
    assert overfull(tmp_path) == []
