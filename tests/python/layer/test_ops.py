"""Every op on every case against float64: at most twice the error that rounding costs by itself.

Steps get the rounded computation's tensors as inputs, so each is judged alone; layers run whole,
through the public functions and their gradients.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import guild
from guild._torch.operators import ops, score_dtype
from layers import ACTIVATIONS, CASES, LAYOUTS, Case, Layer, make_layer
from op_steps import Steps
from oracle.experts import halves
from oracle.steps import compute, compute_rounded, sort_slots
from tolerance import allowed_error, relative_error

DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
MATRIX = [case for case in CASES.values() if "matrix" in case.flags]
OTHERS = [case for case in CASES.values() if not case.has_matrix("cpu")]


def name_of(value: object) -> str:
    """Test ids: the names of cases, the plain text of the rest."""
    return value.name if isinstance(value, Case) else str(value)


class Judge:
    """Compares results with the truth, by the rounded computation's error."""

    def __init__(self, layer: Layer, whole: bool) -> None:
        self.dtype = layer.x.dtype
        self.rounded = compute_rounded(layer)
        self.truth = compute(layer, None if whole else self.rounded)

    def check(self, name: str, value: Tensor) -> None:
        truth, rounded = self.truth[name], self.rounded[name]
        error, allowed = relative_error(value, truth), allowed_error(rounded, truth, self.dtype)
        assert error <= allowed, f"{name}: relative error {error:.3g}, allowed {allowed:.3g}"


def run_layer(layer: Layer, layout: str, judge: Judge) -> None:
    """Forward and backward of `routed_experts` in one layout."""
    arguments = layer.arguments(layout)
    order = arguments["order"]
    x, scores = layer.x.detach().requires_grad_(), layer.scores.detach().requires_grad_()
    out = guild.routed_experts(x, layer.ids, scores, **arguments)
    judge.check("o", out)
    out.backward(layer.dout)
    judge.check("dx", x.grad)
    judge.check("dscores", scores.grad)
    flip = (lambda w: w.mT) if arguments["transposed"] else (lambda w: w)
    judge.check("dw_down", flip(arguments["w_down"].grad))
    gated = layer.gate is not None
    if "separate" in layout:
        parts = [w.grad for w in arguments["w_up"]]
    else:
        parts = [t for t in halves(flip(arguments["w_up"].grad), 1, order, gated) if t is not None]
    for i, half in enumerate(parts):
        judge.check(f"dw_{i}", half)
    if layer.up_bias is None:
        return
    judge.check("db_down", arguments["b_down"].grad)
    parts = [t for t in halves(arguments["b_up"].grad, 1, order, gated) if t is not None]
    for i, half in enumerate(parts):
        judge.check(f"db_{i}", half)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("case", MATRIX, ids=name_of)
def test_layer_in_every_layout(case: Case, activation: str, bias: bool, device: str) -> None:
    """Activation x layout x bias x dtype, whole layers."""
    if not case.has_matrix(device):
        pytest.skip("a matrix for the other device")
    act = ACTIVATIONS[activation]
    for dtype in DTYPES[device]:
        layer = make_layer(case, act, dtype, device, bias)
        judge = Judge(layer, whole=True)
        for layout in LAYOUTS:
            if act.gated or "separate" not in layout:
                run_layer(layer, layout, judge)


@pytest.mark.parametrize("case", OTHERS, ids=name_of)
def test_layer_on_every_case(case: Case, device: str) -> None:
    """Sizes and routings, whole layers in two activations and layouts."""
    if not case.fits(device):
        pytest.skip("sizes that the CUDA backend does not take")
    for dtype in DTYPES[device]:
        for activation, layout in (
            ("swiglu", "concatenated"),
            ("gpt_oss", "interleaved_transposed"),
        ):
            layer = make_layer(case, ACTIVATIONS[activation], dtype, device)
            run_layer(layer, layout, Judge(layer, whole=True))


