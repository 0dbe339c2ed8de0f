"""Times a layer whose experts are spread over ranks, beside one GPU that has only a rank's share.

    torchrun --nproc-per-node 2 -m guild.bench.parallel --preset qwen30b --out results

Alone, a GPU has E / R experts and as many rows as a rank of R has on average: no communication, the
same products. Efficiency is that time over the time of the slowest rank, in the same rounds. There
both engines take turns if ranks reach each other's memory, and with `--beside` what other libraries
have for it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import guild
from guild.bench.names import PASSES
from guild.bench.presets import Shape
from guild.bench.ranks.dispatchers import DISPATCHERS, unfit, why_not
from guild.bench.ranks.layer import SharedLayer
from guild.bench.ranks.options import (
    beside_of,
    device_of,
    expect_valid,
    make_parser,
    shapes_of,
)
from guild.bench.ranks.symmetric import TORCH, SymmetricLayer, expect_nvshmem, use_nvshmem
from guild.bench.results import replacing
from guild.bench.timing import Replay, drawn_orders, free_memory, milliseconds
from guild.provenance import provenance

_CHECKED_TOKENS = 256


def measure_parallel(
    shapes: dict[str, Shape],
    routing: str,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    seconds: float,
    seed: int = 0,
    engine: str = "auto",
    beside: Sequence[str] = (),
    capacity: float | None = None,
    graphs: bool = False,
    inference: bool = False,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Check, then time every shape on all ranks; the record is the same on all of them.

    Parameters
    ----------
    shapes : dict
        By name; tokens are those of a rank.
    routing : str
        One of `problem.ROUTINGS`.
    dtype, device : torch.dtype, torch.device
        Of this rank.
    rounds, seconds : int, float
        Interleaved rounds, and the least time of a call's part of one.
    seed : int
        Of the inputs.
    engine : str
        Of `guild.ExpertParallel`; "both": the peer engine, where the ranks can, and nccl; "torch":
        torch's all-to-all in symmetric memory, instead of them.
    beside : sequence of str
        Names of `DISPATCHERS`, timed beside the engines in the same rounds.
    capacity : float, optional
        Of the peer engine, as `guild.ExpertParallel` takes it.
    graphs : bool
        Replay CUDA graphs of the passes, so that the host's time does not count; with engine
        "peer" and nothing beside, on GPUs.
    inference : bool
        Forwards without gradients alone.
    max_tokens : int, optional
        Of the groups, as `guild.ExpertParallel` takes it; default: a shape's number of tokens.

    Returns
    -------
    dict
        `cases` have times in milliseconds, one per round, `efficiency` and `tflops` medians.
        `engines` are those that were timed; calls of all but the first have its name as a suffix.
        `skipped` says why some of `beside` were not timed; a case's, why not on its shape.
    """
    if engine == TORCH:
        use_nvshmem(device)
    rooms = {
        most: _groups(engine, device, {"max_tokens": most, "capacity": capacity})
        for most in dict.fromkeys(max_tokens or shape.tokens for shape in shapes.values())
    }
    groups = next(iter(rooms.values()))
    group = next(iter(groups.values()))
    record: dict[str, Any] = {"mode": "parallel", "provenance": provenance(device), "cases": []}
    record |= {"ranks": group.size, "routing": routing}
    record["capacity"] = capacity if "peer" in groups else None
    record |= {"dtype": str(dtype).removeprefix("torch."), "seed": seed}
    record |= {"rounds": rounds, "seconds_per_round": seconds}
    reasons = {name: why_not(name, device) for name in beside}
    record |= {"cuda_graphs": graphs, "inference": inference, "max_tokens": max_tokens}
    record["skipped"] = {name: reason for name, reason in reasons.items() if reason}
    beside = [name for name in beside if not reasons[name]]
    record["engines"] = [*groups, *beside]
    stream = torch.cuda.Stream(device) if graphs else None
    with torch.cuda.stream(stream):  # no change where it is None
        for name, shape in shapes.items():
            groups = rooms[max_tokens or shape.tokens]
            record["cases"].append(_measured(name, shape, record, groups, beside, device, stream))
            free_memory(device)
    return record


