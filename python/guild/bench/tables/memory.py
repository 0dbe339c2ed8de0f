"""The table that `guild bench --memory` prints: one line per shape and layer."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from guild.bench.memory import SLOT_BYTES
from guild.bench.names import PASSES, TITLES

_MIB = 1 << 20


def memory_table(record: dict[str, Any]) -> Table:
    """Lay out a record of memory.

    Parameters
    ----------
    record : dict
        What `memory.measure_memory` returns.
    """
    on_gpu = record["device_type"] == "cuda"
    notes = [
        f"saved: X, H and {SLOT_BYTES} bytes a slot",
        "rest: bytes a slot saved beyond X and H",
    ]
    if on_gpu:
        notes.append("forward: H, A, Y, O, routing, logits")
        notes.append("backward: dH, A', dX by row and dS, beside the gradients")
    table = Table(
        title=f"{record['device']}, {record['dtype']}, torch {record['torch']}: MiB, measured / "
        "by formula",
        caption="; ".join(notes),
    )
    for heading in ("shape", "routing", "layer"):
        table.add_column(heading, no_wrap=True)
    headings = ["saved for backward", "ratio", "rest"]
    headings += ["forward, peak", "ratio", "backward, peak", "ratio"] if on_gpu else []
    for heading in headings:
        table.add_column(heading, justify="right")
    for case in record["cases"]:
        for place, (name, found) in enumerate(case["layers"].items()):
            first = ["", ""] if place else [case["name"], case["routing"]]
            table.add_row(*first, TITLES[name], *memory_cells(case, found))
        table.add_section()
    return table


def memory_cells(case: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """A layer's figures as text."""
    shape, formula = case["shape"], case["formula"]
    slots = shape["tokens"] * shape["top_k"]
    rest = found["saved_bytes"] - formula["saved"] + SLOT_BYTES * slots
    cells = [*_pair(found["saved_bytes"], formula["saved"]), f"{rest / slots:.1f}"]
    for which in PASSES:
        if f"{which}_peak_bytes" in found:
            cells += _pair(found[f"{which}_peak_bytes"], formula[which])
    return cells


def _pair(measured: int, wanted: int) -> list[str]:
    digits = 1 if wanted >= 100 * _MIB else 3
    text = f"{measured / _MIB:.{digits}f} / {wanted / _MIB:.{digits}f}"
    return [text, f"{measured / wanted:.3f}"]
