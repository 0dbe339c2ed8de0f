"""Print where Python finds the packages that the build takes headers and libraries from.

One line `name=path` each for eigen, cutlass, torch and torch_version; empty where there is none.
Nothing is imported: finding torch must not take the seconds that importing it takes.
"""

import sys
from importlib import metadata
from pathlib import Path


def find(relative: str, probe: str) -> str:
    """Return the first folder `relative` on sys.path that holds `probe`, or ''."""
    for entry in sys.path:
        folder = Path(entry or ".") / relative
        if (folder / probe).exists():
            return folder.resolve().as_posix()
    return ""


def version(package: str) -> str:
    """Return the installed version of `package`, or ''."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


print("eigen=" + find("cmeel.prefix/include/eigen3", "Eigen/Core"))
print("cutlass=" + find("cutlass_library/source/include", "cute/arch/mma_sm90_gmma.hpp"))
print("torch=" + find("torch", "include/torch/csrc/stable/library.h"))
print("torch_version=" + version("torch"))
