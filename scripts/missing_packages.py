"""Prints which of the project's Python requirements this environment lacks, one per line.

Run by the Python of .venv, with the names of requirement groups: `run` for the dependencies of the
package and of its commands, else the name of a dependency group in pyproject.toml. A package of the
outer Python counts when it lies in the range; one in .venv itself must have the pinned version.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

# pip's own copies come last: once pip is imported, setuptools no longer brings its distutils, which
# torch.compile needs in the tests of the same process.
try:
    import tomllib
except ImportError:  # Python 3.10
    try:
        import tomli as tomllib
    except ImportError:
        from pip._vendor import tomli as tomllib
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def read_pins(text: str) -> dict[str, Requirement]:
    """The pins that apply to this Python, by lower-case name."""
    lines = (line.strip() for line in text.splitlines())
    pins = (Requirement(line) for line in lines if line and not line.startswith("#"))
    return {pin.name.lower(): pin for pin in pins if not pin.marker or pin.marker.evaluate()}


def is_met(wanted: Requirement, pin: Requirement | None) -> bool:
    """Whether an installed package fulfils a requirement, and its pin if it is this venv's own."""
    try:
        found = metadata.distribution(wanted.name)
    except metadata.PackageNotFoundError:
        return False
    if not wanted.specifier.contains(found.version, prereleases=True):
        return False
    is_own = Path(str(found.locate_file(""))).resolve().is_relative_to(Path(sys.prefix).resolve())
    return not (is_own and pin) or pin.specifier.contains(found.version, prereleases=True)


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = read_pins((ROOT / "scripts/pins.txt").read_text())
    package = project["project"]
    run = package["dependencies"] + package["optional-dependencies"]["cli"]
    groups = project["dependency-groups"] | {"run": run}
    for group in sys.argv[1:]:
        for wanted in map(Requirement, groups[group]):
            is_for_us = not wanted.marker or wanted.marker.evaluate()
            if is_for_us and not is_met(wanted, pins.get(wanted.name.lower())):
                print(wanted)


if __name__ == "__main__":
    main()
