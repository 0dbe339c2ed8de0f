"""Low-rank terms of the experts' weights: guild.LoRA in routed_experts and experts_mlp.

test_fuzz.py draws them beside every other option.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import guild
from allocations import allocations
from guild import LoRA
from layers import ACTIVATIONS, Case, make_layer
from oracle.lora import delta
from test_autograd import values
from test_compile import assert_same, fresh_compiler  # noqa: F401 - a fixture of these tests too
from tolerance import relative_error

TINY = Case("tiny", 5, 4, 3, 4, 2, "sentinel", frozenset())
SMALL = Case("small", 40, 64, 48, 4, 2, "sentinel", frozenset())


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
    return value.to(dtype).to(device).requires_grad_()


# ---- right --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation, layout",
    [
        (name, layout)
        for name, act in ACTIVATIONS.items()
        for layout in ("interleaved_transposed", "separate")
        if act.gated or layout != "separate"
    ],
)
def test_gradients(activation: str, layout: str, request: pytest.FixtureRequest) -> None:
    """Of x, scores, A and B, against finite differences."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    act = ACTIVATIONS[activation]
    layer = make_layer(TINY, act, seed=3)
    arguments = layer.arguments(layout)
    experts, hidden, inner = TINY.experts, TINY.hidden, TINY.intermediate
    apart = layout == "separate"
    width = inner if apart else act.width(inner)
    gate = values(experts, 1, hidden, seed=5), values(experts, inner, 1, seed=6)
    low = (
        *(values(experts * 2, hidden, seed=1), values(width, 2 * experts, seed=2)),
        *(values(experts, 3, inner, seed=3), values(experts, hidden, 3, seed=4)),
    )

    def run(x: Tensor, scores: Tensor, a: Tensor, b: Tensor, *others: Tensor) -> Tensor:
        up = LoRA(a, b, 0.7)
        if apart:
            up = LoRA(*others[2:], 1.3), up
        arguments.update(lora_up=up, lora_down=LoRA(*others[:2]))
        return guild.routed_experts(x, layer.ids, scores, **arguments)

    inputs = (layer.x.requires_grad_(), layer.scores.requires_grad_(), *low)
    assert gradcheck(run, (*inputs, *(gate if apart else ())), atol=1e-6, rtol=1e-4)


def peft_layer(device: str, dtype: torch.dtype) -> tuple[dict, dict, LoRA, LoRA]:
    """A layer's arguments, its weights alone, and terms as PEFT stores them, in float32."""
    layer = make_layer(SMALL, ACTIVATIONS["swiglu"], dtype, device, bias=False)
    experts, hidden, inner = (getattr(layer.case, n) for n in ("experts", "hidden", "intermediate"))
    arguments = layer.arguments("concatenated")
    weights = {name: arguments.pop(name).detach() for name in ("w_up", "w_down")}
    arguments |= {"x": layer.x, "topk_ids": layer.ids, "topk_weights": layer.scores}
    rank, given = 5, {"dtype": torch.float32, "device": device}
    up = LoRA(
        draw(experts * rank, hidden, **given, seed=1),
        draw(2 * inner, rank * experts, **given, seed=2) * 5,
        0.3,
    )
    down = LoRA(
        draw(experts * rank, inner, **given, seed=3),
        draw(hidden, rank * experts, **given, seed=4) * 5,
        1.7,
    )
    return arguments, weights, up, down


def summed(weights: dict, up: LoRA, down: LoRA, dtype: torch.dtype) -> dict:
    """The weights with the deltas added to them, as PEFT does it."""
    experts = weights["w_down"].shape[0]
    terms = {"w_up": up, "w_down": down}
    return {
        name: weights[name].to(dtype)
        + delta(lora.a.to(dtype), lora.b.to(dtype), lora.scale, experts)
        for name, lora in terms.items()
    }


