"""guild.MoE as the layers of known models: router bias, order, shared experts, what it returns."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import guild
from oracle.layer import of_module, router_logits
from oracle.routing import choice_keys, choose, weights_of

GPT_OSS = {"activation": "gpt_oss", "bias": True, "router_bias": True, "order": "interleaved"}
LAYERS: dict[str, dict[str, Any]] = {
    "gpt_oss": GPT_OSS,
    "gpt_oss_transposed": {**GPT_OSS, "transposed": True},
    "transposed": {"transposed": True, "shared_experts": 1},
    "qwen2_moe": {"router": "softmax", "shared_intermediate": 20, "shared_gate": True},
    "qwen3_next": {"shared_experts": 1, "shared_gate": True},
    "odd_shared": {"shared_intermediate": 5, "activation": "relu2_ungated"},
    "interleaved_shared": {"shared_experts": 2, "order": "interleaved", "shared_gate": True},
    "everything": {
        **GPT_OSS,
        "shared_intermediate": 7,
        "shared_gate": True,
        "router": guild.Router("sigmoid", scale=2.5, selection_bias=True, groups=3, top_groups=2),
    },
    "llama4": {"router": "llama4", "router_bias": True, "shared_gate": True, "shared_experts": 1},
    "llama4_plain": {"router": "llama4"},
    "recomputed": {**GPT_OSS, "recompute": True},
}


def make(name: str, **more: Any) -> guild.MoE:
    """A layer of 6 experts, 24 wide; every parameter and buffer drawn, biases too."""
    torch.manual_seed(0)
    moe = guild.MoE(24, 16, 6, 1 if name.startswith("llama4") else 2, **{**LAYERS[name], **more})
    with torch.no_grad():
        for key, value in moe.state_dict().items():
            if "b_" in key or "bias" in key:
                value.normal_(std=0.5)
    return moe


def results(moe: guild.MoE, x: Tensor, *, by: Any = None) -> list[Tensor]:
    """Output and every gradient, for one fixed incoming gradient."""
    out = (moe if by is None else by)(x)
    dout = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad(out, (x, *moe.parameters()), dout)]


@pytest.mark.parametrize("name", list(LAYERS))
def test_against_plain_pytorch(name: str) -> None:
    """Output and every gradient in float64."""
    moe = make(name, dtype=torch.float64)
    x = torch.randn(5, 7, 24, dtype=torch.float64, requires_grad=True)
    expected = results(moe, x, by=lambda x: of_module(moe, x))
    # gpt-oss's alpha is float32 in the kernels
    for got, truth in zip(results(moe, x), expected, strict=True):
        torch.testing.assert_close(got, truth, atol=1e-6, rtol=1e-6)
    assert all(value.norm() > 0 for value in expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["everything", "qwen2_moe"])
def test_compiled(name: str, backend: str, device: str) -> None:
    """One graph and eager's results."""
    torch._dynamo.reset()
    if device == "cuda":
        moe = make(name, device=device, dtype=torch.bfloat16, shared_intermediate=8)
    else:
        moe = make(name)
    x = torch.randn(6, 24, device=device, dtype=moe.w_up.dtype, requires_grad=True)
    expected = results(moe, x)
    got = results(moe, x, by=torch.compile(moe, fullgraph=True, backend=backend))
    exact = {"rtol": 0, "atol": 0} if backend == "aot_eager" else {"rtol": 2e-2, "atol": 2e-3}
    for value, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(value, truth, **exact)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_sixteen_bits(name: str, device: str) -> None:
    """Near float64's wherever the choice of experts is not a matter of rounding."""
    moe = make(name, device=device, dtype=torch.bfloat16)
    x = torch.randn(40, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    out, *gradients = results(moe, x)
    expected = of_module(copy.deepcopy(moe).cpu(), x.detach().cpu())
    error = (out.cpu().double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < 0.02
    for value in gradients:
        assert value.dtype == torch.bfloat16 and value.isfinite().all() and value.any()


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next", "llama4", "llama4_plain"])
def test_autocast(name: str, device: str) -> None:
    """float32 parameters: bfloat16 out, float32 gradients, near float64's."""
    moe = make(name, device=device)
    x = torch.randn(40, 24, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, *gradients = results(moe, x)
    assert out.dtype == torch.bfloat16
    expected = of_module(copy.deepcopy(moe).cpu(), x.detach().cpu())
    error = (out.cpu().double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < 0.03
    assert all(value.dtype == torch.float32 and value.any() for value in gradients)


def test_names_in_a_checkpoint() -> None:
    """Names and shapes; a checkpoint of one layer goes into another."""
    moe = make("everything")
    shapes = {name: tuple(value.shape) for name, value in moe.state_dict().items()}
    assert shapes == {
        "router.weight": (6, 24),
        "router.bias": (6,),
        "router.selection_bias": (6,),
        "w_up": (6, 32, 24),
        "w_down": (6, 24, 16),
        "b_up": (6, 32),
        "b_down": (6, 24),
        "shared.w_up": (14, 24),
        "shared.w_down": (24, 7),
        "shared.gate.weight": (1, 24),
    }
    other = guild.MoE(24, 16, 6, 2, **LAYERS["everything"])
    other.load_state_dict(moe.state_dict())
    x = torch.randn(3, 24)
    assert torch.equal(other(x), moe(x))


@pytest.mark.parametrize("transposed", [False, True])
def test_reset_parameters(transposed: bool, device: str) -> None:
    """From memory that nothing has written: weights of variance 1 / inputs, zero biases."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options = {**LAYERS["everything"], "shared_intermediate": 8, "transposed": transposed}
    moe = guild.MoE(256, 16, 6, 2, **options, device="meta", dtype=dtype)
    moe.to_empty(device=device)
    with torch.no_grad():
        for value in moe.state_dict().values():
            value.fill_(torch.nan)
    moe.reset_parameters()
    for name, value in moe.state_dict().items():
        if "b_" in name or "bias" in name:
            assert not value.any(), name
        else:
            inputs = value.shape[-2 if transposed and value.dim() == 3 else -1]
            assert abs(value.float().std().item() * inputs**0.5 - 1) < 0.25, name


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_weight_gradients(later: bool, transposed: bool) -> None:
    """Into main_grad: the same numbers in the order of the weights."""
    sums = guild.WeightGradients(main_grad=True, delayed=later)
    moe = make("everything", weight_gradients=sums, transposed=transposed)
    plain_moe = make("everything", transposed=transposed)
    weights = {name: getattr(moe, name) for name in ("w_up", "w_down", "b_up", "b_down")}
    for weight in weights.values():
        weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(9, 24)
    moe(x).square().sum().backward()
    plain_moe(x).square().sum().backward()
    sums.compute()
    for name, weight in weights.items():
        torch.testing.assert_close(weight.main_grad, getattr(plain_moe, name).grad, msg=name)
    for name in ("router.weight", "router.bias", "shared.gate.weight", "shared.w_up"):
        got, truth = moe.get_parameter(name).grad, plain_moe.get_parameter(name).grad
        torch.testing.assert_close(got, truth, msg=name)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe", "everything", "llama4"])
@pytest.mark.parametrize("training", [True, False])
def test_returned_routing(name: str, training: bool) -> None:
    """The same output; ids, weights and logits as the formula has them, with their gradients."""
    moe = make(name, dtype=torch.float64).train(training)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    out, routing = moe(x, return_routing=True)
    torch.testing.assert_close(out, moe(x))
    assert isinstance(routing, guild.Routing) and routing.token_offsets is None
    k = moe.top_k
    assert routing.ids.shape == (2, 5, k) and routing.ids.dtype == torch.int32
    assert routing.scores.shape == (2, 5, k) and routing.logits.shape == (2, 5, 6)
    flat = x.reshape(-1, 24)
    logits = router_logits(dict(moe.named_parameters()), flat)
    torch.testing.assert_close(routing.logits.view(-1, 6), logits)
    key, _ = choice_keys(moe.routing, logits, getattr(moe.router, "selection_bias", None))
    ids, _ = choose(key, k)
    assert torch.equal(routing.ids.view(-1, k).long(), ids)
    weights = weights_of(moe.routing, logits, ids)
    torch.testing.assert_close(routing.scores.view(-1, k), weights)

    def loss(scores: Tensor, logits: Tensor) -> Tensor:
        return scores.square().sum() + logits.logsumexp(-1).square().sum()

    wanted = x, moe.router.weight
    got = torch.autograd.grad(loss(routing.scores, routing.logits), wanted)
    for value, truth in zip(got, torch.autograd.grad(loss(weights, logits), wanted), strict=True):
        torch.testing.assert_close(value, truth)


def test_returned_lists() -> None:
    """With rounding in training: tokens' lists, and token_offsets; float32 logits in 16 bits."""
    router = guild.Router(rounding="nearest", tile=4)
    moe = guild.MoE(24, 16, 6, 2, router=router, dtype=torch.bfloat16)
    x = torch.randn(3, 10, 24).bfloat16()
    out, routing = moe(x, return_routing=True)
    assert torch.equal(out, moe(x))
    assert routing.ids.dim() == 1 and routing.scores.shape == routing.ids.shape
    assert routing.token_offsets.shape == (31,)
    assert torch.equal(routing.ids[routing.ids >= 0].bincount(minlength=6).int(), moe.expert_counts)
    assert routing.logits.shape == (3, 10, 6) and routing.logits.dtype == torch.float32
    assert moe.eval()(x, return_routing=True)[1].ids.shape == (3, 10, 2)


def test_returned_padding() -> None:
    """ids -1 and scores 0 where the mask says False."""
    moe = make("gpt_oss")
    mask = torch.tensor([[True, False, True], [False, True, True]])
    _, routing = moe(torch.randn(2, 3, 24), mask, return_routing=True)
    assert torch.equal(routing.ids >= 0, mask[..., None].expand(2, 3, 2))
    assert torch.equal(routing.scores > 0, mask[..., None].expand(2, 3, 2))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
def test_gradient_of_returned_padding(name: str) -> None:
    """What comes back to the logits of padding counts nowhere, NaN neither."""
    moe = make(name)
    mask = torch.tensor([[True, False, True], [False, True, True]])
    x = torch.randn(2, 3, 24, requires_grad=True)

    def gradients(at_padding: float) -> list[Tensor]:
        _, routing = moe(x, mask, return_routing=True)
        assert not routing.logits[~mask].any()
        dlogits = torch.ones_like(routing.logits).masked_fill(~mask[..., None], at_padding)
        wanted = x, *moe.router.parameters()
        return list(torch.autograd.grad(routing.logits, wanted, dlogits))

    for got, expected in zip(gradients(float("nan")), gradients(0.0), strict=True):
        assert torch.equal(got, expected)


def test_returned_routing_compiled() -> None:
    """One graph, eager's results."""
    torch._dynamo.reset()
    moe = make("everything")
    x = torch.randn(2, 3, 24)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    out, routing = compiled(x, return_routing=True)
    expected, truth = moe(x, return_routing=True)
    assert torch.equal(out, expected)
    for got, value in zip(routing[:3], truth[:3], strict=True):
        assert torch.equal(got, value)


WRONG = {
    "both widths": (
        {"shared_experts": 1, "shared_intermediate": 8},
        ValueError,
        "shared_intermediate: expected None with shared_experts, .* got 8",
    ),
    "no width": (
        {"shared_intermediate": 0},
        ValueError,
        "shared_intermediate: expected at least 1, got 0",
    ),
    "a gate of nothing": (
        {"shared_gate": True},
        ValueError,
        "shared_gate: expected False without shared_experts or shared_intermediate, got True",
    ),
    "order": (
        {"order": "mixed"},
        ValueError,
        "order: expected .concatenated. or .interleaved., got .mixed.",
    ),
    "weight_gradients": (
        {"weight_gradients": 3},
        TypeError,
        r"weight_gradients: expected guild\.WeightGradients, got int 3",
    ),
    "dtype": (
        {"dtype": "float32"},
        TypeError,
        r"dtype: expected a torch\.dtype, got str 'float32'",
    ),
    "device": ({"device": "gpu"}, ValueError, "device: expected one such as .*, got 'gpu'"),
    "no device": (
        {"device": 3.5},
        TypeError,
        r"device: expected a torch\.device, str or int, got float 3\.5",
    ),
    **{
        name: ({name: "no"}, TypeError, f"{name}: expected True or False, got 'no'")
        for name in ("bias", "transposed", "router_bias", "shared_gate", "recompute")
    },
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_option(name: str) -> None:
    """An error that names it."""
    options, kind, message = WRONG[name]
    with pytest.raises(kind, match=f"^{message}"):
        guild.MoE(24, 16, 6, 2, **options)


@pytest.mark.parametrize("gradients", [True, False])
def test_options_assigned_later(gradients: bool) -> None:
    """With gradients and without, on either way through the layer."""
    layer, x = guild.MoE(24, 16, 6, 2), torch.randn(5, 24)
    other = guild.MoE(24, 16, 6, 2, "relu")
    other.load_state_dict(layer.state_dict())
    with torch.set_grad_enabled(gradients):
        layer(x)
        layer.activation = "relu"
        assert torch.equal(layer(x), other(x))
        for name, value, message in (
            ("activation", "swish", "activation: expected one of silu"),
            ("routing", "sigmoid", r"routing: expected a guild\.Router, got 'sigmoid'"),
            ("fp8", True, r"fp8: expected guild\.FP8, got bool True"),
            ("w_up", None, r"w_up: expected a torch\.Tensor, got NoneType"),
            ("hidden", torch.ones(2), "hidden: expected an int, got Tensor"),
            ("experts", 0, "experts: expected at least 1, got 0"),
            ("experts", "6", "experts: expected an int, got str '6'"),
            ("router", None, r"router: expected a torch\.nn\.Module, got None"),
            ("balance_over", "token", "balance_over: expected None, 'batch' or 'sequence', got"),
            ("recompute", 1, "recompute: expected True or False, got 1"),
            ("weight_gradients", 3, r"weight_gradients: expected guild\.WeightGradients, got int"),
            ("expert_group", "x", r"expert_group: expected a guild\.ExpertParallel, got str"),
        ):
            before = getattr(layer, name)
            setattr(layer, name, value)
            for training in (True, False):
                with pytest.raises((TypeError, ValueError), match=f"^{message}"):
                    layer.train(training)(x)
            setattr(layer, name, before)
        assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", ["activation", "order"])
def test_arrays_in_place_of_names(name: str, gradients: bool) -> None:
    """Arrays, which compare element by element, also beside shared experts' own options."""
    for of_shared in (False, True):
        layer = guild.MoE(24, 16, 6, 2, shared_experts=1)
        setattr(layer.shared if of_shared else layer, name, np.ones(2))
        with (
            torch.set_grad_enabled(gradients),
            pytest.raises((TypeError, ValueError), match=f"^{name}: "),
        ):
            layer(torch.randn(5, 24))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    ("name", "used", "value", "message"),
    [
        ("recompute", True, 1, "recompute: expected True or False, got 1"),
        ("recompute", False, 0, "recompute: expected True or False, got 0"),
        ("transposed", False, 0, "transposed: expected True or False, got 0"),
        ("top_k", 1, True, "top_k: expected an int, got bool True"),
        ("top_k", 2, 2.0, "top_k: expected an int, got float 2.0"),
    ],
)
def test_what_equals_the_last_value(
    name: str, used: object, value: object, message: str, gradients: bool
) -> None:
    """A value of another type, in place of an equal one that a call has used."""
    layer, x = guild.MoE(24, 16, 6, 2), torch.randn(5, 24)
    setattr(layer, name, used)
    with torch.set_grad_enabled(gradients):
        out = layer(x)
        setattr(layer, name, value)
        with pytest.raises(TypeError, match=f"^{message}"):
            layer(x)
        setattr(layer, name, used)
        assert torch.equal(layer(x), out)


def test_wrong_dtype_with_shared_experts() -> None:
    """x is what is wrong, not the first weight that it meets."""
    moe = make("qwen3_next")
    with pytest.raises(TypeError, match=r"^x: expected dtype float32 like w_up, got float64"):
        moe(torch.zeros(3, 24, dtype=torch.float64))


@pytest.mark.parametrize("shared", [0, 1])
def test_tokens_by_columns(shared: int) -> None:
    """Any strides of x give the same bits, whatever is between x and the output."""
    moe = guild.MoE(24, 16, 6, 2, shared_experts=shared)
    columns = torch.randn(24, 7).t()
    assert torch.equal(moe(columns), moe(columns.contiguous()))
    repeated = columns[:1].expand(3, 24)
    assert torch.equal(moe(repeated), moe(repeated.contiguous()))
