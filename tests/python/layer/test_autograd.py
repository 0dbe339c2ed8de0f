"""Gradients in float64 against finite differences, through every public function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import guild
from guild.routing import ROUTERS as NAMED
from layers import ACTIVATIONS, Case, make_layer
from oracle.experts import activate

TINY = Case("tiny", 5, 4, 3, 4, 2, "sentinel", frozenset())


@pytest.fixture(autouse=True)
def cpu_only(request: pytest.FixtureRequest) -> None:
    """float64 exists on the CPU alone."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")


# Of grouped_mm: shapes of A and B, where groups end, and the bias's shape.
GROUPED_SHAPES = {
    "rows": ((7, 3), (4, 3, 5), [2, 2, 5, 6], (4, 5)),
    "inner": ((3, 7), (7, 5), [2, 2, 5, 6], (4, 5)),
    "columns": ((4, 6, 3), (3, 7), [2, 2, 5, 6], (4, 6)),
    "none": ((4, 6, 3), (4, 3, 5), None, (4, 5)),
}


def values(*shape: int, seed: int = 0) -> Tensor:
    """Fresh float64 normals that want a gradient."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize(
    "activation, layout",
    [
        (name, layout)
        for name, act in ACTIVATIONS.items()
        for layout in ("concatenated", "interleaved_transposed", "separate")
        if act.gated or layout != "separate"
    ],
)
def test_routed_experts(activation: str, layout: str) -> None:
    """x, scores, weights and biases, with sentinel ids."""
    act = ACTIVATIONS[activation]
    layer = make_layer(TINY, act, seed=3)
    arguments = layer.arguments(layout)
    weights = arguments.pop("w_up"), arguments.pop("w_down")
    weights = (*weights[0], weights[1]) if layout == "separate" else weights
    b_up, b_down = arguments.pop("b_up"), arguments.pop("b_down")

    def run(x: Tensor, scores: Tensor, b_up: Tensor, b_down: Tensor, *w: Tensor) -> Tensor:
        w_up = w[:2] if layout == "separate" else w[0]
        return guild.routed_experts(x, layer.ids, scores, w_up, w[-1], b_up, b_down, **arguments)

    inputs = (layer.x.requires_grad_(), layer.scores.requires_grad_(), b_up, b_down, *weights)
    assert gradcheck(run, inputs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("alone", [False, True])
def test_residual(alone: bool) -> None:
    """A residual is added to the sum and gets the output's gradient, also as the only one."""
    layer = make_layer(TINY, ACTIVATIONS["swiglu"], seed=3)
    arguments = layer.arguments("concatenated")
    if alone:
        arguments = {n: t.detach() if isinstance(t, Tensor) else t for n, t in arguments.items()}

    def run(residual: Tensor, x: Tensor, scores: Tensor) -> Tensor:
        return guild.routed_experts(x, layer.ids, scores, **arguments, residual=residual)

    inputs = (values(TINY.tokens, TINY.hidden), layer.x, layer.scores)
    without = guild.routed_experts(layer.x, layer.ids, layer.scores, **arguments)
    torch.testing.assert_close(run(*inputs), inputs[0] + without)
    if not alone:
        inputs = (inputs[0], layer.x.requires_grad_(), layer.scores.requires_grad_())
    assert gradcheck(run, inputs, atol=1e-6, rtol=1e-4)


def test_biases_as_a_pair() -> None:
    """b_up as (gate, up), in both orders, gives what the packed one gives."""
    layer = make_layer(TINY, ACTIVATIONS["swiglu"])
    for layout in ("concatenated", "interleaved"):
        arguments = layer.arguments(layout)
        packed = guild.routed_experts(layer.x, layer.ids, layer.scores, **arguments)
        arguments["b_up"] = (layer.gate_bias, layer.up_bias)
        assert torch.equal(
            guild.routed_experts(layer.x, layer.ids, layer.scores, **arguments), packed
        )


@pytest.mark.parametrize("activation", ["gpt_oss", "relu2_ungated", "geglu_tanh"])
def test_experts_mlp(activation: str) -> None:
    """Rows sorted by the caller, some past the last offset, an expert without rows."""
    act = guild.Activation.named(activation)
    offsets = torch.tensor([0, 3, 3, 6], dtype=torch.int32)
    width = act.width(3)
    inputs = (
        values(8, 4),
        values(3, width, 4, seed=1),
        values(3, 4, 3, seed=2),
        values(3, width, seed=3),
        values(3, 4, seed=4),
    )

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return guild.experts_mlp(x, offsets, *weights, activation=act)

    assert gradcheck(run, inputs, atol=1e-6, rtol=1e-4)


