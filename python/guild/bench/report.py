"""`guild bench --report FILE`: the Markdown tables of a recorded benchmark, for README and docs.

Nothing is measured: tables in documents are printed by this, never typed by hand.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from guild.bench.form import form_words
from guild.bench.names import PASSES, SONICMOE, TITLES
from guild.bench.tables.by_mode import table_of
from guild.provenance import short_commit

_TITLES = {"compiled": "torch", "plain": "plain PyTorch", "eager": "torch eager"}
_SONICMOE = f"{TITLES[SONICMOE]} / Guild"


def report(record: dict[str, Any]) -> str:
    """The record's source and its tables, in Markdown."""
    driver = "" if record["driver"] is None else f"driver {record['driver']}, "
    timed = f": medians of {record['rounds']} interleaved rounds"
    source = (
        f"{record['device']}, {driver}torch {record['torch']}, "
        f"{record['dtype']}{form_words(record)}, {record['date'][:10]}, commit "
        f"{short_commit(record['commit'])}{'' if record['mode'] == 'memory' else timed}."
    )
    if record["mode"] == "layers" and _timed(record):
        tables = [short_table(record), full_table(record)]
        if any("over_balanced" in _guild(c)["forward"] for c in record["cases"] if _guild(c)):
            tables.append(routing_table(record))
    else:
        tables = markdown_tables(table_of(record))
    return "\n\n".join([source, *tables])


def markdown_tables(laid_out: Table | Group) -> list[str]:
    """Tables made for the terminal as Markdown, each under its title."""
    tables = laid_out.renderables if isinstance(laid_out, Group) else [laid_out]
    found = []
    for table in tables:
        cells = zip(*(column.cells for column in table.columns), strict=True)
        headings = [str(column.header) for column in table.columns]
        right = [column.justify == "right" for column in table.columns]
        found.append(f"{table.title}\n\n{_markdown(headings, cells, right)}")
    return found


def short_table(record: dict[str, Any]) -> str:
    """README's table: Guild, the baseline, and the two ratios; forward / backward.

    With several routings the first one leads, followed by Guild with balanced routing.
    """
    baseline = _baseline(record)
    title = _TITLES[baseline]
    routings = list(dict.fromkeys(case["routing"] for case in record["cases"]))
    beside = "balanced" if "balanced" in routings[1:] else None
    of = [f", {routing}" for routing in (routings[0], beside)] if beside else [""]
    guilds, overs = [f"Guild ms{each}" for each in of], [f"Guild / bound{each}" for each in of]
    headings = ["preset", "T, H, I, E, K", *guilds, f"{title} ms", f"{title} / Guild", *overs]
    with_sonicmoe = _has(record, SONICMOE)
    headings += [_SONICMOE] if with_sonicmoe else []
    others = {c["name"]: _guild(c) for c in _timed(record) if c["routing"] == beside}
    rows = []
    for case in _timed(record):
        if beside and case["routing"] != routings[0]:
            continue
        shown = [_guild(case), *([others.get(case["name"])] if beside else [])]
        theirs = [_pair(shown[0], ("speedup_over", SONICMOE), 2)] if with_sonicmoe else []
        rows.append(
            [
                case["name"] if beside else _name(case, record)[0],
                _sizes(case),
                *(_pair(guild, ("ms",), 2) for guild in shown),
                _pair(case["figures"].get(baseline), ("ms",), 2),
                _pair(shown[0], ("speedup_over", baseline), 2),
                *(_pair(guild, ("over_bound",), 2) for guild in shown),
                *theirs,
            ]
        )
    return _markdown(headings, rows)


def full_table(record: dict[str, Any]) -> str:
    """The table of docs/measured/layers.md."""
    baseline = _baseline(record)
    title = _TITLES[baseline]
    names = [
        "Guild ms",
        "bound ms",
        f"{title} {baseline} ms" if title == "torch" else f"{title} ms",
    ]
    headings = ["preset", "T, H, I, E, K", *names, "over bound", f"{title} / Guild", "TFLOPS"]
    with_floor, with_sonicmoe = _has(record, "floor"), _has(record, SONICMOE)
    headings += [f"{TITLES['floor']}, over bound"] if with_floor else []
    headings += [f"{TITLES[SONICMOE]} ms", _SONICMOE] if with_sonicmoe else []
    rows = []
    for case in _timed(record):
        guild, figures = _guild(case), case["figures"]
        times = [_pair(figures.get(name), ("ms",), 3) for name in ("guild", "bound", baseline)]
        ratios = [
            _pair(guild, ("over_bound",), 2),
            _pair(guild, ("speedup_over", baseline), 2),
        ]
        tflops = " / ".join(_digits(guild[which]["tflops"]) for which in PASSES)
        floor = [_pair(figures.get("floor"), ("over_bound",), 2)] if with_floor else []
        theirs = [_pair(figures.get(SONICMOE), ("ms",), 3)] if with_sonicmoe else []
        theirs += [_pair(guild, ("speedup_over", SONICMOE), 2)] if with_sonicmoe else []
        rows.append([*_name(case, record), *times, *ratios, tflops, *floor, *theirs])
    return _markdown(headings, rows)


def routing_table(record: dict[str, Any]) -> str:
    """How much longer a row takes than with balanced routing."""
    headings = [
        "preset",
        "T, H, I, E, K",
        "busiest expert / mean",
        "ms / 1000 rows",
        "over balanced",
    ]
    rows = []
    for case in _timed(record):
        guild = _guild(case)
        per_row = " / ".join(f"{guild[which]['ms_per_1000_rows']:.4g}" for which in PASSES)
        load = f"{case['busiest_expert_over_mean']:.2f}"
        rows.append([*_name(case, record), load, per_row, _pair(guild, ("over_balanced",), 3)])
    return _markdown(headings, rows)


def _guild(case: dict[str, Any]) -> dict[str, Any] | None:
    return case["figures"].get("guild")


def _timed(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in record["cases"] if _guild(case)]


def _baseline(record: dict[str, Any]) -> str:
    for name in _TITLES:
        if any(name in case["figures"] for case in record["cases"]):
            return name
    return "compiled"


def _has(record: dict[str, Any], candidate: str) -> bool:
    return any(candidate in case["figures"] for case in _timed(record))


def _name(case: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """Preset and sizes; the routing too, unless all are balanced."""
    plain = all(other["routing"] == "balanced" for other in record["cases"])
    routing = "" if plain else f", {case['routing']}"
    return [case["name"] + routing, _sizes(case)]


def _sizes(case: dict[str, Any]) -> str:
    return ", ".join(map(str, case["shape"].values()))


def _digits(value: float) -> str:
    """Without decimals where there are three digits before them, else with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _pair(figures: dict[str, Any] | None, path: tuple[str, ...], digits: int) -> str:
    """Forward / backward medians of what lies at `path`; empty if it was not measured."""
    found = []
    for which in PASSES:
        value: Any = (figures or {}).get(which)
        for key in path:
            value = (value or {}).get(key)
        if value is None:
            return ""
        found.append(f"{value['median']:.{digits}f}")
    return " / ".join(found)


def _markdown(headings: list[str], rows: Any, right: list[bool] | None = None) -> str:
    rules = ["---:" if r else "---" for r in right or [False] * len(headings)]
    lines = [headings, *rows]
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    return "\n".join([lines[0], "|" + "|".join(rules) + "|", *lines[1:]])
