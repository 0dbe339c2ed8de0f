"""Every op on every case against float64: at most twice the error that rounding costs by itself.

Steps get the rounded computation's tensors as inputs, so each is judged alone; layers run whole,
through the public functions and their gradients.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import guild
from guild._operators import ops, score_dtype
from layers import ACTIVATIONS, CASES, LAYOUTS, Case, Layer, make_layer, pack, unpack
from reference import allowed_error, compute, compute_rounded, relative_error, sort_slots

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

    def input(self, name: str, layer: Layer) -> Tensor:
        """A step's input: what the rounded computation stored, padded to all R rows with NaN."""
        used = self.rounded[name].to(self.dtype)
        rows = layer.case.tokens * layer.case.top_k
        full = torch.full((rows, used.shape[1]), float("nan"), dtype=self.dtype)
        full[: used.shape[0]] = used
        return full.to(layer.x.device)


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
        halves = [w.grad for w in arguments["w_up"]]
    else:
        halves = [t for t in unpack(flip(arguments["w_up"].grad), 1, order, gated) if t is not None]
    for i, half in enumerate(halves):
        judge.check(f"dw_{i}", half)
    if layer.up_bias is None:
        return
    judge.check("db_down", arguments["b_down"].grad)
    halves = [t for t in unpack(arguments["b_up"].grad, 1, order, gated) if t is not None]
    for i, half in enumerate(halves):
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


def run_steps(layer: Layer, judge: Judge) -> None:
    """Each step of forward and backward as its own op, concatenated layout."""
    case, device, dtype = layer.case, layer.x.device, layer.x.dtype
    act, gated = layer.activation, layer.gate is not None
    flags = (*act.scalars, False, False)
    rows = sort_slots(layer.ids, case.experts)
    offsets, row_token, slot_row, row_score = ops.sort_by_expert(
        layer.ids, layer.scores, case.experts
    )
    used = int(rows.offsets[-1])
    assert torch.equal(offsets.cpu(), rows.offsets.int())
    assert torch.equal(row_token.cpu()[:used], rows.token.int())
    assert not row_token.cpu()[used:].any() and not row_score.cpu()[used:].any()
    assert torch.equal(row_score.cpu()[:used], layer.scores.cpu().flatten()[rows.slot])
    w_up = pack(layer.gate, layer.up, 1, "concatenated")
    b_up = (
        None if layer.up_bias is None else pack(layer.gate_bias, layer.up_bias, 1, "concatenated")
    )
    names = ("h_0", "h_1") if gated else ("h_0",)

    def halves(value: Tensor) -> list[Tensor]:
        return [t for t in unpack(value, 1, "concatenated", gated) if t is not None]

    a, h = ops.up_projection(layer.x, offsets, row_token, w_up, None, b_up, *flags, True)
    judge.check("a", a[:used])
    for name, half in zip(names, halves(h), strict=True):
        judge.check(name, half[:used])
    y = ops.down_projection(judge.input("a", layer), offsets, layer.down, layer.down_bias, False)
    judge.check("y", y[:used])
    judge.check("o", ops.combine(judge.input("y", layer), slot_row, layer.scores))

    h = torch.cat([judge.input(name, layer) for name in names], 1)
    dh, a_scaled, parts = ops.down_gradient(
        layer.dout, h, offsets, row_token, row_score, layer.down, *flags
    )
    judge.check("a_scaled", a_scaled[:used])
    for i, half in enumerate(halves(dh)):
        judge.check(f"dh_{i}", half[:used])
    dscores = ops.score_gradient(
        parts, slot_row, offsets, layer.dout, layer.down_bias, case.intermediate
    )
    assert dscores.dtype == score_dtype(dtype)
    judge.check("dscores", dscores)
    run_gradient_steps(layer, judge, offsets, row_token, slot_row, row_score, w_up)
    assert offsets.device == device


def run_gradient_steps(
    layer: Layer,
    judge: Judge,
    offsets: Tensor,
    row_token: Tensor,
    slot_row: Tensor,
    row_score: Tensor,
    w_up: Tensor,
) -> None:
    """What follows the down gradient: weights, biases, up gradient and its combine."""
    gated = layer.gate is not None
    used = int(offsets[-1])
    names = ("dh_0", "dh_1") if gated else ("dh_0",)
    dh = torch.cat([judge.input(name, layer) for name in names], 1)
    a_scaled = judge.input("a_scaled", layer)
    dw_down = torch.full_like(layer.down, float("nan"))
    ops.down_weight_gradient_out(layer.dout, a_scaled, offsets, row_token, dw_down, False, False)
    judge.check("dw_down", dw_down)
    dw_up = torch.full_like(w_up, float("nan"))
    ops.up_weight_gradient_out(
        layer.x, dh, offsets, row_token, dw_up, None, gated, False, False, False
    )
    db_up = torch.full(w_up.shape[:2], float("nan"), dtype=dh.dtype, device=dh.device)
    ops.bias_gradient_out(dh, offsets, None, None, db_up, False)
    db_down = torch.full_like(dw_down[:, :, 0], float("nan")).contiguous()
    ops.bias_gradient_out(layer.dout, offsets, row_token, row_score, db_down, False)
    judge.check("db_down", db_down)
    for kind, value in (("dw", dw_up), ("db", db_up)):
        parts = [t for t in unpack(value, 1, "concatenated", gated) if t is not None]
        for i, part in enumerate(parts):
            judge.check(f"{kind}_{i}", part)
    dx_rows = ops.up_gradient(dh, offsets, w_up, None, gated, False, False)
    judge.check("dx_rows", dx_rows[:used])
    judge.check("dx", ops.combine(judge.input("dx_rows", layer), slot_row, None))


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
        run_steps(layer, Judge(layer, whole=False))


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
        for i, part in enumerate(unpack(arguments["w_up"].grad, 1, "interleaved")):
            judge.check(f"dw_{i}", part)
