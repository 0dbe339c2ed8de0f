"""The tables of `guild bench --fp8`: layers by recipe, PyTorch's beside them, and their steps."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from guild.bench.names import FP8_PASSES

_MIB = 1 << 20


def float8_table(record: dict[str, Any]) -> Group:
    """Lay out a record of layers in FP8.

    Parameters
    ----------
    record : dict
        What `measure.measure_float8` returns.
    """
    where = f"{record['device']}, {record['dtype']}, torch {record['torch']}"
    layers = Table(
        title=f"{where}: layers in FP8 beside 16 bits, router and quantisation of tokens included",
        caption="x: times as fast as 16 bits in the same rounds; x with weights: both passes "
        "where each micro-batch is a step",
    )
    for heading in ("shape", "routing", "recipe"):
        layers.add_column(heading, no_wrap=True)
    headings = [f"{part} {unit}" for part in FP8_PASSES for unit in ("ms", "x")]
    more = ("TFLOPS", "x with weights", "saved MiB", "error O", "error dW1")
    for heading in (*headings, *more):
        layers.add_column(heading, justify="right")
    steps = Table(title=f"{where}: the steps of a layer in FP8")
    for heading in ("shape", "step"):
        steps.add_column(heading, no_wrap=True)
    steps.add_column("us", justify="right")
    peers = Table(
        title=f"{where}: Guild in FP8 beside layers with PyTorch's products, a scale a row",
        caption="Guild x: how many times as fast Guild is in the same rounds",
    )
    for heading in ("shape", "routing", "peer"):
        peers.add_column(heading, no_wrap=True)
    for heading in ("both ms", "Guild x", "weights ms", "Guild x with weights"):
        peers.add_column(heading, justify="right")
    for case in record["cases"]:
        _add_layers(layers, case)
        _add_steps(steps, case)
        _add_peers(peers, case)
    return Group(layers, *(table for table in (peers, steps) if table.row_count))


def _add_layers(table: Table, case: dict[str, Any]) -> None:
    for place, name in enumerate(n for n in case["saved_bytes"] if n in case["figures"]):
        found = case["figures"][name]
        first = ["", ""] if place else [case["name"], case["routing"]]
        cells, tflops = [], found["both"]["tflops"]
        for part in FP8_PASSES:
            cells += [f"{found[part]['ms']['median']:.3f}", _ratio(found[part].get("speedup"))]
        cells += [
            f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}",
            _ratio(found.get("with_weights")),
            f"{case['saved_bytes'][name] / _MIB:.1f}",
            *(f"{case['errors'][name][n]:.1e}" for n in ("out", "w_up_gradient")),
        ]
        table.add_row(*first, name, *cells)
    if "weights" in case["figures"]:
        ms = case["figures"]["weights"]["ms"]["median"]
        table.add_row("", "", "weights, once a step", "", "", "", "", f"{ms:.3f}")
    table.add_section()


def _add_peers(table: Table, case: dict[str, Any]) -> None:
    peers = {name: found for name, found in case["figures"].items() if "guild" in found}
    for place, (name, found) in enumerate(peers.items()):
        first = ["", ""] if place else [case["name"], case["routing"]]
        both, weights = (found[part]["ms"]["median"] for part in ("both", "weights"))
        ours = [_ratio(found["guild"][part]) for part in ("both", "with_weights")]
        table.add_row(*first, name, f"{both:.3f}", ours[0], f"{weights:.3f}", ours[1])
    if peers:
        table.add_section()


def _add_steps(table: Table, case: dict[str, Any]) -> None:
    for place, (step, ms) in enumerate(case["figures"]["steps"].items()):
        table.add_row("" if place else case["name"], step, f"{1e3 * ms['median']:.1f}")
    table.add_section()


def _ratio(found: dict[str, float] | None) -> str:
    return "" if found is None else f"{found['median']:.2f}"
