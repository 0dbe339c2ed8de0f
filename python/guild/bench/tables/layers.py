"""The table that `guild bench` prints: one line per shape, routing and pass."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from guild.bench.form import form_words
from guild.bench.names import BASELINES, LIMITED, PASSES, TITLES
from guild.bench.timing import spread_of


def bench_table(record: dict[str, Any]) -> Table:
    """Lay out a benchmark's record.

    Parameters
    ----------
    record : dict
        What `layers.measure` returns.
    """
    cases = record["cases"]
    timed = [name for name in TITLES if any(name in case["figures"] for case in cases)]
    baselines = [name for name in timed if name in BASELINES]
    table = Table(
        title=f"{record['device']}, {record['dtype']}{form_words(record)}, torch "
        f"{record['torch']}, medians of {record['rounds']} rounds",
        caption="; ".join(_notes(timed)),
    )
    for heading in ("shape", "routing", "pass"):
        table.add_column(heading, no_wrap=True)
    for name in timed:
        table.add_column(f"{TITLES[name]} ms", justify="right")
    several = any("over_balanced" in row for row in _guild_rows(cases))
    extra = ["ms / 1000 rows", "per row / balanced"] if several else []
    extra += [f"{record['num_sms']} SMs / all"] if LIMITED in timed else []
    baseline_headings = [f"{TITLES[b]} / Guild" for b in baselines]
    for heading in ["TFLOPS", "over bound", *extra, *baseline_headings, "load", "error"]:
        table.add_column(heading, justify="right")
    for case in cases:
        for direction in PASSES:
            _add_line(table, case, direction, timed, baselines, several)
        table.add_section()
    return table


def _notes(timed: list[str]) -> list[str]:
    """Explanations of the columns that the table has."""
    notes = ["TFLOPS of useful work (6TKHI forward, 12TKHI backward)"]
    if "bound" in timed:
        notes.append("bound: the bare products, balanced")
    if "floor" in timed:
        notes.append(f"{TITLES['floor']}: these, then copies of what a layer moves beside its own")
    notes.append("load: rows of the busiest expert over the mean")
    return [*notes, "error: the largest relative one of Guild's output and gradients"]


def _guild_rows(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for case in cases for row in case["figures"].get("guild", {}).values()]


def _add_line(
    table: Table,
    case: dict[str, Any],
    direction: str,
    timed: list[str],
    baselines: list[str],
    several: bool,
) -> None:
    found = {name: case["figures"].get(name, {}).get(direction) for name in timed}
    ours = found.get("guild")
    first = direction == "forward"
    errors = case["errors"].get("guild")
    load = case.get("busiest_expert_over_mean")
    table.add_row(
        case["name"] if first else "",
        case["routing"] if first else "",
        direction,
        *(_milliseconds(found[name], case["failures"].get(name)) for name in timed),
        f"{ours['tflops']:.3g}" if ours else "",
        _ratio(ours, "over_bound"),
        *([_per_row(ours), _ratio(ours, "over_balanced", 3)] if several else []),
        *([_ratio(found[LIMITED], "over_guild", 3)] if LIMITED in timed else []),
        *(
            f"{ours['speedup_over'][b]['median']:.2f}x"
            if ours and b in ours["speedup_over"]
            else ""
            for b in baselines
        ),
        f"{load:.2f}" if first and load is not None else "",
        f"{max(errors.values()):.1e}" if first and errors else "",
    )


def _ratio(found: dict[str, Any] | None, name: str, digits: int = 2) -> str:
    return f"{found[name]['median']:.{digits}f}" if found and name in found else ""


def _per_row(found: dict[str, Any] | None) -> str:
    return f"{found['ms_per_1000_rows']:.4g}" if found else ""


def _milliseconds(found: dict[str, Any] | None, failure: str | None) -> str:
    if found is None:
        return "failed" if failure else ""
    ms = found["ms"]
    return f"{ms['median']:.3f} {spread_of(ms)}"
