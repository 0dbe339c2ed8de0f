"""Derivatives other than plain backward: each is right, or an error that names the op.

Second derivatives, forward mode and vmap, of every op and of every public function.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, hessian, jacrev, jvp, vjp, vmap
from torch.func import grad as func_grad

import guild
from layers import ACTIVATIONS
from test_autograd import (
    GROUPED_SHAPES,
    cpu_only,  # noqa: F401 - a fixture of these tests too
    values,
)
from test_opcheck import CALLS, Inputs, ops

TWICE = {"bias_gradient", "grouped_mm", "pair_down", "pair_up", "router_logits"}
ONCE = {
    *("balance_sums", "experts_forward", "lora_forward", "moe_forward", "moe_layer"),
    *("round_tokens", "route", "route_tokens"),
}
FLOATS = (torch.float32, torch.bfloat16)


def plain(name: str) -> tuple[Callable, list]:
    """An op, and its arguments without gradients."""
    arguments = CALLS[name](Inputs("cpu"))
    op = getattr(ops, name.split()[0])
    return op, [a.detach() if isinstance(a, Tensor) else a for a in arguments]


def floats(values: list) -> list[int]:
    return [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.dtype in FLOATS]


def results_of(op: Callable, arguments: list) -> list[Tensor]:
    results = op(*arguments)
    return [results] if isinstance(results, Tensor) else list(results or ())


# ---- every op -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CALLS))
def test_forward_mode_raises(name: str) -> None:
    """An error, whichever argument has a tangent."""
    op, arguments = plain(name)
    for i in floats(arguments):
        with forward_ad.dual_level():
            given = list(arguments)
            given[i] = forward_ad.make_dual(given[i], torch.ones_like(given[i]))
            with pytest.raises(NotImplementedError, match=f"guild::{name.split()[0]} has no forw"):
                op(*given)


@pytest.mark.parametrize("name", [n for n in CALLS if n.split()[0] not in TWICE | ONCE])
def test_ops_without_a_gradient_raise(name: str) -> None:
    """Ops that write to an argument raise at once, others when a result is differentiated."""
    op, arguments = plain(name)
    for i in floats(arguments):
        given = list(arguments)
        given[i] = given[i].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"guild::{name.split()[0]} has no deriv"):
            results = [r for r in results_of(op, given) if r.requires_grad]
            assert results
            torch.autograd.grad(sum(r.sum() for r in results), given[i])


def is_constant(gradient: Tensor, of: Tensor) -> bool:
    """Whether autograd says so; otherwise it must raise."""
    if not gradient.requires_grad:
        return True
    try:
        (again,) = torch.autograd.grad(gradient.sum(), of, retain_graph=True, allow_unused=True)
    except NotImplementedError as error:
        assert "has no derivative" in str(error)
        return False
    assert again is None
    return True


@pytest.mark.parametrize("name", [n for n in CALLS if n.split()[0] in ONCE])
def test_second_derivatives_raise(name: str) -> None:
    """A gradient of any argument raises for any that it depends on, one asked for at a time."""
    op, arguments = plain(name)
    for wanted in [[i] for i in floats(arguments)] + [floats(arguments)]:
        given = list(arguments)
        for i in wanted:
            given[i] = given[i].clone().requires_grad_()

        def first(given: list, inputs: list[Tensor], create: bool) -> tuple[Tensor | None, ...]:
            results = [r for r in results_of(op, given) if r.requires_grad]
            loss = sum((r * torch.linspace(0, 1, r.numel()).view_as(r)).sum() for r in results)
            return torch.autograd.grad(loss, inputs, create_graph=create, allow_unused=True)

        if not any(r.requires_grad for r in results_of(op, given)):
            continue
        for k, gradient in enumerate(first(given, [given[i] for i in wanted], True)):
            for i in wanted if gradient is not None else ():
                if not is_constant(gradient, given[i]):
                    continue
                moved = list(given)
                draw = torch.Generator().manual_seed(0)
                step = torch.randn(given[i].shape, generator=draw) * 1e-3
                moved[i] = (given[i].detach() + step).requires_grad_()
                same = first(moved, [moved[j] for j in wanted], False)[k]
                assert torch.equal(same, gradient), f"gradient {k} depends on argument {i}"


@pytest.mark.parametrize("name", [n for n in CALLS if n.split()[0] not in TWICE | ONCE])
def test_writes_count(name: str) -> None:
    """The version counter of each tensor that an op writes to goes up by one; no other changes."""
    op, arguments = plain(name)
    schema = op.default._schema.arguments
    tensors = [(a, s) for a, s in zip(arguments, schema, strict=False) if isinstance(a, Tensor)]
    versions = [tensor._version for tensor, _ in tensors]
    op(*arguments)
    for (tensor, argument), version in zip(tensors, versions, strict=True):
        assert tensor._version == version + (argument.alias_info is not None), argument.name


@pytest.mark.parametrize("name", list(CALLS))
def test_vmap_runs_one_after_the_other(name: str) -> None:
    op, arguments = plain(name)
    written = [a.alias_info is not None for a in op.default._schema.arguments]
    places = [i for i in floats(arguments) if not written[i]]
    both = {i: torch.stack((arguments[i], arguments[i] * 0.5)) for i in places}
    dims = tuple(0 if i in both else None for i in range(len(arguments)))
    stacked = [both.get(i, a) for i, a in enumerate(arguments)]
    if any(written):
        with pytest.raises(RuntimeError):
            vmap(op, in_dims=dims)(*stacked)
        return
    results = vmap(op, in_dims=dims)(*stacked)
    for one in range(2):
        expected = op(*(both[i][one] if i in both else a for i, a in enumerate(arguments)))
        got = results[one] if isinstance(results, Tensor) else [r[one] for r in results]
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# ---- every public function ----------------------------------------------------------------------

T, H, INNER, E, K = 6, 4, 3, 4, 2
OFFSETS = torch.tensor([0, 2, 3, 5, 6], dtype=torch.int32)


def double(*shape: int, seed: int = 0) -> Tensor:
    return values(*shape, seed=seed).detach()


def moe(**more: object) -> guild.MoE:
    torch.manual_seed(0)
    return guild.MoE(H, INNER, E, K, dtype=torch.float64, **more)


def expert_weights() -> tuple[Tensor, ...]:
    shapes = (E, 2 * INNER, H), (E, H, INNER), (E, 2 * INNER), (E, H)
    return tuple(double(*shape, seed=i) for i, shape in enumerate(shapes, 1))


def low_rank_operands() -> tuple[Tensor, ...]:
    shapes = (E * 2, H), (2 * INNER, 2 * E), (E, 3, INNER), (E, H, 3)
    return tuple(double(*shape, seed=i) for i, shape in enumerate(shapes, 5))


def low_rank_terms(a_up: Tensor, b_up: Tensor, a_down: Tensor, b_down: Tensor) -> dict:
    return {"lora_up": guild.LoRA(a_up, b_up, 0.7), "lora_down": guild.LoRA(a_down, b_down)}


def pair(x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor, b_down: Tensor) -> Tensor:
    ends = OFFSETS[1:]
    plain = {"activation": "swiglu"}
    a, aux = guild.grouped_mm_swiglu(x, w_up.mT, ends, b_up, **plain)
    return guild.grouped_mm_downproj(a, w_down.mT, ends, b_down, aux, **plain)


def balanced(logits: Tensor) -> Tensor:
    ids, scores = guild.route(logits, K)
    sums = guild.balance_sums(logits, ids)
    return sums.load_balancing_loss() + sums.z_loss() + scores.sum(0)


def rounded(logits: Tensor) -> Tensor:
    ids, _ = guild.route(logits, K)
    return guild.round_tokens(logits, ids, tile=2)[1]


def of_layer(layer: guild.MoE) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    return call, (double(T, H), *(p.detach() for p in parameters))


IDS = torch.arange(T * K).view(T, K) % E
FROZEN = expert_weights()
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "routed_experts": (
        lambda x, scores, *weights: guild.routed_experts(x, IDS, scores, *weights),
        (double(T, H), double(T, K, seed=7).abs(), *expert_weights()),
    ),
    "recompute": (
        lambda x, *weights: guild.routed_experts(
            x, IDS, torch.ones(T, K), *weights, recompute=True
        ),
        (double(T, H), *expert_weights()),
    ),
    "experts_mlp": (
        lambda x, *weights: guild.experts_mlp(x, OFFSETS, *weights),
        (double(T, H), *expert_weights()),
    ),
    "LoRA": (
        lambda x, scores, *low: guild.routed_experts(
            *(x, IDS, scores, *FROZEN), **low_rank_terms(*low)
        ),
        (double(T, H), double(T, K, seed=7).abs(), *low_rank_operands()),
    ),
    "LoRA of sorted rows": (
        lambda x, *low: guild.experts_mlp(
            *(x, OFFSETS, *FROZEN), **low_rank_terms(*low), recompute=True
        ),
        (double(T, H), *low_rank_operands()),
    ),
    "route": (lambda logits: guild.route(logits, K, score="sigmoid")[1], (double(T, E),)),
    "balance_sums": (balanced, (double(T, E),)),
    "round_tokens": (rounded, (double(T, E),)),
    "MoE": of_layer(moe(bias=True, shared_experts=1)),
    "MoE rounded": of_layer(moe(router=guild.Router(rounding="nearest", tile=2))),
}
AGAIN: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "grouped_mm": (
        lambda a, b, bias: guild.grouped_mm(a, b.mT, OFFSETS[1:], bias),
        (double(T, H), *expert_weights()[::2]),
    ),
    "pair": (pair, (double(T, H), *expert_weights())),
}
BOTH = {**FUNCTIONS, **AGAIN}


def penalised(call: Callable[..., Tensor], of: int) -> Callable[..., Tensor]:
    """call's squares and those of its gradient by one input."""

    def loss(*inputs: Tensor) -> Tensor:
        gradient = func_grad(lambda *given: call(*given).square().sum(), argnums=of)(*inputs)
        return call(*inputs).sum() + gradient.square().sum()

    return loss


