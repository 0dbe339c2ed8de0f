"""`guild bench`: Guild's layer, the cuBLAS bound and PyTorch, checked and timed side by side.

For every shape and routing each candidate is checked against a reference, then all are timed in
interleaved rounds; what fails its check is not timed. Ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from .bench_layers import CPU_CANDIDATES, GPU_CANDIDATES, Bound, Layer, make_candidate
from .bench_problem import ROUTINGS, Problem, make_problems
from .bench_reference import TOLERANCE, relative_errors
from .bench_table import bench_table
from .presets import CPU_SHAPES, PRESETS, Shape, parse_shape
from .provenance import pick_device, provenance
from .timing import interleaved, median_ratio, summary_of

SCHEMA = 1
_LOG_WIDTH = 150  # of a table that goes to a file, where rich would assume 80 columns
PASSES = ("forward", "backward")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class BenchPlan:
    """What is timed and how.

    Attributes
    ----------
    shapes : dict
        Shapes by name.
    routings, candidates : tuple of str
        Names from `bench_problem.ROUTINGS` and of `bench_layers`.
    device, dtype : torch.device, torch.dtype
        Where and in what the layers compute.
    rounds : int
        Interleaved rounds.
    seconds : float
        Least time of one candidate's pass in a round.
    steps : int or None
        Calls in a round, in place of `seconds`.
    seed : int
        Of the inputs.
    """

    shapes: dict[str, Shape]
    routings: tuple[str, ...]
    candidates: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    rounds: int = 5
    seconds: float = 0.5
    steps: int | None = None
    seed: int = 0


def run_bench(args: argparse.Namespace) -> int:
    """Run what the command line asks for; 1 when a candidate failed or was wrong."""
    plan = plan_bench(args)
    # With --json, standard output is the JSON alone.
    console = Console(stderr=args.json)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    if args.out is not None:
        _make_folder(args.out)
    record = measure(plan, console)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        console.print(bench_table(record))
    if args.out is not None:
        from .plots import plot_bench

        (args.out / "bench.json").write_text(json.dumps(record, indent=2) + "\n")
        plot_bench(record, args.out / "bench.png")
        console.print(f"results in {args.out}: bench.json, bench.png")
    return 1 if any(case["failures"] for case in record["cases"]) else 0


def plan_bench(args: argparse.Namespace) -> BenchPlan:
    """Check the arguments and fill in what depends on the device.

    Raises
    ------
    ValueError
        Naming the argument, its value and what was expected.
    """
    device = pick_device(args.device)
    on_gpu = device.type == "cuda"
    known = GPU_CANDIDATES if on_gpu else CPU_CANDIDATES
    candidates = tuple(args.candidates.split(",")) if args.candidates else known
    for name in candidates:
        if name not in known:
            raise ValueError(
                f"candidates: expected some of {', '.join(known)} on {device}, got {name!r}"
            )
    for name in ("rounds", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    seconds = (0.5 if on_gpu else 0.2) if args.seconds is None else args.seconds
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"seconds: expected a positive number, got {seconds}")
    dtype = "bfloat16" if on_gpu else "float32"
    dtype = dtype if args.dtype == "auto" else args.dtype
    return BenchPlan(
        shapes=_shapes(args, on_gpu),
        routings=ROUTINGS if args.routing == "all" else (args.routing,),
        candidates=candidates,
        device=device,
        dtype=_DTYPES[dtype],
        rounds=args.rounds,
        seconds=seconds,
        steps=args.steps,
        seed=args.seed,
    )


def _shapes(args: argparse.Namespace, on_gpu: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name in args.preset:
        named = PRESETS if name == "all" else {name: {**PRESETS, **CPU_SHAPES}[name]}
        shapes.update(named)
    for text in args.thiek:
        shapes[text] = parse_shape(text)
    return shapes or (PRESETS if on_gpu else CPU_SHAPES)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"out: expected a folder, got the file {str(out)!r}") from None


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
        # Compiled layers of the last shape would count against torch's limit of recompilations.
        torch._dynamo.reset()
        for routing in plan.routings:
            cases.append(_measure_case(name, shape, routing, plan, console))
    return {
        "schema": SCHEMA,
        **provenance(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "rounds": plan.rounds,
        "seconds_per_round": None if plan.steps else plan.seconds,
        "calls_per_round": plan.steps,
        "reference": "float64" if plan.device.type == "cpu" else "float32",
        "cases": cases,
    }


def _measure_case(
    name: str, shape: Shape, routing: str, plan: BenchPlan, console: Console
) -> dict[str, Any]:
    with console.status(f"{name}, {routing} routing: making inputs") as status:
        problems = make_problems(shape, routing, plan.dtype, plan.device, plan.seed)
        case = {
            "name": name,
            "shape": shape._asdict(),
            "routing": routing,
            "input_sets": len(problems),
            "failures": {},
            "errors": {},
        }
        candidates: dict[str, Layer | Bound] = {}
        for candidate in plan.candidates:
            status.update(f"{name}, {routing} routing: checking {candidate}")
            try:
                made = make_candidate(candidate, problems)
                if isinstance(made, Layer):
                    _check(made, problems[0], case)
                candidates[candidate] = made
            except (RuntimeError, ArithmeticError, TypeError, ValueError) as error:
                # One candidate out of memory or unsupported must not cost the others' figures.
                case["failures"][candidate] = str(error).strip().splitlines()[0]
                console.print(f"[red]{name}, {candidate}:[/] {escape(case['failures'][candidate])}")
            _free_memory(plan.device)
        status.update(f"{name}, {routing} routing: timing")
        times = _time(candidates, plan)
    case["figures"] = figures(times, shape)
    candidates.clear()
    del problems
    _free_memory(plan.device)
    return case


def _check(layer: Layer, problem: Problem, case: dict[str, Any]) -> None:
    errors, counts = relative_errors(problem, layer.results())
    case["errors"][layer.name] = errors
    case["busiest_expert_over_mean"] = (counts.max() / counts.double().mean()).item()
    tolerance = TOLERANCE[problem.x.dtype]
    for name, error in errors.items():
        if not error <= tolerance:
            raise ArithmeticError(
                f"wrong {name}: relative error {error:.2e}, expected at most {tolerance:.0e}"
            )


def _time(candidates: dict[str, Layer | Bound], plan: BenchPlan) -> dict[str, dict[str, Any]]:
    calls = {
        (name, direction): getattr(candidate, direction)
        for direction in PASSES
        for name, candidate in candidates.items()
    }
    taken = interleaved(calls, plan.rounds, plan.seconds, plan.device, plan.steps)
    return {
        name: {direction: taken[name, direction] for direction in PASSES} for name in candidates
    }


def figures(times: dict[str, dict[str, list[float]]], shape: Shape) -> dict[str, Any]:
    """Times to medians, spreads, TFLOPS and ratios.

    Parameters
    ----------
    times : dict
        Milliseconds a call, one a round, by candidate and pass.
    shape : Shape
        Gives the useful operations.

    Returns
    -------
    dict
        By candidate and pass: `ms`, `tflops`, and where the bound was timed `over_bound`; Guild
        has `speedup_over` each baseline as well.
    """
    found: dict[str, Any] = {}
    for name, passes in times.items():
        found[name] = {}
        for (direction, taken), flops in zip(passes.items(), shape.flops(), strict=True):
            row: dict[str, Any] = {"ms": summary_of(taken)}
            row["tflops"] = flops / row["ms"]["median"] / 1e9
            if "bound" in times and name != "bound":
                row["over_bound"] = median_ratio(taken, times["bound"][direction])
            if name == "guild":
                row["speedup_over"] = {
                    other: median_ratio(times[other][direction], taken)
                    for other in times
                    if other not in ("guild", "bound")
                }
            row["rounds_ms"] = taken
            found[name][direction] = row
    return found


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
