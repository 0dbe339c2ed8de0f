"""`guild bench --rounding`: what token rounding costs, alone and in a training step of a layer.

The same logits are routed by top-k, by token rounding to the nearest tile, and by dropping what
exceeds an even share of the rows. First routing alone is timed, then forward and backward of the
whole layer; on a GPU both in CUDA graphs, so that the host's launches are not included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import guild
from guild.bench.candidates import module_of
from guild.bench.failures import note_failure, note_no_rows, noting
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape
from guild.bench.problem import Problem, make_problems
from guild.bench.record import record_head
from guild.bench.timing import Call, Replay, free_memory, interleaved, median_ratio, summary_of
from guild.train.dropping import DroppingMoE, first_slots
from guild.train.failures import is_out_of_memory

TILE = 128  # rows of a tile of the grouped products
CAPACITY = 1.0  # of the layer that drops
PARTS = ("routing", "layer")
_ROUTINGS_A_GRAPH = 8


def measure_rounding(plan: BenchPlan, console: Console) -> dict[str, Any]:
    """Check and time every shape and routing of the plan.

    Returns
    -------
    dict
        The record: provenance, and a case for every shape and routing with `rows` and `tile_rows`
        (in whole tiles) by method of routing, and its `figures`: by part ("routing", "layer") and
        method `ms`, and relative to top-k `more_us` and `over_top_k`.
    """
    cases = []
    for name, shape in plan.shapes.items():
        for routing in plan.routings:
            with console.status(f"{name}, {routing} routing"):
                case = {"name": name, "shape": shape._asdict(), "routing": routing}
                case |= {"failures": {}, "rows": {}, "tile_rows": {}}
                case["figures"] = {part: {} for part in PARTS}
                with noting(case, "inputs", console, is_out_of_memory):
                    _measure_case(case, shape, plan, console)
            cases.append(case)
            free_memory(plan.device)
    head = {**record_head(plan), "reference": None}  # counts of rows are checked, not values
    return {**head, "mode": "rounding", "tile": TILE, "capacity": CAPACITY, "cases": cases}


def _measure_case(case: dict[str, Any], shape: Shape, plan: BenchPlan, console: Console) -> None:
    problems = make_problems(shape, case["routing"], plan.dtype, plan.device, plan.seed)
    failed: dict[tuple[str, str], Exception] = {}
    times = _time(_make_calls(problems, case, console), len(problems), plan, failed)
    for (_, name), error in failed.items():
        note_failure(case, name, error, console)
    for part in PARTS:
        mine = {name: t for name, t in times[part].items() if name not in case["failures"]}
        case["figures"][part] = figures(mine)


def figures(times: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of each round, by method of routing, to medians and comparisons with top-k."""
    found = {}
    for name, taken in times.items():
        found[name] = {"ms": summary_of(taken), "rounds_ms": taken}
        if name != "top_k" and "top_k" in times:
            pairs = zip(taken, times["top_k"], strict=True)
            found[name]["more_us"] = summary_of([1e3 * (a - b) for a, b in pairs])
            found[name]["over_top_k"] = median_ratio(taken, times["top_k"])
    return found


def _make_calls(
    problems: list[Problem], case: dict[str, Any], console: Console
) -> dict[str, dict[str, Call]]:
    """Calls over all problems, by part and method; notes rows and failures in the case."""
    calls: dict[str, dict[str, Call]] = {part: {} for part in PARTS}
    chosen: Tensor | None = None  # rows of each expert with top-k
    for name, (route, make) in _ways(problems[0]).items():
        with noting(case, name, console):
            modules = [module_of(make, problem) for problem in problems]
            modules[0](problems[0].x)
            counts = modules[0].expert_counts.cpu().long()
            chosen = counts if name == "top_k" else chosen
            if name == "nearest" and chosen is not None:
                _require_nearest(counts, chosen, problems[0].shape.tokens)
            case["rows"][name] = int(counts.sum())
            if not case["rows"][name]:
                note_no_rows(case, name, console)
            case["tile_rows"][name] = int(((counts + TILE - 1) // TILE * TILE).sum())
            calls["routing"][name] = _all_of([partial(route, _logits(p)) for p in problems])
            steps = [partial(_step, m, p) for m, p in zip(modules, problems, strict=True)]
            calls["layer"][name] = _all_of(steps)
    return calls


def _ways(problem: Problem) -> dict[str, tuple[Callable[[Tensor], object], Callable]]:
    """By method: a routing of logits, and the constructor of the layer that routes like it."""
    tokens, _, _, experts, top_k = problem.shape
    most = max(1, math.ceil(CAPACITY * tokens * top_k / experts))

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        return guild.route(logits, top_k)

    def nearest(logits: Tensor) -> object:
        return guild.round_tokens(logits, choose(logits)[0], tile=TILE)

    def dropping(logits: Tensor) -> object:
        return first_slots(*choose(logits), experts, most)

    router = guild.Router(rounding="nearest", tile=TILE)
    return {
        "top_k": (choose, guild.MoE),
        "nearest": (nearest, partial(guild.MoE, router=router)),
        "dropping": (dropping, partial(DroppingMoE, capacity=CAPACITY)),
    }


def _logits(problem: Problem) -> Tensor:
    with torch.no_grad():
        return guild.router_logits(problem.x, problem.router)


def _step(module: nn.Module, problem: Problem) -> tuple[Tensor, ...]:
    return torch.autograd.grad(module(problem.x), problem.leaves(), problem.out_gradient)


def _all_of(calls: list[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _require_nearest(counts: Tensor, chosen: Tensor, tokens: int) -> None:
    """Raise ArithmeticError unless counts are the chosen ones rounded to the nearest tile."""
    expected = ((chosen + TILE // 2) // TILE * TILE).clamp(max=tokens)
    wrong = (counts != expected).nonzero().flatten()
    if wrong.numel():
        e = int(wrong[0])
        raise ArithmeticError(
            f"wrong rows of expert {e}: {counts[e]} of {chosen[e]}, expected {expected[e]}"
        )


def _time(
    calls: dict[str, dict[str, Call]],
    problems: int,
    plan: BenchPlan,
    failed: dict[tuple[str, str], Exception] | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of one routing or one step, by part and method, all in the same rounds.

    failed: as the failures of `interleaved`.
    """
    flat = {(part, name): call for part in PARTS for name, call in calls[part].items()}
    count = dict.fromkeys(flat, problems)
    if plan.device.type == "cuda":
        pool = torch.cuda.graph_pool_handle()
        for (part, name), call in flat.items():
            repeats = _ROUTINGS_A_GRAPH if part == "routing" else 1
            flat[part, name] = Replay(call, repeats, pool)
            count[part, name] *= repeats
    taken = interleaved(flat, plan.rounds, plan.seconds, plan.device, plan.calls, failed)
    return {
        part: {n: [t / count[p, n] for t in ms] for (p, n), ms in taken.items() if p == part}
        for part in PARTS
    }
