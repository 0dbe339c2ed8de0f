"""Low-rank terms in the steps: T B^T is what further columns of the operands would add."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from guild._torch.low_rank import _like as as_the_weight_lies
from guild._torch.operators import ops
from layers import ACTIVATIONS
from tolerance import allowed_error, relative_error

# More than a tile's rows and columns, an empty expert, rows of no expert; H fills no whole step.
TOKENS, HIDDEN, INNER, EXPERTS = 90, 136, 264, 4
ENDS = (0, 130, 130, 137, 300)
ROWS = 305

# name: activation, order of the columns of H, gate and up as two weights
KINDS = {
    "swiglu": ("swiglu", False, False),
    "gpt_oss": ("gpt_oss", True, False),
    "a pair": ("geglu_tanh", False, True),
    "no gate": ("relu_squared", False, False),
}


class Operands(NamedTuple):
    """Of one product: rows by token or by row, the weight (E, outputs, inputs), T and B."""

    x: Tensor
    weight: Tensor
    t: Tensor
    b: Tensor

    def to(self, device: str, dtype: torch.dtype) -> Operands:
        return Operands(*(t.to(dtype).to(device) for t in self))

    def joined(self, row_token: Tensor | None) -> tuple[Tensor, Tensor]:
        """[X, T] by row and [W, B]."""
        rows = self.x if row_token is None else self.x[row_token]
        return torch.cat((rows, self.t), 1), torch.cat((self.weight, self.b), 2)


def operands(rows: int, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> Operands:
    draw = torch.Generator().manual_seed(rank)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=draw, dtype=torch.float64) * scale
        return values.to(dtype).double()

    return Operands(
        normal(rows, inputs),
        normal(EXPERTS, outputs, inputs, scale=inputs**-0.5),
        normal(ROWS, rank),
        normal(EXPERTS, outputs, rank, scale=rank**-0.5),
    )


def laid_out(weight: Tensor, transposed: bool) -> Tensor:
    """(E, outputs, inputs) as a checkpoint has it: transposed, (E, inputs, outputs)."""
    return weight.mT.contiguous() if transposed else weight.contiguous()


def compare(run: Callable[..., list[Tensor]], given: Operands, device: str, gathered: bool) -> None:
    """The step with a term beside itself on joined operands, in float64 and in the same dtype."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    places = torch.tensor(ENDS, dtype=torch.int32)
    token = torch.arange(ROWS, dtype=torch.int32) * 7 % TOKENS if gathered else None
    at = places.to(device), None if token is None else token.to(device)
    got = run(given.to(device, dtype), *at, True)
    joined = Operands(*given.joined(token), given.t, given.b)
    truth = run(joined, places, None, False)
    rounded = run(joined.to("cpu", dtype), places, None, False)
    for value, true, near in zip(got, truth, rounded, strict=True):
        value, true, near = (v[: ENDS[-1]].cpu() for v in (value, true, near))
        assert relative_error(value, true) <= allowed_error(near, true, dtype)


def term(given: Operands, weight: Tensor, inputs: int, used: bool) -> tuple[Tensor, ...]:
    return (given.t, as_the_weight_lies(given.b, weight, inputs)) if used else (None, None)


RANKS = pytest.mark.parametrize("rank", [8, 64, 72])
LAYOUTS = pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
GATHERED = pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])


@RANKS
@LAYOUTS
@GATHERED
@pytest.mark.parametrize("kind", KINDS)
def test_up_projection(kind: str, gathered: bool, transposed: bool, rank: int, device: str) -> None:
    name, interleaved, apart = KINDS[kind]
    activation = ACTIVATIONS[name]
    flags = *activation.scalars, interleaved, transposed
    rows = TOKENS if gathered else ROWS
    given = operands(rows, HIDDEN, activation.width(INNER), rank, dtype_of(device))

    def run(o: Operands, offsets: Tensor, token: Tensor | None, used: bool) -> list[Tensor]:
        gate, up = o.weight.chunk(2, 1) if apart else (None, o.weight)
        weights = [None if w is None else laid_out(w, transposed) for w in (up, gate)]
        low = term(o, weights[0], 1 if transposed else 2, used)
        return list(ops.up_projection(o.x, offsets, token, *weights, None, *flags, True, *low))

    compare(run, given, device, gathered)