def test_bf16_is_no_less_exact_than_a_sum_of_weights(device: str) -> None:
    """Against float64: result and gradients, beside W + delta in bf16, which rounds the sum."""
    arguments, weights, up, down = peft_layer(device, torch.bfloat16)
    leaves = (up.a, up.b, down.a, down.b)
    dout = draw(*arguments["x"].shape, dtype=torch.bfloat16, device=device, seed=9).detach()

    def found(**more: object) -> list[Tensor]:
        out = guild.routed_experts(**(arguments | more))
        gradients = torch.autograd.grad(out, leaves, dout.to(out.device, out.dtype))
        return [t.detach().cpu().double() for t in (out, *gradients)]

    ours = found(**weights, lora_up=up, lora_down=down)
    theirs = found(**summed(weights, up, down, torch.bfloat16))
    exact = {n: t.cpu().double() for n, t in weights.items()}
    wide = [LoRA(t.a.cpu().double(), t.b.cpu().double(), t.scale) for t in (up, down)]
    cpu = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in arguments.items()}
    cpu |= {n: cpu[n].double() for n in ("x", "topk_weights")}
    truth = found(**cpu, **summed(exact, *wide, torch.float64))
    names = ("out", "da_up", "db_up", "da_down", "db_down")
    for name, our, their, true in zip(names, ours, theirs, truth, strict=True):
        assert relative_error(our, true) <= 1.1 * relative_error(their, true), name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_factors_of_8_bits(dtype: torch.dtype) -> None:
    """As those of 16 bits with the same values, scale included."""
    torch.manual_seed(0)
    x, ids = torch.randn(5, 16), torch.arange(5)[:, None] % 2
    w_up, w_down = torch.randn(2, 16, 16), torch.randn(2, 16, 8)
    a, b = torch.randn(2, 4, 16).to(dtype), torch.randn(2, 16, 4).to(dtype)
    layer = x, ids, torch.ones(5, 1), w_up, w_down
    for scale in (1.0, 2.0, -0.3):
        narrow = guild.routed_experts(*layer, lora_up=LoRA(a, b, scale))
        wide = guild.routed_experts(*layer, lora_up=LoRA(a.float(), b.float(), scale))
        assert torch.equal(narrow, wide)


def test_both_forms_are_one(device: str) -> None:
    """(E r, in) and (out, r E) of PEFT, and (E, r, in) and (E, out, r): the same bits."""
    arguments, weights, up, down = peft_layer(device, torch.bfloat16)
    experts = weights["w_down"].shape[0]

    def by_expert(lora: LoRA) -> LoRA:
        a, b = lora.a.detach(), lora.b.detach()
        parts = [b[:, e::experts] for e in range(experts)]  # columns j E + e
        return LoRA(torch.stack(a.chunk(experts)), torch.stack(parts), lora.scale)

    one = guild.routed_experts(**arguments, **weights, lora_up=up, lora_down=down)
    terms = {"lora_up": by_expert(up), "lora_down": by_expert(down)}
    assert torch.equal(one, guild.routed_experts(**arguments, **weights, **terms))
    assert not torch.equal(one, guild.routed_experts(**arguments, **weights))


def test_zero_terms_change_nothing(device: str) -> None:
    """As PEFT makes them, with B at zero: on the CPU to the last bit."""
    arguments, weights, up, down = peft_layer(device, torch.bfloat16)
    terms = (LoRA(lora.a, torch.zeros_like(lora.b), lora.scale) for lora in (up, down))
    out = guild.routed_experts(
        **arguments, **weights, **dict(zip(("lora_up", "lora_down"), terms, strict=True))
    )
    plain = guild.routed_experts(**arguments, **weights)
    exact = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, plain, **exact)


def test_parts_of_something_larger(device: str) -> None:
    """A and B anywhere in memory, as flat parameters of FSDP have them."""
    arguments, weights, *terms = peft_layer(device, torch.bfloat16)

    def moved(t: Tensor, by: int) -> Tensor:
        flat = torch.empty(t.numel() + by, dtype=torch.bfloat16, device=device)[by:]
        return flat.view(t.shape).copy_(t.detach())

    def found(by: int) -> Tensor:
        up, down = (LoRA(moved(lora.a, by), moved(lora.b, by)) for lora in terms)
        return guild.routed_experts(**arguments, **weights, lora_up=up, lora_down=down)

    assert torch.equal(found(1), found(0))


# ---- nothing too large, nothing in vain ---------------------------------------------------------