def check_sort(layer: Layer, routing: tuple[Tensor, ...]) -> None:
    """sort_by_expert against a plain stable sort; what belongs to nobody is zero."""
    offsets, row_token, slot_row, row_score = (t.cpu() for t in routing)
    rows = sort_slots(layer.ids, layer.case.experts)
    used = int(rows.offsets[-1])
    assert torch.equal(offsets, rows.offsets.int())
    assert torch.equal(row_token[:used], rows.token.int())
    assert not row_token[used:].any() and not row_score[used:].any()
    assert torch.equal(row_score[:used], layer.scores.cpu().flatten()[rows.slot])
    expected = torch.full((layer.ids.numel(),), -1, dtype=torch.int32)
    expected[rows.slot] = torch.arange(used, dtype=torch.int32)
    assert torch.equal(slot_row.flatten(), expected)


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss", "relu_squared"])
@pytest.mark.parametrize("case", list(CASES.values()), ids=name_of)
def test_steps(case: Case, activation: str, device: str) -> None:
    """Every step alone, in every dtype."""
    if not case.fits(device):
        pytest.skip("sizes that the CUDA backend does not take")
    for dtype in DTYPES[device]:
        layer = make_layer(
            case, ACTIVATIONS[activation], dtype, device, bias=activation != "swiglu"
        )
        judge = Judge(layer, whole=False)
        steps = Steps(layer, judge.rounded)
        check_sort(layer, steps.routing)
        assert set(steps.results) == set(judge.truth)
        for name, value in steps.results.items():
            judge.check(name, value)
        assert steps.results["dscores"].dtype == score_dtype(dtype)


def sums_by_expert(m: Tensor, offsets: Tensor) -> Tensor:
    """(E, width), float64."""
    ends = offsets.tolist()
    parts = [m[a:b].double().sum(0) for a, b in zip(ends, ends[1:], strict=False)]
    return torch.stack(parts)


def check_biases(layer: Layer, dtype: torch.dtype, accumulate: bool) -> None:
    """db1 and db2 of one down gradient, in `dtype`, against sums of the dH that it gave."""
    case, place = layer.case, {"device": layer.x.device, "dtype": dtype}
    offsets, row_token, _, row_score = ops.sort_by_expert(layer.ids, layer.scores, case.experts)
    used = int(offsets[-1])
    h = torch.randn(len(row_token), 2 * case.intermediate).to(layer.x)
    h[used:] = float("nan")
    flags = (*layer.activation.scalars, False, False)
    arguments = (layer.dout, h, offsets, row_token, row_score, layer.down, *flags)
    shapes = (case.experts, h.shape[1]), (case.experts, case.hidden)
    starts = [torch.randn(s) if accumulate else torch.full(s, float("nan")) for s in shapes]
    db_up, db_down = (start.to(**place) for start in starts)
    befores = [db.clone().double() for db in (db_up, db_down)]
    dh, *_ = ops.down_gradient(*arguments, db_up, db_down, accumulate)
    assert torch.equal(dh[:used], ops.down_gradient(*arguments)[0][:used])
    weighted = row_score[:, None] * layer.dout[row_token.long()].double()
    for db, m, before in zip((db_up, db_down), (dh, weighted), befores, strict=True):
        truth = sums_by_expert(m, offsets) + (before if accumulate else 0)
        allowed = allowed_error(truth.to(dtype), truth, layer.x.dtype)
        assert relative_error(db, truth) <= allowed
        empty = offsets.diff() == 0
        assert torch.equal(db[empty].double(), truth[empty])


@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
@pytest.mark.parametrize(
    "name", ["matrix_tiles", "tile_rows", "empty_experts", "wide_hidden", "no_tokens"]
)
def test_biases_of_the_down_gradient(name: str, accumulate: bool, device: str) -> None:
    """In the layer's dtype and in float32."""
    for dtype in DTYPES[device]:
        for activation in ("swiglu", "gpt_oss"):
            layer = make_layer(CASES[name], ACTIVATIONS[activation], dtype, device)
            for stored in {dtype, torch.float32}:
                check_biases(layer, stored, accumulate)


@pytest.mark.parametrize("case", [c for c in CASES.values() if "sorted" in c.flags], ids=name_of)
def test_experts_mlp(case: Case, device: str) -> None:
    """Rows that the caller sorted: scores of one, rows past the end zero."""
    for dtype in DTYPES[device]:
        layer = make_layer(case, ACTIVATIONS["gpt_oss"], dtype, device)
        layer.scores = torch.ones_like(layer.scores)
        judge = Judge(layer, whole=True)
        offsets = sort_slots(layer.ids, case.experts).offsets.int().to(device)
        arguments = layer.arguments("interleaved")
        extra = torch.full((5, case.hidden), float("nan"), dtype=dtype, device=device)
        x = torch.cat((layer.x, extra)).requires_grad_()
        out = guild.experts_mlp(x, offsets, **arguments)
        assert not out[case.tokens :].any()
        judge.check("o", out[: case.tokens])
        out.backward(torch.cat((layer.dout, extra)))
        assert not x.grad[case.tokens :].any()
        judge.check("dx", x.grad[: case.tokens])
        judge.check("dw_down", arguments["w_down"].grad)
        judge.check("db_down", arguments["b_down"].grad)
        for i, part in enumerate(halves(arguments["w_up"].grad, 1, "interleaved")):
            judge.check(f"dw_{i}", part)