def test_bias_gradients_of_many_rows() -> None:
    """Sums of equal terms in float32, whose rounding errors would all add up."""
    rows = 1 << 18
    x, ids = torch.full((rows, 1), 0.1), torch.zeros(rows, 1, dtype=torch.int32)
    one = torch.ones(1, 1, 1)
    biases = [torch.zeros(1, 1, requires_grad=True) for _ in range(2)]
    out = guild.routed_experts(
        x, ids, torch.ones(rows, 1), one, one, *biases, activation="relu_ungated"
    )
    out.backward(torch.full_like(out, 0.1))
    for bias in biases:
        torch.testing.assert_close(bias.grad.item(), rows * x[0].double().item(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("a, b, ends, bias", GROUPED_SHAPES.values(), ids=GROUPED_SHAPES)
@pytest.mark.parametrize("flip", [False, True], ids=["row_major", "column_major"])
def test_grouped_mm(
    a: tuple[int, ...],
    b: tuple[int, ...],
    ends: list[int] | None,
    bias: tuple[int, ...],
    flip: bool,
) -> None:
    """All four cases, with bias, and twice: the gradient is differentiable itself."""
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    mat_a, mat_b = values(*a), values(*b, seed=1)
    if flip:
        mat_a = mat_a.detach().mT.contiguous().mT.requires_grad_()
        mat_b = mat_b.detach().mT.contiguous().mT.requires_grad_()

    def run(mat_a: Tensor, mat_b: Tensor, bias: Tensor) -> Tensor:
        return guild.grouped_mm(mat_a, mat_b, offs, bias)

    assert gradcheck(run, (mat_a, mat_b, values(*bias, seed=2)))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route(score: str, renormalize: bool) -> None:
    """The gradient of the weights; small changes do not change the choice."""

    def run(logits: Tensor) -> Tensor:
        return guild.route(logits, 3, score=score, renormalize=renormalize, scale=2.5)[1]

    assert gradcheck(run, (values(6, 8),))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("padded", [False, True])
def test_routers(name: str, padded: bool) -> None:
    """Every named router from x to the layer's output, all of its parameters."""
    torch.manual_seed(1)
    router = guild.Router.named(name)
    top_k = 1 if router.applied_to == "input" else 3
    moe = guild.MoE(4, 3, 8, top_k, router=router, shared_experts=1, dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, True]) if padded else None
    names, parameters = zip(*moe.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(moe, given, (x, mask))

    inputs = (values(5, 4), *(p.detach().clone().requires_grad_() for p in parameters))
    assert gradcheck(run, inputs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "aux"])
@pytest.mark.parametrize("alone", [False, True], ids=["only_down", "used_alone"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_pair(activation: str, alone: bool, fused: bool) -> None:
    """The fused pair; swiglu_out also used on its own; both ways through the down projection."""
    act = ACTIVATIONS[activation]
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    width = act.width(3)
    options = {"activation": act, "order": "interleaved"}

    def run(x: Tensor, w_up: Tensor, b_up: Tensor, w_down: Tensor, b_down: Tensor) -> Tensor:
        a, aux = guild.grouped_mm_swiglu(x, w_up, offs, b_up, **options)
        out = guild.grouped_mm_downproj(a, w_down, offs, b_down, aux if fused else None, **options)
        return torch.cat((out, a.sin()), 1) if alone else out

    inputs = (
        values(6, 4),
        values(3, 4, width, seed=1),
        values(3, width, seed=2),
        values(3, 3, 4, seed=3),
        values(3, 4, seed=4),
    )
    assert gradcheck(run, inputs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("activation", ["silu", "gpt_oss", "gelu_ungated"])
def test_moe(activation: str, shared: int) -> None:
    """The module: input and every parameter."""
    torch.manual_seed(5)
    moe = guild.MoE(4, 3, 5, 2, activation, bias=True, shared_experts=shared, dtype=torch.float64)
    names, parameters = zip(*moe.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(moe, dict(zip(names, weights, strict=True)), (x,))

    assert gradcheck(run, (values(2, 3, 4), *parameters), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("order", ["concatenated", "interleaved"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activation_formulas(activation: str, order: str) -> None:
    """`Activation` in plain torch: its value and its written-out gradient."""
    act = ACTIVATIONS[activation]
    h = values(50, act.width(8)) * 2
    gate, up = h, None
    if act.gated:
        gate, up = h.chunk(2, 1) if order == "concatenated" else (h[:, 0::2], h[:, 1::2])
    expected = activate(act, gate, up)
    torch.testing.assert_close(act(h, order), expected)
    da = torch.randn_like(expected)
    (dh,) = torch.autograd.grad(expected, h, da)
    torch.testing.assert_close(act.gradient(h.detach(), da, order), dh)


def test_no_gradient_of_a_clamped_up() -> None:
    """Whatever else the product has: NaN in gate, an infinite gradient."""
    act = guild.Activation(limit=1.0)
    h = torch.tensor([[float("nan"), 5.0], [1.0, -5.0]])
    for da in (1.0, float("inf")):
        assert (act.gradient(h, torch.full((2, 1), da))[:, 1] == 0).all()


def test_only_what_is_wanted_is_computed() -> None:
    """A frozen layer still gives x its gradient; with x frozen the weights still get theirs."""
    layer = make_layer(TINY, ACTIVATIONS["swiglu"])
    arguments = layer.arguments("concatenated")
    x = layer.x.requires_grad_()
    guild.routed_experts(x, layer.ids, layer.scores, **arguments).sum().backward()
    whole = {name: t.grad.clone() for name, t in arguments.items() if isinstance(t, Tensor)}
    dx = x.grad.clone()
    frozen = {n: t.detach() if isinstance(t, Tensor) else t for n, t in arguments.items()}
    x.grad = None
    guild.routed_experts(x, layer.ids, layer.scores, **frozen).sum().backward()
    assert torch.equal(x.grad, dx)
    for name in whole:
        one = {**frozen, name: frozen[name].clone().requires_grad_()}
        guild.routed_experts(x.detach(), layer.ids, layer.scores, **one).sum().backward()
        assert torch.equal(one[name].grad, whole[name]), name
