"""Builds the documents' site into build/site with Sphinx; a warning, such as a dead link, fails it.

The documents are written to be read in the repository, with links to its other files. So they are
copied to build/docs first, with README.md, CONTRIBUTING.md, CHANGELOG.md and the pages of both APIs
beside them. Links to documents then lead to their pages, those to headers to the reference, those
to other files to copies of them; a link to a folder becomes plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cpp_reference
import python_reference
from machine import ROOT, VENV_PYTHON, say

DOCS = ROOT / "docs"
STAGE, SITE = ROOT / "build/docs", ROOT / "build/site"
PAGES_OF_ROOT = {"readme.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
PAGES_OF_ROOT |= {"changelog.md": "CHANGELOG.md"}
# Code, whose brackets are not links, or a link: a picture's mark, text, target.
_CODE_OR_LINK = re.compile(
    r"^```.*?^```|(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)|(!?)\[((?:[^\]\[`]|`[^`]*`)*)\]\(([^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)
# The navigation column beside every page, in this order; * stands for all of a folder.
CONTENTS = {
    "Guide": ["readme", "guide", "lora", "float8", "parallel", "numerics", "integrations/*"],
    "Python": ["api/python/*"],
    "C++": ["api/cpp/*"],
    "Measured": ["measured/*"],
    "Developers": ["kernel", "papers", "contributing", "changelog"],
}


def place(file: Path) -> str | None:
    """Where the site has a file of the repository; None for a folder."""
    path = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        return None
    if path.startswith("docs/") and file.suffix == ".md":
        return path.removeprefix("docs/")
    if path.startswith("include/guild/") and file.name != "guild.h":
        return f"api/cpp/{file.stem}.md"
    named = (page for page, name in PAGES_OF_ROOT.items() if name == path)
    return next(named, f"source/{path}")


def lead_links(text: str, origin: Path, page: str) -> str:
    """Rewrite a document's links, from the repository's files to where the site has them.

    The document lies at `origin` and is shown on `page`. A dead link stays as it is, and Sphinx
    warns of it.
    """

    def replace(match: re.Match[str]) -> str:
        _, mark, words, target = match.groups()
        path, sign, anchor = (target or "").partition("#")
        file = Path(posixpath.normpath(origin.parent / path))
        outer = not path or re.match(r"[a-z]+:", path)
        if outer or not file.exists() or not file.is_relative_to(ROOT):
            return match[0]
        where = place(file)
        if where is None:
            return words
        if where.startswith("source/"):
            (STAGE / where).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, STAGE / where)
        return f"{mark}[{words}]({posixpath.relpath(where, posixpath.dirname(page))}{sign}{anchor})"

    return _CODE_OR_LINK.sub(replace, text)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every page of the site."""
    origins = {file.relative_to(DOCS).as_posix(): file for file in sorted(DOCS.rglob("*.md"))}
    origins |= {page: ROOT / name for page, name in PAGES_OF_ROOT.items()}
    for page, origin in origins.items():
        text = lead_links(origin.read_text(), origin, page)
        yield page, text + contents() if page == "index.md" else text
    for header in sorted((ROOT / "include/guild").glob("*.h")):
        if header.name != "guild.h":
            text = cpp_reference.page(header, f"guild/{header.name}")
            yield f"api/cpp/{header.stem}.md", text
    for page, text in python_reference.pages(ROOT / "python/guild").items():
        yield f"api/python/{page}", text


def contents() -> str:
    """The tables of contents that Sphinx makes the site's navigation of."""
    tables = (
        "\n".join(["```{toctree}", ":hidden:", ":glob:", f":caption: {title}", "", *entries])
        for title, entries in CONTENTS.items()
    )
    return "".join(f"\n{table}\n```\n" for table in tables)


def main() -> int:
    for folder in (STAGE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    for page, text in pages():
        (STAGE / page).parent.mkdir(parents=True, exist_ok=True)
        (STAGE / page).write_text(text)
    sphinx = [VENV_PYTHON, "-m", "sphinx", "-b", "html", "-q", "-n", "-W", "--keep-going"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [*sphinx, "-c", DOCS, "-d", ROOT / "build/doctrees", STAGE, SITE]
    if status := subprocess.run(command, env=environment).returncode:
        return status
    say(f"{sum(1 for _ in SITE.rglob('*.html'))} pages: {SITE / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