@pytest.mark.parametrize("name", list(BOTH))
def test_func_grad(name: str) -> None:
    """torch.func.grad and vjp give what backward gives; a vmap of them, what a loop gives."""
    call, inputs = BOTH[name]
    every = tuple(range(len(inputs)))

    def loss(*inputs: Tensor) -> Tensor:
        return call(*inputs).square().sum()

    def by_backward(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        return torch.autograd.grad(loss(*leaves), leaves)

    expected = by_backward(*inputs)
    torch.testing.assert_close(func_grad(loss, argnums=every)(*inputs), expected)
    torch.testing.assert_close(vjp(loss, *inputs)[1](torch.ones((), dtype=torch.float64)), expected)
    both = [torch.stack((t, t * 0.5)) for t in inputs]
    got = vmap(func_grad(loss, argnums=every))(*both)
    for one in range(2):
        expected = by_backward(*(t[one] for t in both))
        torch.testing.assert_close(tuple(g[one] for g in got), expected)


@pytest.mark.parametrize("name", list(BOTH))
def test_public_functions_in_forward_mode(name: str) -> None:
    call, inputs = BOTH[name]
    for i, value in enumerate(inputs):
        with pytest.raises(NotImplementedError, match=r"guild::.* has no forward-mode derivative"):
            jvp(lambda t, i=i: call(*inputs[:i], t, *inputs[i + 1 :]), (value,), (value,))
    with pytest.raises(NotImplementedError, match=r"guild::.* has no forward-mode derivative"):
        hessian(lambda t: call(t, *inputs[1:]).square().sum())(inputs[0])


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_gradient_penalty_raises(name: str) -> None:
    """By backward(), by any one input, by nested transforms, and by one level inside another."""
    call, inputs = FUNCTIONS[name]
    for of in range(len(inputs)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        loss = call(*leaves).square().sum()
        (gradient,) = torch.autograd.grad(loss, leaves[of], create_graph=True)
        penalty = loss + gradient.square().sum()
        for leaf in leaves:
            with pytest.raises(NotImplementedError, match=r"guild::.* has no derivative"):
                torch.autograd.grad(penalty, leaf, retain_graph=True)
        with pytest.raises(NotImplementedError, match=r"guild::.* has no derivative"):
            penalty.backward()
        nested = penalised(call, of)
        for other in range(len(inputs)):
            with pytest.raises(NotImplementedError, match=r"guild::.* has no derivative"):
                func_grad(nested, argnums=other)(*inputs)
            leaves[other] = inputs[other].clone().requires_grad_()
            with pytest.raises(NotImplementedError, match=r"guild::.* has no derivative"):
                torch.autograd.grad(nested(*leaves), leaves[other])
    with pytest.raises(NotImplementedError, match=r"guild::.* has no derivative"):
        jacrev(jacrev(lambda x: call(x, *inputs[1:]).square().sum()))(inputs[0])


@pytest.mark.parametrize("name", list(AGAIN))
def test_gradient_penalty(name: str) -> None:
    """What can be differentiated twice, also by torch.func: as create_graph=True has it."""
    call, inputs = AGAIN[name]
    every = tuple(range(len(inputs)))
    got = func_grad(penalised(call, 1), argnums=every)(*inputs)
    leaves = [t.clone().requires_grad_() for t in inputs]
    (gradient,) = torch.autograd.grad(call(*leaves).square().sum(), leaves[1], create_graph=True)
    penalty = call(*leaves).sum() + gradient.square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(penalty, leaves))


@pytest.mark.parametrize("a, b, ends, bias", GROUPED_SHAPES.values(), ids=GROUPED_SHAPES)
def test_grouped_mm_twice(
    a: tuple[int, ...], b: tuple[int, ...], ends: list[int] | None, bias: tuple[int, ...]
) -> None:
    """Second derivatives against finite differences, rows of nobody and empty groups with them."""
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    inputs = values(*a), values(*b, seed=1), values(*bias, seed=2)
    assert gradgradcheck(lambda a, b, c: guild.grouped_mm(a, b, offs, c), inputs)


def test_router_logits_twice() -> None:
    operands = values(5, 3), values(4, 3, seed=1), values(4, seed=2)
    assert gradgradcheck(ops.router_logits, operands)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "aux"])
