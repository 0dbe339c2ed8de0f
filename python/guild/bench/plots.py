"""The figure of a benchmark: bars of forward and backward time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a server
import matplotlib.pyplot as plt  # noqa: E402

from .names import TITLES  # noqa: E402

_COLOURS = {
    "guild": "#1f5fa8",
    "guild_sms": "#7fa8d4",
    "plain": "#d9822b",
    "compiled": "#d9822b",
    "eager": "#c9b458",
    "bound": "#999999",
    "floor": "#cccccc",
}


def plot_bench(record: dict[str, Any], file: Path) -> None:
    """Bars of forward and backward time over the bound (milliseconds where there is none).

    Parameters
    ----------
    record : dict
        What `layers.measure` returns.
    file : Path
        The PNG to write.
    """
    cases = [case for case in record["cases"] if case["figures"]]
    relative = bool(cases) and all("bound" in case["figures"] for case in cases)
    names = [n for n in TITLES if any(n in c["figures"] for c in cases)]
    names = [n for n in names if not (relative and n == "bound")]
    width = max(5.0, 1.6 + 0.55 * len(cases) * max(1, len(names)))
    figure, axes = plt.subplots(2, 1, figsize=(width, 7.0), layout="constrained", sharex=True)
    figure.suptitle(f"{record['device']}, {record['dtype']}", fontsize=11)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        for place, name in enumerate(names):
            _plot_bars(axis, cases, name, direction, place, len(names), relative)
        axis.set_ylabel(f"{direction}, " + ("time over the bound" if relative else "ms"))
        if relative:
            axis.axhline(1.0, color="black", linewidth=0.8)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    several = len({case["routing"] for case in cases}) > 1
    labels = [c["name"] + (f"\n{c['routing']}" if several else "") for c in cases]
    axes[1].set_xticks(range(len(cases)), labels, fontsize=9)
    axes[0].legend(frameon=False, fontsize=9, ncols=len(names) or 1)
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