def _measured(
    name: str,
    shape: Shape,
    record: dict[str, Any],
    groups: dict[str, guild.ExpertParallel],
    beside: Sequence[str],
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> dict[str, Any]:
    """The case of a shape; what else is timed, and how, is in the record."""
    group = next(iter(groups.values()))
    alone = shape._replace(experts=len(group.local_experts(shape.experts)))
    dtype = getattr(torch, record["dtype"])
    arguments = record["routing"], dtype, device, record["seed"] + 1000 * group.rank
    only: dict[str, Any] = {"inference": record["inference"]}
    layers: list[SharedLayer] = []
    for one in groups.values():
        layers.append(SharedLayer(shape, one, *arguments, *layers[:1], **only))
    reasons = {one: unfit(one, shape) for one in beside}
    fit = [one for one in beside if not reasons[one]]
    names = [TORCH] if TORCH in groups else fit
    others = _others(shape, layers[0], names)
    errors = [_error(layer, group) for layer in layers]
    errors += [_difference(other, layers[0]) for other in others]
    for one, error in zip([*groups, *names], errors, strict=True):
        if not error < 2e-2:
            raise RuntimeError(f"{name}: the layer of {one} is off by {error:.2g}")
    layers = others if TORCH in groups else [*layers, *others]
    passes = PASSES[:1] if record["inference"] else PASSES
    by_itself = SharedLayer(alone, None, *arguments, **only)
    calls = _calls(passes, layers, [*groups, *fit], by_itself)
    if stream is not None:
        pool = torch.cuda.graph_pool_handle()
        calls = {call: Replay(launched, 1, pool, stream) for call, launched in calls.items()}
    times = _rounds(calls, record["rounds"], record["seconds_per_round"], device)
    skipped = {one: reason for one, reason in reasons.items() if reason}
    case = {"name": name, "shape": list(shape), "error": max(errors), "skipped": skipped}
    return case | _case(times, shape)


def _others(shape: Shape, layer: SharedLayer, names: Sequence[str]) -> list[SharedLayer]:
    """The same tokens and weights, sent by other libraries."""
    made = []
    for name in names:
        kind = SymmetricLayer if name == TORCH else DISPATCHERS[name][0]
        made.append(layer.sent_by(kind(shape, layer.layer)))
    return made


def _difference(layer: SharedLayer, like: SharedLayer) -> float:
    """The largest relative difference of this rank's output and gradients."""
    return max(map(_distance, layer.results(), like.results()))


def _groups(
    engine: str, device: torch.device, room: dict[str, Any]
) -> dict[str, guild.ExpertParallel]:
    """The groups that `engine` stands for, by engine."""
    if engine == TORCH:  # compared with a layer of the same weights over nccl
        return {TORCH: guild.ExpertParallel(engine="nccl")}
    if engine != "both":
        group = guild.ExpertParallel(engine=engine, **room)
        return {group.engine(device): group}
    group = guild.ExpertParallel(**room)
    if group.engine(device) == "nccl":
        return {"nccl": group}
    return {"peer": group, "nccl": guild.ExpertParallel(engine="nccl")}


def _calls(
    passes: Sequence[str], layers: list[SharedLayer], engines: list[str], alone: SharedLayer
) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    for name in passes:
        calls[name] = getattr(layers[0], name)
        for engine, layer in zip(engines[1:], layers[1:], strict=True):
            calls[f"{name} {engine}"] = getattr(layer, name)
        calls[f"{name} alone"] = getattr(alone, name)
    return calls


def _rounds(
    calls: dict[str, Callable[[], object]], rounds: int, seconds: float, device: torch.device
) -> dict[str, list[list[float]]]:
    """Milliseconds of each call, by round and rank. All ranks make the same number of calls."""
    counts = {}
    for name, call in calls.items():
        milliseconds(call, 3, device)
        slowest = max(_of_ranks(milliseconds(call, 5, device)))
        counts[name] = max(1, round(1e3 * seconds / slowest))
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    for order in drawn_orders(calls, rounds):
        for name in order:
            dist.barrier()
            times[name].append(_of_ranks(milliseconds(calls[name], counts[name], device)))
    return times


def _of_ranks(value: float) -> list[float]:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _case(times: dict[str, list[list[float]]], shape: Shape) -> dict[str, Any]:
    case: dict[str, Any] = {"milliseconds": times, "efficiency": {}, "tflops": {}}
    flops = dict(zip(PASSES, shape.flops(), strict=True))
    for call, by_round in times.items():
        name, _, what = call.partition(" ")
        if what == "alone":
            continue
        slowest = [max(ranks) for ranks in by_round]
        alone = [statistics.fmean(ranks) for ranks in times[f"{name} alone"]]
        ratios = [a / b for a, b in zip(alone, slowest, strict=True)]
        case["efficiency"][call] = statistics.median(ratios)
        case["tflops"][call] = flops[name] / statistics.median(slowest) / 1e9
    return case


@torch.no_grad()
def _error(together: SharedLayer, group: guild.ExpertParallel) -> float:
    """Relative error of some tokens' output, against sums of all ranks' experts' results."""
    layer, x = together.layer, together.x[:_CHECKED_TOKENS]
    out, routing = layer(x, return_routing=True)
    mine = group.local_experts(layer.experts)
    truth = []
    for rank in range(group.size):
        tokens = [t.contiguous().clone() for t in (x, routing.ids, routing.scores)]
        for tensor in tokens:
            dist.broadcast(tensor, dist.get_global_rank(group.group, rank), group=group.group)
        rows, ids, scores = tokens
        ids = torch.where((ids >= mine.start) & (ids < mine.stop), ids - mine.start, -1)
        part = guild.routed_experts(rows, ids, scores, layer.w_up, layer.w_down).float()
        dist.all_reduce(part, group=group.group)
        truth.append(part)
    return _distance(out, truth[group.rank])


@torch.no_grad()
def _distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return float((out.float() - expected).norm() / expected.norm())


def main(arguments: list[str] | None = None) -> None:
    """The command; see the top of the file."""
    parser = make_parser(__doc__.splitlines()[0])
    args = parser.parse_args(arguments)
    try:
        expect_valid(args)
        shapes, device, beside = shapes_of(args), device_of(args), beside_of(args)
        if args.engine == TORCH:
            expect_nvshmem(device)
    except ValueError as error:
        parser.error(str(error))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    how = args.routing, getattr(torch, args.dtype), device, args.rounds, args.seconds, args.seed
    more = args.engine, beside, args.capacity, args.cuda_graph, args.inference, args.max_tokens
    record = measure_parallel(shapes, *how, *more)
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        try:
            _write(record, args.out)
        except ValueError as error:
            parser.error(str(error))
        finally:
            show(record)


def _write(record: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        with replacing(out / "parallel.json") as unfinished:
            unfinished.write_text(json.dumps(record, indent=2) + "\n")


def show(record: dict[str, Any]) -> None:
    """Print a line for each shape and pass."""
    facts = record["provenance"]
    engines = " and ".join(record["engines"]) + (", CUDA graphs" if record["cuda_graphs"] else "")
    engines += ", without gradients" if record["inference"] else ""
    print(f"{record['ranks']} ranks, {facts['device']}, {record['routing']} routing, {engines}")
    for name, reason in record["skipped"].items():
        print(f"{name}: not timed, {reason}")
    print(f"{'shape':>12} {'pass':>25} {'ms':>8} {'alone':>8} {'efficiency':>10} {'TFLOPS':>7}")
    for case in record["cases"]:
        for name, reason in case["skipped"].items():
            print(f"{case['name']:>12}: {name} not timed, {reason}")
        for call, efficiency in case["efficiency"].items():
            name = call.partition(" ")[0]
            slowest = statistics.median(max(ranks) for ranks in case["milliseconds"][call])
            alone = statistics.median(map(statistics.fmean, case["milliseconds"][f"{name} alone"]))
            figures = f"{slowest:8.4f} {alone:8.4f} {efficiency:10.3f}"
            print(f"{case['name']:>12} {call:>25} {figures} {case['tflops'][call]:7.1f}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
