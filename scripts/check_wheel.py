"""Builds the wheel and checks that it works on its own, away from the source tree.

Reuses build/test, so that nothing is compiled twice. Checks the contents, runs a layer
forward and backward from an installation of it, and builds the C++ example against the CMake
package inside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from machine import ROOT, VENV_PYTHON, output, say, stop

FOLDER = ROOT / "build/wheel"
HEAD = output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
PACKAGE = ROOT / "python"
EXPECTED = (
    *(path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("guild/**/*.py"))),
    "guild/libguild_torch.so",
    "guild/bench/quack_h200.json",
    *(["guild/commit.txt"] if HEAD and (ROOT / ".git").exists() else []),
    "guild/include/guild/guild.h",
    "guild/lib/libguild.a",
    "guild/lib/cmake/guild/guildConfig.cmake",
)
LAYER = """
import pathlib, sys, torch, guild
here = pathlib.Path(sys.argv[1])
assert here in pathlib.Path(guild.__file__).parents, guild.__file__
layer = guild.MoE(hidden=32, intermediate=16, experts=4, top_k=2)
x = torch.randn(10, 32, requires_grad=True)
out = layer(x)
out.square().sum().backward()
assert out.shape == x.shape and out.isfinite().all() and out.abs().sum() > 0
assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
from guild.provenance import commit
assert (commit() or "").startswith(sys.argv[2]), commit()
print("a layer ran forward and backward from", guild.__file__)
"""


def run(*command: object, **options) -> None:
    if subprocess.run([str(part) for part in command], **options).returncode:
        stop(f"the wheel check failed at: {' '.join(str(part) for part in command)[:300]}")


def build() -> Path:
    """Build the wheel from build/test's objects; returns its path."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    pip = (VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "-q", "wheel", ROOT)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-w", FOLDER)
    run(*pip, *options, "-C", f"build-dir={ROOT / 'build/test'}", cwd=ROOT)
    return next(FOLDER.glob("guild-*.whl"))


def main() -> None:
    wheel = build()
    names = zipfile.ZipFile(wheel).namelist()
    if missing := [name for name in EXPECTED if name not in names]:
        stop(f"{wheel.name} lacks {', '.join(missing)}")
    say(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {len(names)} files")

    site = FOLDER / "site"
    pip = (VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "-q", "install")
    run(*pip, "--no-deps", "--no-index", "--target", site, wheel)
    environment = {k: v for k, v in os.environ.items() if k != "GUILD_LIBRARY"}
    environment["PYTHONPATH"] = str(site)
    head = os.environ.get("GUILD_COMMIT", HEAD if (ROOT / ".git").exists() else "")
    run(VENV_PYTHON, "-c", LAYER, site, head, cwd=FOLDER, env=environment)

    example = FOLDER / "example"
    configure = ("cmake", "-G", "Ninja", "-S", ROOT / "examples/cpp", "-B", example)
    quiet = {"stdout": subprocess.DEVNULL}
    run(*configure, f"-DCMAKE_PREFIX_PATH={site / 'guild'}", **quiet)
    run("cmake", "--build", example, **quiet)
    say("the C++ example builds against the wheel's CMake package")


if __name__ == "__main__":
    sys.exit(main())
