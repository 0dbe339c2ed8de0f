"""Layers to test on, from tests/cases.csv and tests/activations.csv: inputs in every layout."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from guild import Activation

_TESTS = Path(__file__).resolve().parents[2]
_KINDS = {"gelu_erf": "gelu", "relu_squared": "relu2"}  # C++ names to Python's

LAYOUTS = (
    "concatenated",
    "interleaved",
    "concatenated_transposed",
    "interleaved_transposed",
    "separate",
    "separate_interleaved",
)


@dataclass(frozen=True)
class Case:
    """One line of tests/cases.csv."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    routing: str
    flags: frozenset[str]

    def fits(self, device: str) -> bool:
        """Whether the device's backend supports these sizes."""
        return device == "cpu" or "cpu" not in self.flags

    def has_matrix(self, device: str) -> bool:
        """Whether the device runs it in every activation, layout and dtype."""
        return (
            "matrix" in self.flags
            and self.fits(device)
            and (device == "cuda" or "cuda" not in self.flags)
        )


def _rows(name: str) -> list[dict[str, str]]:
    lines = (_TESTS / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if line and not line.startswith("#")))


def _read_cases() -> dict[str, Case]:
    sizes = ("tokens", "hidden", "intermediate", "experts", "top_k")
    return {
        row["name"]: Case(
            row["name"],
            *(int(row[size]) for size in sizes),
            row["routing"],
            frozenset(row["flags"].split()),
        )
        for row in _rows("cases.csv")
    }


def _read_activations() -> dict[str, Activation]:
    return {
        row["name"]: Activation(
            _KINDS.get(row["kind"], row["kind"]),
            gated=row["gated"] == "1",
            **{name: float(row[name]) for name in ("alpha", "limit", "up_offset")},
            clamp_after=row["clamp_after"] == "1",
        )
        for row in _rows("activations.csv")
    }


CASES = _read_cases()
ACTIVATIONS = _read_activations()


def _choose_ids(case: Case, draw: torch.Generator) -> Tensor:
    """int64 (T, K) expert ids of a case's routing."""
    tokens, experts, top_k = case.tokens, case.experts, case.top_k
    slots = torch.arange(tokens * top_k).view(tokens, top_k)
    random = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :top_k]
    if case.routing == "random":
        return random
    if case.routing == "balanced":
        return slots % experts
    if case.routing == "one":
        return torch.full((tokens, top_k), experts // 2)
    if case.routing == "even":
        return random // 2 * 2
    if case.routing == "sentinel":
        outside = torch.rand(tokens, top_k, generator=draw) < 0.25
        sentinel = torch.where(slots % 2 == 0, experts, -1)
        return torch.where(outside, sentinel, random)
    if case.routing == "none":
        return torch.where(slots % 3 == 0, -7, experts + slots % 5)
    counts = torch.tensor([int(count) for count in case.routing.split("|")])
    order = torch.randperm(tokens * top_k, generator=draw)
    if "sorted" in case.flags:
        order = torch.arange(tokens * top_k)
    return torch.arange(experts).repeat_interleave(counts)[order].view(tokens, top_k)


@dataclass
class Layer:
    """A layer's inputs in the test's dtype and on its device; gate and up are kept apart."""

    case: Case
    activation: Activation
    x: Tensor  # (T, H)
    ids: Tensor  # (T, K) int64
    scores: Tensor  # (T, K)
    gate: Tensor | None  # (E, I, H)
    up: Tensor  # (E, I, H), the only one without a gate
    down: Tensor  # (E, H, I)
    gate_bias: Tensor | None  # (E, I)
    up_bias: Tensor | None  # (E, I)
    down_bias: Tensor | None  # (E, H)
    dout: Tensor  # (T, H)

    def arguments(self, layout: str) -> dict:
        """Keyword arguments of `routed_experts` in a layout; weights and biases are new leaves."""
        order = "interleaved" if "interleaved" in layout else "concatenated"
        transposed = layout.endswith("transposed")

        def leaf(weight: Tensor | None, flip: bool = False) -> Tensor | None:
            if weight is None:
                return None
            return (weight.mT.contiguous() if flip else weight).detach().requires_grad_()

        if "separate" in layout:
            w_up = (leaf(self.gate), leaf(self.up))
        else:
            w_up = leaf(pack(self.gate, self.up, 1, order), transposed)
        bias = None if self.up_bias is None else pack(self.gate_bias, self.up_bias, 1, order)
        return {
            "w_up": w_up,
            "w_down": leaf(self.down, transposed),
            "b_up": leaf(bias),
            "b_down": leaf(self.down_bias),
            "activation": self.activation,
            "order": order,
            "transposed": transposed,
        }


def moved(t: Tensor, by: int) -> Tensor:
    """A copy that begins `by` elements into its memory."""
    return torch.cat((t.new_empty(by), t.flatten()))[by:].view(t.shape)


def pack(gate: Tensor | None, up: Tensor, dim: int, order: str) -> Tensor:
    """Gate and up as one tensor along `dim`."""
    if gate is None:
        return up
    if order == "concatenated":
        return torch.cat((gate, up), dim)
    return torch.stack((gate, up), dim + 1).flatten(dim, dim + 1)


def make_layer(
    case: Case,
    activation: Activation,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    bias: bool = True,
    seed: int = 0,
) -> Layer:
    """Fresh random normals, scaled so that pre-activations have variance about 1."""
    draw = torch.Generator().manual_seed(seed)
    experts, hidden, inner = case.experts, case.hidden, case.intermediate

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=draw, dtype=torch.float64) * scale
        return values.to(dtype).to(device)

    def strided(rows: int, width: int) -> Tensor:
        if "strided" not in case.flags:
            return normal(rows, width)
        return normal(rows, width + 16)[:, 8 : 8 + width]  # 16-byte aligned in 16 bits

    gated = activation.gated
    scores = torch.rand(case.tokens, case.top_k, generator=draw, dtype=torch.float64)
    return Layer(
        case=case,
        activation=activation,
        x=strided(case.tokens, hidden),
        ids=_choose_ids(case, draw).contiguous().to(device),
        scores=scores.to(torch.float64 if dtype == torch.float64 else torch.float32).to(device),
        gate=normal(experts, inner, hidden, scale=hidden**-0.5) if gated else None,
        up=normal(experts, inner, hidden, scale=hidden**-0.5),
        down=normal(experts, hidden, inner, scale=inner**-0.5),
        gate_bias=normal(experts, inner) if bias and gated else None,
        up_bias=normal(experts, inner) if bias else None,
        down_bias=normal(experts, hidden) if bias else None,
        dout=strided(case.tokens, hidden),
    )
