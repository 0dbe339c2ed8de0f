"""Layers without gradients: a fast path gives the same bits and errors; out=, expert maps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import guild
from guild.logits import LogitLinear
from guild.moe_fast_path import quick_output

HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 4, 2

QUICK: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"bias": True, "activation": "gpt_oss", "order": "interleaved"},
    "transposed": {"transposed": True, "activation": "relu2_ungated"},
    "selection bias": {"router": "sigmoid"},
    "groups": {"router": guild.Router("sigmoid", groups=2, scale=2.5, group_score="max")},
    "dense softmax": {"router": "softmax"},
    "shared": {"shared_experts": 2},
    "shared, biases": {"shared_intermediate": 24, "activation": "gpt_oss", "bias": True},
    "shared, interleaved": {"shared_experts": 1, "order": "interleaved", "transposed": True},
    "shared with a gate": {"shared_experts": 1, "shared_gate": True},
    "shared with a gate, no other": {
        "shared_intermediate": 40,
        "shared_gate": True,
        "activation": "gelu_ungated",
    },
    "router bias": {"router_bias": True, "bias": True, "order": "interleaved", "transposed": True},
    "router bias, shared": {"router_bias": True, "shared_experts": 1, "shared_gate": True},
    "router bias, selection bias": {"router_bias": True, "router": "sigmoid"},
    "balancing": {"balance_over": "batch"},  # in training it takes the slow path
    "sink": {"weight_gradients": guild.WeightGradients(), "recompute": True},
}
LONG: dict[str, dict[str, Any]] = {"input": {"router": "llama4", "top_k": 1}}


def layer_of(device: str, dtype: torch.dtype | None = None, **options: Any) -> guild.MoE:
    torch.manual_seed(0)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    sizes = {"hidden": HIDDEN, "intermediate": INNER, "experts": EXPERTS, "top_k": TOP_K}
    layer = guild.MoE(**{**sizes, **options}, device=device, dtype=dtype).eval()
    for name, values in (*layer.named_parameters(), *layer.named_buffers()):
        if "b_" in name or "bias" in name:
            nn.init.normal_(values, std=0.3)
    return layer


def tokens(layer: guild.MoE, *shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, device=layer.w_up.device).to(layer.w_up.dtype)


def long_way(layer: guild.MoE, x: Tensor) -> Tensor:
    """The result of a forward on the slow path."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(guild.moe, "quick_output", lambda *_: None)
        return layer(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", QUICK)
def test_same_bits_as_in_training(name: str, mode: Callable, device: str) -> None:
    """Of every number of tokens and shape of x; counts too, none for T = 0."""
    for dtype in (torch.bfloat16, torch.float16 if device == "cuda" else torch.float64):
        layer = layer_of(device, dtype, **QUICK[name])
        for shape in ((1,), (0,), (5,), (2, 3), (2, 0), (1, 1, 4), ()):
            x = tokens(layer, *shape)
            wanted = layer(x)
            counts = layer.expert_counts
            with mode():
                long = "selection bias" in name and dtype == torch.float64
                assert (quick_output(layer, x) is None) == long
                out = layer(x)
            assert out.shape == x.shape and out.dtype == x.dtype
            assert torch.equal(out, wanted) and torch.equal(layer.expert_counts, counts)
            assert torch.equal(out, long_way(layer, x))


@pytest.mark.parametrize("name", LONG)
def test_what_goes_the_long_way(name: str, device: str) -> None:
    layer = layer_of(device, **LONG[name])
    x = tokens(layer, 5)
    with torch.no_grad():
        assert quick_output(layer, x) is None
        assert torch.equal(layer(x), long_way(layer, x))


def replaced_bias(layer: guild.MoE) -> None:
    layer.b_up = torch.randn_like(layer.w_up[:, :, 0])  # no parameter


def wrapped_router(layer: guild.MoE) -> None:
    layer.router = nn.Sequential(layer.router)


def parametrised(layer: guild.MoE) -> None:
    twice = nn.Module()
    twice.forward = lambda weight: 2 * weight
    parametrize.register_parametrization(layer, "w_up", twice, unsafe=True)


CHANGES: dict[str, Callable[[guild.MoE], object]] = {
    "in place": lambda m: m.w_up.data.mul_(2),
    "data": lambda m: setattr(m.w_down, "data", torch.randn_like(m.w_down)),
    "parameter": lambda m: setattr(m, "w_up", nn.Parameter(torch.randn_like(m.w_up))),
    "dtype": lambda m: m.to(torch.float16),
    "strides": lambda m: setattr(m.w_up, "data", m.w_up.data.mT.contiguous().mT),
    "top_k": lambda m: setattr(m, "top_k", 1),
    "activation": lambda m: setattr(m, "activation", guild.Activation.named("gpt_oss")),
    "order": lambda m: setattr(m, "order", "interleaved"),
    "routing": lambda m: setattr(m, "routing", guild.Router(renormalize=False, scale=3.0)),
    "bias": replaced_bias,
    "router": wrapped_router,
    "parametrisation": parametrised,
    "router weight": lambda m: m.router.weight.data.neg_(),
    "router hook": lambda m: m.router.register_forward_hook(lambda *a: a[2].flip(-1)),
    "router forward": lambda m: setattr(m.router, "forward", lambda x: x[:, :EXPERTS].float()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str, device: str) -> None:
    """After a call on the fast path a change of the layer has the effect that the slow path has."""
    layer = layer_of(device)
    with torch.no_grad():
        x = tokens(layer, 9)
        before = layer(x)
        CHANGES[name](layer)
        x = x.to(layer.w_down.dtype)
        out = layer(x)
        assert torch.equal(out, long_way(layer, x))
        assert not torch.equal(out.float(), before.float()) or name in ("strides", "router")
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(x), out)


def test_a_copy_leaves_the_buffer_of_the_last_call() -> None:
    """Pickles and copies have the counts alone."""
    layer = layer_of("cpu")
    with torch.inference_mode():
        layer(tokens(layer, 40))
    assert layer._offsets.untyped_storage().nbytes() > 1000
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin._offsets.untyped_storage().nbytes() == 4 * (EXPERTS + 1)
        assert torch.equal(twin.expert_counts, layer.expert_counts)


def test_surroundings_are_noticed(device: str) -> None:
    """Autocast, functorch, subclasses and modes take the slow path or are noticed by it."""
    layer = layer_of(device)
    x = tokens(layer, 4)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        assert quick_output(layer, x) is None
        assert layer(x).dtype == torch.bfloat16
    with torch.no_grad():
        plain = layer(x)
        strange = x.as_subclass(type("Strange", (Tensor,), {}))
        assert quick_output(layer, strange) is None
        assert torch.equal(layer(strange), plain)
        assert torch.equal(layer(torch.stack((x, x), 1)[:, 0]), plain)  # rows further apart
        looped = torch.func.vmap(layer, chunk_size=1)(x[:, None])
        torch.testing.assert_close(looped[:, 0], plain)
        with FlopCounterMode(display=False):
            assert torch.equal(layer(x), plain)
        meta = copy.deepcopy(layer).to("meta")
        assert meta(x.to("meta")).is_meta


SHARED_CHANGES: dict[str, Callable[[guild.MoE], object]] = {
    "in place": lambda m: m.shared.w_up.data.mul_(2),
    "strides": lambda m: setattr(m.shared.w_down, "data", m.shared.w_down.data.mT.contiguous().mT),
    "activation": lambda m: setattr(m.shared, "activation", guild.Activation.named("geglu")),
    "hook": lambda m: m.shared.register_forward_hook(lambda *a: 2 * a[2]),
    "forward": lambda m: setattr(m.shared, "forward", lambda x: 3 * x),
    "gate": lambda m: setattr(m.shared, "gate", LogitLinear(HIDDEN, 1, False)),
    "gate's hook": lambda m: (
        setattr(m.shared, "gate", LogitLinear(HIDDEN, 1, False)),
        m.shared.gate.register_forward_hook(lambda *a: a[2].double() - 1),
    ),
    "module": lambda m: setattr(m, "shared", nn.Linear(HIDDEN, HIDDEN)),
    "none": lambda m: setattr(m, "shared", None),
}


@pytest.mark.parametrize("name", SHARED_CHANGES)
def test_changes_of_shared_experts_are_noticed(name: str) -> None:
    layer = layer_of("cpu", shared_experts=1)
    with torch.no_grad():
        x = tokens(layer, 3)
        before = layer(x)
        SHARED_CHANGES[name](layer)
        out = layer(x)
        assert torch.equal(out, long_way(layer, x))
        assert not torch.equal(out, before) or name == "strides"


WRONG: dict[str, Callable[[guild.MoE, Tensor], Tensor]] = {
    "x: expected shape (..., 16)": lambda m, x: x[:, :8],
    "x: expected dtype": lambda m, x: x.to(torch.float16),
    "x: expected a torch.Tensor": lambda m, x: None,
    "x: expected a tensor on": lambda m, x: x.to("meta"),
    "w_down: expected shape": lambda m, x: setattr(m.w_down, "data", m.w_down.data.mT) or x,
    "w_up: expected shape": lambda m, x: setattr(m.w_up, "data", m.w_up.data[:, :8]) or x,
    "router.weight: expected shape": lambda m, x: (
        setattr(m.router.weight, "data", m.router.weight.data[:3]) or x
    ),
    "order: expected": lambda m, x: setattr(m, "order", "mixed") or x,
    "selection_bias": lambda m, x: setattr(m, "routing", guild.Router.named("sigmoid")) or x,
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_are_the_same(message: str, device: str) -> None:
    layer = layer_of(device)
    x = WRONG[message](layer, tokens(layer, 5))
    texts = []
    for call in (lambda: layer(x), lambda: long_way(layer, x)):
        with pytest.raises((TypeError, ValueError)) as error, torch.no_grad():
            call()
        texts.append(str(error.value))
    assert texts[0] == texts[1] and message in texts[0]


# ---- out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*QUICK, *LONG])
@pytest.mark.parametrize("shape", [(5,), (0,), (2, 3)])
def test_out(name: str, shape: tuple[int, ...], device: str) -> None:
    """Written to and returned; the version says so; a tensor of longer rows will do."""
    layer = layer_of(device, **{**QUICK, **LONG}[name])
    x = tokens(layer, *shape)
    wanted = layer(x).detach()
    with torch.no_grad():
        out = torch.full_like(x, torch.nan)
        version = out._version
        assert layer(x, out=out) is out
        assert torch.equal(out, wanted) and out._version > version
        if len(shape) == 1:
            wide = torch.full((*shape, HIDDEN + 8), 7.0, device=device).to(x.dtype)
            assert torch.equal(layer(x, out=wide[:, :HIDDEN]), wanted)
            assert (wide[:, HIDDEN:] == 7).all()
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        got, routing = layer(x, mask, out=out, return_routing=True)
        assert got is out and (out == 0).all() and (routing.ids == -1).all()
    with torch.inference_mode():
        assert torch.equal(layer(x, out=torch.empty_like(x)), wanted)


def routed(layer: guild.MoE, x: Tensor, ids: Tensor, **options: Any) -> Tensor:
    scores = torch.linspace(0.1, 1, ids.numel(), device=x.device).view(ids.shape)
    return guild.routed_experts(x, ids, scores, layer.w_up, layer.w_down, **options)


def test_out_of_routed_experts(device: str) -> None:
    """-1 costs and gives nothing, T = 0 is fine; a residual comes first."""
    layer = layer_of(device)
    x = tokens(layer, 6)
    ids = torch.tensor([[0, 1], [-1, 2], [-1, -1], [1, 0], [2, -1], [-1, -1]], device=device)
    with torch.no_grad():
        layer.w_up[3] = torch.nan  # of an expert that nobody chose
        out = torch.full_like(x, torch.nan)
        assert routed(layer, x, ids, out=out) is out
        assert torch.equal(out, routed(layer, x, ids)) and out.isfinite().all()
        assert (out[[2, 5]] == 0).all() and (out[[0, 1, 3, 4]] != 0).any(1).all()
        assert torch.equal(routed(layer, x, ids, residual=x, out=out)[2], x[2])
        assert routed(layer, x[:0], ids[:0], out=out[:0]).shape == (0, HIDDEN)
        offsets = torch.tensor([0, 1, 1, 2, 3, 3, 3], dtype=torch.int32, device=device)
        slots = ids.flatten()[:4]
        lists = routed(layer, x, slots, token_offsets=offsets)
        assert torch.equal(routed(layer, x, slots, token_offsets=offsets, out=out), lists)


def test_out_is_compiled(device: str) -> None:
    layer = layer_of(device)
    x = tokens(layer, 5)
    compiled = torch.compile(lambda x, out: layer(x, out=out), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = torch.full_like(x, torch.nan)
        assert compiled(x, out) is out
        assert torch.equal(out, layer(x))


def test_out_in_a_graph(gpu: str) -> None:
    """Replayed with other tokens, another routing and padding."""
    layer = layer_of(gpu)
    x, out = tokens(layer, 8), tokens(layer, 8)
    with torch.inference_mode():
        layer(x, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x, out=out)
        for _ in range(20):
            x.copy_(tokens(layer, 8))
            graph.replay()
            assert torch.equal(out, layer(x))


WRONG_OUT: dict[str, Callable[[Tensor], Any]] = {
    "expected shape": lambda x: x.new_empty(4, HIDDEN),
    "expected dtype": lambda x: x.new_empty(x.shape, dtype=torch.float16),
    "expected a tensor on": lambda x: x.new_empty(x.shape, device="meta"),
    "expected a torch.Tensor": lambda x: 3,
    r"expected rows .* got strides \(1, \d+\)$": lambda x: x.new_empty(HIDDEN, 5).mT,
    "expected memory not shared with other arguments, got memory shared with x": lambda x: x,
    "expected rows": lambda x: x.new_empty(1, HIDDEN).expand(5, HIDDEN),
}


@pytest.mark.parametrize("message", WRONG_OUT)
def test_wrong_out(message: str, device: str) -> None:
    layer = layer_of(device)
    x = tokens(layer, 5)
    out = WRONG_OUT[message](x)
    ids = torch.zeros(5, 1, dtype=torch.int32, device=device)
    with torch.no_grad():
        for call in (lambda: layer(x, out=out), lambda: routed(layer, x, ids, out=out)):
            with pytest.raises((TypeError, ValueError), match=f"out: {message}"):
                call()


def test_out_shares_no_memory_and_wants_no_gradient(device: str) -> None:
    layer = layer_of(device)
    x = tokens(layer, 5)
    ids = torch.zeros(5, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"out: expected None since .* requires a gradient"):
        layer(x, out=torch.empty_like(x))
    with pytest.raises(ValueError, match=r"out: expected None since .* requires a gradient"):
        routed(layer, x, ids, out=torch.empty_like(x))
    low = guild.LoRA(layer.w_up.new_ones(4, 8, HIDDEN), layer.w_up.new_ones(4, 2 * INNER, 8))
    low.b.requires_grad_()
    ups, downs = (list(w.detach().unbind()) for w in (layer.w_up, layer.w_down))
    ups[2].requires_grad_()
    for up, sink, lora in ((layer.w_up.detach(), None, low), (ups, guild.WeightGradients(), None)):
        options = {"weight_gradients": sink, "lora_up": lora, "out": torch.empty_like(x)}
        with pytest.raises(ValueError, match=r"out: expected None since .* requires a gradient"):
            guild.routed_experts(x, ids, torch.ones(5, 1).to(x), up, downs, **options)
        with torch.no_grad():
            found = guild.routed_experts(x, ids, torch.ones(5, 1).to(x), up, downs, **options)
        assert found is options["out"]
    with torch.no_grad():
        of_weights = layer.w_up.data.flatten()[: x.numel()].view(x.shape)
        with pytest.raises(ValueError, match=r"out: .* shared with w_up"):
            layer(x, out=of_weights)
        residual = torch.empty_like(x)
        with pytest.raises(ValueError, match=r"out: .* shared with residual"):
            routed(layer, x, ids, residual=residual, out=residual)
        with pytest.raises(ValueError, match="out: expected a contiguous tensor"):
            layer(x.view(1, 5, HIDDEN), out=x.new_empty(1, 5, 2 * HIDDEN)[..., :HIDDEN])
    layer.requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"out: expected None under torch.func"):
        torch.func.vmap(lambda x: routed(layer, x, ids, out=x * 0))(x[None])


# ---- expert maps --------------------------------------------------------------------------------


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_expert_map(id_dtype: torch.dtype, device: str) -> None:
    """Ids of all ranks' experts: others' slots, and ids out of range, give nothing."""
    layer = layer_of(device)
    x = tokens(layer, 4)
    expert_map = torch.full((10,), -1, dtype=torch.int32, device=device)
    expert_map[torch.tensor([7, 2, 9, 4], device=device)] = torch.arange(
        4, dtype=torch.int32, device=device
    )
    ids = torch.tensor([[7, 0], [2, 9], [-1, 10], [4, 8]], dtype=id_dtype, device=device)
    local = torch.tensor([[0, -1], [1, 2], [-1, -1], [3, -1]], device=device)
    out = routed(layer, x, ids, expert_map=expert_map)
    assert torch.equal(out, routed(layer, x, local))
    assert (out[2] == 0).all()
    out.sum().backward()
    assert layer.w_up.grad.abs().sum((1, 2)).gt(0).all()


@pytest.mark.parametrize(
    ("expert_map", "message"),
    [
        (torch.zeros(8), "expected dtype int32, got float32"),
        (torch.zeros(2, 4, dtype=torch.int32), "expected 1 dimensions"),
        (torch.zeros(0, dtype=torch.int32), "expected at least one expert"),
        (torch.zeros(8, dtype=torch.int32, device="meta"), "expected a tensor on"),
        ([0, 1], "expected a torch.Tensor"),
    ],
)
def test_wrong_expert_map(expert_map: Any, message: str) -> None:
    layer = layer_of("cpu")
    ids = torch.zeros(5, 1, dtype=torch.int32)
    with pytest.raises((TypeError, ValueError), match=f"expert_map: {message}"):
        routed(layer, tokens(layer, 5), ids, expert_map=expert_map)
