"""Timing in interleaved rounds, and medians of what was timed side by side.

A card's clock moves by 6 to 10 % with its temperature and load, so two figures may only be compared
if they were taken seconds apart. A round runs one call after the other, each repeatedly for a
while. What ran just before affects the clock too, so the order of the calls is drawn anew every
round. Many short rounds tell more than few long ones of the same total time.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

import torch

from guild.bench.failures import Noted, is_expected

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
_CALIBRATION_SECONDS = 0.05


def milliseconds(call: Call, count: int, device: torch.device) -> float:
    """Mean time of `count` calls in a row: CUDA events on a GPU, the wall clock on the CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return 1e3 * (time.perf_counter() - start) / count
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(count):
        call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / count


def calls_per_round(call: Call, seconds: float, device: torch.device) -> int:
    """How often to call so that a round lasts at least `seconds`; also warms the call up."""
    count = 1
    milliseconds(call, 1, device)  # the first call compiles, allocates, picks algorithms
    while (each := milliseconds(call, count, device)) * count < 1e3 * _CALIBRATION_SECONDS:
        count *= 2
    return max(1, math.ceil(1e3 * seconds / each))


def drawn_orders(names: Iterable[Name], rounds: int) -> Iterator[list[Name]]:
    """The names in a random order, drawn anew for each round: the same in every process."""
    all_names, draw = list(names), random.Random(0)
    for _ in range(rounds):
        yield draw.sample(all_names, len(all_names))


def interleaved(
    calls: dict[Name, Call],
    rounds: int,
    seconds: float,
    device: torch.device,
    calls_a_round: int | None = None,
    failures: dict[Name, Exception] | None = None,
    noted: Noted = is_expected,
) -> dict[Name, list[float]]:
    """Time every call in every round.

    Parameters
    ----------
    calls : dict
        What to time, by name.
    rounds : int
        Number of rounds; each gives one figure per call.
    seconds : float
        Least duration of one call's part of a round.
    device : torch.device
        Where the calls run.
    calls_a_round : int, optional
        Calls in a round, instead of `seconds`.
    failures : dict, optional
        Gets the errors of calls that fail. Without it such an error is raised.
    noted : callable
        Which errors it gets.

    Returns
    -------
    dict
        Milliseconds per call, one figure per round, in the order of the rounds; without the calls
        that failed.
    """
    counts: dict[Name, int] = {}
    times: dict[Name, list[float]] = {name: [] for name in calls}

    def count(name: Name) -> None:
        if calls_a_round is None:
            counts[name] = calls_per_round(calls[name], seconds, device)
        else:
            milliseconds(calls[name], 1, device)  # compiles, allocates, picks algorithms
            counts[name] = calls_a_round

    def measure(name: Name) -> None:
        times[name].append(milliseconds(calls[name], counts[name], device))

    failed = {} if failures is None else failures
    for step, order in [(count, list(calls)), *((measure, o) for o in drawn_orders(calls, rounds))]:
        for name in order:
            if name in failed:
                continue
            try:
                step(name)
            except Exception as error:
                if failures is None or not noted(error):
                    raise
                failed[name] = error.with_traceback(None)  # whose frames would hold memory
            if name in failed:
                free_memory(device)
    return {name: taken for name, taken in times.items() if name not in failed}


class Replay:
    """A CUDA graph of several calls in a row, for one launch on the host.

    Parameters
    ----------
    call : callable
        What to capture; its results are dropped.
    count : int
        Calls in the graph.
    pool : tuple
        Memory pool (`torch.cuda.graph_pool_handle`) that graphs share whose results nobody reads.
    stream : torch.cuda.Stream, optional
        What to capture on: for a backward, the stream of its forward, which cannot be the default.
    """

    def __init__(
        self,
        call: Call,
        count: int,
        pool: tuple[int, int],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        call()  # compiles, allocates, picks algorithms
        self._call = call  # the graph reads what it refers to
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            for _ in range(count):
                call()

    def __call__(self) -> None:
        self._graph.replay()


def replayed(call: Call, count: int) -> tuple[Call, int]:
    """A `Replay` and its number of calls; the call itself and 1 if it cannot be captured."""
    try:  # a pool of its own, as a pool in which a capture failed accepts no other
        return Replay(call, count, torch.cuda.graph_pool_handle()), count
    except RuntimeError:
        torch.cuda.synchronize()
        return call, 1


def summary_of(values: list[float]) -> dict[str, float]:
    """Median, least and greatest value."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def spread_of(summary: dict[str, float]) -> str:
    """Half of the distance from the least to the greatest value, relative to the median."""
    return f"±{50 * (summary['high'] - summary['low']) / summary['median']:.0f}%"


def median_ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Median and spread of the ratios taken round by round."""
    return summary_of([a / b for a, b in zip(above, below, strict=True)])


def compared(
    measured: dict[str, dict[str, list[float]]], reference: str
) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Times by what was timed and by candidate: "milliseconds", and "over_" the reference."""
    return {
        "milliseconds": {
            what: {name: summary_of(values) for name, values in figures.items()}
            for what, figures in measured.items()
        },
        f"over_{reference}": {
            what: {name: median_ratio(v, figures[reference]) for name, v in figures.items()}
            for what, figures in measured.items()
        },
    }


def free_memory(device: torch.device) -> None:
    """Give freed memory back, so that the next candidate finds all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