@pytest.mark.parametrize(
    "activation, order",
    [("gpt_oss", "interleaved"), ("geglu_tanh", "concatenated"), ("clamped_after", "interleaved")],
)
def test_pair_twice(activation: str, fused: bool, order: str) -> None:
    """The fused pair, swiglu_out also used on its own; GELU of unwritten memory is NaN here."""
    offs = torch.tensor([2, 2, 4], dtype=torch.int32)
    options = {"activation": ACTIVATIONS[activation], "order": order}
    width = options["activation"].width(2)

    def run(x: Tensor, w_up: Tensor, b_up: Tensor, w_down: Tensor, b_down: Tensor) -> Tensor:
        a, aux = guild.grouped_mm_swiglu(x, w_up, offs, b_up, **options)
        out = guild.grouped_mm_downproj(a, w_down, offs, b_down, aux if fused else None, **options)
        return torch.cat((out, a.sin()), 1)

    shapes = (5, 3), (3, 3, width), (3, width), (3, 2, 3), (3, 3)
    inputs = tuple(values(*shape, seed=i) for i, shape in enumerate(shapes))
    assert gradcheck(run, inputs, check_batched_grad=True, atol=1e-5, rtol=1e-4)
    assert gradgradcheck(run, inputs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_batch_of_gradients_for_a_sink(fp8: bool) -> None:
    options = {"fp8": guild.FP8(), "dtype": torch.bfloat16} if fp8 else {}
    layer = guild.MoE(64, 32, 4, 2, weight_gradients=guild.WeightGradients(), **options)
    x = torch.randn(5, 64, dtype=layer.w_up.dtype, requires_grad=True)
    out = layer(x)
    many = torch.ones(3, *out.shape, dtype=out.dtype)
    with pytest.raises(NotImplementedError, match=r"^weight_gradients: expected backward of one"):
        torch.autograd.grad(out, x, many, is_grads_batched=True)
