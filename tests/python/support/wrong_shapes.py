"""Correct calls, and calls with wrong shapes: what test_errors.py runs.

Every entry of a table is (call, exception, text of its message).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

import guild

E, H, I, T, K = 4, 32, 16, 6, 2  # noqa: E741 - the paper's name for the expert's width


def right(device: str) -> SimpleNamespace:
    """The arguments of correct calls."""
    dtype = torch.bfloat16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    ids = torch.arange(T * K, device=device).view(T, K) % E
    return SimpleNamespace(
        x=normal(T, H),
        ids=ids,
        weights=torch.rand(T, K, device=device),
        up=normal(E, 2 * I, H),
        down=normal(E, H, I),
        b_up=normal(E, 2 * I),
        b_down=normal(E, H),
        offsets=torch.tensor([0, 1, 2, 4, T], dtype=torch.int32, device=device),
        offs=torch.tensor([1, 2, 4, T], dtype=torch.int32, device=device),
        logits=torch.randn(T, E, device=device),
        a=normal(T, I),
    )


def routed(r: SimpleNamespace, **changed: object) -> object:
    """`routed_experts` with some arguments changed."""
    given = {
        "x": r.x,
        "topk_ids": r.ids,
        "topk_weights": r.weights,
        "w_up": r.up,
        "w_down": r.down,
        "b_up": r.b_up,
        "b_down": r.b_down,
    }
    return guild.routed_experts(**{**given, **changed})


def mlp(r: SimpleNamespace, **changed: object) -> object:
    """`experts_mlp` with some arguments changed."""
    given = {"x_sorted": r.x, "offsets": r.offsets, "w_up": r.up, "w_down": r.down}
    return guild.experts_mlp(**{**given, **changed})


def product(r: SimpleNamespace, **changed: object) -> object:
    """`grouped_mm`, groups along rows, with some arguments changed."""
    return guild.grouped_mm(**{"mat_a": r.x, "mat_b": r.up.mT, "offs": r.offs, **changed})


def pair_up(r: SimpleNamespace, **changed: object) -> object:
    """`grouped_mm_swiglu` with some arguments changed."""
    return guild.grouped_mm_swiglu(**{"x": r.x, "w_up": r.up.mT, "offs": r.offs, **changed})


def pair_down(r: SimpleNamespace, **changed: object) -> object:
    """`grouped_mm_downproj` with some arguments changed."""
    given = {"swiglu_out": r.a, "w_down": r.down.mT, "offs": r.offs}
    return guild.grouped_mm_downproj(**{**given, **changed})


def elsewhere(t: torch.Tensor) -> torch.Tensor:
    """The tensor on another device: meta exists everywhere."""
    return t.to("meta")


Wrong = tuple[Callable[[SimpleNamespace], object], type[Exception], str]

SHAPES: dict[str, Wrong] = {
    "x 1-d": (
        lambda r: routed(r, x=r.x[0]),
        ValueError,
        r"x: expected 2 dimensions \(tokens, hidden\), got shape \(32,\)",
    ),
    "w_up too narrow": (
        lambda r: routed(r, w_up=r.up[:, : 2 * I - 2]),
        ValueError,
        r"w_up: expected shape \(4, 32, 32\), got \(4, 30, 32\)",
    ),
    "w_up without its up half": (
        lambda r: routed(r, w_up=r.up[:, :I]),
        ValueError,
        r"w_up: expected shape \(4, 32, 32\), got \(4, 16, 32\); .* with a gate",
    ),
    "w_up of other experts": (
        lambda r: routed(r, w_up=r.up[:3]),
        ValueError,
        r"w_up: expected shape \(4, 32, 32\), got \(3, 32, 32\)",
    ),
    "w_down transposed": (
        lambda r: routed(r, w_down=r.down.mT),
        ValueError,
        r"w_down: expected shape \(4, 32, 16\), got \(4, 16, 32\); pass transposed=True",
    ),
    "w_down not transposed": (
        lambda r: routed(r, w_up=r.up.mT, transposed=True),
        ValueError,
        r"w_down: expected shape \(4, 16, 32\), got \(4, 32, 16\); leave transposed out",
    ),
    "square w_down, w_up transposed": (
        lambda r: routed(r, w_up=r.up.mT.repeat(1, 1, 2), w_down=r.down.repeat(1, 1, 2), b_up=None),
        ValueError,
        r"w_up: expected shape \(4, 64, 32\), got \(4, 32, 64\); pass transposed=True if",
    ),
    "square w_down, w_up not transposed": (
        lambda r: mlp(r, w_up=r.up.repeat(1, 2, 1), w_down=r.down.repeat(1, 1, 2), transposed=True),
        ValueError,
        r"w_up: expected shape \(4, 32, 64\), got \(4, 64, 32\); leave transposed out if",
    ),
    "w_down of another hidden than x_sorted": (
        lambda r: mlp(r, w_down=r.down[:, :24]),
        ValueError,
        "w_down: expected .*; hidden is 32 in x_sorted",
    ),
    "w_down of another hidden": (
        lambda r: routed(r, w_down=r.down[:, :24]),
        ValueError,
        r"w_down: expected shape \(4, 32, 16\), got \(4, 24, 16\); hidden is 32 in x",
    ),
    "w_down 2-d": (
        lambda r: routed(r, w_down=r.down[0]),
        ValueError,
        r"w_down: expected 3 dimensions \(experts, hidden, intermediate\), got shape \(32, 16\)",
    ),
    "b_up too short": (
        lambda r: routed(r, b_up=r.b_up[:, :I]),
        ValueError,
        r"b_up: expected shape \(4, 32\), got \(4, 16\)",
    ),
    "b_down of other experts": (
        lambda r: routed(r, b_down=r.b_down[1:]),
        ValueError,
        r"b_down: expected shape \(4, 32\), got \(3, 32\)",
    ),
    "three weights": (
        lambda r: routed(r, w_up=(r.up, r.up, r.up)),
        ValueError,
        r"w_up: expected a pair \(gate, up\) or a list of one tensor per expert, got 3 tensors",
    ),
    "a pair without a gate": (
        lambda r: routed(r, w_up=(r.up, r.up), activation="relu_ungated"),
        ValueError,
        "w_up: expected one tensor without a gate or a list of one tensor per expert, got 2",
    ),
    "half of a pair": (
        lambda r: routed(r, w_up=(r.up[:, :8], r.up[:, :I]), b_up=None),
        ValueError,
        r"w_up\[0\] \(gate\): expected shape \(4, 16, 32\), got \(4, 8, 32\)",
    ),
    "residual of other tokens": (
        lambda r: routed(r, residual=r.x[1:]),
        ValueError,
        r"residual: expected shape \(6, 32\), got \(5, 32\)",
    ),
    "ids of other tokens": (
        lambda r: routed(r, topk_ids=r.ids[1:]),
        ValueError,
        r"topk_ids: expected 6 tokens as in x, got shape \(5, 2\)",
    ),
    "weights of another top_k": (
        lambda r: routed(r, topk_weights=r.weights[:, :1]),
        ValueError,
        r"topk_weights: expected shape \(6, 2\), got \(6, 1\)",
    ),
    "ends for starts": (
        lambda r: mlp(r, offsets=r.offs),
        ValueError,
        r"offsets: expected shape \(5,\), got \(4,\); it holds starts and the last end",
    ),
    "offs of other groups": (
        lambda r: product(r, offs=r.offsets),
        ValueError,
        r"offs: expected shape \(4,\), got \(5,\)",
    ),
    "inner sizes differ": (
        lambda r: product(r, mat_b=r.down.mT),
        ValueError,
        r"mat_b: expected 32 rows to match the columns of mat_a \(6, 32\), got shape \(4, 16, 32\)",
    ),
    "1-d operand": (
        lambda r: product(r, mat_a=r.x[0]),
        ValueError,
        r"mat_a: expected 2 or 3 dimensions, got shape \(32,\)",
    ),
    "groups without ends": (
        lambda r: product(r, offs=None),
        ValueError,
        "offs: expected the end of each group, int32",
    ),
    "ends without groups": (
        lambda r: product(r, mat_a=r.down.mT, mat_b=r.up[:, :, :16].mT.mT),
        ValueError,
        r"offs: expected None where both operands have 3 dimensions, got shape \(4,\)",
    ),
    "pair's weight not a view": (
        lambda r: pair_down(r, w_down=r.down),
        ValueError,
        r"w_down: expected shape \(4, 16, outputs\).* got \(4, 32, 16\); pass w_down.mT",
    ),
    "odd columns": (
        lambda r: pair_up(r, w_up=r.up.mT[:, :, :31]),
        ValueError,
        r"w_up: expected an even number of columns",
    ),
    "bias of the other half": (
        lambda r: pair_up(r, bias=r.b_up[:, :I]),
        ValueError,
        r"bias: expected shape \(4, 32\), got \(4, 16\)",
    ),
    "out of another shape": (
        lambda r: product(r, out=torch.empty_like(r.a)),
        ValueError,
        r"out: expected shape \(6, 32\), got \(6, 16\)",
    ),
}
