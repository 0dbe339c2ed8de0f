"""Layers whose parts torch or the user has changed: pruned weights, modules replacing Guild's."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import guild
from odd_modules import Rows

HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 4, 2


def layer_of(device: str, **options: Any) -> guild.MoE:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    options = {"shared_experts": 1, "shared_gate": True, "router_bias": True} | options
    return guild.MoE(HIDDEN, INNER, EXPERTS, TOP_K, **options, device=device, dtype=dtype)


def tokens(layer: guild.MoE, *shape: int) -> Tensor:
    return torch.randn(*(shape or (5,)), HIDDEN, device=layer.w_up.device).to(layer.w_up.dtype)


def of_norm(way: Callable) -> Callable:
    """A weight or spectral norm whose hook draws no new vector in evaluation."""
    return lambda module, name: way(module, name).eval()


WAYS = {
    "prune": lambda module, name: prune.random_unstructured(module, name, 0.5),
    "weight_norm": of_norm(weight_norm),
    "spectral_norm": of_norm(spectral_norm),
}
PARTS = ("w_up", "router.weight", "shared.w_up", "shared.w_down", "shared.gate.weight")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", PARTS)
def test_what_hooks_compute(part: str, way: str, device: str) -> None:
    """A hooked weight is not a parameter; bits are the same with and without gradients."""
    layer = layer_of(device, router_bias=False).eval()
    module, _, name = part.rpartition(".")
    WAYS[way](layer.get_submodule(module), name)
    x = tokens(layer)
    wanted = layer(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(layer(x), wanted.detach(), rtol=0, atol=0)
    wanted.sum().backward()
    original = layer.get_parameter(part + ("_orig" if way != "weight_norm" else "_v"))
    assert original.grad.abs().sum() > 0


def test_pruned_bias_of_the_router(device: str) -> None:
    """A pruned bias is still added."""
    layer = layer_of(device)
    nn.init.normal_(layer.router.bias)
    prune.random_unstructured(layer.router, "bias", 0.5)
    x = tokens(layer)
    (_, routing), wanted = layer(x, return_routing=True), layer.router(x)
    torch.testing.assert_close(routing.logits, wanted, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer(x, return_routing=True)[0], rtol=0, atol=0)


@pytest.mark.parametrize("grad", [True, False])
def test_module_in_place_of_shared_experts(grad: bool, device: str) -> None:
    """Its output may lie anyhow; what does not fit is named."""
    layer = layer_of(device)
    x = tokens(layer)
    with torch.set_grad_enabled(grad):
        layer.shared = Rows(lambda x: x)
        wanted = layer(x)
        layer.shared = Rows(lambda x: x.t().contiguous().t())
        torch.testing.assert_close(layer(x), wanted, rtol=0, atol=0)
        for rows, error, message in (
            (lambda x: x[:1], ValueError, r"shared: output: expected shape \(5, 16\), got \(1"),
            (lambda x: x.float(), TypeError, "shared: output: expected dtype .*, got float32"),
            (lambda x: None, TypeError, "shared: output: expected a torch.Tensor, got NoneType"),
        ):
            layer.shared = Rows(rows)
            with pytest.raises(error, match=message):
                layer(x)
    with torch.autocast(device, torch.bfloat16):
        layer.shared = Rows(lambda x: x.float())
        assert layer.to(torch.float32)(x.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("grad", [True, False])
def test_weights_in_place_of_shared_experts(grad: bool, device: str) -> None:
    """Wrong ones are named; a gate of as many logits as the layer is wide would pass by chance."""
    layer = layer_of(device)
    x = tokens(layer)
    like = {"device": device, "dtype": x.dtype}
    other = torch.float16 if x.dtype == torch.float32 else torch.float32
    with torch.set_grad_enabled(grad):
        layer.shared.gate.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, **like))
        with pytest.raises(ValueError, match=r"shared.gate.weight: expected shape \(1, 16\)"):
            layer(x)
        layer.shared.gate.weight = nn.Parameter(torch.randn(1, HIDDEN, **{**like, "dtype": other}))
        with pytest.raises(TypeError, match=r"shared.gate.weight: expected dtype .* like x, got"):
            layer(x)
        layer.shared.gate = Rows(lambda x: x[:, 0])
        with pytest.raises(ValueError, match=r"shared.gate: logits: .*got \(5,\); \(tokens, 1\)"):
            layer(x)
        layer.shared.gate = None
        for name in ("w_up", "w_down"):
            right = getattr(layer.shared, name)
            setattr(layer.shared, name, nn.Parameter(right.detach().to(other)))
            with pytest.raises(TypeError, match=rf"shared.{name}: expected dtype .* like x, got"):
                layer(x)
            setattr(layer.shared, name, right)
        layer.shared.w_down = nn.Parameter(torch.randn(HIDDEN, INNER - 1, **like))
        with pytest.raises(ValueError, match=r"shared.w_up: expected shape \(14, 16\), got \(16"):
            layer(x)
        layer.shared.w_down = nn.Parameter(torch.randn(1, HIDDEN, INNER, **like))
        with pytest.raises(ValueError, match=r"shared.w_down: expected 2 dimensions"):
            layer(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("router", ["softmax", "sigmoid", "llama4"])
def test_traced(router: str, dtype: torch.dtype, device: str) -> None:
    """By torch.jit.trace; the fast path in float64 refuses the float32 bias of the choice."""
    torch.manual_seed(0)
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("a GPU has no float64")
    sizes = HIDDEN, INNER, EXPERTS, 1 if router == "llama4" else TOP_K
    layer = guild.MoE(
        *sizes, router=router, shared_experts=1, shared_gate=True, device=device, dtype=dtype
    ).eval()
    with torch.no_grad():
        for shape in ((5,), (2, 3)):
            traced = torch.jit.trace(layer, tokens(layer, *shape), check_trace=False)
            x = tokens(layer, 7, *shape[1:])
            torch.testing.assert_close(traced(x), layer(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*", "ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::guild.CopiedWeightsWarning")
@pytest.mark.parametrize("recorder", ["trace", "make_fx"])
@pytest.mark.parametrize("grad", [False, True])
def test_traces_hold_no_addresses(recorder: str, grad: bool, device: str) -> None:
    """Of lists of weights, whose tensors lie elsewhere when the program runs."""
    torch.manual_seed(0)
    place = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float64}
    x, w_up = torch.randn(6, HIDDEN, **place), torch.randn(EXPERTS, 2 * INNER, HIDDEN, **place)
    ids = torch.randint(0, EXPERTS, (6, TOP_K), device=device)
    scores = torch.rand(6, TOP_K, device=device).to(w_up.dtype)
    w_down = torch.randn(EXPERTS, HIDDEN, INNER, **place).requires_grad_(grad)

    def experts(x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        lists = [t * 1 for t in w_up], [t.clone() for t in w_down]
        return guild.routed_experts(x, ids, scores, *lists)

    with torch.set_grad_enabled(grad):
        given = x, w_up, w_down
        if recorder == "trace":
            recorded = torch.jit.trace(experts, given, check_trace=False)
        else:
            recorded = make_fx(experts)(*given)
        kept = [torch.randn(300, 300) for _ in range(5)]  # so that memory lies elsewhere
        for _ in range(2):
            given = x + 1, w_up + 1, w_down
            assert torch.equal(recorded(*given), experts(*given))
    assert len(kept) == 5


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kept", [2, 6])
def test_other_numbers_of_experts(kept: int, mode: Callable, device: str) -> None:
    """Pruned weights beside a router that still chooses the others: their tokens would be lost."""
    layer = layer_of(device)
    for name in ("w_up", "w_down"):
        weight = torch.cat([getattr(layer, name).detach()] * 2)[:kept]
        setattr(layer, name, nn.Parameter(weight))
    with mode(), pytest.raises(ValueError, match=rf"^w_down: expected .* 4 experts, got {kept}"):
        layer(tokens(layer))


def test_a_forward_on_fake_tensors(device: str) -> None:
    """Has losses, and leaves a layer that can be copied and pickled."""
    layer = layer_of(device, balance_over="batch")
    x = tokens(layer)
    loss = make_fx(
        lambda x: layer(x).sum() + layer.load_balancing_loss,
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )(x)
    assert torch.equal(loss(x), layer(x).sum() + layer.load_balancing_loss)
    make_fx(layer, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert torch.equal(copied(x), layer(x))


def test_losses_without_a_gradient(device: str) -> None:
    """Under reentrant checkpoints forward runs without gradients, and its losses train nothing."""
    layer = layer_of(device, balance_over="batch")
    x = tokens(layer).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(layer, x, use_reentrant=False)
        assert layer.load_balancing_loss.requires_grad
        with torch.no_grad():
            layer(x)
            assert layer.z_loss > 0
    out = checkpoint(layer, x, use_reentrant=True)
    for name in ("load_balancing_loss", "z_loss"):
        with pytest.warns(UserWarning, match="no gradient reaches the router.*use_reentrant=False"):
            getattr(layer, name)
    (out.sum()).backward()
    layer.router.requires_grad_(False)
    layer(x.detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not layer.load_balancing_loss.requires_grad


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_tensor_that_was_left_on_meta(mode: Callable, device: str) -> None:
    """Torch would run the op's fake in place of the op: its results are memory as it was."""
    whole = layer_of(device, bias=True, router="sigmoid")
    x = tokens(whole)
    for name in dict(whole.named_parameters()):
        layer = layer_of(device, bias=True, router="sigmoid")
        module = layer.get_submodule(name.rpartition(".")[0])
        module._parameters[name.rpartition(".")[2]] = torch.nn.Parameter(
            layer.get_parameter(name).to("meta")
        )
        with (
            mode(),
            pytest.raises(ValueError, match=r"expected a tensor on .* like .*, got one on"),
        ):
            layer(x)
    whole.router.selection_bias = whole.router.selection_bias.to("meta")
    with mode(), pytest.raises(ValueError, match=r"^router\.selection_bias: .* on meta"):
        whole(x)


