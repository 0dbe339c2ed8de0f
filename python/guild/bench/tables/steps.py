"""The tables that `guild bench --steps` prints: one per shape and routing, one line per step."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from guild.bench.form import form_words
from guild.bench.timing import spread_of

_HEADINGS = (
    "ms",
    "TFLOPS",
    "TB/s",
    "floor ms",
    "of floor",
    "bmm ms",
    "over bmm",
    "QuACK ms",
    "Guild / QuACK",
)


def steps_table(record: dict[str, Any]) -> Group:
    """Lay out a record of steps.

    Parameters
    ----------
    record : dict
        What `steps.measure_steps` returns.
    """
    return Group(*(_case_table(case, record) for case in record["cases"] if "steps" in case))


def _case_table(case: dict[str, Any], record: dict[str, Any]) -> Table:
    machine = case["machine"]
    rates = (
        f"{machine['matrix_size']}^3 product {machine['matrix_tflops']:.3g} TFLOPS, "
        f"copy {machine['copy_tbps']:.3g} TB/s"
    )
    table = Table(
        title=f"{case['name']} ({','.join(map(str, case['shape'].values()))}), {case['routing']} "
        f"routing, {record['dtype']}{form_words(record)}, {record['device']}, medians of "
        f"{record['rounds']} rounds",
        caption="floor: the longer of FLOPs and bytes at this run's best rates "
        f"({rates}); bmm: the same product for balanced experts{_about_quack(case)}",
    )
    table.add_column("step", no_wrap=True)
    quack = any("quack" in step for step in case["steps"].values())
    for heading in _HEADINGS if quack else _HEADINGS[:-2]:
        table.add_column(heading, justify="right")
    for which, total in case["passes"].items():
        for name, step in case["steps"].items():
            if step["pass"] == which:
                table.add_row(name, *step_cells(step, quack))
        bound, over = total["bound_ms"]["median"], total["over_bound"]["median"]
        sums = [f"{total['steps_ms']['median']:.3f}", "", "", "", "", f"{bound:.3f}", f"{over:.2f}"]
        table.add_row(f"{which}, sum", *sums, style="bold")
        table.add_section()
    return table


def _about_quack(case: dict[str, Any]) -> str:
    """The note that marks QuACK's times from another run, if there are any."""
    if not any("scaled_ms" in step.get("quack", {}) for step in case["steps"].values()):
        return ""
    return "; ~: QuACK's recorded time, scaled by the ratio of the two runs' cuBLAS bounds"


def step_cells(step: dict[str, Any], quack: bool) -> list[str]:
    """A step's figures as text, in the order of the headings; empty where there is none."""
    ms = step["ms"]
    cells = [
        f"{ms['median']:.4f} {spread_of(ms)}",
        f"{step['tflops']:.3g}" if step["tflops"] else "",
        f"{step['tbps']:.3g}",
        f"{step['floor_ms']:.4f}",
        f"{step['share_of_floor']['median']:.2f}",
        f"{step['bmm_ms']['median']:.4f}" if "bmm_ms" in step else "",
        f"{step['over_bmm']['median']:.3f}" if "over_bmm" in step else "",
    ]
    if not quack:
        return cells
    other = step.get("quack")
    if other is None:
        return [*cells, "", ""]
    measured = "measured_ms" in other
    time = f"{other['measured_ms']['median']:.4f}" if measured else f"~{other['scaled_ms']:.4f}"
    return [*cells, time, f"{other['over']['median']:.3f}"]
