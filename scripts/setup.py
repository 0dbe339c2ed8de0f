"""Makes .venv with everything that `make train` (run) or `make test` (test) needs.

Run by the machine's own Python, standard library only. Installs only what is missing: a second run
installs nothing, uses no network and takes under a second.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from machine import (
    GTEST,
    ROOT,
    VENV,
    VENV_PYTHON,
    apt_install,
    apt_unpack,
    find_gtest,
    find_nvcc,
    has_supported_gpu,
    output,
    say,
    stop,
)
from torch_install import install_torch

PINS = ROOT / "scripts/pins.txt"
PIP = [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check", "-q"]


def outer_torch() -> bool:
    """Whether this Python already has a suitable torch, which is then not downloaded again."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= (2, 10)


def venv_is_ours() -> bool:
    """Whether .venv works and was made here: its scripts hold the path they were made at."""
    made_at = VENV / "made-at"
    if made_at.exists() and made_at.read_text() != str(ROOT):
        return False
    check = "import pip, sys; print(sys.version_info >= (3, 10))"
    return output(str(VENV_PYTHON), "-c", check).strip() == "True"


def check_maker() -> None:
    """Stop if $PYTHON asks for another Python than the one that .venv was made with."""
    asked, record = os.environ.get("PYTHON"), VENV / "made-with"
    if not asked or Path(sys.prefix).resolve() == VENV.resolve():
        return
    says = "import platform, sys; print(f'Python {platform.python_version()} in {sys.base_prefix}')"
    made_with = record.read_text() if record.exists() else output(str(VENV_PYTHON), "-c", says)
    if made_with.strip() != maker():
        stop(
            f"PYTHON={asked} is {maker()}, but .venv was made with {made_with.strip()}.\n"
            "Remove .venv to make it anew, or leave PYTHON out."
        )


def maker() -> str:
    """This Python, by its version and the place of its packages."""
    return f"Python {platform.python_version()} in {sys.prefix}"


def has_module(name: str) -> bool:
    """Whether this Python can import a module; an empty folder of that name does not count."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def make_venv() -> None:
    """Make .venv; it sees the outer Python's packages if torch is among them."""
    say(f"  making .venv with Python {platform.python_version()}")
    shutil.rmtree(VENV, ignore_errors=True)
    inside_venv = sys.prefix != sys.base_prefix
    make = [sys.executable, "-m", "venv", str(VENV)]
    if outer_torch() and not inside_venv:
        make.append("--system-site-packages")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if has_module("ensurepip") or apt_install(f"python{version}-venv"):
        subprocess.run(make, check=True)
    else:
        make_venv_without_ensurepip(make)
    if outer_torch() and inside_venv:  # venv itself passes over an outer virtual environment
        (venv_packages() / "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (VENV / "made-at").write_text(str(ROOT))
    (VENV / "made-with").write_text(maker())


def make_venv_without_ensurepip(make: list[str]) -> None:
    """Debian leaves pip out of venv: bring it from the outer Python or from apt's package."""
    subprocess.run([*make, "--without-pip"], check=True)
    if has_module("pip"):
        pip = [sys.executable, "-m", "pip", "-q", "--python", str(VENV_PYTHON), "install", "pip"]
        if subprocess.run(pip).returncode == 0:
            return
    if apt_unpack(VENV / "pip", "python3-pip-whl"):
        wheel = next((VENV / "pip").glob("usr/share/python-wheels/pip-*.whl"))
        pip = [str(VENV_PYTHON), f"{wheel}/pip", "install", "-q", "--no-index", str(wheel)]
        if subprocess.run(pip).returncode == 0:
            return
    shutil.rmtree(VENV)
    stop("Python cannot make virtual environments here: run `apt-get install python3-venv`.")


def venv_packages() -> Path:
    """The site-packages folder of .venv."""
    return next(VENV.glob("lib/python3*/site-packages"))


def install_pinned_torch() -> None:
    """Install the torch of scripts/pins.txt."""
    pin = next(line for line in PINS.read_text().splitlines() if line.startswith("torch=="))
    say(f"  installing {pin} (this is the large one)")
    if not install_torch([*PIP, "install", "-c", str(PINS)], pin):
        stop("torch could not be installed: see pip's message above. Any torch >= 2.10 will do.")


def install_packages(groups: list[str]) -> None:
    """Install what the requirement groups still lack, at the pinned versions."""
    missing = missing_packages(*groups)
    if any(line.startswith("torch") for line in missing):
        install_pinned_torch()
        missing = missing_packages(*groups)
    headers = missing_packages(*(g for g in groups if g.endswith("headers")))
    plain = [line for line in missing if line not in headers]
    for lines, options in ((plain, []), (headers, ["--no-deps"])):
        if not lines:
            continue
        say(f"  installing {', '.join(lines)}")
        if subprocess.run([*PIP, "install", "-c", str(PINS), *options, *lines]).returncode:
            stop(f"pip could not install {', '.join(lines)}: see its message above.")


def missing_packages(*groups: str) -> list[str]:
    """The requirements of these groups that .venv does not meet."""
    command = [str(VENV_PYTHON), "scripts/missing_packages.py", *groups]
    return subprocess.run(
        command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()


def link_package() -> None:
    """Let .venv use the package straight from the tree: `import guild` and the command `guild`.

    Tools that came with the outer Python's packages are linked beside it.
    """
    path = venv_packages() / "guild-tree.pth"
    path.write_text(f"{ROOT / 'python'}\n")
    command = VENV / "bin/guild"
    text = f'#!/bin/sh\nexec "{VENV_PYTHON}" -m guild "$@"\n'
    if not command.exists() or command.read_text() != text:
        command.write_text(text)
        command.chmod(0o755)
    for tool in ("cmake", "ctest", "ninja", "ruff", "clang-format"):
        outer, own = Path(sys.prefix) / "bin" / tool, VENV / "bin" / tool
        if outer.exists() and not own.exists() and outer.parent != Path("/usr/bin"):
            own.symlink_to(outer)


def install_gtest() -> None:
    """Install GoogleTest; without it the C++ tests are reported as skipped."""
    if find_gtest() or apt_install("libgtest-dev", "libgmock-dev"):
        return
    if not apt_unpack(GTEST.parent, "libgtest-dev", "libgmock-dev"):
        shutil.rmtree(GTEST.parent, ignore_errors=True)
        say("  GoogleTest could not be installed (apt-get install libgtest-dev libgmock-dev):")
        say("  the C++ tests will be SKIPPED")


def main() -> None:
    if sys.argv[1:] not in (["run"], ["test"]):
        stop("usage: setup.py run|test")
    is_test = sys.argv[1] == "test"
    say("== set-up")
    os.chdir(ROOT)
    if venv_is_ours():
        check_maker()
    else:
        make_venv()
    groups = ["run", "build", "headers"] + (["test", "style"] if is_test else [])
    needs_cuda = find_nvcc() and (is_test or has_supported_gpu())
    if needs_cuda and not os.environ.get("GUILD_CUTLASS_DIR"):
        groups.append("cuda-headers")
    if is_test:
        groups += ["wheel", "docs"]
    install_packages(groups)
    link_package()
    if is_test:
        install_gtest()


if __name__ == "__main__":
    main()
