"""A layer in FP8 against the same recipe in plain torch, in every layout and over several calls."""

from __future__ import annotations

import copy
import warnings
from dataclasses import astuple
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import guild
from guild import FP8, FP8Weights
from guild.float8 import settings
from layers import ACTIVATIONS, LAYOUTS, Case, Layer, make_layer
from oracle.experts import Experts, halves, routed
from oracle.float8 import Recipe, routed_in_fp8

LEAST = 4e-3  # of relative error: what rounding to 16 bits adds where nothing else does
NAMES = "gate", "up", "down", "gate_bias", "up_bias", "down_bias"  # of a Layer and of Experts
SMALL = Case("small", 150, 256, 208, 4, 2, "sentinel", frozenset({"strided"}))
TINY = Case("tiny", 40, 144, 80, 3, 2, "random", frozenset())

OPTIONS = {
    "wgrad": ("bf16", "fp8"),
    "gradients": ("e4m3", "e5m2"),
    "scales": ("exact", "power_of_two"),
    "save": ("bf16", "fp8"),
}
RECIPES = [FP8(*chosen) for chosen in product(*OPTIONS.values())]


def run(layer: Layer, fp8: FP8 | None, layout: str = "concatenated", **how) -> dict[str, Tensor]:
    """Output and gradients by the oracle's names."""
    given = layer.arguments(layout)
    x, scores = layer.x.detach().requires_grad_(), layer.scores.detach().requires_grad_()
    out = guild.routed_experts(x, layer.ids, scores, **given, fp8=fp8, **how)
    out.backward(layer.dout)
    made = {"o": out, "dx": x.grad, "dscores": scores.grad}
    up, down = given["w_up"], given["w_down"].grad
    order, gated = given["order"], layer.activation.gated
    if isinstance(up, tuple):
        parts = tuple(w.grad for w in up)
    else:
        flat = up.grad.mT if given["transposed"] else up.grad
        parts = halves(flat, 1, order, gated)
    made |= {"gate": parts[0], "up": parts[1]}
    made["down"] = down.mT if given["transposed"] else down
    if given["b_up"] is not None:
        parts = halves(given["b_up"].grad, 1, order, gated)
        made |= {"gate_bias": parts[0], "up_bias": parts[1], "down_bias": given["b_down"].grad}
    return {n: t.detach().double().cpu() for n, t in made.items() if t is not None}


def exact(layer: Layer, fp8: FP8 | None) -> dict[str, Tensor]:
    """The same in plain torch, in float64: by a recipe, or without any."""
    leaves = {}
    for name in ("x", "scores", *NAMES):
        tensor = getattr(layer, name)
        leaves[name] = None if tensor is None else tensor.detach().double().cpu().requires_grad_()
    experts = Experts(layer.activation, *(leaves[n] for n in NAMES))
    ids = layer.ids.flatten().cpu()
    token = torch.arange(layer.x.shape[0]).repeat_interleave(layer.ids.shape[1])
    slots = torch.nonzero((ids >= 0) & (ids < layer.down.shape[0])).flatten()
    tokens = leaves["x"], token[slots], ids[slots], leaves["scores"].flatten()[slots]
    if fp8 is None:
        out = routed(experts, *tokens)
    else:
        out = routed_in_fp8(experts, *tokens, Recipe(fp8, layer.x.dtype))
    out.backward(layer.dout.double().cpu())
    made = {"o": out.detach(), "dx": leaves["x"].grad, "dscores": leaves["scores"].grad}
    return made | {n: leaves[n].grad for n in NAMES if leaves[n] is not None}


