"""`routed_experts` without gradients: one op, few arguments, the slow path's bits and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import guild
from allocations import allocations
from guild.routed_experts_fast_path import quick_experts

HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 4, 2
Given = dict[str, Any]
OPTIONS: dict[str, Given] = {
    "plain": {},
    "interleaved": {"order": "interleaved"},
    "transposed": {"transposed": True},
    "biases": {"bias": True},
    "gpt_oss": {"activation": "gpt_oss", "bias": True, "order": "interleaved"},
    "no gate": {"activation": "gelu_ungated"},
    "residual": {"residual": True},
    "int64": {"id_dtype": torch.int64},
    "an activation": {"activation": guild.Activation.named("relu2_ungated")},
}


def given(device: str, tokens: int = 5, dtype: torch.dtype | None = None, **options: Any) -> Given:
    """Arguments of `routed_experts`."""
    torch.manual_seed(1)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    plain = str(options.get("activation", "")).endswith("ungated") or isinstance(
        options.get("activation"), guild.Activation
    )
    width = INNER if plain else 2 * INNER
    found = {
        "x": draw(tokens, HIDDEN),
        "topk_ids": torch.randint(-1, EXPERTS, (tokens, TOP_K), device=device).to(
            options.pop("id_dtype", torch.int32)
        ),
        "topk_weights": torch.rand(tokens, TOP_K, device=device).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        ),
        "w_up": draw(EXPERTS, width, HIDDEN),
        "w_down": draw(EXPERTS, HIDDEN, INNER),
    }
    if options.pop("bias", False):
        found |= {"b_up": draw(EXPERTS, width), "b_down": draw(EXPERTS, HIDDEN)}
    if options.pop("residual", False):
        found["residual"] = draw(tokens, HIDDEN)
    if options.get("transposed"):
        found |= {name: found[name].mT.contiguous() for name in ("w_up", "w_down")}
    return found | options


def long_way(arguments: Given) -> Tensor:
    """The result of a call on the slow path."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(guild.experts, "quick_experts", lambda *_: None)
        return guild.routed_experts(**arguments)


def goes_quick(call: Callable[[], Tensor]) -> tuple[bool, Tensor]:
    """Whether a call was answered by `quick_experts`, and its result."""
    answers = []

    def noted(*arguments: Any) -> tuple[Tensor, Tensor] | None:
        answers.append(quick_experts(*arguments))
        return answers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guild.experts, "quick_experts", noted)
        out = call()
    return any(answer is not None for answer in answers), out


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", OPTIONS)
def test_same_bits(name: str, mode: Callable, device: str) -> None:
    """The bits of the slow path and of training, at T = 0 too; parameters or plain tensors."""
    for dtype in (torch.bfloat16, torch.float16 if device == "cuda" else torch.float64):
        for tokens in (0, 1, 5):
            arguments = given(device, tokens, dtype, **OPTIONS[name])
            wanted = guild.routed_experts(
                **{**arguments, "w_up": arguments["w_up"].clone().requires_grad_()}
            )
            with mode():
                quick, out = goes_quick(lambda a=arguments: guild.routed_experts(**a))
                arguments["w_down"] = nn.Parameter(arguments["w_down"])
                again, second = goes_quick(lambda a=arguments: guild.routed_experts(**a))
            assert quick and again
            assert torch.equal(out, wanted) and torch.equal(second, wanted)
            assert torch.equal(out, long_way(arguments))


LONG: dict[str, Callable[[Given], Given]] = {
    "gradients": lambda a: a,
    "weights of another type": lambda a: {**a, "topk_weights": a["topk_weights"].double()},
    "strided ids": lambda a: {**a, "topk_ids": a["topk_ids"].mT.contiguous().mT},
    "a subclass": lambda a: {**a, "x": a["x"].as_subclass(type("Strange", (Tensor,), {}))},
    "out": lambda a: {**a, "out": torch.empty_like(a["x"])},
    "recompute": lambda a: {**a, "recompute": True},
    "a list": lambda a: {**a, "w_down": list(a["w_down"])},
    "a pair": lambda a: {**a, "w_up": tuple(half.clone() for half in a["w_up"].chunk(2, 1))},
    "a map": lambda a: {**a, "expert_map": torch.arange(4, dtype=torch.int32).to(a["x"].device)},
}


