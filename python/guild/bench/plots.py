"""The figures of benchmarks: bars of forward and backward time, lines of latency over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a server
import matplotlib.pyplot as plt  # noqa: E402

from guild.bench.decode.table import candidate_names, candidate_title  # noqa: E402
from guild.bench.form import form_words  # noqa: E402
from guild.bench.names import PASSES, TITLES  # noqa: E402

_COLOURS = {
    "guild": "#1f5fa8",
    "guild_sms": "#7fa8d4",
    "plain": "#d9822b",
    "compiled": "#d9822b",
    "eager": "#c9b458",
    "sonicmoe": "#7a4fa3",
    "bound": "#999999",
    "floor": "#cccccc",
}


def plot_bench(record: dict[str, Any], file: Path) -> None:
    """Bars of forward and backward time over the bound (milliseconds where there is none).

    Parameters
    ----------
    record : dict
        What `layers.measure` returns; each of its routings gets a panel for either pass.
    file : Path
        The PNG to write.
    """
    cases = [case for case in record["cases"] if case["figures"]]
    relative = bool(cases) and all("bound" in case["figures"] for case in cases)
    names = [n for n in TITLES if any(n in c["figures"] for c in cases)]
    names = [n for n in names if not (relative and n == "bound")]
    routings = list(dict.fromkeys(case["routing"] for case in cases)) or [""]
    most = max((sum(c["routing"] == r for c in cases) for r in routings), default=0)
    height = 3.5 if len(routings) == 1 else 2.6
    size = (max(5.0, 1.6 + 0.55 * most * max(1, len(names))), height * 2 * len(routings))
    figure, axes = plt.subplots(
        2 * len(routings), 1, figsize=size, layout="constrained", squeeze=False
    )
    figure.suptitle(f"{record['device']}, {record['dtype']}{form_words(record)}", fontsize=11)
    panels = [(routing, direction) for routing in routings for direction in PASSES]
    for axis, (routing, direction) in zip(axes[:, 0], panels, strict=True):
        shown = [case for case in cases if case["routing"] == routing]
        for place, name in enumerate(names):
            _plot_bars(axis, shown, name, direction, place, len(names), relative)
        axis.set_title(f"{routing} routing", fontsize=9)
        axis.set_ylabel(f"{direction}, " + ("time over the bound" if relative else "ms"))
        if relative:
            axis.axhline(1.0, color="black", linewidth=0.8)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xticks(range(len(shown)), [case["name"] for case in shown], fontsize=9)
    if names:
        axes[0, 0].legend(frameon=False, fontsize=9, ncols=len(names))
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _plot_bars(
    axis: plt.Axes,
    cases: list[dict[str, Any]],
    name: str,
    direction: str,
    place: int,
    places: int,
    relative: bool,
) -> None:
    bar, label = 0.8 / places, TITLES[name]
    for number, case in enumerate(cases):
        if name not in case["figures"]:
            continue
        found = case["figures"][name][direction]
        value = found["over_bound" if relative else "ms"]
        middle = value["median"]
        spread = [[middle - value["low"]], [value["high"] - middle]]
        at = number + (place - (places - 1) / 2) * bar
        axis.bar(at, middle, bar, color=_COLOURS[name], yerr=spread, label=label)
        label = None  # one entry in the legend
        axis.text(at, value["high"], f"{middle:.2f}", ha="center", va="bottom", fontsize=7)


def plot_decode(record: dict[str, Any], file: Path) -> None:
    """Latency over the number of tokens, a panel for every shape, routing and part.

    Parameters
    ----------
    record : dict
        What `decode.measure.measure_decode` returns.
    file : Path
        The PNG to write.
    """
    panels: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for case in record["cases"]:
        row = panels.setdefault((case["routing"], case["part"]), {})
        row.setdefault(case["name"], []).append(case)
    columns = list(dict.fromkeys(case["name"] for case in record["cases"]))
    size = (1.0 + 3.2 * len(columns), 0.8 + 2.8 * len(panels))
    figure, axes = plt.subplots(
        len(panels), len(columns), figsize=size, layout="constrained", squeeze=False
    )
    figure.suptitle(f"{record['device']}, {record['dtype']}{form_words(record)}", fontsize=11)
    names = candidate_names(record["cases"])
    for line, ((routing, part), shapes) in zip(axes, panels.items(), strict=True):
        for axis, column in zip(line, columns, strict=True):
            _plot_latencies(axis, shapes.get(column, []), names)
            axis.set_title(f"{column}, {routing}, {part}", fontsize=9)
        line[0].set_ylabel("us")
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _plot_latencies(axis: plt.Axes, cases: list[dict[str, Any]], names: list[str]) -> None:
    cases = sorted(cases, key=lambda case: case["shape"]["tokens"])
    tokens = [case["shape"]["tokens"] for case in cases]
    floors = [case["floor_us"] for case in cases]
    axis.plot(tokens, floors, color="black", linestyle=":", label="floor")
    for number, name in enumerate(names):
        there = [case for case in cases if name in case["figures"]]
        places = [case["shape"]["tokens"] for case in there]
        times = [case["figures"][name]["us"]["median"] for case in there]
        colour = _COLOURS.get(name, f"C{number}")
        axis.plot(places, times, marker=".", color=colour, label=candidate_title(name))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
