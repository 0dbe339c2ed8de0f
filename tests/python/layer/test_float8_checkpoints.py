"""Weights that are codes already, in the layouts that checkpoints and other libraries have them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import guild
from guild import FP8, Quantized
from layers import ACTIVATIONS, Case, make_layer
from oracle.experts import Experts, routed
from oracle.float8 import rounded

CASE = Case("checkpoint", 60, 256, 208, 4, 2, "sentinel", frozenset())


def checkpoint(w: Tensor) -> dict[str, Tensor]:
    """(E, out, in) as DeepSeek-V3 and Qwen3-FP8 store it: codes, and scales that multiply them."""
    made = guild.quantize_weights(w)
    return {"weight": made.codes, "weight_scale_inv": made.scales}


def as_weight(stored: dict[str, Tensor]) -> Quantized:
    return Quantized(stored["weight"], stored["weight_scale_inv"])


@pytest.mark.parametrize("activation", ["swiglu", "relu_squared"])
def test_checkpoints_are_read_in_place(activation: str, device: str) -> None:
    """Gate and up apart, with scales of their own; beside the same values in float64."""
    layer = make_layer(CASE, ACTIVATIONS[activation], torch.bfloat16, device)
    names = [n for n in ("gate", "up", "down") if getattr(layer, n) is not None]
    stored = {n: checkpoint(getattr(layer, n)) for n in names}
    up = as_weight(stored["up"])
    w_up = (as_weight(stored["gate"]), up) if "gate" in stored else up
    given = layer.arguments("separate" if "gate" in stored else "concatenated")
    given |= {"w_up": w_up, "w_down": as_weight(stored["down"]), "order": "concatenated"}
    with torch.no_grad():
        out = guild.routed_experts(layer.x, layer.ids, layer.scores, **given)
        again = guild.routed_experts(layer.x, layer.ids, layer.scores, **given, fp8=FP8())
        into = torch.empty_like(out)
        assert guild.routed_experts(layer.x, layer.ids, layer.scores, **given, out=into) is into
    assert torch.equal(out, again) and torch.equal(out, into)
    values = {n: rounded(getattr(layer, n).cpu(), 128) for n in names}
    biases = [getattr(layer, n) for n in ("gate_bias", "up_bias", "down_bias")]
    experts = Experts(
        layer.activation,
        *(values.get(n) for n in ("gate", "up", "down")),
        *(None if b is None else b.double().cpu() for b in biases),
    )
    ids = layer.ids.flatten().cpu()
    slots = torch.nonzero((ids >= 0) & (ids < 4)).flatten()
    x = rounded(layer.x.cpu(), 1)
    scores = layer.scores.flatten().double().cpu()[slots]
    want = routed(experts, x, slots // 2, ids[slots], scores)
    assert (out.double().cpu() - want).norm() < 0.05 * want.norm()  # A is quantised, too


def test_packed_codes_are_the_same(device: str) -> None:
    """Gate and up in one tensor share no block of scales where 128 divides I."""
    wide = Case("wide", 40, 128, 256, 3, 2, "random", frozenset())
    layer = make_layer(wide, ACTIVATIONS["swiglu"], torch.bfloat16, device)
    given = layer.arguments("concatenated")
    pair = tuple(as_weight(checkpoint(w)) for w in (layer.gate, layer.up))
    down = as_weight(checkpoint(layer.down))
    outs = []
    with torch.no_grad():
        for w_up in (as_weight(checkpoint(given["w_up"])), pair):
            rest = given | {"w_up": w_up, "w_down": down}
            outs.append(guild.routed_experts(layer.x, layer.ids, layer.scores, **rest))
        outs.append(guild.routed_experts(layer.x, layer.ids, layer.scores, **given, fp8=FP8()))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    text = r"^w_up.codes: expected shape \(3, 512, 128\)"
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        guild.routed_experts(layer.x, layer.ids, layer.scores, **(rest | {"w_up": pair[0]}))


def memory_of(codes: Tensor, x: Tensor) -> Tensor:
    """Some of it, as a tensor like x."""
    return codes.view(torch.uint8).flatten()[: 2 * x.numel()].view(x.dtype).view(x.shape)


def test_wrong_codes_are_named(device: str) -> None:
    """Each of another kind, shape or use than it can have."""
    layer = make_layer(CASE, ACTIVATIONS["swiglu"], torch.bfloat16, device)
    gate, up, down = (as_weight(checkpoint(w)) for w in (layer.gate, layer.up, layer.down))
    rows = layer.x, layer.ids, layer.scores
    scales = up.scales[:, :1]
    cases = [
        ({"w_up": layer.up}, TypeError, r"w_up: expected a pair \(gate, up\) of guild.Quantized"),
        ({"w_up": up}, ValueError, r"w_up: expected a pair \(gate, up\) of guild.Quantized"),
        ({"w_up": (gate, down)}, ValueError, r"w_up\[1\] \(up\).codes: expected shape \(4, 208, 2"),
        ({"w_down": layer.down}, TypeError, "w_down: expected guild.Quantized like the other"),
        (
            {"w_up": (gate, Quantized(up.codes, scales))},
            ValueError,
            r"w_up\[1\] \(up\).scales: expected shape \(4, 2, 2\)",
        ),
        (
            {"w_down": Quantized(down.codes.view(torch.uint8), down.scales)},
            TypeError,
            "w_down.codes: expected dtype float8_e4m3fn, got uint8",
        ),
        ({"transposed": True}, ValueError, "order, transposed: expected"),
        ({"transposed": 0}, TypeError, "transposed: expected True or False, got 0"),
        ({"transposed": 1}, TypeError, "transposed: expected True or False, got 1"),
        ({"lora_down": object()}, NotImplementedError, "lora_down: expected None with fp8"),
        ({"fp8": "fp8"}, TypeError, "fp8: expected guild.FP8 with quantised weights, got str"),
        ({"recompute": 1}, TypeError, "recompute: expected True or False, got 1"),
        (
            {"b_up": (None, layer.up_bias)},
            TypeError,
            r"b_up\[0\] \(gate\): expected a torch.Tensor",
        ),
        ({"b_up": (layer.up_bias,)}, ValueError, r"b_up: expected a pair \(gate, up\), got 1"),
        ({"b_down": 3}, TypeError, "b_down: expected a torch.Tensor, got int"),
        (
            {"out": memory_of(down.codes, layer.x)},
            ValueError,
            "out: expected memory not shared with .* with w_d",
        ),
        (
            {"out": memory_of(up.codes, layer.x)},
            ValueError,
            "out: expected memory not shared with .* with w_u",
        ),
    ]
    for changed, error, message in cases:
        given = {"w_up": (gate, up), "w_down": down} | changed
        with torch.no_grad(), pytest.raises(error, match=message):
            guild.routed_experts(*rows, **given)
    x = layer.x.detach().requires_grad_()
    wants = {"b_up": torch.cat((layer.gate_bias, layer.up_bias), 1).requires_grad_()}
    pair = {"b_up": (layer.gate_bias, layer.up_bias.detach().requires_grad_())}
    for tokens, more in ((x, {}), (layer.x, wants), (layer.x, pair)):
        with pytest.raises(ValueError, match="quantised weights have no gradients"):
            guild.routed_experts(tokens, *rows[1:], (gate, up), down, **more)
    quantised = guild.quantize(layer.x)
    with pytest.raises(TypeError, match=r"^x: expected a torch\.Tensor, got Quantized"):
        guild.routed_experts(quantised, *rows[1:], (gate, up), down)


def test_biases_of_codes_may_be_lists(device: str) -> None:
    """One tensor per expert, also in a pair, as with weights that are no codes."""
    layer = make_layer(CASE, ACTIVATIONS["swiglu"], torch.bfloat16, device)
    weights = tuple(guild.quantize_weights(w) for w in (layer.gate, layer.up))
    given = layer.x, layer.ids, layer.scores, weights, guild.quantize_weights(layer.down)
    b_up = torch.cat((layer.gate_bias, layer.up_bias), 1)
    pair = [t.clone() for t in layer.gate_bias], [t.clone() for t in layer.up_bias]
    down = [t.clone() for t in layer.down_bias]
    with torch.no_grad():
        want = guild.routed_experts(*given, b_up, layer.down_bias)
        for up in ([t.clone() for t in b_up], pair, (layer.gate_bias, pair[1])):
            assert torch.equal(guild.routed_experts(*given, up, down), want)
    pair[1][2].requires_grad_()
    with pytest.raises(ValueError, match="quantised weights have no gradients"):
        guild.routed_experts(*given, pair, down)


def test_scales_that_want_a_gradient_are_refused(device: str) -> None:
    layer = make_layer(CASE, ACTIVATIONS["swiglu"], torch.bfloat16, device)
    gate, up, down = (guild.quantize_weights(w) for w in (layer.gate, layer.up, layer.down))
    gate = gate._replace(scales=gate.scales.clone().requires_grad_())
    with pytest.raises(ValueError, match="quantised weights have no gradients"):
        guild.routed_experts(layer.x.detach(), layer.ids, layer.scores, (gate, up), down)


def test_gradients_of_outer_transforms_are_refused(device: str) -> None:
    """The innermost level of torch.func does not know that an outer one differentiates x."""
    layer = make_layer(CASE, ACTIVATIONS["swiglu"], torch.bfloat16, device)
    weights = tuple(guild.quantize_weights(w) for w in (layer.gate, layer.up))
    given = layer.ids, layer.scores, weights, guild.quantize_weights(layer.down)

    def inner(x: Tensor) -> Tensor:
        return torch.func.grad(lambda s: (s * guild.routed_experts(x, *given)).float().sum())(one)

    one, x = torch.ones((), device=device), layer.x.detach()
    inner(x)
    for call in (torch.func.grad(inner), lambda x: inner(x.requires_grad_())):
        with pytest.raises(ValueError, match="quantised weights have no gradients"):
            call(x.clone())


@pytest.mark.parametrize("gated", [False, True])
def test_packed_codes_that_share_scales_are_refused(gated: bool, device: str) -> None:
    """Codes of gate and up in one tensor, however they were quantised."""
    case = Case("shared scales", 5, 32, 192, 2, 1, "random", frozenset())
    layer = make_layer(case, ACTIVATIONS["swiglu"], torch.bfloat16, device)
    packed = guild.quantize_weights(torch.cat((layer.gate, layer.up), 1), gated=gated)
    down = guild.quantize_weights(layer.down)
    text = "w_up: expected a pair .* of 128 rows each, got one tensor, and w_down with 192"
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        guild.routed_experts(layer.x, layer.ids, layer.scores, packed, down)


def test_tensors_of_other_libraries(device: str) -> None:
    """Scales of rows transposed and padded, of weights by column: as others lay them out.

    TransformerEngine keeps rows' scales as (K / 128, rows padded to 4), which cuBLASLt wants;
    torchao's weights come transposed, with scales by column.
    """
    torch.manual_seed(0)
    rows, hidden, out, experts = 50, 384, 256, 3
    x, w = torch.randn(rows, hidden), torch.randn(experts, out, hidden)
    x, w = x.bfloat16().to(device), w.bfloat16().to(device)
    ends = torch.tensor([20, 20, 50], dtype=torch.int32, device=device)
    a, b = guild.quantize(x), guild.quantize_weights(w)
    want = guild.scaled_grouped_mm(a.codes, b.codes.mT, a.scales, b.scales.mT, ends)
    padded = torch.zeros(3, 52, device=device)
    padded[:, :rows] = a.scales.T
    by_column = b.scales.mT.contiguous()  # (E, K / 128, N / 128), contiguous
    got = guild.scaled_grouped_mm(a.codes, b.codes.mT, padded[:, :rows].T, by_column, ends)
    assert torch.equal(got, want)
    exact = torch.zeros(rows, out, dtype=torch.float64)
    a64 = a.codes.cpu().double() * a.scales.cpu().double().repeat_interleave(128, 1)
    b64 = b.codes.cpu().double()
    b64 *= b.scales.cpu().double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    exact[:20], exact[20:] = a64[:20] @ b64[0].T, a64[20:] @ b64[2].T
    assert (got.cpu().double() - exact).norm() < 4e-3 * exact.norm()
