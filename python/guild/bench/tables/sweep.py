"""The table that `guild bench --sweep` prints: one line per shape, and the spread at the end."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from guild.bench.form import form_words
from guild.bench.names import PASSES


def sweep_table(record: dict[str, Any]) -> Table:
    """Lay out a sweep's record.

    Parameters
    ----------
    record : dict
        What `layers.measure` returns, over many shapes.
    """
    table = Table(
        title=f"{len(record['cases'])} random shapes, seed {record['seed']}; {record['device']}, "
        f"{record['dtype']}{form_words(record)}, medians of {record['rounds']} rounds",
        caption="forward / backward; over bound: the time over that of bare, balanced "
        "products; error: the largest relative error",
    )
    for heading in ("T,H,I,E,K", "routing"):
        table.add_column(heading, no_wrap=True)
    for heading in ("rows / expert", "ms", "TFLOPS", "over bound", "error"):
        table.add_column(heading, justify="right")
    for case in record["cases"]:
        table.add_row(*_cells(case))
    table.add_section()
    for name, choose in (("median", statistics.median), ("worst", max)):
        ratios = [_over_bound(record["cases"], which) for which in PASSES]
        chosen = " / ".join(f"{choose(r):.2f}" if r else "" for r in ratios)
        table.add_row(name, "", "", "", "", chosen, "")
    return table


def _over_bound(cases: list[dict[str, Any]], which: str) -> list[float]:
    rows = (case["figures"].get("guild", {}).get(which, {}) for case in cases)
    return [row["over_bound"]["median"] for row in rows if "over_bound" in row]


def _cells(case: dict[str, Any]) -> list[str]:
    shape = case["shape"]
    rows = shape["tokens"] * shape["top_k"] / shape["experts"]
    first = [case["name"], case["routing"], f"{rows:.0f}"]
    guild = case["figures"].get("guild")
    if guild is None:
        return [*first, "failed", "", "", ""]
    passes = [guild[which] for which in PASSES]
    over = [f"{p['over_bound']['median']:.2f}" for p in passes if "over_bound" in p]
    return [
        *first,
        " / ".join(f"{p['ms']['median']:.3f}" for p in passes),
        " / ".join(f"{p['tflops']:.3g}" for p in passes),
        " / ".join(over),
        f"{max(case['errors']['guild'].values()):.1e}",
    ]
