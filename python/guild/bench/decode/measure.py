"""`guild bench --decode`: the layer without gradients on few tokens, against the memory's speed.

floor = max(bytes / read rate, FLOPs / matrix rate), both rates measured in the same run. Bytes are
the weights of the experts that the tokens chose, the tokens and the output, and the router's
weights where it is part of the layer. On a GPU a graph holds many layers over several sets of
weights; the same calls are timed one by one too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from rich.console import Console

from guild.bench.decode.candidates import Candidate, expected_output, own_candidate, peer_of
from guild.bench.decode.changes import add_changes
from guild.bench.decode.layers import (
    DecodeLayer,
    expected_hits,
    expert_bytes,
    experts_hit,
    layer_count,
    make_layers,
    make_weights,
)
from guild.bench.decode.rates import Rates, measured_rates
from guild.bench.failures import is_any, note_failure, noting, skipping
from guild.bench.plan import BenchPlan, decode_tokens
from guild.bench.presets import Shape
from guild.bench.problem import Weights
from guild.bench.record import record_head
from guild.bench.reference import RelativeError, require_right
from guild.bench.timing import (
    Call,
    Replay,
    free_memory,
    interleaved,
    median_ratio,
    replayed,
    summary_of,
)

GRAPH, EAGER = "graph", "eager"
_HOST_CALLS, _HOST_REPEATS = 40, 5
Key = tuple[str, str, str]  # part, candidate, GRAPH or EAGER
Peers = dict[str, Callable[[list[DecodeLayer], str], dict[str, Candidate]]]


def measure_decode(plan: BenchPlan, console: Console) -> dict[str, Any]:
    """Check and time every shape, routing and number of tokens in the plan.

    Returns
    -------
    dict
        The record: provenance, settings, and a case for every shape, routing, number of tokens and
        part ("experts", "layer"), with its work, floor, errors and figures; `skipped` says which
        found too little memory.
    """
    peers = {file.stem: peer_of(file) for file in plan.peers}
    cases: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name, shape in plan.shapes.items():
        with console.status(f"{name}: measuring the machine") as status:
            rates, machine = measured_rates(plan.dtype, plan.device)
            free_memory(plan.device)
            status.update(f"{name}: making weights")
            generator = torch.Generator(plan.device).manual_seed(plan.seed)
            weights: list[Weights] = []
            with skipping(skipped, name, console):
                weights = make_weights(shape, plan.form, plan.dtype, plan.device, generator)
            for routing, tokens in product(plan.routings, decode_tokens(plan, name)):
                if not weights:
                    break
                status.update(f"{name}, {routing} routing: {tokens} tokens")
                case = {"name": name, "shape": shape._replace(tokens=tokens)._asdict()}
                case |= {"routing": routing, "machine": machine}
                with skipping(skipped, f"{name}, {routing} routing, {tokens} tokens", console):
                    cases += _measure_tokens(case, weights, rates, peers, generator, plan, console)
            del weights
            free_memory(plan.device)
    add_changes(cases)
    return {**record_head(plan), "mode": "decode", "cases": cases, "skipped": skipped}


@torch.inference_mode()
def _measure_tokens(
    head: dict[str, Any],
    weights: list[Weights],
    rates: Rates,
    peers: Peers,
    generator: torch.Generator,
    plan: BenchPlan,
    console: Console,
) -> list[dict[str, Any]]:
    """The cases of one number of tokens, one per part, all timed in the same rounds."""
    shape = Shape(**head["shape"])
    guess = expected_hits(shape) * expert_bytes(shape, plan.dtype) / rates.read
    layers = make_layers(
        weights, shape, head["routing"], layer_count(len(weights), guess, plan.device), generator
    )
    hit, want = experts_hit(layers), expected_output(layers[0])
    pool = torch.cuda.graph_pool_handle() if plan.device.type == "cuda" else None
    cases, calls, counts = {}, {}, {}
    for part in plan.parts:
        case = {**head, "part": part, "layers": len(layers), "weight_sets": len(weights)}
        case |= {"failures": {}, "errors": {}, **work_of(shape, part, plan.dtype, hit, rates)}
        cases[part] = case
        for name, make in _makers(part, layers, peers, plan, case, console):
            with noting(case, name, console, is_any):
                call = make()
                _check(call(layers[0]), want, plan.dtype, case["errors"], name)
                turn = _turn(call, layers)
                if pool is not None:
                    taken = _captured(turn, len(layers), pool, name)
                    calls[part, name, GRAPH], counts[part, name, GRAPH] = taken
                calls[part, name, EAGER], counts[part, name, EAGER] = turn, 1
    failed: dict[Key, Exception] = {}
    times = _time(calls, counts, plan, failed)
    for part, case in cases.items():
        for (_, name, _), error in ((k, e) for k, e in failed.items() if k[0] == part):
            note_failure(case, name, error, console)
        mine = {
            key[1:]: taken
            for key, taken in times.items()
            if key[0] == part and key[1] not in case["failures"]
        }
        case["figures"] = decode_figures(mine, case["bytes"], case["floor_us"])
        if pool is not None:
            for name, found in [*case["figures"].items()]:
                with noting(case, name, console, is_any):
                    found["host_us"] = host_microseconds(calls[part, name, EAGER])
                if name in case["failures"]:
                    del case["figures"][name]
    _add_router(cases)
    return list(cases.values())


def work_of(
    shape: Shape, part: str, dtype: torch.dtype, hit: float, rates: Rates
) -> dict[str, Any]:
    """What a layer has to do: experts hit, bytes, FLOPs, the floor in us, and what sets it."""
    tokens, hidden, _, experts, _ = shape
    router = part == "layer"
    moved = hit * expert_bytes(shape, dtype) + 2 * tokens * hidden * dtype.itemsize
    flops = shape.flops()[0]
    if router:
        moved += experts * hidden * dtype.itemsize
        flops += 2 * tokens * hidden * experts
    memory, compute = moved / rates.read, flops / rates.matrix
    return {
        "experts_hit": hit,
        "bytes": moved,
        "flops": flops,
        "floor_us": max(memory, compute),
        "bound_by": "memory" if memory >= compute else "compute",
    }


def _makers(
    part: str,
    layers: list[DecodeLayer],
    peers: Peers,
    plan: BenchPlan,
    case: dict[str, Any],
    console: Console,
) -> Iterator[tuple[str, Callable[[], Candidate]]]:
    """Name and constructor of every candidate; a file that gives none is noted in the case."""
    for name in plan.candidates:
        yield name, partial(own_candidate, name, layers, part)
    taken = set(plan.candidates)
    for file, peer in peers.items():
        with noting(case, file, console, is_any):
            found = peer(layers, part)
            if strange := [name for name in found if not isinstance(name, str)]:
                raise TypeError(f"peer: expected names, got {strange[0]!r}")
            if clash := taken & found.keys():
                raise ValueError(f"peer: expected names of its own, got {sorted(clash)}")
            taken |= found.keys()
            for name, call in found.items():
                yield name, lambda call=call: call


def _check(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, errors: dict[str, float], name: str
) -> None:
    if got.shape != want.shape:
        raise ArithmeticError(f"wrong shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    error = RelativeError()
    error.add(got, want)
    errors[name] = error.value()
    require_right({"out": errors[name]}, dtype)


def _turn(call: Candidate, layers: list[DecodeLayer]) -> Call:
    turn = cycle(layers)
    return lambda: call(next(turn))


def _captured(turn: Call, count: int, pool: tuple[int, int], name: str) -> tuple[Call, int]:
    """A graph of all layers and its number of calls; a file's candidate may not be capturable."""
    if name in ("guild", "torch"):
        return Replay(turn, count, pool), count
    return replayed(turn, count)


