"""How times are taken: units, how many calls a round needs, and in which order they run."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from guild.bench import timing
from guild.bench.timing import calls_per_round, drawn_orders, milliseconds, summary_of

CPU = torch.device("cpu")


def test_milliseconds_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of several calls, from a clock in seconds."""
    clock = SimpleNamespace(perf_counter=itertools.count(10.0, 0.5).__next__)
    monkeypatch.setattr(timing, "time", clock)
    calls: list[int] = []
    assert milliseconds(lambda: calls.append(1), 4, CPU) == 125.0
    assert len(calls) == 4


@pytest.mark.parametrize(("each", "count"), [(4.0, 25), (3.0, 34), (60.0, 2), (900.0, 1)])
def test_a_round_is_long_enough(each: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round has 0.1 s of calls that take `each` milliseconds, at least one."""
    monkeypatch.setattr(timing, "milliseconds", lambda *call: each)
    assert calls_per_round(lambda: None, 0.1, CPU) == count


def test_short_calls_are_calibrated_over_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one warm-up call, the number of calls doubles until they last 50 ms."""
    asked: list[int] = []
    monkeypatch.setattr(timing, "milliseconds", lambda call, count, _: asked.append(count) or 10.0)
    calls_per_round(lambda: None, 0.1, CPU)
    assert asked == [1, 1, 2, 4, 8]


def test_events_of_a_gpu_are_milliseconds(gpu: str) -> None:
    """Events report as much time as the wall clock, where the host waits for the device."""
    a = torch.randn(4096, 4096, device=gpu)
    device = torch.device(gpu)
    milliseconds(lambda: a @ a, 3, device)
    events = milliseconds(lambda: a @ a, 50, device)
    wall = milliseconds(lambda: ((a @ a), torch.cuda.synchronize()), 50, CPU)
    assert 0.2 * wall < events < 1.2 * wall


def test_summary() -> None:
    assert summary_of([5.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 5.0}


def test_orders_are_drawn_anew_and_alike_everywhere() -> None:
    orders = list(drawn_orders("abcd", 24))
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len({tuple(order) for order in orders}) > 6
    assert orders == list(drawn_orders("abcd", 24))
