"""The tables that `guild bench --decode` prints: one per shape, routing and part, a line per T."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from guild.bench.form import form_words
from guild.bench.timing import spread_of

Case = dict[str, Any]
_PARTS = {"experts": "experts alone", "layer": "with the router"}
_OWN = {"guild": "Guild"}
# Figures that not every case has, and their headings.
_OPTIONAL = {
    "host_us": ["eager us", "host us"],
    "router_us": ["router us"],
    "step": ["step"],
    "skew": ["skew"],
}


def decode_table(record: dict[str, Any]) -> Group:
    """Lay out a record of decode.

    Parameters
    ----------
    record : dict
        What `measure.measure_decode` returns.
    """
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in record["cases"]:
        groups.setdefault((case["name"], case["routing"], case["part"]), []).append(case)
    return Group(*(_table(cases, record) for cases in groups.values()))


def candidate_title(name: str) -> str:
    """What a candidate is called in tables and plots."""
    return _OWN.get(name, name)


def candidate_names(cases: list[Case]) -> list[str]:
    """Every candidate that was timed, or failed, in any of the cases."""
    found = (name for case in cases for name in (*case["figures"], *case["failures"]))
    return list(dict.fromkeys(found))


def _table(cases: list[Case], record: dict[str, Any]) -> Table:
    first = cases[0]
    sizes = ",".join(str(value) for name, value in first["shape"].items() if name != "tokens")
    machine = first["machine"]
    names = candidate_names(cases)
    given = {key for case in cases for row in case["figures"].values() for key in row}
    shown = [key for key in _OPTIONAL if key in given]
    table = Table(
        title=f"{first['name']} ({sizes}), {first['routing']} routing, {_PARTS[first['part']]}, "
        f"{record['dtype']}{form_words(record)}, {record['device']}, medians of "
        f"{record['rounds']} rounds",
        caption="; ".join(_notes(machine, shown)),
    )
    for heading in ("T", "experts hit", "floor us"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in names:
        for heading in _headings(name, shown, "guild" in names):
            table.add_column(heading, justify="right")
    for case in cases:
        cells = [str(case["shape"]["tokens"]), f"{case['experts_hit']:.0f}"]
        compute = " c" if case["bound_by"] == "compute" else ""
        cells.append(f"{case['floor_us']:.4g}{compute}")
        for name in names:
            cells += _cells(case, name, shown, len(_headings(name, shown, "guild" in names)))
        table.add_row(*cells)
    return table


def _notes(machine: dict[str, Any], shown: list[str]) -> list[str]:
    """Explanations of the columns that the table has."""
    notes = [
        f"floor: bytes of the experts hit, tokens and output at {machine['read_tbps']:.3g} TB/s, "
        f"or FLOPs at {machine['matrix_tflops']:.3g} TFLOPS where that takes longer (c)",
        "of floor: the floor's share of the time",
    ]
    if "host_us" in shown:
        notes.append("times in CUDA graphs (*: not captured); eager: the same calls one by one")
        notes.append("host: what the host takes to queue a call")
    if "router_us" in shown:
        notes.append("router: what it adds to the experts alone")
    if "step" in shown:
        notes.append("step: the time's growth since the line before over the floor's")
    if "skew" in shown:
        notes.append("skew: the time over that of random routing, over the same of the floor")
    return notes


def _headings(name: str, shown: list[str], guild: bool) -> list[str]:
    headings = [f"{candidate_title(name)} us", "of floor"]
    if name == "guild":
        headings.append("TB/s")
    for key in shown:
        headings += _OPTIONAL[key]
    if guild and name != "guild":
        headings.append(f"Guild / {candidate_title(name)}")
    return headings


def _cells(case: Case, name: str, shown: list[str], count: int) -> list[str]:
    """A candidate's figures in the order of its headings."""
    row = case["figures"].get(name)
    if row is None:
        return ["failed" if name in case["failures"] else "", *[""] * (count - 1)]
    us = row["us"]
    mark = "*" if "host_us" in row and row["how"] == "eager" else ""
    cells = [f"{us['median']:.4g}{mark} {spread_of(us)}"]
    cells.append(f"{row['share_of_floor']['median']:.3f}")
    if name == "guild":
        cells.append(f"{row['tbps']:.3g}")
    for key in shown:
        cells += _optional(key, row) if key in row else [""] * len(_OPTIONAL[key])
    if "guild_over" in row:
        cells.append(f"{row['guild_over']['median']:.3f}")
    return cells


def _optional(key: str, row: dict[str, Any]) -> list[str]:
    if key == "host_us":
        return [f"{row['eager_us']['median']:.4g}", f"{row['host_us']:.1f}"]
    if key == "router_us":
        return [f"{row['router_us']['median']:+.1f}"]
    return [f"{row[key]:.2f}"]
