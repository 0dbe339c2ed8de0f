"""What `guild train --compare` and `--fp8` conclude from two interleaved runs: speeds, agreement.

Both models train in one process, a round of the first and a round of the second in turn, with the
order swapped every round. Step times are compared within a round, so a machine that speeds up
or slows down during the run moves both sides of a ratio.
"""

from __future__ import annotations

import statistics
from typing import Any

AGREEMENT_STEPS = 50

Rows = list[dict[str, Any]]


def steps_of(rows: Rows, moe: str) -> Rows:
    """The training rows of one layer, in order of steps."""
    return [row for row in rows if row["moe"] == moe and "loss" in row]


def mean_loss(rows: Rows, moe: str, last: int) -> float:
    """Mean training loss of the `last` steps."""
    losses = [row["loss"] for row in steps_of(rows, moe)]
    return statistics.fmean(losses[-last:])


def tokens_per_second(rows: Rows, moe: str, tokens_per_step: int) -> float:
    """Median over the steps."""
    return tokens_per_step / statistics.median(row["seconds"] for row in steps_of(rows, moe))


def loss_differences(rows: Rows, layers: tuple[str, str]) -> list[float]:
    """The first layer's loss minus the second's, step by step, in nats per byte."""
    pairs = zip(*(steps_of(rows, moe) for moe in layers), strict=True)
    return [ours["loss"] - theirs["loss"] for ours, theirs in pairs]


def comparison(
    rows: Rows,
    tokens_per_step: int,
    layers: tuple[str, str] = ("guild", "plain"),
    timed: Rows | None = None,
) -> dict[str, Any]:
    """Speeds, their ratio and the agreement of the two curves.

    timed: the rows that speeds are of; by default all.

    Returns
    -------
    dict
        `step_time_ratio` is the median over the steps of the first layer's time over the second's,
        its spread the first and the third quartile; times in milliseconds, losses in nats per byte.
    """
    timed = rows if timed is None else timed
    ours, theirs = (steps_of(timed, moe) for moe in layers)
    first, second = layers
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(ours, theirs, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    early = [abs(value) for value in loss_differences(rows, layers)[:AGREEMENT_STEPS]]
    return {
        f"{first}_step_ms": 1e3 * statistics.median(row["seconds"] for row in ours),
        f"{second}_step_ms": 1e3 * statistics.median(row["seconds"] for row in theirs),
        f"{first}_tokens_per_second": tokens_per_second(timed, first, tokens_per_step),
        f"{second}_tokens_per_second": tokens_per_second(timed, second, tokens_per_step),
        "step_time_ratio": statistics.median(ratios),
        "step_time_ratio_quartiles": [quartiles[0], quartiles[2]],
        "largest_loss_difference": max(early),
        "largest_loss_difference_steps": len(early),
    }
