"""Fails a CUDA build whose kernels spill registers or serialise their wgmma instructions.

    check_ptxas.py run nvcc ...     compile, keep ptxas's report beside the object, check it
    check_ptxas.py show FOLDER      check every report under a build folder and print a table

The first form is CMake's CUDA compiler launcher (CMAKE_CUDA_COMPILER_LAUNCHER): a kernel that
breaks the rule leaves no object, so a later, partial build cannot miss it.
Needs nvcc's `-Xptxas -v`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".ptxas"
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SERIALISED = re.compile(r"C7510|wgmma\.mma_async instructions are serialized")
_INJECTED = re.compile(r"warpgroup\.(?:wait|arrive) is injected")  # slower, not serialised


@dataclass
class Kernel:
    """What ptxas reports of one function: registers per thread, bytes spilled, bytes of stack."""

    name: str
    registers: int = 0
    stack_bytes: int = 0
    spilled_bytes: int = 0
    serialised: str = ""  # ptxas's own words, if it serialised wgmma
    injected: int = 0  # waits that ptxas added around wgmma

    def fault(self) -> str:
        """How the kernel breaks the rule, or an empty string."""
        if self.spilled_bytes:
            return f"spills {self.spilled_bytes} bytes"
        return self.serialised


def read_report(text: str) -> list[Kernel]:
    """The functions of one `ptxas -v` report."""
    kernels: dict[str, Kernel] = {}
    kernel = Kernel("")
    for line in text.splitlines():
        named = re.search(r"(?:Function properties for|in (?:the )?function) '?([\w$.]+)'?", line)
        if named:
            kernel = kernels.setdefault(named[1], Kernel(named[1]))
        if found := _SPILL.search(line):
            kernel.stack_bytes = int(found[1])
            kernel.spilled_bytes = int(found[2]) + int(found[3])
        elif found := _REGISTERS.search(line):
            kernel.registers = int(found[1])
        elif _SERIALISED.search(line):
            kernel.serialised = line.partition(":")[2].strip()
        elif _INJECTED.search(line):
            kernel.injected += 1
    return list(kernels.values())


def demangle(names: list[str]) -> list[str]:
    """Readable names, where binutils' c++filt is installed."""
    if not names or not shutil.which("c++filt"):
        return names
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    return done.stdout.splitlines()


def run(command: list[str]) -> int:
    """Compile; on success keep and check ptxas's report; pass everything else through."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    other = [x for x in done.stderr.splitlines() if not re.match(r"ptxas info|    \d+ bytes", x)]
    if other:
        print("\n".join(other), file=sys.stderr)
    if done.returncode or "-c" not in command or "-o" not in command:
        return done.returncode
    target = Path(command[command.index("-o") + 1])
    target.with_name(target.name + SUFFIX).write_text(done.stderr)
    faults = [k for k in read_report(done.stderr) if k.fault()]
    for kernel, name in zip(faults, demangle([k.name for k in faults]), strict=True):
        print(f"{target}: {name}: {kernel.fault()}", file=sys.stderr)
    if faults:
        target.unlink(missing_ok=True)
    return 1 if faults else 0


def show(folder: Path) -> int:
    """Print a table of every kernel built in a folder; fail on any fault, or if there is none."""
    kernels: list[Kernel] = []
    for report in sorted(folder.rglob(f"*{SUFFIX}")):
        if report.with_name(report.name.removesuffix(SUFFIX)).exists():
            kernels += read_report(report.read_text())
    names = demangle([k.name for k in kernels])
    print("registers  stack  spilled  kernel")
    for kernel, name in sorted(zip(kernels, names, strict=True), key=lambda pair: pair[1]):
        note = f"  ({kernel.injected} waits added)" if kernel.injected else ""
        note += f"  {kernel.serialised}" if kernel.serialised else ""
        sizes = f"{kernel.registers:9}  {kernel.stack_bytes:5}  {kernel.spilled_bytes:7}"
        print(f"{sizes}  {shorten(name)}{note}")
    faults = sum(bool(k.fault()) for k in kernels)
    print(f"ptxas: {len(kernels)} kernels, {faults} with spills or serialised wgmma")
    unseen = [o for o in folder.rglob("*.cu.o") if not o.with_name(o.name + SUFFIX).exists()]
    for target in unseen:
        print(f"{target}: compiled without a report; remove it and build again")
    return 1 if faults or unseen or not kernels else 0


def shorten(name: str) -> str:
    """A kernel's name cut to a line: no namespaces, no parameters, types and tiles in short."""
    name = re.sub(r"GemmConfig\{([^}]*)\}", lambda m: m[1].replace(", ", ":"), name)
    for pattern, short in (
        (r"\(anonymous namespace\)::|\b(?:guild|cuda|cute|void)(?:::| )", ""),
        (r"__nv_bfloat16", "bf16"),
        (r"__half", "fp16"),
        (r"\((?:\w+::)*(\w+)\)(\d+)", r"\1 \2"),
        (r"\b(\w+)<(?:bf16|fp16), \d+:[\w:]+, ", r"\1<"),  # a kernel's parts share its config
        (r"\b(\w+)<(?:bf16|fp16), \d+:[\w:]+>", r"\1"),
        (r"(?<=[\w>])\(.*$", ""),
    ):
        name = re.sub(pattern, short, name)
    return name if len(name) <= 140 else name[:137] + "..."


def main() -> int:
    mode, *rest = sys.argv[1:] or [""]
    if mode == "run" and rest:
        return run(rest)
    if mode == "show" and len(rest) == 1:
        return show(Path(rest[0]))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