@pytest.mark.parametrize("grad", [False, True])
def test_selection_bias_that_is_a_column(grad: bool, device: str) -> None:
    """Of one tensor for the biases of all layers."""
    layer = layer_of(device, router="sigmoid")
    layer = layer.float() if device == "cpu" else layer
    layer.router.selection_bias = torch.randn(EXPERTS, 3, device=device)[:, 1]
    x = tokens(layer)
    with torch.set_grad_enabled(grad):
        out, _ = layer(x, return_routing=True)
        assert torch.equal(layer(x), out)


def test_a_last_forward_on_another_device(device: str) -> None:
    """`balance` does not take its counts; a bias of 16 bits is replaced for good."""
    router = guild.Router(selection_bias=True)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = guild.MoE(HIDDEN, 8, 4, 2, router=router, device="meta", dtype=dtype)
    layer(torch.empty(3, HIDDEN, device="meta", dtype=dtype))
    assert layer.expert_counts.is_meta
    layer.to_empty(device=device).reset_parameters()
    assert layer.expert_counts is None
    with pytest.raises(RuntimeError, match="expected a forward pass first"):
        layer.balance(0.1)
    layer.router.selection_bias = layer.router.selection_bias.half()
    with torch.inference_mode():
        layer(torch.randn(3, HIDDEN, device=device, dtype=dtype))
    layer.balance(0.1)
    assert layer.router.selection_bias.any()


