"""Second derivatives of layers in FP8: an error for every input that a gradient depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.func import grad as func_grad

import guild

EXPERTS, HIDDEN, SIZE, TOKENS = 3, 16, 8, 5
RECIPES = {
    "exact": guild.FP8(),
    "codes kept": guild.FP8(wgrad="fp8", scales="power_of_two"),
}
Inputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def cpu_only(request: pytest.FixtureRequest) -> None:
    """Derivatives are registered alike on both devices."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")


def inputs() -> Inputs:
    torch.manual_seed(0)
    shapes = {
        "x": (TOKENS, HIDDEN),
        "w_up": (EXPERTS, 2 * SIZE, HIDDEN),
        "w_down": (EXPERTS, HIDDEN, SIZE),
        "b_up": (EXPERTS, 2 * SIZE),
        "b_down": (EXPERTS, HIDDEN),
    }
    made = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    return made | {"scores": torch.rand(TOKENS, 1)}


def experts(fp8: guild.FP8, how: str, given: Inputs) -> Tensor:
    """`routed_experts` of weights in a tensor, a list or an FP8Weights."""
    weights = [given[name] for name in ("w_up", "w_down", "b_up", "b_down")]
    if how == "lists":
        weights = [list(w.unbind(0)) for w in weights]
    elif how == "uneven lists":
        weights = [[one.clone() for one in w] for w in weights]
    if how == "FP8Weights":
        fp8 = guild.FP8Weights(fp8, *weights[:2])
    ids = torch.arange(TOKENS)[:, None] % EXPERTS
    return guild.routed_experts(
        given["x"], ids, given["scores"], *weights, fp8=fp8, recompute=how == "recompute"
    )


def expect_errors(call: Callable[[Inputs], Tensor], given: Inputs) -> None:
    """The gradient of each input, differentiated by any one of them, must raise."""
    for of in given:
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        loss = call(leaves).float().sum()  # whose gradient depends on nothing
        (gradient,) = torch.autograd.grad(loss, leaves[of], create_graph=True)
        penalty = gradient.float().square().sum()
        for leaf in leaves.values():
            with pytest.raises(NotImplementedError, match=r"guild::.* has no derivative"):
                (penalty + leaf.float().sum()).backward(inputs=[leaf], retain_graph=True)


@pytest.mark.parametrize("how", ["tensors", "recompute", "lists", "uneven lists", "FP8Weights"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts(recipe: str, how: str) -> None:
    expect_errors(lambda given: experts(RECIPES[recipe], how, given), inputs())


@pytest.mark.parametrize("router_bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layer(recipe: str, router_bias: bool) -> None:
    more = {"fp8": RECIPES[recipe], "router_bias": router_bias, "dtype": torch.bfloat16}
    layer = guild.MoE(HIDDEN, SIZE, EXPERTS, 2, **more)
    given = {name: p.detach() for name, p in layer.named_parameters()}
    x = inputs()["x"]
    expect_errors(
        lambda leaves: functional_call(
            layer, {n: t for n, t in leaves.items() if n != "x"}, (leaves["x"],)
        ),
        {"x": x, **given},
    )


def test_derivatives_by_another_variable_raise() -> None:
    """The inner level does not know that the outer one differentiates x."""
    given = inputs()

    def inner(x: Tensor) -> Tensor:
        def loss(w_up: Tensor) -> Tensor:
            return experts(RECIPES["codes kept"], "tensors", {**given, "x": x, "w_up": w_up}).sum()

        return func_grad(loss)(given["w_up"]).square().sum()

    with pytest.raises(NotImplementedError, match=r"guild::.* has no derivative"):
        func_grad(inner)(given["x"])
    with pytest.raises(NotImplementedError, match=r"guild::.* has no derivative"):
        inner(given["x"].clone().requires_grad_()).backward()


def test_nested_transforms() -> None:
    given = inputs()

    def loss(x: Tensor) -> Tensor:
        out = experts(RECIPES["codes kept"], "tensors", {**given, "x": x})
        return out.float().square().sum()

    leaf = given["x"].clone().requires_grad_()
    assert torch.equal(func_grad(loss)(given["x"]), torch.autograd.grad(loss(leaf), leaf)[0])
    with pytest.raises(NotImplementedError, match=r"guild::.* has no derivative"):
        func_grad(lambda x: func_grad(loss)(x).float().square().sum())(given["x"])


def test_kept_codes_do_not_keep_the_input() -> None:
    """Its place in the graph is kept, its memory is not."""
    given = inputs()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        leaf = given["x"].clone().requires_grad_()
        experts(RECIPES["codes kept"], "tensors", {**given, "x": leaf})
    assert saved and leaf.data_ptr() not in {t.data_ptr() for t in saved}
