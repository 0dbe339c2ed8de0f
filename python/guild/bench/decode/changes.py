"""How times change with the number of tokens and with the routing, relative to the floor's change.

With the number of tokens a candidate may change its kernels, as Guild does between few and many
tokens: `step` is the growth of the time since the next smaller number of tokens, divided by that of
the floor. `skew` is the same from random routing to another one. 1: as the floor; above: slower.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

Case = dict[str, Any]


def add_changes(cases: list[Case]) -> None:
    """Give every candidate its `step` and its `skew` in every case that has a predecessor.

    Parameters
    ----------
    cases : list of dict
        As `measure.measure_decode` makes them, of any shapes, routings, numbers of tokens and
        parts.
    """
    rows: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        rows.setdefault((case["name"], case["part"], case["routing"]), []).append(case)
    for (name, part, routing), row in rows.items():
        row.sort(key=_tokens)
        for before, case in pairwise(row):
            _add("step", case, before)
        if routing == "random":
            continue
        random = {_tokens(case): case for case in rows.get((name, part, "random"), [])}
        for case in row:
            if _tokens(case) in random:
                _add("skew", case, random[_tokens(case)])


def _tokens(case: Case) -> int:
    return case["shape"]["tokens"]


def _add(change: str, case: Case, before: Case) -> None:
    """For every candidate that was timed in both cases."""
    floor = case["floor_us"] / before["floor_us"]
    for name, found in case["figures"].items():
        if name in before["figures"]:
            time = found["us"]["median"] / before["figures"][name]["us"]["median"]
            found[change] = time / floor
