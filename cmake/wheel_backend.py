"""The build backend of Guild's wheel: scikit-build-core's, or a message on what to install.

pip installs what pyproject.toml's build-system requires unless it is given --no-build-isolation.
Then a missing scikit-build-core would end in a traceback that does not name what else is missing.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None

try:
    from scikit_build_core.build import *  # noqa: F403 - the hooks that pip calls
except ImportError:
    if tomllib is None:
        missing = ["what build-system.requires of pyproject.toml lists"]
    else:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
        names = {found.name.lower().replace("_", "-") for found in metadata.distributions()}
        missing = [
            wanted
            for wanted in project["build-system"]["requires"]
            if wanted.partition(">")[0].partition("=")[0] not in names
        ]
    listed = " ".join(f"'{wanted}'" for wanted in missing)
    sys.exit(
        f"Guild's wheel cannot be built without isolation, {sys.executable} lacks what it needs.\n"
        f"Install it: {sys.executable} -m pip install {listed}\n"
        "or leave out --no-build-isolation: pip then brings it all, and a torch, for this build."
    )
