"""Draws records of `guild.bench.parallel`: TFLOPS per GPU over the shapes, engines side by side.

    python -m guild.bench.parallel_plot results/parallel.json other.json --out parallel.png

Engines of several records, timed in separate runs, stand side by side; the GPU that has only a
rank's share of the experts is the mean of those runs.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a server
import matplotlib.pyplot as plt  # noqa: E402

from guild.bench.names import PASSES  # noqa: E402
from guild.bench.presets import Shape  # noqa: E402
from guild.bench.results import make_folder, read_json, replacing  # noqa: E402

_ALONE = "alone"
_ENGINES = {
    "nccl": ("engine nccl", "#c9b458"),
    "torchtitan": ("torchtitan, all-to-all", "#b07aa1"),
    "torchtitan-async": ("torchtitan, MinimalAsyncEP", "#8c6bb1"),
    "torch": ("torch's all-to-all in symmetric memory", "#d9822b"),
    "deepep": ("DeepEP", "#7fb77e"),
    "deepep-static": ("DeepEP, the host waits for nothing", "#3f8f4f"),
    "peer": ("engine peer", "#1f5fa8"),
    _ALONE: ("one GPU alone, nothing sent", "#999999"),
}

Figures = dict[str, dict[str, dict[str, float]]]


def figures_of(records: list[dict[str, Any]]) -> Figures:
    """TFLOPS by pass, engine and shape; the last record of a shape counts, "alone" is the mean.

    Parameters
    ----------
    records : list of dict
        What `parallel.measure_parallel` returns.

    Returns
    -------
    dict
        Engines in the order of the plot, without those that no record has.
    """
    found: Figures = {name: {engine: {} for engine in _ENGINES} for name in PASSES}
    alone: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for case in record["cases"]:
            flops = dict(zip(PASSES, Shape(*case["shape"]).flops(), strict=True))
            for call, by_round in case["milliseconds"].items():
                name, _, engine = call.partition(" ")
                if engine == _ALONE:
                    times = [statistics.fmean(ranks) for ranks in by_round]
                    tflops = flops[name] / statistics.median(times) / 1e9
                    alone.setdefault((name, case["name"]), []).append(tflops)
                else:
                    engine = engine or record["engines"][0]
                    found[name][engine][case["name"]] = case["tflops"][call]
    for (name, shape), values in alone.items():
        found[name][_ALONE][shape] = statistics.fmean(values)
    return {
        name: {engine: values for engine, values in engines.items() if values}
        for name, engines in found.items()
    }


def plot_parallel(records: list[dict[str, Any]], file: Path) -> None:
    """A panel for each pass, a group of bars for each shape.

    Parameters
    ----------
    records : list of dict
        See `figures_of`.
    file : Path
        The PNG to write.
    """
    figures = {name: engines for name, engines in figures_of(records).items() if engines}
    shapes = list(dict.fromkeys(case["name"] for record in records for case in record["cases"]))
    engines = list(dict.fromkeys(engine for found in figures.values() for engine in found))
    size = (max(6.0, 1.5 + 0.5 * len(shapes) * len(engines)), 3.3 * len(figures))
    figure, axes = plt.subplots(len(figures), 1, figsize=size, layout="constrained", squeeze=False)
    first = records[0]
    device = first["provenance"]["device"]
    figure.suptitle(f"{first['ranks']} x {device}, {first['routing']} routing", fontsize=11)
    bar = 0.8 / len(engines)
    for axis, (name, found) in zip(axes[:, 0], figures.items(), strict=True):
        for place, engine in enumerate(engines):
            title, colour = _ENGINES[engine]
            for number, shape in enumerate(shapes):
                if shape not in found.get(engine, {}):
                    continue
                at, value = number + (place - (len(engines) - 1) / 2) * bar, found[engine][shape]
                axis.bar(at, value, bar, color=colour, label=title)
                axis.text(at, value, f"{value:.0f}", ha="center", va="bottom", fontsize=7)
                title = None  # one entry in the legend
        axis.set_ylabel(f"{name}, TFLOPS a GPU")
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xticks(range(len(shapes)), shapes, fontsize=9)
    handles, titles = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, titles, frameon=False, fontsize=8, ncols=2, loc="outside lower center")
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """The command; see the top of the file."""
    parser = argparse.ArgumentParser(
        prog="python -m guild.bench.parallel_plot", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "records", nargs="+", type=Path, help="files that guild.bench.parallel wrote"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    args = parser.parse_args(arguments)
    try:
        records = [read_record(file) for file in args.records]
        make_folder(args.out.parent)
        with replacing(args.out) as unfinished:
            plot_parallel(records, unfinished)
    except ValueError as error:
        parser.error(str(error))


def read_record(file: Path) -> dict[str, Any]:
    """A record that `guild.bench.parallel` wrote.

    Raises
    ------
    ValueError
        If the file cannot be read or is not such a record.
    """
    record = read_json(file)
    try:
        heads = record["ranks"], record["provenance"]["device"], record["routing"]
        drawn = all(figures_of([record]).values())
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        heads, drawn = (), False
    if not (heads and drawn):
        raise ValueError(f"expected a record that guild.bench.parallel wrote, got {str(file)!r}")
    return record


if __name__ == "__main__":
    main()