def wide_layer(device: str = "cpu") -> tuple[Callable[..., Tensor], tuple[Tensor, ...], int]:
    """A call whose weights are much larger than its rows, its inputs, and a weight's bytes."""
    experts, hidden, inner, rank = 32, 64, 48, 2
    dtype = torch.bfloat16
    w_up = draw(experts, 2 * inner, hidden, dtype=dtype, device=device).detach()
    w_down = draw(experts, hidden, inner, dtype=dtype, device=device).detach()
    ids = torch.tensor([[0, 3], [2, 3], [0, 31]], device=device)
    low = (
        *(draw(experts * rank, hidden, dtype=dtype, device=device),),
        *(draw(2 * inner, rank * experts, dtype=dtype, device=device),),
        *(draw(experts * rank, inner, dtype=dtype, device=device),),
        *(draw(hidden, rank * experts, dtype=dtype, device=device),),
    )
    x = draw(3, hidden, dtype=dtype, device=device)

    def call(x: Tensor, a_up: Tensor, b_up: Tensor, a_down: Tensor, b_down: Tensor) -> Tensor:
        terms = {"lora_up": LoRA(a_up, b_up, 2.0), "lora_down": LoRA(a_down, b_down, 2.0)}
        return guild.routed_experts(x, ids, torch.ones_like(ids).float(), w_up, w_down, **terms)

    return call, (x, *low), w_down.nbytes


def test_no_delta_is_made(request: pytest.FixtureRequest) -> None:
    """Forward and backward allocate nothing of a weight's size; adding a delta does."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    call, inputs, weight = wide_layer()

    def step() -> None:
        call(*inputs).float().sum().backward()

    step()
    assert max(allocations(step)) < weight / 3
    _, a_up, b_up, *_ = inputs
    assert max(allocations(lambda: delta(a_up, b_up, 1.0, 32))) >= weight


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (1, 2), (3, 4)])
def test_only_what_is_wanted(wanted: tuple[int, ...], device: str) -> None:
    """Each gradient alone has the bits that it has beside the others."""
    call, inputs, _ = wide_layer(device)
    every = torch.autograd.grad(call(*inputs).float().sum(), inputs)
    given = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    found = torch.autograd.grad(call(*given).float().sum(), [given[i] for i in wanted])
    for i, gradient in zip(wanted, found, strict=True):
        assert torch.equal(gradient, every[i])


# ---- beside the rest of PyTorch -----------------------------------------------------------------


def test_compiles(device: str) -> None:
    """fullgraph, forward and backward; the eager bits."""
    call, inputs, _ = wide_layer(device)
    assert_same(call, inputs, "aot_eager")


def test_compiles_with_a_pair_of_weights(device: str) -> None:
    """Sorted rows, one of the pair without a term, recompute."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    offsets = torch.tensor([0, 3, 3, 7, 10], dtype=torch.int32, device=device)
    gate, up, down = (
        draw(4, *shape, dtype=dtype, device=device) for shape in ((8, 16), (8, 16), (16, 8))
    )
    inputs = (
        *(draw(10, 16, dtype=dtype, device=device), draw(4, 3, 16, dtype=dtype, device=device)),
        draw(4, 8, 3, dtype=dtype, device=device),
    )

    def call(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        weights = (gate.detach(), up.detach()), down.detach()
        terms = {"lora_up": (None, LoRA(a, b, 0.5))}
        return guild.experts_mlp(x, offsets, *weights, **terms, recompute=True)

    assert_same(call, inputs, "aot_eager")


def test_autocast(device: str) -> None:
    """Terms of float32 over weights of float32: used in bf16, their gradients in float32."""
    arguments, weights, up, down = peft_layer(device, torch.bfloat16)
    expected = guild.routed_experts(**arguments, **weights, lora_up=up, lora_down=down)
    masters = {name: t.float() for name, t in weights.items()}
    arguments["x"] = arguments["x"].float()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = guild.routed_experts(**arguments, **masters, lora_up=up, lora_down=down)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    gradients = torch.autograd.grad(out.float().sum(), (up.a, up.b, down.a, down.b))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)


def test_with_a_sink_backward_cannot_be_differentiated() -> None:
    """What weight_gradients writes has no graph."""
    arguments, weights, up, down = peft_layer("cpu", torch.float32)
    weights = {name: t.requires_grad_() for name, t in weights.items()}
    sink = guild.WeightGradients()
    out = guild.routed_experts(
        **arguments, **weights, lora_up=up, lora_down=down, weight_gradients=sink
    )
    with pytest.raises(NotImplementedError, match=r"^weight_gradients: expected backward without"):
        torch.autograd.grad(out.sum(), up.a, create_graph=True)


