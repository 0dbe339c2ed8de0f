"""Measures every step's error for docs/numerics.md: `python tests/python/support/numerics.py`.

Prints Markdown tables: the op's relative error against float64, that of the same computation in
float32 rounded where the algorithm stores 16 bits, and their ratio. This is done step by step from
the rounded computation's tensors, then for a whole layer, whose errors add up along the way. With
`--document` the tables also replace those in a file.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import torch
from torch import Tensor

import guild
from guild.provenance import commit, short_commit
from layers import ACTIVATIONS, Case, Layer, make_layer
from op_steps import Steps
from oracle.experts import halves
from oracle.steps import compute, compute_rounded
from tolerance import allowed_error, relative_error

STEPS = {
    "up projection, H": ("h_0", "h_1"),
    "up projection, A": ("a",),
    "down projection, Y": ("y",),
    "combine, O": ("o",),
    "down gradient, dH": ("dh_0", "dh_1"),
    "down gradient, A'": ("a_scaled",),
    "down gradient, db1": ("db_0", "db_1"),
    "down gradient, db2": ("db_down",),
    "score gradient, dS": ("dscores",),
    "down weight gradient, dW2": ("dw_down",),
    "up weight gradient, dW1": ("dw_0", "dw_1"),
    "up gradient, dX by row": ("dx_rows",),
    "combine gradient, dX": ("dx",),
    "bias gradient, db1": ("db_0", "db_1"),
    "bias gradient, db2": ("db_down",),
}
WHOLE = {
    "O": ("o",),
    "dX": ("dx",),
    "dS": ("dscores",),
    "dW1": ("dw_0", "dw_1"),
    "dW2": ("dw_down",),
    "db1": ("db_0", "db_1"),
    "db2": ("db_down",),
}
DOCUMENTED = "writes what follows:\n\n"  # in a document the tables come after this


def whole_layer(layer: Layer) -> dict[str, Tensor]:
    """Output and gradients of `routed_experts`, by the oracle's names."""
    arguments = layer.arguments("concatenated")
    x, scores = layer.x.detach().requires_grad_(), layer.scores.detach().requires_grad_()
    out = guild.routed_experts(x, layer.ids, scores, **arguments)
    out.backward(layer.dout)
    gradients = {name: t.grad for name, t in arguments.items() if isinstance(t, Tensor)}
    dw = halves(gradients["w_up"], 1, "concatenated")
    db = halves(gradients["b_up"], 1, "concatenated")
    return {
        "o": out,
        "dx": x.grad,
        "dscores": scores.grad,
        "dw_0": dw[0],
        "dw_1": dw[1],
        "db_0": db[0],
        "db_1": db[1],
        "dw_down": gradients["w_down"],
        "db_down": gradients["b_down"],
    }


def by_step(steps: Steps) -> dict[str, dict[str, Tensor]]:
    """The results that each line of `STEPS` refers to."""
    return {
        label: steps.biases if label.startswith("down gradient, db") else steps.results
        for label in STEPS
    }


def table(
    title: str,
    names: dict[str, tuple[str, ...]],
    results: dict[str, dict[str, Tensor]],
    rounded: dict[str, Tensor],
    truth: dict[str, Tensor],
    dtype: torch.dtype,
) -> tuple[str, list[str]]:
    """One table in Markdown, and the lines that exceed what the tests allow."""
    where = truth["o"].device
    lines = [f"| {title} | error | rounding alone | ratio |", "|---|---|---|---|"]
    failures = []

    def whole(tensors: dict[str, Tensor], parts: tuple[str, ...]) -> Tensor:
        return torch.cat([tensors[part].detach().to(where).double() for part in parts])

    for label, parts in names.items():
        exact = whole(truth, parts)
        error = relative_error(whole(results[label], parts), exact)
        rounding = relative_error(whole(rounded, parts), exact)
        lines.append(f"| {label} | {error:.3e} | {rounding:.3e} | {error / rounding:.2f} |")
        allowed = allowed_error(whole(rounded, parts), exact, dtype)
        if error > allowed:
            failures.append(f"{title}, {label}: expected at most {allowed:.3e}, got {error:.3e}")
    return "\n".join(lines), failures


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and fail if an error is above what the tests allow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--reference", choices=("cpu", "cuda"), default="cpu", help="where it runs")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="swiglu")
    parser.add_argument("--sizes", default="1024,512,256,16,4", help="T,H,I,E,K")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write the tables there")
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]
    case = Case("numerics", *sizes, "random", frozenset())
    dtype = getattr(torch, options.dtype)
    layer = make_layer(case, ACTIVATIONS[options.activation], dtype, options.device)
    rounded = compute_rounded(layer, options.reference)
    truth = compute(layer, rounded, options.reference)
    steps, failures = table("step", STEPS, by_step(Steps(layer, rounded)), rounded, truth, dtype)
    truth = compute(layer, device=options.reference)
    results = dict.fromkeys(WHOLE, whole_layer(layer))
    whole, more = table("whole layer", WHOLE, results, rounded, truth, dtype)
    text = "\n\n".join([source(options), steps, whole])
    print(text)
    if failures or more:
        raise SystemExit("\n".join(failures + more))
    if options.document is not None:
        write(text, options.document)


def source(options: argparse.Namespace) -> str:
    """What was measured, where and when."""
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return (
        f"{options.dtype}, {options.activation}, T, H, I, E, K = "
        f"{options.sizes.replace(',', ', ')}; {where}, torch {torch.__version__}, "
        f"{datetime.date.today()}, commit {short_commit(commit())}."
    )


def write(text: str, document: Path) -> None:
    """Replace the document's tables."""
    before, found, _ = document.read_text().partition(DOCUMENTED)
    if not found:
        raise SystemExit(f"document: expected {DOCUMENTED.strip()!r} in {document}")
    document.write_text(f"{before}{found}{text}\n")


if __name__ == "__main__":
    main()