@RANKS
@LAYOUTS
def test_down_projection(transposed: bool, rank: int, device: str) -> None:
    given = operands(ROWS, INNER, HIDDEN, rank, dtype_of(device))

    def run(o: Operands, offsets: Tensor, _: Tensor | None, used: bool) -> list[Tensor]:
        weight = laid_out(o.weight, transposed)
        low = term(o, weight, 1 if transposed else 2, used)
        return [ops.down_projection(o.x, offsets, weight, None, transposed, *low)]

    compare(run, given, device, False)


@RANKS
@LAYOUTS
@GATHERED
@pytest.mark.parametrize("kind", KINDS)
def test_down_gradient(kind: str, gathered: bool, transposed: bool, rank: int, device: str) -> None:
    name, interleaved, _ = KINDS[kind]
    activation = ACTIVATIONS[name]
    flags = *activation.scalars, interleaved, transposed
    dtype = dtype_of(device)
    given = operands(TOKENS if gathered else ROWS, HIDDEN, INNER, rank, dtype)
    draw = torch.Generator().manual_seed(1)
    h = torch.randn(ROWS, activation.width(INNER), generator=draw).to(dtype)
    score = torch.rand(ROWS, generator=draw)

    def run(o: Operands, offsets: Tensor, token: Tensor | None, used: bool) -> list[Tensor]:
        weight = laid_out(o.weight.mT, transposed)  # (E, H, I): g = dO W2
        low = term(o, weight, 2 if transposed else 1, used)
        wide = torch.float64 if o.x.dtype == torch.float64 else torch.float32
        saved = h.to(o.x.device, o.x.dtype), offsets, token, score.to(o.x.device, wide)
        results = ops.down_gradient(o.x, *saved, weight, *flags, None, None, False, *low)
        return list(results)

    compare(run, given, device, gathered)


@RANKS
@LAYOUTS
@pytest.mark.parametrize("kind", KINDS)
def test_up_gradient(kind: str, transposed: bool, rank: int, device: str) -> None:
    name, interleaved, apart = KINDS[kind]
    gated = ACTIVATIONS[name].gated
    given = operands(ROWS, ACTIVATIONS[name].width(INNER), HIDDEN, rank, dtype_of(device))

    def run(o: Operands, offsets: Tensor, _: Tensor | None, used: bool) -> list[Tensor]:
        if not used:  # two halves have no place for further inputs
            return [ops.down_projection(o.x, offsets, o.weight.contiguous(), None, False)]
        weight = o.weight.mT  # (E, W, H): dX = dH W1
        gate, up = weight.chunk(2, 1) if apart else (None, weight)
        weights = [None if w is None else laid_out(w, transposed) for w in (up, gate)]
        low = term(o, weights[0], 2 if transposed else 1, True)
        return [ops.up_gradient(o.x, offsets, *weights, gated, interleaved, transposed, *low)]

    compare(run, given, device, False)


def dtype_of(device: str) -> torch.dtype:
    """What the operands' numbers exist in."""
    return torch.bfloat16 if device == "cuda" else torch.float64


def test_wrong_terms() -> None:
    """One without the other, no rank, other shapes; on a GPU the other dimension contiguous."""
    o = operands(ROWS, INNER, HIDDEN, 8, torch.float64)
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    call = o.x, offsets, o.weight, None, False
    for low, message in {
        (o.t, None): "low_rank_b: expected a tensor with low_rank_t, got none",
        (None, o.b): "low_rank_t: expected a tensor with low_rank_b, got none",
        (o.t[:, :0], o.b[..., :0]): "low_rank_t: expected a rank of at least 1, got 0",
        (o.t[1:], o.b): "low_rank_t: expected shape",
        (o.t, o.b[:, 1:]): "low_rank_b: expected shape",
        (o.t.float(), o.b): "low_rank_t: expected dtype",
    }.items():
        with pytest.raises(RuntimeError, match=message):
            ops.down_projection(*call, *low)


def test_terms_that_lie_otherwise(gpu: str) -> None:
    """A term along its outputs beside a weight along its inputs."""
    o = operands(ROWS, INNER, HIDDEN, 8, torch.bfloat16).to(gpu, torch.bfloat16)
    offsets = torch.tensor(ENDS, dtype=torch.int32, device=gpu)
    with pytest.raises(RuntimeError, match=r"low_rank.b: expected the contiguous dimension"):
        ops.down_projection(o.x, offsets, o.weight, None, False, o.t, o.b.mT.contiguous().mT)