def expect_as_good(got: dict[str, Tensor], layer: Layer, fp8: FP8) -> None:
    """Errors against float64 are at most 1.05 times those of the simulated recipe."""
    truth, recipe = exact(layer, None), exact(layer, fp8)
    assert set(got) == set(truth)
    for name, want in truth.items():
        size = want.norm()
        error, allowed = (got[name] - want).norm() / size, (recipe[name] - want).norm() / size
        assert error <= max(1.05 * allowed, LEAST), (name, float(error), float(allowed))
        assert error >= allowed / 1.05 - LEAST, (name, float(error), float(allowed))


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss", "relu_squared"])
@pytest.mark.parametrize("fp8", RECIPES, ids=lambda fp8: "-".join(astuple(fp8)[:4]))
def test_error_is_the_recipes(fp8: FP8, activation: str, device: str) -> None:
    """O, dX, dS, dW and db against float64; also in float16 and without biases."""
    dtype = torch.float16 if activation == "gpt_oss" else torch.bfloat16
    bias = activation != "relu_squared"
    layer = make_layer(SMALL, ACTIVATIONS[activation], dtype, device, bias=bias)
    expect_as_good(run(layer, fp8), layer, fp8)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_error_of_every_activation(activation: str, device: str) -> None:
    """Errors of every activation, with all products in FP8."""
    layer = make_layer(SMALL, ACTIVATIONS[activation], torch.bfloat16, device)
    for gradients in OPTIONS["gradients"]:
        fp8 = FP8(wgrad="fp8", gradients=gradients, scales="power_of_two")
        expect_as_good(run(layer, fp8), layer, fp8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_recompute_and_layouts_have_the_same_bits(dtype: torch.dtype, device: str) -> None:
    """However weights are laid out, and whether H is kept or recomputed."""
    layer = make_layer(TINY, ACTIVATIONS["swiglu"], dtype, device)
    for fp8 in (FP8(), FP8(save="fp8"), FP8(wgrad="fp8", scales="power_of_two")):
        first = run(layer, fp8)
        for layout, recompute in product(LAYOUTS, (False, True)):
            again = run(layer, fp8, layout, recompute=recompute)
            for name, want in first.items():
                assert torch.equal(again[name], want), (layout, recompute, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_frozen_bias_changes_no_other_gradient(dtype: torch.dtype, device: str) -> None:
    """A' has the layer's dtype, whichever of backward's other results are made."""
    layer = make_layer(TINY, ACTIVATIONS["swiglu"], dtype, device)
    for save in OPTIONS["save"]:
        fp8 = FP8(wgrad="fp8", scales="power_of_two", save=save)
        made = []
        for wanted in (True, False):
            given = layer.arguments("concatenated")
            given["b_up"].requires_grad_(wanted)
            guild.routed_experts(layer.x, layer.ids, layer.scores, **given, fp8=fp8).backward(
                layer.dout
            )
            made.append(given["w_down"].grad)
        assert torch.equal(*made), save


def test_float32_masters_are_not_rounded_before(device: str) -> None:
    """Codes are those of the float32 values, and gradients are float32."""
    layer = make_layer(TINY, ACTIVATIONS["swiglu"], torch.float32, device)
    given = layer.arguments("concatenated")
    given |= {n: given[n].detach().bfloat16().requires_grad_() for n in ("b_up", "b_down")}
    x = layer.x.bfloat16()
    weights = guild.FP8Weights(FP8(), given["w_up"], given["w_down"])
    whole = guild.quantize_weights(given["w_down"])
    assert torch.equal(weights.codes.down, whole.codes.view(torch.uint8))
    out = guild.routed_experts(x, layer.ids, layer.scores, **given, fp8=FP8())
    assert out.dtype == torch.bfloat16
    out.backward(layer.dout.bfloat16())
    assert given["w_up"].grad.dtype == given["w_down"].grad.dtype == torch.float32
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = guild.routed_experts(layer.x, layer.ids, layer.scores, **given, fp8=FP8())
    assert torch.equal(out, cast)


def module(device: str = "cpu", **kwargs) -> guild.MoE:
    """A small layer with everything."""
    torch.manual_seed(0)
    return guild.MoE(
        64, 48, 4, 2, bias=True, shared_experts=1, device=device, dtype=torch.bfloat16, **kwargs
    )


def test_kept_weights_are_those_of_the_last_refresh(device: str) -> None:
    """One quantisation serves until refresh_fp8(), which every update of the weights requires."""
    layer, plain = module(device, fp8=FP8(cached=True)), module(device, fp8=FP8())
    x = torch.randn(20, 64, device=device).bfloat16()
    assert torch.equal(layer(x), plain(x))
    with torch.no_grad():
        for moe in (layer, plain):
            moe.w_up.mul_(2)
    with pytest.raises(RuntimeError, match=r"refresh_fp8\(\)"):
        layer(x)
    guild.refresh_fp8(torch.nn.Sequential(layer))
    assert torch.equal(layer(x), plain(x))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), plain(x))
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module"):
        guild.refresh_fp8([layer])