@pytest.mark.parametrize("name", LONG)
def test_what_goes_the_long_way(name: str, device: str) -> None:
    arguments = LONG[name](given(device))
    with torch.set_grad_enabled(name == "gradients"):
        quick, out = goes_quick(lambda: guild.routed_experts(**arguments))
    assert not quick
    torch.testing.assert_close(out.as_subclass(Tensor), long_way(given(device)))


def test_surroundings_are_noticed(device: str) -> None:
    """Autocast, functorch and compilation."""
    arguments = given(device)
    wanted = long_way(arguments)
    x = arguments.pop("x")
    call = lambda x: guild.routed_experts(x, **arguments)  # noqa: E731
    with torch.no_grad():
        with torch.autocast(device, dtype=torch.bfloat16):
            quick, out = goes_quick(lambda: call(x))
            assert not quick and out.dtype == torch.bfloat16
        quick, out = goes_quick(lambda: torch.func.vmap(call, chunk_size=1)(x[None]))
        assert not quick
        torch.testing.assert_close(out[0], wanted)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), wanted)


WRONG: dict[str, Given] = {
    "x: expected 2 dimensions": {"x": torch.randn(5, 1, HIDDEN)},
    "x: expected dtype": {"x": torch.zeros(5, HIDDEN, dtype=torch.int32)},
    "x: expected rows with contiguous columns": {"x": torch.randn(HIDDEN, 5).mT},
    "topk_ids: expected 5 tokens": {"topk_ids": torch.zeros(4, TOP_K, dtype=torch.int32)},
    "topk_ids: expected 1 to 4096": {
        "topk_ids": torch.zeros(5, 0, dtype=torch.int32),
        "topk_weights": torch.zeros(5, 0),
    },
    "topk_ids: expected dtype": {"topk_ids": torch.zeros(5, TOP_K)},
    "topk_weights: expected shape": {"topk_weights": torch.rand(5, 3)},
    "topk_weights: expected a floating dtype": {"topk_weights": torch.zeros(5, TOP_K).int()},
    "w_up: expected shape": {"w_up": torch.randn(EXPERTS, 2 * INNER + 1, HIDDEN)},
    "w_up: expected dtype": {"w_up": torch.randn(EXPERTS, 2 * INNER, HIDDEN).double()},
    "w_down: expected sizes": {"w_down": torch.randn(EXPERTS, HIDDEN, 0)},
    "w_down: expected shape": {"w_down": torch.randn(EXPERTS, INNER, HIDDEN)},
    "b_up: expected shape": {"b_up": torch.randn(EXPERTS, INNER)},
    "b_down: expected shape": {"b_down": torch.randn(EXPERTS, INNER)},
    "residual: expected shape": {"residual": torch.randn(4, HIDDEN)},
    "activation: expected": {"activation": "tanh"},
    "order: expected": {"order": "mixed"},
    "transposed: expected": {"transposed": 1},
    "recompute: expected": {"recompute": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_are_the_same(message: str) -> None:
    arguments = given("cpu") | WRONG[message]
    texts = []
    for call in (lambda: guild.routed_experts(**arguments), lambda: long_way(arguments)):
        with pytest.raises((TypeError, ValueError)) as error, torch.no_grad():
            call()
        texts.append(str(error.value))
    assert texts[0] == texts[1] and message in texts[0]


def test_no_more_than_two_allocations() -> None:
    """The result, and one buffer for all the rest."""

    arguments = given("cpu")
    with torch.inference_mode():
        guild.routed_experts(**arguments)
        assert len(allocations(lambda: guild.routed_experts(**arguments))) == 2


@pytest.mark.parametrize("options", [{}, {"order": "interleaved"}, {"shared_gate": True}])
def test_shared_experts_alone(options: Given, device: str) -> None:
    """The module by itself, as an outer model may call it: the bits of its call with gradients."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    layer = guild.MoE(HIDDEN, INNER, EXPERTS, TOP_K, shared_experts=2, **options, dtype=dtype)
    layer = layer.to(device)
    for tokens in (0, 1, 7):
        x = torch.randn(tokens, HIDDEN).to(device, dtype)
        wanted = layer.shared(x)
        assert wanted.requires_grad
        with torch.no_grad():
            assert torch.equal(layer.shared(x), wanted)
            layer.shared.w_up.data = layer.shared.w_up.data.mT.contiguous().mT  # the slow path
            assert torch.equal(layer.shared(x), wanted)
