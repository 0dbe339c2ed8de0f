"""`guild bench --steps`: every step of the layer alone, against its floor, cuBLAS and QuACK.

floor = max(FLOPs / matrix rate, bytes / copy rate), both rates from the same rounds: of one large
cuBLAS product and of one large copy. On a GPU each step is timed as a CUDA graph of several calls,
so that starting a small kernel from Python is not part of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from guild.bench import quack
from guild.bench.candidates import Bound
from guild.bench.chain import BACKWARD, FORWARD, StepChain, Work, in_turn, step_work
from guild.bench.failures import noting
from guild.bench.names import PASSES, PRODUCTS
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape
from guild.bench.problem import Problem, make_problems
from guild.bench.record import record_head
from guild.bench.reference import relative_errors, require_right
from guild.bench.timing import (
    Call,
    Replay,
    free_memory,
    interleaved,
    median_ratio,
    replayed,
    summary_of,
)

_GRAPH_CALLS = 8
_MATRIX, _COPY = "matrix", "copy"
_PASS_OF = {**dict.fromkeys(FORWARD, "forward"), **dict.fromkeys(BACKWARD, "backward")}
Times = dict[tuple[str, str], list[float]]


class Yardsticks:
    """One large product and one large copy, to measure what the machine can do.

    Parameters
    ----------
    dtype, device : torch.dtype, torch.device
        Dtype of the product, and where it runs.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.size = 8192 if on_gpu else 1024
        self.copy_bytes = (1 << 30) if on_gpu else (1 << 26)
        place = {"dtype": dtype, "device": device}
        a, b = (torch.randn(self.size, self.size, **place) for _ in range(2))
        out = torch.empty_like(a)
        source = torch.randn(self.copy_bytes // 4, device=device)
        target = torch.empty_like(source)
        self.work = {
            _MATRIX: Work(2 * self.size**3, 0),
            _COPY: Work(0, 2 * self.copy_bytes),
        }
        self.calls: dict[str, Call] = {
            _MATRIX: lambda: torch.mm(a, b, out=out),
            # A kernel: in a graph copy_ becomes a node for the copy engine, at half the rate.
            _COPY: lambda: torch.neg(source, out=target),
        }


def measure_steps(plan: BenchPlan, console: Console, with_quack: bool = False) -> dict[str, Any]:
    """Check and time every step of every shape and routing in the plan.

    Parameters
    ----------
    plan : BenchPlan
        Its candidates are not used. With biases the down gradient computes their gradients too.
    with_quack : bool
        Time QuACK's products too.

    Returns
    -------
    dict
        The record: provenance, settings, and a case for every shape and routing.

    Raises
    ------
    ValueError
        If QuACK is asked for and not installed, or the device is not a GPU.
    """
    if with_quack and (plan.device.type != "cuda" or not quack.importable()):
        raise ValueError("quack: expected a GPU and the package quack (quack-kernels)")
    cases = []
    for name, shape in plan.shapes.items():
        for routing in plan.routings:
            with console.status(f"{name}, {routing} routing: making inputs") as status:
                case = {"name": name, "shape": shape._asdict(), "routing": routing}
                case |= {"bias": plan.form.bias, "failures": {}}
                with noting(case, "guild", console):
                    _measure_case(case, shape, plan, with_quack, status.update)
            cases.append(case)
            free_memory(plan.device)
    return {**record_head(plan), "mode": "steps", "cases": cases}


def _measure_case(
    case: dict[str, Any],
    shape: Shape,
    plan: BenchPlan,
    with_quack: bool,
    say: Callable[[str], None],
) -> None:
    title = f"{case['name']}, {case['routing']} routing"
    bias, routing = case["bias"], case["routing"]
    given = shape, routing, plan.dtype, plan.device, plan.seed
    problems = make_problems(*given, form=plan.form)
    say(f"{title}: checking")
    chains = [StepChain(problem) for problem in problems]
    case["errors"], _ = relative_errors(problems[0], chains[0].results())
    require_right(case["errors"], plan.dtype)
    yardsticks = Yardsticks(plan.dtype, plan.device)
    calls: dict[tuple[str, str], Call] = {
        **{("yardstick", name): call for name, call in yardsticks.calls.items()},
        **{("guild", name): call for name, call in in_turn(chains).items()},
        **{("bmm", name): call for name, call in _bound(problems, chains[0]).items()},
    }
    if with_quack:
        say(f"{title}: choosing QuACK's tiles")
        found, case["failures"] = quack.best_calls(chains[0])
        calls |= {("quack", name): call for name, call in found.items()}
    say(f"{title}: timing")
    times = _time(calls, plan, len(problems))
    work = {**step_work(shape, plan.dtype, bias), **yardsticks.work}
    case["machine"] = {
        "matrix_size": yardsticks.size,
        "matrix_tflops": work[_MATRIX].flops / _median(times, _MATRIX) / 1e9,
        "copy_bytes": yardsticks.copy_bytes,
        "copy_tbps": work[_COPY].bytes / _median(times, _COPY) / 1e9,
    }
    recorded = (
        quack.entry(shape) if plan.dtype == torch.bfloat16 and routing == "balanced" else None
    )
    case |= step_figures(times, work, recorded if plan.device.type == "cuda" else None)


def _bound(problems: list[Problem], chain: StepChain) -> dict[str, Call]:
    """cuBLAS's products; the largest two results overwrite the chain's gradients."""
    _, h, i, e, _ = chain.shape
    out = {"dW1": chain.dw_up.view(e, h, 2 * i), "dW2": chain.dw_down.view(e, i, h)}
    return Bound(problems).calls(out)


def _median(times: Times, yardstick: str) -> float:
    return summary_of(times["yardstick", yardstick])["median"]


def _time(calls: dict[tuple[str, str], Call], plan: BenchPlan, sets: int) -> Times:
    """Milliseconds per call; a graph cycles through all the input sets."""
    if plan.device.type != "cuda":
        return interleaved(calls, plan.rounds, plan.seconds, plan.device, plan.calls)
    pool = torch.cuda.graph_pool_handle()
    count = sets * -(-_GRAPH_CALLS // sets)
    replays: dict[tuple[str, str], Call] = {}
    counts = dict.fromkeys(calls, count)
    for name, call in calls.items():
        if name[0] == "quack":  # Guild cannot promise that its calls can be captured
            replays[name], counts[name] = replayed(call, count)
        else:
            replays[name] = Replay(call, count, pool)
    taken = interleaved(replays, plan.rounds, plan.seconds, plan.device, plan.calls)
    return {name: [ms / counts[name] for ms in each] for name, each in taken.items()}


def step_figures(
    times: Times, work: dict[str, Work], recorded: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Times of the steps to medians, rates and ratios.

    Parameters
    ----------
    times : dict
        Milliseconds per call, one per round, by ("yardstick" | "guild" | "bmm" | "quack", step).
    work : dict
        Of the steps and of the two yardsticks.
    recorded : dict, optional
        QuACK's entry for this shape.

    Returns
    -------
    dict
        `steps`: by name `pass`, `ms`, `flops`, `bytes`, `tflops`, `tbps`, `floor_ms`,
        `share_of_floor`, and if available `bmm_ms`, `over_bmm` and `quack` (`recorded_ms`,
        `scaled_ms` or `measured_ms`, and `over`, Guild's time over it); `passes`: the sums.
    """
    machine = times["yardstick", _MATRIX], times["yardstick", _COPY]
    rates = [
        (work[_MATRIX].flops / matrix, work[_COPY].bytes / copy)
        for matrix, copy in zip(*machine, strict=True)
    ]
    bound = {
        which: [
            sum(each)
            for each in zip(
                *(times["bmm", p] for p in PRODUCTS if _PASS_OF[p] == which), strict=True
            )
        ]
        for which in PASSES
    }
    steps: dict[str, Any] = {}
    for (who, name), taken in times.items():
        if who != "guild":
            continue
        floors = [max(work[name].flops / f, work[name].bytes / b) for f, b in rates]
        step: dict[str, Any] = {"pass": _PASS_OF[name], "ms": summary_of(taken)}
        step["flops"], step["bytes"] = work[name]
        step["tflops"] = work[name].flops / step["ms"]["median"] / 1e9
        step["tbps"] = work[name].bytes / step["ms"]["median"] / 1e9
        step["floor_ms"] = summary_of(floors)["median"]
        step["share_of_floor"] = median_ratio(floors, taken)
        if ("bmm", name) in times:
            step["bmm_ms"] = summary_of(times["bmm", name])
            step["over_bmm"] = median_ratio(taken, times["bmm", name])
        if ("quack", name) in times:
            measured = times["quack", name]
            step["quack"] = {"measured_ms": summary_of(measured)}
            step["quack"]["over"] = median_ratio(taken, measured)
        elif recorded is not None and name in recorded["ms"]:
            step["quack"] = _scaled(name, taken, bound[_PASS_OF[name]], recorded)
        step["rounds_ms"] = taken
        steps[name] = step
    return {"steps": steps, "passes": _pass_sums(steps, times, bound)}


def _scaled(
    name: str, taken: list[float], bound: list[float], recorded: dict[str, Any]
) -> dict[str, Any]:
    """QuACK's recorded time, scaled to this run by the ratio of the two runs' cuBLAS bounds."""
    entry, then = recorded["ms"][name], recorded["bound_ms"][_PASS_OF[name]]
    scaled = [entry * now / then for now in bound]
    return {
        "recorded_ms": entry,
        "scaled_ms": summary_of(scaled)["median"],
        "over": median_ratio(taken, scaled),
    }


def _pass_sums(
    steps: dict[str, Any], times: Times, bound: dict[str, list[float]]
) -> dict[str, Any]:
    sums = {}
    for which in PASSES:
        names = [name for name in steps if _PASS_OF[name] == which]
        total = [sum(each) for each in zip(*(times["guild", n] for n in names), strict=True)]
        sums[which] = {
            "steps_ms": summary_of(total),
            "bound_ms": summary_of(bound[which]),
            "over_bound": median_ratio(total, bound[which]),
        }
    return sums
