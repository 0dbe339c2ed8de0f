"""`guild bench` where memory ends: what does not fit is noted, the rest is timed."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

import guild.bench.decode.measure as bench_decode
import guild.bench.float8.measure as bench_float8
from guild.bench import layers, memory, rounding, steps, timing
from guild.bench.decode.rates import Rates
from guild.bench.decode.table import decode_table
from guild.bench.float8.table import float8_table
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape
from guild.bench.tables.layers import bench_table
from guild.bench.tables.memory import memory_table
from guild.bench.tables.rounding import rounding_table
from guild.bench.tables.steps import steps_table
from guild.bench.timing import interleaved

CPU = torch.device("cpu")
SHAPE = Shape(tokens=64, hidden=32, intermediate=16, experts=4, top_k=2)
MESSAGE = "CUDA out of memory. Tried to allocate 14.00 GiB."

# By mode: its module, what measures, what prints, the candidate whose calls fail, and its part of
# a call's name.
MODES: dict[str, tuple[Any, Callable, Callable, str]] = {
    "layers": (layers, layers.measure, bench_table, "plain"),
    "rounding": (rounding, rounding.measure_rounding, rounding_table, "dropping"),
    "fp8": (bench_float8, bench_float8.measure_float8, float8_table, "fp8"),
    "decode": (bench_decode, bench_decode.measure_decode, decode_table, "torch"),
}


def plan_of(mode: str, rounds: int = 2) -> BenchPlan:
    dtype = torch.bfloat16 if mode == "fp8" else torch.float32
    candidates = ("guild", "torch") if mode == "decode" else ("guild", "bound", "plain")
    shapes = {"first": SHAPE, "second": SHAPE}
    more = {"tokens": (1,), "parts": ("experts",)} if mode == "decode" else {}
    return BenchPlan(shapes, ("random",), candidates, CPU, dtype, rounds=rounds, calls=1, **more)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=300)


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(f"{MESSAGE}\nGPU 0 has a total capacity of 139.80 GiB")


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_a_call_out_of_memory(failing_call: int) -> None:
    """Whether warming up or in a round; the others' figures are complete."""
    ran: list[str] = []

    def call() -> None:
        ran.append("a")
        if len(ran) == failing_call:
            out_of_memory()

    calls = {"a": call, "b": lambda: None}
    failures: dict[str, torch.OutOfMemoryError] = {}
    times = interleaved(calls, 2, 0.1, CPU, calls_a_round=1, failures=failures)
    assert times.keys() == {"b"} and len(times["b"]) == 2
    assert failures.keys() == {"a"} and str(failures["a"]).startswith(MESSAGE)
    assert len(ran) == failing_call  # not called again
    ran.clear()
    with pytest.raises(torch.OutOfMemoryError):
        interleaved(calls, 2, 0.1, CPU, calls_a_round=1)


def test_frames_of_an_error_hold_no_memory() -> None:
    held: list[weakref.ref] = []

    def call() -> None:
        big = torch.zeros(10)
        held.append(weakref.ref(big))
        out_of_memory()

    failures: dict[str, torch.OutOfMemoryError] = {}
    interleaved({"a": call}, 1, 0.1, CPU, calls_a_round=1, failures=failures)
    assert failures and held[0]() is None


def is_of(name: Any, candidate: str, call: Callable) -> bool:
    """Whether a call that is timed is the candidate's, whatever a mode names its calls by."""
    owner = getattr(call, "__self__", None)
    return candidate in name or getattr(owner, "name", None) == candidate


@pytest.mark.parametrize("mode", MODES)
def test_a_candidate_out_of_memory(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fits alone, but not when all are timed, fails alone, on every shape."""
    module, measure, table, candidate = MODES[mode]
    monkeypatch.setattr(bench_float8, "why_not", lambda *_: "not wanted here")
    machine = {"read_tbps": 1e-3, "matrix_tflops": 1.0}
    monkeypatch.setattr(bench_decode, "measured_rates", lambda *_: (Rates(1e3, 1e6), machine))

    def full(calls: dict, *rest: Any) -> dict:
        mine = {n: out_of_memory if is_of(n, candidate, c) else c for n, c in calls.items()}
        return timing.interleaved(mine, *rest)

    monkeypatch.setattr(module, "interleaved", full)
    console = quiet()
    record = measure(plan_of(mode), console)
    assert [case["name"] for case in record["cases"]] == ["first", "second"]
    for case in record["cases"]:
        assert case["failures"] == {candidate: MESSAGE}
        found = case["figures"]["layer"] if mode == "rounding" else case["figures"]
        assert candidate not in found
        others = {"rounding": "top_k", "fp8": "bf16"}
        assert others.get(mode, "guild") in found
        assert f"{case['name']}, random routing" in console.file.getvalue()
    console.print(table(record))


ALL = {
    **{mode: (module, measure, table) for mode, (module, measure, table, _) in MODES.items()},
    "memory": (memory, memory.measure_memory, memory_table),
    "steps": (steps, steps.measure_steps, steps_table),
}


def out_of_host_memory(*_: object, **__: object) -> None:
    """As torch says it, which has no error type for the CPU's memory."""
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("out_of_memory", [out_of_memory, out_of_host_memory])
@pytest.mark.parametrize("mode", [mode for mode in ALL if mode != "decode"])
def test_inputs_out_of_memory(
    mode: str, out_of_memory: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape that does not fit is noted; the next one is timed."""
    module, measure, table = ALL[mode]
    real = module.make_problems
    asked: list[object] = []

    def full(*args: Any, **options: Any) -> Any:
        asked.append(args)
        return out_of_memory() if len(asked) == 1 else real(*args, **options)

    monkeypatch.setattr(module, "make_problems", full)
    monkeypatch.setattr(bench_float8, "why_not", lambda *_: "not wanted here")
    record = measure(plan_of(mode), quiet())
    first, second = record["cases"]
    (said,) = first["failures"].values()
    assert said == MESSAGE or "DefaultCPUAllocator" in said
    assert second["failures"] == {}
    quiet().print(table(record))


@pytest.mark.parametrize("out_of_memory", [out_of_memory, out_of_host_memory])
@pytest.mark.parametrize("name", ["make_weights", "make_layers", "expected_output"])
def test_decode_inputs_out_of_memory(
    name: str, out_of_memory: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = getattr(bench_decode, name), []

    def full(*args: Any, **options: Any) -> Any:
        asked.append(args)
        return out_of_memory() if len(asked) == 1 else real(*args, **options)

    monkeypatch.setattr(bench_decode, name, full)
    record = bench_decode.measure_decode(plan_of("decode"), quiet())
    (case,) = record["cases"]
    (said,) = record["skipped"].values()
    assert case["name"] == "second" and (said == MESSAGE or "DefaultCPUAllocator" in said)
    quiet().print(decode_table(record))


def test_layers_of_the_shape_before_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a shape's case, such as its steps, is in memory when the next one is made."""
    monkeypatch.setattr(bench_float8, "why_not", lambda *_: "not wanted here")
    real, made = bench_float8.make_problems, []

    def noted(*args: Any) -> Any:
        gc.collect()
        assert all(problem() is None for problem in made)
        problems = real(*args)
        made.extend(weakref.ref(p.w_up) for p in problems)
        return problems

    monkeypatch.setattr(bench_float8, "make_problems", noted)
    bench_float8.measure_float8(plan_of("fp8", rounds=1), quiet())
    assert len(made) == 2
