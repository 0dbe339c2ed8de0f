"""The figure of a training run: loss, load balance, and the difference of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import matplotlib

matplotlib.use("Agg")  # no display on a server
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from guild.train.compare import loss_differences, steps_of  # noqa: E402
from guild.train.names import NAMES  # noqa: E402

_COLOURS = {"fp8": "#2a8a4a", "guild": "#1f5fa8", "plain": "#d9822b"}
_SMOOTHING = 25
_MOST_LABELS = 8  # of layers: a longer legend would leave no room for the curves


def _smooth(values: list[float]) -> np.ndarray:
    """Mean over `_SMOOTHING` values around each one, as many before as after it.

    So the curve does not lag behind the data. Near the ends, and in a short run, fewer values are
    used.
    """
    count = len(values)
    half = min(_SMOOTHING, 1 + count // 16) // 2
    sums = np.concatenate(([0.0], np.cumsum(values)))
    at = np.arange(count)
    reach = np.minimum(half, np.minimum(at, count - 1 - at))
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)


def plot_run(rows: list[dict[str, Any]], title: str, file: Path | IO[bytes]) -> None:
    """Loss and load balance of a run, and with two runs the difference of their losses.

    Parameters
    ----------
    rows : list of dict
        The rows of metrics.jsonl.
    title : str
        First line of the figure.
    file : Path or file
        The PNG to write.
    """
    runs = [moe for moe in NAMES if steps_of(rows, moe)]
    panels = 3 if len(runs) == 2 else 2
    figure, axes = plt.subplots(1, panels, figsize=(5.2 * panels, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    _plot_loss(axes[0], rows, runs)
    _plot_load(axes[1], rows, runs[0])
    if panels == 3:
        _plot_difference(axes[2], rows, (runs[0], runs[1]))
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def _plot_loss(axis: plt.Axes, rows: list[dict[str, Any]], runs: list[str]) -> None:
    for moe in runs:
        steps = [row["step"] for row in steps_of(rows, moe)]
        losses = [row["loss"] for row in steps_of(rows, moe)]
        # The second curve is dashed: where the two agree, both stay visible.
        style = "-" if moe == runs[0] else "--"
        axis.plot(steps, losses, color=_COLOURS[moe], alpha=0.2, linewidth=0.7)
        axis.plot(steps, _smooth(losses), style, color=_COLOURS[moe], label=f"{NAMES[moe]}, train")
        checks = [row for row in rows if row["moe"] == moe and "validation_loss" in row]
        axis.plot(
            [row["step"] for row in checks],
            [row["validation_loss"] for row in checks],
            "o" if moe == runs[0] else "x",
            color=_COLOURS[moe],
            label=f"{NAMES[moe]}, held out",
        )
    axis.set_title("loss", fontsize=10)
    axis.set_ylabel("nats per byte")


def _plot_load(axis: plt.Axes, rows: list[dict[str, Any]], moe: str) -> None:
    run = steps_of(rows, moe)
    steps = [row["step"] for row in run]
    layers = list(zip(*(row["load"] for row in run), strict=True))
    every = -(-len(layers) // _MOST_LABELS)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(layers)))  # from first to last
    for layer, (loads, colour) in enumerate(zip(layers, colours, strict=True)):
        label = f"layer {layer}" if layer % every == 0 else None
        axis.plot(steps, _smooth(list(loads)), color=colour, label=label)
    axis.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axis.set_title(f"expert load, {NAMES[moe]}", fontsize=10)
    axis.set_ylabel("busiest expert / mean (1 is even)")


def _plot_difference(axis: plt.Axes, rows: list[dict[str, Any]], layers: tuple[str, str]) -> None:
    difference = np.abs(loss_differences(rows, layers))
    steps = np.arange(1, len(difference) + 1)
    label, equal = f"|{' - '.join(NAMES[moe] for moe in layers)}|", int((difference == 0).sum())
    if equal:  # a logarithmic axis cannot show zeros
        label += f", not drawn where 0 ({equal} of {len(difference)} steps)"
    drawn = np.where(difference > 0, difference, np.nan)
    axis.semilogy(steps, drawn, ".-", markersize=2, color="#555555", label=label)
    axis.set_title("difference of the training losses", fontsize=10)
    axis.set_ylabel("nats per byte")