@pytest.mark.parametrize("lists", ["even", "uneven", "copied", "cast"])
def test_refresh_reads_the_weights_that_were_given(lists: str, device: str) -> None:
    """Also where a list was copied or cast, and where its tensors have moved since."""
    torch.manual_seed(0)
    shapes = (2 * 48, 64), (64, 48)
    dtype = torch.float32 if lists == "cast" else torch.bfloat16
    weights = [[torch.randn(s, device=device, dtype=dtype) / 8 for _ in range(3)] for s in shapes]
    if lists == "copied":
        for one in weights:
            one[1] = one[1].t().contiguous().t()
    if lists == "even":
        for one in weights:
            guild.lay_evenly(one)
    x, ids = torch.randn(9, 64, device=device).bfloat16(), torch.arange(18, device=device) % 3
    chosen = ids.view(9, 2), torch.rand(9, 2, device=device)
    with warnings.catch_warnings(), torch.autocast(device, enabled=lists == "cast"):
        warnings.simplefilter("ignore", guild.CopiedWeightsWarning)
        kept = FP8Weights(FP8(), *weights)
        for move in (False, True):
            for weight in (w for one in weights for w in one):
                if move and lists != "copied":
                    weight.data = weight.data.clone() * 3
                else:
                    weight.mul_(2).add_(0.01)
            kept.refresh()
            got, wanted = (
                guild.routed_experts(x, *chosen, *weights, fp8=fp8) for fp8 in (kept, FP8())
            )
            assert torch.equal(got, wanted), (lists, move)


def test_module_differs_from_16_bits_by_its_recipe(device: str) -> None:
    """FP8 is used: the error is that of three mantissa bits, and padding is zero."""
    x = torch.randn(3, 30, 64, device=device).bfloat16()
    mask = torch.rand(3, 30, device=device) < 0.7
    x[~mask] = float("nan")
    plain, layer = module(device)(x, mask), module(device, fp8=FP8())(x, mask)
    error = float(((plain - layer).norm() / plain.norm()).detach())
    assert 5e-3 < error < 6e-2
    assert not layer[~mask].any()


def test_compiled_checkpointed_and_without_gradients(device: str) -> None:
    """The same bits as eager, forward and backward."""
    x = torch.randn(20, 64, device=device).bfloat16().requires_grad_()
    layer = module(device, fp8=FP8(save="fp8"))

    def results(call) -> list[Tensor]:
        layer.zero_grad()
        x.grad = None
        out = call(x)
        out.square().mean().backward()
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]

    eager = results(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for call in (compiled, lambda x: checkpoint(layer, x, use_reentrant=False)):
        for got, want in zip(results(call), eager, strict=True):
            assert torch.equal(got, want)
    out = torch.empty_like(eager[0])
    with torch.no_grad():
        assert torch.equal(layer(x), eager[0])
        assert layer(x, out=out) is out
    assert torch.equal(out, eager[0])


def test_lists_of_weights_get_their_gradients(device: str) -> None:
    """Each expert's tensor its own, wherever it lies."""
    layer = make_layer(TINY, ACTIVATIONS["swiglu"], torch.bfloat16, device)
    whole = layer.arguments("concatenated")
    apart = dict(whole)
    for name in ("w_up", "w_down"):
        parts = [torch.empty_like(w) for w in whole[name] for _ in range(2)][::2]
        apart[name] = [
            p.copy_(w).detach().requires_grad_()
            for p, w in zip(parts, whole[name].detach(), strict=True)
        ]
    for given in (whole, apart):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", guild.CopiedWeightsWarning)
            out = guild.routed_experts(layer.x, layer.ids, layer.scores, **given, fp8=FP8())
        out.backward(layer.dout)
    for name in ("w_up", "w_down"):
        assert torch.equal(torch.stack([p.grad for p in apart[name]]), whole[name].grad)


@pytest.mark.parametrize("how", [{}, {"delayed": True}, {"main_grad": True}])
@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["interleaved", "separate", "concatenated_transposed"])
def test_gradients_past_autograd(wgrad: str, layout: str, how: dict, device: str) -> None:
    """Into `.grad` with the same bits, now or later, or summed in float32 over two passes."""
    layer = make_layer(TINY, ACTIVATIONS["swiglu"], torch.bfloat16, device)
    fp8 = FP8(wgrad=wgrad, scales="power_of_two")
    want, given = layer.arguments(layout), layer.arguments(layout)
    flat = [t for v in given.values() for t in (v if isinstance(v, tuple) else (v,))]
    wanted = [t for v in want.values() for t in (v if isinstance(v, tuple) else (v,))]
    sink = guild.WeightGradients(**how)
    passes = 2 if sink.main_grad else 1
    xs = [layer.x.detach().requires_grad_() for _ in range(2)]
    out = guild.routed_experts(xs[0], layer.ids, layer.scores, **want, fp8=fp8)
    out.backward(layer.dout)
    for t in flat:
        if sink.main_grad and isinstance(t, Tensor):
            t.main_grad = torch.zeros(t.shape, device=device)
    for _ in range(passes):
        got = guild.routed_experts(
            xs[1], layer.ids, layer.scores, **given, fp8=fp8, weight_gradients=sink
        )
        xs[1].grad = None
        got.backward(layer.dout)
    sink.compute()
    assert torch.equal(got, out)
    assert torch.equal(xs[0].grad, xs[1].grad)
    for mine, autograds in zip(flat, wanted, strict=True):
        if isinstance(mine, Tensor) and sink.main_grad:
            torch.testing.assert_close(
                mine.main_grad, 2 * autograds.grad.float(), rtol=8e-3, atol=1e-2
            )
        elif isinstance(mine, Tensor):
            assert torch.equal(mine.grad, autograds.grad)