# ---- wrong --------------------------------------------------------------------------------------


def of(*shapes: tuple[int, ...]) -> LoRA:
    return LoRA(*(torch.zeros(shape) for shape in shapes))


WRONG = {
    "a of one dimension": (lambda: of((3,), (4, 3)), ValueError, "a: expected 2 or 3 dimensions"),
    "b of other dimensions": (
        lambda: of((4, 2, 6), (10, 8)),
        ValueError,
        "b: expected 3 dimensions like a, got shape (10, 8)",
    ),
    "a of integers": (
        lambda: LoRA(torch.zeros(8, 6, dtype=torch.int32), torch.zeros(10, 8)),
        TypeError,
        "a: expected a floating dtype, got int32",
    ),
    "a scale of NaN": (
        lambda: LoRA(torch.zeros(8, 6), torch.zeros(10, 8), float("nan")),
        ValueError,
        "scale: expected a finite number, got nan",
    ),
    "no LoRA": ({"lora_up": torch.zeros(8, 6)}, TypeError, "lora_up: expected a guild.LoRA, got"),
    "a that no rank fits": (
        {"lora_up": ((9, 6), (10, 8))},
        ValueError,
        "lora_up.a: expected (experts * r, inputs) with 4 experts, got shape (9, 6)",
    ),
    "a of no rank": ({"lora_up": ((0, 6), (10, 0))}, ValueError, "lora_up.a: expected (experts *"),
    "a by expert of no rank": (
        {"lora_down": ((4, 0, 5), (4, 6, 0))},
        ValueError,
        "lora_down.a: expected a rank of at least 1, got (4, 0, 5)",
    ),
    "a of another width": (
        {"lora_up": ((8, 5), (10, 8))},
        ValueError,
        "lora_up.a: expected shape (8, 6), got (8, 5)",
    ),
    "b of another width": (
        {"lora_down": ((8, 5), (10, 8))},
        ValueError,
        "lora_down.b: expected shape (6, 8), got (10, 8); (outputs, r * experts)",
    ),
    "b of other experts": (
        {"lora_up": ((4, 2, 6), (3, 10, 2))},
        ValueError,
        "lora_up.b: expected shape (4, 10, 2), got (3, 10, 2); (experts, outputs, r)",
    ),
    "a pair for one weight": (
        {"lora_up": (None, None)},
        TypeError,
        "lora_up: expected a guild.LoRA, got tuple",
    ),
    "one for a pair of weights": (
        {"lora_up": ((8, 6), (10, 8)), "w_up": (torch.zeros(4, 5, 6), torch.zeros(4, 5, 6))},
        ValueError,
        "lora_up: expected a pair (gate, up) like w_up, got LoRA",
    ),
    "on another device": (
        {"lora_up": LoRA(torch.zeros(8, 6, device="meta"), torch.zeros(10, 8, device="meta"))},
        ValueError,
        "lora_up.a: expected a tensor on cpu like x, got one on meta",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong(name: str) -> None:
    """An error that names the argument, what came and what was expected."""
    call, exception, message = WRONG[name]
    if isinstance(call, dict):
        given = {"w_up": torch.zeros(4, 10, 6), "w_down": torch.zeros(4, 6, 5)}
        given |= {
            n: of(*t) if n.startswith("lora") and is_shapes(t) else t for n, t in call.items()
        }
        for function in (mlp, routed):
            with pytest.raises(exception) as raised:
                function(**given)
            assert message in str(raised.value)
        return
    with pytest.raises(exception) as raised:
        call()
    assert message in str(raised.value)


def is_shapes(value: object) -> bool:
    return isinstance(value, tuple) and isinstance(value[0], tuple)


def mlp(**more: object) -> Tensor:
    offsets = torch.zeros(5, dtype=torch.int32)
    return guild.experts_mlp(torch.zeros(3, 6), offsets, **more)


def routed(**more: object) -> Tensor:
    ids = torch.zeros(3, 1, dtype=torch.int64)
    return guild.routed_experts(torch.zeros(3, 6), ids, torch.ones(3, 1), **more)