def _time(
    calls: dict[Key, Call],
    counts: dict[Key, int],
    plan: BenchPlan,
    failed: dict[Key, Exception] | None = None,
) -> dict[Key, list[float]]:
    """Milliseconds per layer. Single calls get a quarter of the time that graphs get.

    failed: as the failures of `interleaved`.
    """
    times: dict[Key, list[float]] = {}
    for how, seconds in ((GRAPH, plan.seconds), (EAGER, plan.seconds / 4)):
        mine = {key: call for key, call in calls.items() if key[2] == how}
        taken = interleaved(mine, plan.rounds, seconds, plan.device, plan.calls, failed, is_any)
        times |= {key: [ms / counts[key] for ms in each] for key, each in taken.items()}
    return times


def host_microseconds(call: Call) -> float:
    """Time that the host takes to queue a call, without waiting for the GPU."""
    taken = []
    for _ in range(_HOST_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        taken.append(1e6 * (time.perf_counter() - start) / _HOST_CALLS)
    torch.cuda.synchronize()
    return summary_of(taken)["median"]


def decode_figures(
    times: dict[tuple[str, str], list[float]], moved: float, floor_us: float
) -> dict[str, Any]:
    """Times to medians, spreads, rates and ratios.

    Parameters
    ----------
    times : dict
        Milliseconds per layer, one per round, by (candidate, GRAPH or EAGER).
    moved, floor_us : float
        The layer's bytes, and its floor in microseconds.

    Returns
    -------
    dict
        By candidate `us`, `tbps` and `share_of_floor`, in a graph if there is one (see `how`),
        `eager_us`, and for candidates other than Guild `guild_over`, Guild's time over theirs.
    """
    found: dict[str, Any] = {}
    names = dict.fromkeys(name for name, _ in times)
    best = {n: times.get((n, GRAPH), times.get((n, EAGER))) for n in names}
    for name, taken in best.items():
        rounds = [1e3 * ms for ms in taken]
        row: dict[str, Any] = {"how": GRAPH if (name, GRAPH) in times else EAGER}
        row["us"] = summary_of(rounds)
        row["tbps"] = moved / row["us"]["median"] / 1e6
        row["share_of_floor"] = summary_of([floor_us / us for us in rounds])
        row["eager_us"] = summary_of([1e3 * ms for ms in times[name, EAGER]])
        if name != "guild" and "guild" in best:
            row["guild_over"] = median_ratio(best["guild"], taken)
        row["rounds_us"] = rounds
        found[name] = row
    return found


def _add_router(cases: dict[str, dict[str, Any]]) -> None:
    """What the router adds to each candidate's experts: medians of the rounds' differences."""
    if len(cases) < 2:
        return
    experts = cases["experts"]["figures"]
    for name, found in cases["layer"]["figures"].items():
        if name in experts:
            pairs = zip(found["rounds_us"], experts[name]["rounds_us"], strict=True)
            found["router_us"] = summary_of([a - b for a, b in pairs])
