"""Whole layers checked and timed side by side: Guild's, the cuBLAS bound, PyTorch's.

For every shape and routing each candidate is checked against a reference, then all are timed in
interleaved rounds; one that fails its check is not timed. Ratios are medians over the rounds.
Several routings of a shape share their weights and their rounds, so that they can be compared too.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from guild.bench.candidates import Bound, Layer, make_candidate
from guild.bench.failures import note_failure, noting
from guild.bench.names import BASELINES, BOUNDS, LIMITED, PASSES
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape
from guild.bench.problem import Problem, make_problems
from guild.bench.record import record_head
from guild.bench.reference import relative_errors, require_right
from guild.bench.timing import free_memory, interleaved, median_ratio, summary_of
from guild.train.failures import is_out_of_memory


def measure(plan: BenchPlan, console: Console) -> dict[str, Any]:
    """Check and time everything in the plan.

    Returns
    -------
    dict
        The record that is written as JSON: provenance, settings, and a case for every shape and
        routing with errors, times in milliseconds, TFLOPS and ratios.
    """
    cases = []
    for name, shape in plan.shapes.items():
        # Compiled layers of the previous shape would count against torch's recompilation limit.
        torch._dynamo.reset()
        cases += _measure_shape(name, shape, plan, console)
    return {**record_head(plan), "mode": "layers", "num_sms": plan.num_sms, "cases": cases}


def _measure_shape(
    name: str, shape: Shape, plan: BenchPlan, console: Console
) -> list[dict[str, Any]]:
    """One case per routing, all timed in the same rounds."""
    cases: dict[str, dict[str, Any]] = {}
    made: dict[str, dict[str, Layer | Bound]] = {}
    problems: list[Problem] | None = None
    with console.status(f"{name}: making inputs") as status:
        for routing in plan.routings:
            case = {"name": name, "shape": shape._asdict(), "routing": routing, "input_sets": 0}
            cases[routing] = case | {"failures": {}, "errors": {}}
            # Bounds do not depend on the routing: one serves all.
            bounds = {n: c for found in made.values() for n, c in found.items() if n in BOUNDS}
            made[routing] = bounds
            with noting(cases[routing], "inputs", console, is_out_of_memory):
                given = shape, routing, plan.dtype, plan.device, plan.seed
                problems = make_problems(*given, weights_of=problems, form=plan.form)
                cases[routing]["input_sets"] = len(problems)
            if "inputs" in cases[routing]["failures"]:
                continue
            for candidate in plan.candidates:
                status.update(f"{name}, {routing} routing: checking {candidate}")
                if candidate not in bounds:
                    _make_checked(candidate, problems, plan, cases[routing], made[routing], console)
        status.update(f"{name}: timing")
        times = _time(made, plan, cases, console)
    balanced = times.get("balanced") if len(times) > 1 else None
    for routing, case in cases.items():
        case["figures"] = figures(times[routing], shape, balanced)
    made.clear()
    del problems
    free_memory(plan.device)
    return list(cases.values())


def _make_checked(
    candidate: str,
    problems: list[Problem],
    plan: BenchPlan,
    case: dict[str, Any],
    made: dict[str, Layer | Bound],
    console: Console,
) -> None:
    """Add a candidate to `made` if it runs and is correct; otherwise note why in the case."""
    with noting(case, candidate, console):
        layer = make_candidate(candidate, problems, plan.num_sms)
        if isinstance(layer, Layer):
            _check(layer, problems[0], case)
        made[candidate] = layer
    free_memory(plan.device)


def _check(layer: Layer, problem: Problem, case: dict[str, Any]) -> None:
    errors, counts = relative_errors(problem, layer.results())
    case["errors"][layer.name] = errors
    case["busiest_expert_over_mean"] = (counts.max() / counts.double().mean()).item()
    require_right(errors, problem.x.dtype)


def _time(
    made: dict[str, dict[str, Layer | Bound]],
    plan: BenchPlan,
    cases: dict[str, dict[str, Any]],
    console: Console,
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Milliseconds by routing, candidate and pass; a call shared by routings runs only once.

    Candidates that are out of memory are noted in the cases and left out.
    """
    calls = {
        (direction, id(candidate)): getattr(candidate, direction)
        for direction in PASSES
        for candidates in made.values()
        for candidate in candidates.values()
    }
    failed: dict[tuple[str, int], Exception] = {}
    taken = interleaved(calls, plan.rounds, plan.seconds, plan.device, plan.calls, failed)
    for routing, candidates in made.items():
        for name, candidate in list(candidates.items()):
            errors = [failed[key] for d in PASSES if (key := (d, id(candidate))) in failed]
            if errors:
                note_failure(cases[routing], name, errors[0], console)
                del candidates[name]
    return {
        routing: {
            name: {direction: taken[direction, id(candidate)] for direction in PASSES}
            for name, candidate in candidates.items()
        }
        for routing, candidates in made.items()
    }


def figures(
    times: dict[str, dict[str, list[float]]],
    shape: Shape,
    balanced: dict[str, dict[str, list[float]]] | None = None,
) -> dict[str, Any]:
    """Times to medians, spreads, TFLOPS and ratios.

    Parameters
    ----------
    times : dict
        Milliseconds per call, one per round, by candidate and pass.
    shape : Shape
        Gives the useful operations and the rows.
    balanced : dict, optional
        The same with balanced routing.

    Returns
    -------
    dict
        By candidate and pass: `ms`, `tflops`, `ms_per_1000_rows` and, if the bound was timed,
        `over_bound`; with `balanced` also `over_balanced`, the ratio of the times per row. Guild
        has `speedup_over` each baseline as well, Guild on fewer multiprocessors its ratio
        `over_guild`.
    """
    found: dict[str, Any] = {}
    for name, passes in times.items():
        found[name] = {}
        for (direction, taken), flops in zip(passes.items(), shape.flops(), strict=True):
            row: dict[str, Any] = {"ms": summary_of(taken)}
            row["tflops"] = flops / row["ms"]["median"] / 1e9
            row["ms_per_1000_rows"] = 1e3 * row["ms"]["median"] / (shape.tokens * shape.top_k)
            if "bound" in times and name != "bound":
                row["over_bound"] = median_ratio(taken, times["bound"][direction])
            if balanced is not None and name in balanced and name not in BOUNDS:
                row["over_balanced"] = median_ratio(taken, balanced[name][direction])
            if name == LIMITED and "guild" in times:
                row["over_guild"] = median_ratio(taken, times["guild"][direction])
            if name == "guild":
                row["speedup_over"] = {
                    other: median_ratio(times[other][direction], taken)
                    for other in times
                    if other in BASELINES
                }
            row["rounds_ms"] = taken
            found[name][direction] = row
    return found
