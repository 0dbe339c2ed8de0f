"""The steps that quantise their results: codes and scales beside float64 and, on a GPU, the CPU.

The rule: scales are equal except where a largest value lies at the edge of a power of two, and few
codes are neighbours of the code that the exact value is rounded to.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import guild
from guild._torch.float8_steps import (
    Codes,
    Kept,
    QuantizedExperts,
    Recipe,
    Wanted,
    data_gradients,
    quantized_rows,
    up_step,
)
from guild._torch.operators import LayerFlags, ops
from guild._torch.row_routing import RowRouting
from layers import ACTIVATIONS, Case, Layer, make_layer
from oracle.experts import activate
from oracle.float8 import rounded

CASE = Case("steps", 300, 256, 272, 5, 2, "sentinel", frozenset())
POWER_OF_TWO = 1
# The share of codes that may differ. Hopper's tensor cores keep 13 bits while they sum FP8: in a
# simulation of that, 0.2 to 0.9 % of these steps' codes differ.
MOST_OTHER_CODES = {"cpu": 1e-3, "cuda": 1.5e-2}


def plain(codes: Codes, halves: int = 1) -> Tensor:
    """The values of rows of codes in float64; each half of a row has its own blocks."""
    values = codes.codes.view(torch.float8_e4m3fn).cpu().double().unflatten(1, (halves, -1))
    scales = codes.scales.cpu().double().unflatten(1, (halves, -1)).repeat_interleave(128, 2)
    return (values * scales[..., : values.shape[2]]).flatten(1)


def expect_quantised(got: Codes, want: Tensor, halves: int, device: str) -> None:
    """The codes must be those of these float64 rows, by the rule above."""
    parts = [rounded(half, 1, scales="power_of_two") for half in want.chunk(halves, 1)]
    exact, values = torch.cat(parts, 1), plain(got, halves)
    # A neighbouring code is at most an eighth away; at the edge of a scale it may be lost below.
    assert ((values - exact).abs() <= exact.abs() / 8 + 2.0**-8 * want.abs().amax()).all()
    assert (values != exact).double().mean() <= MOST_OTHER_CODES[device]
    scales = got.scales.cpu()
    assert torch.equal(scales, 2.0 ** scales.log2().round())


class Step:
    """A layer's sorted operands as codes, and their values in float64."""

    def __init__(self, layer: Layer) -> None:
        given = layer.arguments("concatenated")
        self.flags = LayerFlags(*layer.activation.scalars, False, False)
        self.recipe = Recipe(0, POWER_OF_TWO, False, False)
        fp8 = guild.FP8(scales="power_of_two")
        options = {"activation": layer.activation}
        weights = guild.FP8Weights(fp8, given["w_up"], given["w_down"], **options)
        self.experts: QuantizedExperts = weights.codes
        self.places = RowRouting(*ops.sort_by_expert(layer.ids, layer.scores, 5))
        self.x = quantized_rows(layer.x, 0, POWER_OF_TWO)
        self.dout = quantized_rows(layer.dout, 0, POWER_OF_TWO)
        self.rows = int(self.places.offsets[-1])
        self.token = self.places.row_token[: self.rows].cpu().long()
        ends = self.places.ends.cpu()
        self.expert = torch.searchsorted(ends, torch.arange(self.rows), right=True)
        self.score = self.places.row_score[: self.rows, None].cpu().double()
        self.halves = 2 if layer.activation.gated else 1

    def product(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Each row times its expert's weight (E, out, in)."""
        exact = rounded(weights.detach().cpu(), 128, scales="power_of_two")
        return torch.einsum("ri,roi->ro", rows, exact[self.expert])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss", "relu_squared"])
def test_up_and_down_gradient(activation: str, bias: bool, device: str) -> None:
    """A and H of the up projection; dH, A' and the parts of dS from the down gradient."""
    layer = make_layer(CASE, ACTIVATIONS[activation], torch.bfloat16, device, bias)
    step, act = Step(layer), layer.activation
    b_up = layer.arguments("concatenated")["b_up"]
    b_up = None if b_up is None else b_up.detach()
    operands = step.x, step.places, step.experts.halves(), b_up, step.flags
    a, kept = up_step(*operands, step.recipe, torch.bfloat16, True)
    x = plain(step.x)[step.token]
    names = [("gate", "gate_bias"), ("up", "up_bias")][2 - step.halves :]
    h = [step.product(x, getattr(layer, w)) for w, _ in names]
    if bias:
        biases = [getattr(layer, b).cpu().double()[step.expert] for _, b in names]
        h = [t + b for t, b in zip(h, biases, strict=True)]
    want = activate(act, h[0], h[1] if step.halves == 2 else None)
    used = slice(0, step.rows)
    expect_quantised(Codes(a.codes[used], a.scales[used]), want, 1, device)
    whole = torch.cat(h, 1)
    error = (kept.h[used].cpu().double() - whole).norm() / whole.norm()
    assert error < 2.0**-8
    wanted = Wanted(False, True, True, True, False, False)
    rest = step.places, step.experts, None, step.flags, step.recipe, wanted
    exact_h = kept.h[used].cpu().double().requires_grad_()
    parts = exact_h.chunk(step.halves, 1)
    again = activate(act, parts[0], parts[1] if step.halves == 2 else None)
    dout = plain(step.dout)[step.token]
    g = step.product(dout, layer.down.mT)
    (dh,) = torch.autograd.grad(again, exact_h, step.score * g)
    made = data_gradients(layer.dout, Kept(kept.h), *rest)
    for got, value in ((made.dh, dh), (made.a_scaled, step.score * again.detach())):
        assert (got[used].cpu().double() - value).norm() < 2.0**-7 * value.norm()
    dscores = torch.zeros(layer.ids.numel(), dtype=torch.float64)
    slot_row = step.places.slot_row.flatten().cpu()
    real = slot_row >= 0
    dscores[real] = (g * again.detach()).sum(1)[slot_row[real].long()]
    found = made.dscores.flatten().cpu().double()
    assert (found - dscores).norm() < 1e-3 * dscores.norm()
    codes = dh_codes(step, layer, kept)
    expect_quantised(Codes(codes.codes[used], codes.scales[used]), dh, step.halves, device)


def dh_codes(step: Step, layer: Layer, kept: Kept) -> Codes:
    """dH as the up gradient reads it."""
    rows, width = kept.h.shape
    scales = step.halves * -(-width // step.halves // 128)
    made = Codes(
        torch.empty(rows, width, dtype=torch.uint8, device=kept.h.device),
        torch.empty(scales, rows, device=kept.h.device).t(),
    )
    ops.scaled_down_gradient_out(
        *(*step.dout, 0, step.places.offsets, step.places.row_token, step.places.row_score),
        *(step.experts.down_transposed.mT, step.experts.down_scales, kept.h, None, None),
        *(*step.flags[:-1], 0, POWER_OF_TWO, *made, None, None, None),
    )
    return made


def test_halves_of_k_and_bias(device: str) -> None:
    """A product over gate and up, no block of which holds parts of both, and a bias."""
    torch.manual_seed(0)
    rows, size, out, experts = 70, 144, 64, 3
    a, w = torch.randn(rows, 2 * size), torch.randn(experts, out, 2 * size)
    bias = torch.randn(experts, out).bfloat16()
    ends = torch.tensor([20, 20, 60], dtype=torch.int32)
    codes = [guild.quantize(t.to(device)) for t in a.chunk(2, 1)]
    weights = [guild.quantize_weights(t.to(device)) for t in w.chunk(2, 2)]
    joined = [torch.cat([t.codes.view(torch.uint8) for t in both], -1) for both in (codes, weights)]
    scales = [torch.cat([t.scales for t in both], -1) for both in (codes, weights)]
    got = torch.empty(rows, out, dtype=torch.bfloat16, device=device)
    operands = joined[0], scales[0], 0, joined[1], scales[1], 0
    ops.scaled_grouped_mm_out(*operands, ends.to(device), got, 2, bias.to(device))
    want = torch.zeros(rows, out, dtype=torch.float64)
    a, w = (
        torch.cat([rounded(t, n) for t in both.chunk(2, -1)], -1) for both, n in ((a, 1), (w, 128))
    )
    want[:20] = a[:20] @ w[0].T + bias[0].double()
    want[20:60] = a[20:60] @ w[2].T + bias[2].double()
    assert (got.cpu().double() - want).norm() < 4e-3 * want.norm()
    assert not got[60:].any()
