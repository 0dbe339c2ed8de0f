"""Writes the Python API's pages: one for each module whose names a package lists in `__all__`.

Signatures and docstrings are read from the source; nothing is imported, so neither the compiled
library nor the frameworks that integrations are for are needed.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
# Methods that other parts of Guild call, and users do not: the reference leaves them out.
INTERNAL = {
    "ExpertParallel": {
        "fill_normal",
        "local_parts",
        "new_layer",
        "routed_experts_and_offsets",
        "routed_layer",
    },
    "FP8": {"recipe"},
    "FP8Weights": {"expect_layout", "refresh_from"},
    "LoRA": {"operands"},
    "MoE": {"share_experts"},
    "Router": {"expect_sizes"},
    "WeightGradients": {
        "expect_no_averaging",
        "expect_targets",
        "gradients_without_meaning",
        "reached_by_autograd",
        "take",
    },
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def public_packages(package: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Yield name, file and `__all__` of every module that has one, outside of _private folders."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if path.name == "__init__.py":
            parts = parts[:-1]
        if not any(part.startswith("_") for part in parts) and (names := listed(path)):
            yield ".".join(parts), path, names


def listed(path: Path) -> list[str]:
    """The names in a file's `__all__`; none if it has no such list.

    For a list that is computed, the names that the file imports for type checkers.
    """
    body = tree_of(path).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            if isinstance(node.value, (ast.List, ast.Tuple)):
                return ast.literal_eval(node.value)
            blocks = [
                x for x in body if isinstance(x, ast.If) and "TYPE_CHECKING" in ast.dump(x.test)
            ]
            imports = [x for block in blocks for x in block.body if isinstance(x, ast.ImportFrom)]
            return sorted(alias.asname or alias.name for x in imports for alias in x.names)
    return []


def file_of(module: str, package: Path) -> Path:
    """The file of a module of the package, "guild.moe"."""
    path = package.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definition(name: str, path: Path, package: Path) -> tuple[ast.AST, Path]:
    """What a module's name refers to: the class, function or assignment, and its file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.ClassDef, *Function)) and node.name == name:
            return node, path
        if isinstance(node, ast.ImportFrom) and not node.level:
            if any((alias.asname or alias.name) == name for alias in node.names):
                return definition(name, file_of(node.module, package), package)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node, path
    raise LookupError(f"{path}: __all__ lists {name}, which the file neither defines nor imports")


def signature(node: ast.FunctionDef, bound: bool = False) -> str:
    """A function's parameters in parentheses and what it returns; without self where bound."""
    parameters = ast.unparse(node.args)
    if bound:
        parameters = parameters.partition(",")[2].strip().removeprefix("/").lstrip(", ")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({parameters}){returns}"


def class_signature(node: ast.ClassDef) -> str:
    """How a class is called: by its __init__, or with the fields of a dataclass or NamedTuple."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(text.startswith("dataclass") for text in decorators) or any(
        ast.unparse(parent).endswith("NamedTuple") for parent in node.bases
    ):
        fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
        return f"({', '.join(field for field in fields if 'init=False' not in field)})"
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return signature(part, bound=True).partition(" -> ")[0]
    return ""


def literal_equations(docstring: str) -> str:
    """Mark what is indented before a docstring's first section as literal: equations, examples."""
    head, *sections = re.split(r"^(?=\w+\n-{3,}$)", docstring, maxsplit=1, flags=re.MULTILINE)
    marked = re.sub(r"\n\n(?=    )((?:    .*\n|\n)+)", r"\n\n::\n\n\1", f"{head}\n")
    return marked + "".join(sections)


def as_rest(docstring: str) -> str:
    """A numpy-style docstring as reStructuredText; `names` in it become references."""
    from sphinx.ext.napoleon import Config, NumpyDocstring

    def refer(match: re.Match[str]) -> str:
        is_name = re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", match[1])
        return f":py:obj:`{match[1]}`" if is_name else f"``{match[1]}``"

    text = re.sub(r"(?<![`:\w])`([^`]+)`(?!`)", refer, literal_equations(docstring))
    config = Config(napoleon_use_ivar=True, napoleon_use_param=False, napoleon_use_rtype=False)
    return str(NumpyDocstring(text, config))


def directive(kind: str, head: str, node: ast.AST, options: str = "", inside: str = "") -> str:
    """One entry of the reference: a directive, the docstring and the members below it."""
    text = as_rest(inspect.cleandoc(ast.get_docstring(node) or ""))
    body = f"{options}\n\n{text}\n\n{inside}\n"
    return f".. py:{kind}:: {head}\n" + textwrap.indent(body, "   ")


def method(node: ast.FunctionDef) -> str:
    """The entry of one method or property of a class."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if "property" in decorators:
        returns = f":type: {ast.unparse(node.returns)}" if node.returns else ""
        return directive("property", node.name, node, returns)
    options = "".join(f":{kind}:" for kind in ("classmethod", "staticmethod") if kind in decorators)
    shown = signature(node, bound="staticmethod" not in decorators)
    return directive("method", f"{node.name}{shown}", node, options)


def entry(name: str, node: ast.AST) -> str:
    """The entry of `name`; of a class with the documented methods that are for users."""
    if isinstance(node, Function):
        return directive("function", f"{name}{signature(node)}", node)
    if not isinstance(node, ast.ClassDef):
        return f".. py:data:: {name}\n   :value: {ast.unparse(node.value)}\n"
    hidden = INTERNAL.get(node.name, ())
    members = [
        method(part)
        for part in node.body
        if isinstance(part, Function)
        and part.name[0] != "_"
        and part.name not in hidden
        and ast.get_docstring(part)
    ]
    return directive("class", f"{name}{class_signature(node)}", node, "", "\n".join(members))


def pages(package: Path) -> dict[str, str]:
    """The pages of a package by file name: one for each module that its public names come from.

    The title of a page is its module if users import from that, or else the names on the page.
    """
    written: dict[str, list[str]] = {}
    titles: dict[str, str] = {}
    packages = list(public_packages(package))
    for name, path, names in packages:
        for public in names:
            node, file = definition(public, path, package)
            if path.parent != package:  # a subpackage's names are one page
                file = path
            parts = file.relative_to(package.parent).with_suffix("").parts
            module = ".".join(parts).removesuffix(".__init__")
            about = inspect.cleandoc(ast.get_docstring(tree_of(file)) or "").partition("\n\n")[0]
            page = written.setdefault(module, [" ".join(about.split())])
            if any(module == imported for imported, _, _ in packages):
                titles[module] = module
            else:
                others = titles.get(module)
                titles[module] = f"{others}, {public}" if others else f"{name}.{public}"
            shown = f".. py:currentmodule:: {name}\n\n{entry(public, node)}"
            page.append(f"```{{eval-rst}}\n{shown}```")
    return {
        f"{module}.md": "\n\n".join([f"# {titles[module]}", *parts]) + "\n"
        for module, parts in written.items()
    }