SUPPLIED = {"router": "router.weight", "shared.gate": "shared.gate.weight", "shared": "shared.w_up"}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("part", SUPPLIED)
def test_weight_that_a_hook_supplies(part: str, grad: bool, device: str) -> None:
    """As those of accelerate.cpu_offload do: before the call there is none."""
    layer = layer_of(device, router_bias=False)
    module, weight = layer.get_submodule(part), layer.get_parameter(SUPPLIED[part])
    x, values, nothing = tokens(layer), weight.data, weight.data.new_empty(0)
    with torch.set_grad_enabled(grad):
        module.register_forward_hook(lambda *_: None)  # the same path as below
        expected = layer(x)
        weight.data = nothing
        module.register_forward_pre_hook(lambda *_: setattr(weight, "data", values))
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("part", ["router", "shared.gate"])
def test_module_of_another_dtype_whose_hook_converts(part: str) -> None:
    layer = layer_of("cpu", router_bias=False).float()
    module = layer.get_submodule(part).double()
    x = tokens(layer)
    module.register_forward_pre_hook(lambda _, given: (given[0].double(),))
    module.register_forward_hook(lambda *given: given[2].float())
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize("hooked", ["shared", "gate", "own"])
def test_shared_experts_are_called_once(hooked: str, device: str) -> None:
    """Also where the op of inference refuses a call that the layer supports."""
    layer = guild.MoE(16, 8, 4, 2, shared_experts=1, shared_gate=True, device=device)
    if device == "cuda":
        layer.bfloat16()
    if hooked == "own":
        layer.shared = nn.Linear(16, 16, device=device, dtype=layer.w_up.dtype)
    calls: list[nn.Module] = []
    watched = layer.shared.gate if hooked == "gate" else layer.shared
    watched.register_forward_hook(lambda module, *_: calls.append(module))
    x = torch.randn(16, 8, device=device, dtype=layer.w_up.dtype).t()
    with torch.no_grad():
        for given in (x, x.contiguous()):
            layer(given)
        layer.activation = "silu"
        layer(x)
    assert len(calls) == 3
