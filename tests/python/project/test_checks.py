"""The checks of scripts/ find what they exist to find, and pass what is clean."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import machine  # noqa: E402
from check_ptxas import read_report  # noqa: E402
from check_sizes import breaches  # noqa: E402
from cpp_functions import definitions  # noqa: E402
from machine import find_nvcc  # noqa: E402

# nvcc 13.0's words for a clean kernel, one that spills, and one that ptxas serialised.
CLEAN = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_Z4holdILi8EEvPKfPf' for 'sm_90a'
ptxas info    : Function properties for _Z4holdILi8EEvPKfPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 1 barriers
"""
SPILLING = """\
ptxas info    : Compiling entry function '_Z4holdILi96EEvPKfPf' for 'sm_90a'
ptxas info    : Function properties for _Z4holdILi96EEvPKfPf
    488 bytes stack frame, 488 bytes spill stores, 584 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 488 bytes cumulative stack size
"""
SERIALISED = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function '_Z6serialmmPfi'
ptxas info    : Function properties for _Z6serialmmPfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
"""


@pytest.mark.parametrize(
    ("built_for", "reported", "usable"),
    [
        ("9.0", "9.0\n", True),
        ("9.0", "8.0\n9.0\n", True),
        ("9.0", "8.9\n", False),
        ("9.0", "", False),
        ("8.0", "8.0\n", True),
    ],
)
def test_the_gpu_is_one_that_the_kernels_are_built_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built_for: str, reported: str, usable: bool
) -> None:
    """CMakeLists.txt is the only place that names it."""
    assert machine.compute_capability() == "9.0"
    (tmp_path / "CMakeLists.txt").write_text(f"set(compute_capability {built_for})\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "output", lambda *command: reported)
    assert machine.has_supported_gpu() == usable


def test_ptxas_report_is_read_kernel_by_kernel() -> None:
    clean, spilling, serialised = read_report(CLEAN + SPILLING + SERIALISED)
    assert (clean.name, clean.registers, clean.fault()) == ("_Z4holdILi8EEvPKfPf", 18, "")
    assert (spilling.spilled_bytes, spilling.stack_bytes) == (488 + 584, 488)
    assert spilling.fault() == "spills 1072 bytes"
    assert serialised.name == "_Z6serialmmPfi" and "serialized" in serialised.fault()


@pytest.mark.parametrize(
    ("report", "status"), [(CLEAN, 0), (CLEAN + SPILLING, 1), (SERIALISED, 1), ("", 1)]
)
def test_ptxas_check_fails_a_build(tmp_path: Path, report: str, status: int) -> None:
    (tmp_path / "kernel.cu.o").touch()
    (tmp_path / "kernel.cu.o.ptxas").write_text(report)
    assert run_script("check_ptxas.py", "show", tmp_path).returncode == status


def test_ptxas_check_fails_on_an_object_without_a_report(tmp_path: Path) -> None:
    for name, report in (("seen", CLEAN), ("unseen", None)):
        (tmp_path / f"{name}.cu.o").touch()
        if report:
            (tmp_path / f"{name}.cu.o.ptxas").write_text(report)
    done = run_script("check_ptxas.py", "show", tmp_path)
    assert done.returncode == 1 and "unseen.cu.o" in done.stdout


@pytest.mark.skipif(not find_nvcc(), reason="no nvcc on this machine")
@pytest.mark.parametrize(("values", "status"), [(8, 0), (96, 1)])
def test_spilling_kernel_does_not_compile(tmp_path: Path, values: int, status: int) -> None:
    source = tmp_path / "hold.cu"
    source.write_text(f"""
        __global__ __launch_bounds__(1024, 2) void hold(float const* in, float* out) {{
          float v[{values}], sum = 0;
          #pragma unroll
          for (int i = 0; i < {values}; ++i) v[i] = in[i * 1024 + threadIdx.x];
          __syncthreads();
          #pragma unroll
          for (int i = 0; i < {values}; ++i) {{
            sum = sum * v[{values} - 1 - i] + v[i];
            __syncthreads();
          }}
          out[threadIdx.x] = sum;
        }}""")
    target = tmp_path / "hold.cu.o"
    flags = ("-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-c", source)
    done = run_script("check_ptxas.py", "run", find_nvcc(), *flags, "-o", target)
    assert done.returncode == status, done.stderr
    assert target.exists() == (status == 0)
    assert ("spills" in done.stderr) == (status == 1)


def function_of(lines: int) -> str:
    return "int f() {\n" + "  call();\n" * (lines - 2) + "}\n"


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("src/a.h", "int x;\n" * 399, ""),
        ("src/a.h", "int x;\n" * 400, "400 lines"),
        ("src/a.h", "//" + "x" * 98, ""),
        ("src/a.h", "//" + "x" * 99, "101 columns"),
        ("src/a.h", function_of(59), ""),
        ("src/a.h", function_of(60), "function f has 60 lines"),
        ("src/a.h", "struct S {\n" + function_of(61) + "};", "function f has 61 lines"),
        ("python/a.py", "def f():\n" + "    call()\n" * 58, ""),
        ("python/a.py", "def f():\n" + "    call()\n" * 59, "function f has 60 lines"),
        ("python/a.py", 'def f():\n    """Long.\n' + "\n" * 90 + '    """\n    call()\n', ""),
        ("python/data_utils.py", "", "utils"),
        ("src/common/a.h", "", "common"),
        ("src/a.h", "struct GemmBase {};", "type GemmBase says base"),
        ("src/a.h", "class LaunchManager {};", "manager"),
        ("src/a.h", "void route_v2(int x) { y(); }", "function route_v2 says v2"),
        ("python/a.py", "class Misc:\n    pass\n", "misc"),
        ("python/a.py", "def helper_rows():\n    pass\n", "helper"),
        ("src/a.h", "int f() { return database + implied; }", ""),
        ("src/a.cpp", "STABLE_TORCH_LIBRARY_IMPL(guild, CPU, m) { m.run(); }", ""),
    ],
)
def test_sizes_and_names(path: str, text: str, expected: str) -> None:
    found = "\n".join(breaches(Path(path), text))
    assert (expected in found) if expected else not found


CPP = """
// void commented() {
#define OPEN {
namespace guild {
enum class Kind : int { one, two };
template <class T, class U = Pair<T, int>>
struct View : Parent<T> {
  View(T* data) : data{data}, other{} {
    char const* text = "}";
  }
  bool operator==(View const&) const { return true; }
  int sizes[2] = {1, 2};
};
template <int n>
__global__ __launch_bounds__(Config::threads(), 1) void run(Params const p) {
  if (p.n) { auto f = [&](int x) { return x; }; }
}
inline constexpr int kSizes[] = {1, 2};
auto compare(int a, int b = {}) -> std::pair<int, int> {
  return {a, b};
}
}
"""


def test_cpp_definitions_are_found() -> None:
    found = {(d.kind, d.name, d.first_line, d.last_line) for d in definitions(CPP)}
    assert found == {
        ("namespace", "guild", 4, 22),
        ("type", "Kind", 5, 5),
        ("type", "View", 6, 13),
        ("function", "View", 8, 10),
        ("function", "operator==", 11, 11),
        ("function", "run", 14, 17),
        ("function", "compare", 19, 21),
    }


def test_size_check_fails_an_empty_tree(tmp_path: Path) -> None:
    assert run_script("check_sizes.py", tmp_path).returncode == 1


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)
