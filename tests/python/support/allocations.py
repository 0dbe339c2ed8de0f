"""The sizes of what torch allocates on the CPU, Guild's compiled ops included."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocations(call: Callable[[], object]) -> list[int]:
    """Bytes of every allocation that a call makes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = record.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