STEPS = {
    "codes kept": FP8(wgrad="fp8", scales="power_of_two", cached=True),
    "H of codes": FP8(wgrad="fp8", scales="power_of_two", save="fp8"),
    "exact scales": FP8(wgrad="fp8", gradients="e5m2"),
    "16-bit dW": FP8(save="fp8"),
}


def test_lists_in_a_cuda_graph(gpu: str) -> None:
    """No host wait: their places are known to the kernels alone."""
    layer = make_layer(TINY, ACTIVATIONS["swiglu"], torch.bfloat16, gpu)
    rows = layer.x, layer.ids, layer.scores
    up = torch.cat((layer.gate, layer.up), 1)
    for w_up in (
        [t.clone() for t in up],
        ([t.clone() for t in layer.gate], [t.clone() for t in layer.up]),
    ):
        given = *rows, w_up, [t.clone() for t in layer.down]
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            want = guild.routed_experts(*given, fp8=FP8())
            with torch.cuda.graph(graph):
                got = guild.routed_experts(*given, fp8=FP8())
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", list(STEPS))
def test_a_step_in_a_cuda_graph(name: str, device: str) -> None:
    """A captured forward and backward quantise again in each replay and so follow the weights."""
    if device == "cpu":
        pytest.skip("for a GPU")
    layer = module(device, fp8=STEPS[name])
    x = torch.randn(60, 64, device=device).bfloat16().requires_grad_()
    wants = [x, layer.w_up, layer.w_down, layer.router.weight]

    def step() -> tuple[Tensor, ...]:
        guild.refresh_fp8(layer)
        out = layer(x)
        return out, *torch.autograd.grad(out.float().square().sum(), wants)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
        for got, want in zip(captured, step(), strict=True):
            assert torch.equal(got, want)
        with torch.no_grad():
            layer.w_up.mul_(1.5)


def test_small_products_are_told_of_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Where FP8 does not pay, on a GPU; the CPU is no place for it anyway."""
    monkeypatch.setattr(settings, "_warned", [])
    layer, x = module(device, fp8=FP8()), torch.randn(20, 64, device=device).bfloat16()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            layer(x)
    told = [str(w.message) for w in found if issubclass(w.category, guild.SlowFP8Warning)]
    assert len(told) == (1 if device == "cuda" else 0)
    assert all("experts of width 48; expected 512 or more" in text for text in told)
