"""Tries the wheel with several torches, each time in an empty environment where pip installs both.

Each time README's quick start, a layer forward and backward, all kinds of calls under
torch.compile, and `guild info` run there; then, with the packages of `guild[cli]`, `guild train`.
The library is one file for all of them, as it uses only torch's stable ABI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import venv
from pathlib import Path

from machine import ROOT, VENV_PYTHON, output, say, stop
from torch_install import install_torch

OLDEST = (2, 10)
MOST_SECONDS = 900  # for a download that `make test` can do without
LAYER = """
import pathlib, sys, torch, guild
from guild.provenance import commit

folder, head, version, with_cuda = sys.argv[1:]
assert pathlib.Path(folder) in pathlib.Path(guild.__file__).parents, guild.__file__
assert guild.__version__ == version, guild.__version__
assert (commit() or "").startswith(head), commit()
layer = guild.MoE(hidden=32, intermediate=16, experts=4, top_k=2)
x = torch.randn(10, 32, requires_grad=True)
out = layer(x)
out.square().sum().backward()
assert out.shape == x.shape and out.isfinite().all() and out.abs().sum() > 0
assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
ids, scores = guild.route(torch.randn(10, 4), top_k=2)
offsets = torch.tensor([0, 3, 5, 5, 10], dtype=torch.int32)
weights = layer.w_up.detach(), layer.w_down.detach()
low = guild.LoRA(torch.randn(4, 3, 32), torch.randn(4, 32, 3).requires_grad_())
fp8 = guild.MoE(32, 16, 4, 2, fp8=guild.FP8(), dtype=torch.bfloat16)
for name, call, rows in (
    ("MoE", layer, x),
    ("routed_experts", lambda x: guild.routed_experts(x, ids, scores, *weights), x),
    ("LoRA", lambda x: guild.routed_experts(x, ids, scores, *weights, lora_up=low), x),
    ("experts_mlp", lambda x: guild.experts_mlp(x, offsets, *weights), x),
    ("FP8", fp8, x.detach().bfloat16().requires_grad_()),
):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(rows)
    compiled.sum().backward()
    assert torch.equal(compiled, call(rows)), name
assert torch.ops.guild.cuda_built() == (with_cuda == "True"), with_cuda
print("a layer ran forward, backward and compiled from", folder, "with torch", torch.__version__)
"""


USABLE_GPU = """
import guild, torch
guild.MoE  # loads the library
if torch.cuda.is_available() and torch.ops.guild.cuda_reason():
    torch.cuda.is_available = lambda: False
"""
TRAIN = (
    "train --steps 2 --batch 4 --context 32 --hidden 32 --layers 1 --heads 2 --experts 4 "
    "--intermediate 16 --warmup 1 --device cpu --out run"
).split()


def newest_of_each_minor(versions: list[str]) -> list[str]:
    """The last release of every 2.x from 2.10 on, oldest first; builds and previews left out."""
    releases = {
        tuple(map(int, v.split("."))) for v in versions if re.fullmatch(r"\d+\.\d+\.\d+", v)
    }
    last = {release[:2]: release for release in sorted(releases) if release[:2] >= OLDEST}
    return [".".join(map(str, last[minor])) for minor in sorted(last)]


def torches_of_the_index() -> list[str]:
    """The versions of torch that pip's index offers to this Python."""
    text = output(str(VENV_PYTHON), "-m", "pip", "index", "versions", "torch")
    listed = re.search(r"^Available versions: (.*)$", text, re.MULTILINE)
    return newest_of_each_minor(re.split(r",\s*", listed[1])) if listed else []


def plain_environment(**more: str) -> dict[str, str]:
    """The environment without what would lead Python or Guild back to the source tree."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("GUILD_", "PYTHON"))} | more


def quick_start() -> str:
    """README's first Python block, on a GPU only where Guild has kernels for it."""
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    return USABLE_GPU + block


def run_programs(python: Path, folder: Path, facts: list[str], **more: str) -> bool:
    """Run what needs torch alone by `python`, which finds Guild in `folder` or its packages."""
    layer = ["-c", LAYER, str(folder), *facts]
    return run_each(python, folder, ["-c", quick_start()], layer, ["-m", "guild", "info"], **more)


def run_each(python: Path, folder: Path, *programs: list[str], **more: str) -> bool:
    """Run programs by `python` in a folder, up to the first that fails."""
    environment = plain_environment(**more)
    for program in programs:
        quiet = {"stdout": subprocess.DEVNULL} if program[0] == "-m" else {}
        done = subprocess.run([python, *program], cwd=folder, env=environment, **quiet)
        if done.returncode:
            say(f"failed: {python} {program[0]} {program[1][:60].strip()}")
            return False
    return True


def try_torch(
    wheel: Path, version: str, folder: Path, facts: list[str], seconds: float | None
) -> str:
    """Install one torch and the wheel into an empty environment and run the programs there.

    The environment is made in `folder` and removed again: with CUDA it takes 7 GB.

    Returns "passed", "FAILED", or "not to be had" where pip cannot install this torch in time.
    """
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    pip = [str(VENV_PYTHON), "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "-q", "install"]
    try:
        if not install_torch(install, f"torch=={version}", seconds):
            return "not to be had"
        if subprocess.run([*install, str(wheel)]).returncode:
            return "FAILED"
        passed = run_programs(python, folder, facts)
        passed = passed and subprocess.run([*install, f"{wheel}[cli]"]).returncode == 0
        passed = passed and run_each(python, folder, ["-m", "guild", *TRAIN])
        return "passed" if passed else "FAILED"
    finally:
        shutil.rmtree(folder)


def try_torches(wheel: Path, folder: Path, facts: list[str], every: bool) -> None:
    """Try the oldest torch that Guild supports, or `every` minor version that the index has.

    facts: the commit, the version and whether it has CUDA kernels, as the wheel must say itself.
    """
    offered = torches_of_the_index()
    if not offered:
        say("the package index has no torch: the wheel is tried with the installed one alone")
        if every:
            stop("--all-torches: expected a package index that has torch, found none")
        return
    seconds = None if every else MOST_SECONDS
    results = {}
    for version in offered if every else offered[:1]:
        began = time.monotonic()
        results[version] = try_torch(wheel, version, folder / f"torch-{version}", facts, seconds)
        say(f"torch {version}: {results[version]}, {time.monotonic() - began:.0f} s")
    bad = {"FAILED", "not to be had"} if every else {"FAILED"}
    if failed := [version for version, result in results.items() if result in bad]:
        stop(f"the wheel does not work with torch {', '.join(failed)}: see above")
