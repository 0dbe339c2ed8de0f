"""The table that `guild bench --rounding` prints: one line per shape and method of routing."""

from __future__ import annotations

from typing import Any

from rich.table import Table

TITLES = {"top_k": "top-k", "nearest": "rounding to nearest", "dropping": "dropping"}


def rounding_table(record: dict[str, Any]) -> Table:
    """Lay out a record of token rounding.

    Parameters
    ----------
    record : dict
        What `rounding.measure_rounding` returns.
    """
    table = Table(
        title=f"{record['device']}, {record['dtype']}, torch {record['torch']}: routing alone and "
        f"forward + backward of the layer, tile {record['tile']}, capacity {record['capacity']}",
        caption="more: beside top-k, median of the rounds' differences; tile rows: rows in whole "
        "tiles, which a GPU computes",
    )
    for heading in ("shape", "routing", "way"):
        table.add_column(heading, no_wrap=True)
    headings = ("routing us", "more us", "layer ms", "more us", "over top-k", "rows", "tile rows")
    for heading in headings:
        table.add_column(heading, justify="right")
    for case in record["cases"]:
        for place, name in enumerate(case["rows"]):
            first = ["", ""] if place else [case["name"], case["routing"]]
            table.add_row(*first, TITLES[name], *_cells(case, name))
        table.add_section()
    return table


def _cells(case: dict[str, Any], name: str) -> list[str]:
    rows = [f"{case['rows'][name]:,}", f"{case['tile_rows'][name]:,}"]
    if name not in case["figures"]["layer"]:  # it failed after its rows were counted
        return ["", "", "", "", "", *rows]
    routing, layer = (case["figures"][part][name] for part in ("routing", "layer"))
    cells = [f"{1e3 * routing['ms']['median']:.1f}", _more(routing)]
    over = f"{layer['over_top_k']['median']:.3f}" if "over_top_k" in layer else ""
    return [*cells, f"{layer['ms']['median']:.3f}", _more(layer), over, *rows]


def _more(figures: dict[str, Any]) -> str:
    return f"{figures['more_us']['median']:+.1f}" if "more_us" in figures else ""
