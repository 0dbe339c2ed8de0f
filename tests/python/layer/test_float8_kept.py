"""Codes that are kept over calls: which weights they stand for, and when they are made again."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize

import guild

EXPERTS, HIDDEN, SIZE, TOKENS = 4, 96, 80, 37


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Also forgets what was compiled: torch compiles a function only a few times per process."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def layer_of(device: str, dtype: torch.dtype = torch.bfloat16) -> guild.MoE:
    given = {"fp8": guild.FP8(cached=True), "dtype": dtype, "device": device}
    return guild.MoE(HIDDEN, SIZE, EXPERTS, 2, **given)


def tokens_of(device: str) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)


@pytest.fixture
def swapping() -> Iterator[None]:
    """Conversions swap the parameters' tensors, in place of their data."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def expect_near_bf16(layer: guild.MoE, x: Tensor, out: Tensor) -> None:
    """The output must be as close as FP8 comes to the same weights in 16 bits."""
    layer.fp8 = None
    exact = layer(x).double()
    assert (out.double() - exact).norm() < 0.1 * exact.norm()


def test_codes_made_in_inference_mode_train(device: str) -> None:
    layer, x = layer_of(device), tokens_of(device)
    with torch.inference_mode():
        layer(x)
    for _ in range(2):
        guild.refresh_fp8(layer)
        layer(x).sum().backward()
        with torch.inference_mode():
            guild.refresh_fp8(layer)
            layer(x)
    expect_near_bf16(layer, x, copy.deepcopy(layer)(x))


@pytest.mark.parametrize("first", ["compiled", "eager"])
def test_compiled_and_eager_calls(first: str, device: str) -> None:
    """What one of them cannot count is no sign of an update to the other."""
    layer, x = layer_of(device), tokens_of(device)
    calls = [torch.compile(layer, backend="eager", fullgraph=True), layer]
    results = [call(x) for call in (calls if first == "compiled" else calls[::-1])]
    assert torch.equal(*results)


@pytest.mark.parametrize("first", ["functional", "eager", "compiled"])
def test_compiled_calls_after_others_weights(first: str, device: str) -> None:
    """What functional_call lends an eager call is not what compiled code reads afterwards."""
    layer, x = layer_of(device), tokens_of(device)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    other = {"w_up": -2 * layer.w_up.detach()}
    with torch.no_grad():
        want = copy.deepcopy(layer)(x)
        if first != "functional":
            (layer if first == "eager" else compiled)(x)
        for _ in range(2):
            assert not torch.equal(torch.func.functional_call(layer, other, (x,)), want)
            assert torch.equal(compiled(x), want)


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool, called_before: bool, device: str) -> None:
    """The program quantises its own weights, and leaves the layer no codes that hold nothing."""
    layer, x = layer_of(device), tokens_of(device)
    with torch.no_grad():
        if called_before:
            layer(x)
        program = torch.export.export(layer, (x,), strict=strict)
        assert not program.constants
        for _ in range(2):
            assert torch.equal(program.module()(x), layer(x))
            layer.w_up.mul_(-2)  # which the program has, too
            guild.refresh_fp8(layer)


def test_fake_tensors(device: str) -> None:
    """A call with fake tensors must not leave fake codes behind."""
    layer, x = layer_of(device), tokens_of(device)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert layer(fake.from_tensor(x)).shape == x.shape
    expect_near_bf16(layer, x, layer(x))


@pytest.mark.parametrize("how", ["assigned", "parameter", "functional"])
def test_other_tensors_become_the_weights(how: str, device: str) -> None:
    """The new weights are quantised, whatever their version counters say."""
    layer, x = layer_of(device), tokens_of(device)
    layer(x)
    if how == "assigned":
        layer.load_state_dict(layer_of(device).state_dict(), assign=True)
    elif how == "parameter":
        layer.w_up = nn.Parameter(torch.randn_like(layer.w_up))
    else:
        zeros = {"w_up": torch.zeros_like(layer.w_up)}
        assert not torch.func.functional_call(layer, zeros, (x,)).any()
    expect_near_bf16(layer, x, layer(x))


def test_replicas_of_data_parallel(device: str) -> None:
    """They run at the same time, so the layer's codes are none of theirs."""
    layer, x = layer_of(device), tokens_of(device)
    out, codes, replica = layer(x), layer._fp8_weights.codes, layer._replicate_for_data_parallel()
    replica.w_up, replica.w_down = layer.w_up.detach().clone(), layer.w_down.detach() / 2
    torch.testing.assert_close(2 * replica(x), out)
    assert layer._fp8_weights.codes is codes


@pytest.mark.parametrize("changed", ["order", "size"])
def test_another_layout(changed: str, device: str) -> None:
    layer, x = layer_of(device), tokens_of(device)
    layer(x)
    if changed == "order":
        layer.order = "interleaved"
    else:
        layer.w_up = nn.Parameter(torch.randn_like(layer.w_up[:, :128]))
        layer.w_down = nn.Parameter(torch.randn_like(layer.w_down[..., :64]))
    guild.refresh_fp8(layer)
    expect_near_bf16(layer, x, layer(x))


def test_another_dtype(device: str) -> None:
    """Weights that are rounded in place of the masters are quantised by themselves."""
    layer, x = layer_of(device, torch.float32), tokens_of(device)
    with torch.autocast(device, torch.bfloat16):
        layer(x)
    out = layer.bfloat16()(x)
    guild.refresh_fp8(layer)
    assert torch.equal(out, layer(x))


def test_forgotten_refresh(device: str) -> None:
    layer, x = layer_of(device), tokens_of(device)
    layer(x)
    with torch.no_grad():
        layer.w_up.neg_()
    with pytest.raises(RuntimeError, match="fp8: expected refresh_fp8"):
        layer(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["assigned", "functional", "written"])
def test_weights_that_compiled_code_quantised(how: str, backend: str, device: str) -> None:
    """Eager calls after it see other weights, and those that were written to since."""
    layer, x = layer_of(device), tokens_of(device)
    compiled = torch.compile(layer, backend=backend)
    with torch.no_grad():
        compiled(x)
        if how == "assigned":
            other = {name: -2 * t for name, t in layer.state_dict().items()}
            layer.load_state_dict(other, assign=True)
        elif how == "functional":
            zeros = {"w_up": torch.zeros_like(layer.w_up)}
            assert not torch.func.functional_call(layer, zeros, (x,)).any()
        else:
            layer(x)
            layer.w_up.mul_(3)
            with pytest.raises(RuntimeError, match="fp8: expected refresh_fp8"):
                layer(x)
            guild.refresh_fp8(layer)
        expect_near_bf16(layer, x, layer(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_codes_that_compiled_code_made_in_inference_mode(backend: str, device: str) -> None:
    layer, x = layer_of(device), tokens_of(device)
    compiled = torch.compile(layer, backend=backend)
    with torch.inference_mode():
        compiled(x)
    for call in (layer, compiled, layer):
        guild.refresh_fp8(layer)
        call(x).sum().backward()
    with torch.inference_mode():
        compiled(x)
    layer(x).sum().backward()
    expect_near_bf16(layer, x, layer(x))


def test_step_of_a_fused_optimizer(device: str) -> None:
    """It does not change the weights' versions by itself."""
    layer, x = layer_of(device), tokens_of(device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="fp8: expected refresh_fp8"):
        layer(x)


def test_backward_after_a_forward_of_other_tensors(device: str) -> None:
    """Each forward's codes last until its backward, unless `refresh_fp8` was called."""
    layer, x = layer_of(device), tokens_of(device)
    parts = []
    for factor in (1.0, 2.0):
        own = {n: (factor * p).detach().requires_grad_() for n, p in layer.named_parameters()}
        parts.append((own, torch.func.functional_call(layer, own, (x,))))
    for own, out in parts:
        twin = copy.deepcopy(layer)
        twin.load_state_dict(own)
        twin(x).sum().backward()
        out.sum().backward()
        assert torch.equal(own["w_up"].grad, twin.w_up.grad)
    parametrize.register_parametrization(layer, "w_up", nn.Identity())
    layer(layer(x)).sum().backward()
    assert layer.parametrizations.w_up.original.grad.any()


def test_loaded_and_drawn_weights(device: str) -> None:
    """Neither needs a call of `refresh_fp8`."""
    layer, x = layer_of(device), tokens_of(device)
    layer(x)
    layer.load_state_dict({n: 2 * t for n, t in layer.state_dict().items()})
    loaded = layer(x)
    layer.reset_parameters()
    assert not torch.equal(layer(x), loaded)
    expect_near_bf16(layer, x, layer(x))


def test_a_batch_of_weights(device: str) -> None:
    layer, x = layer_of(device), tokens_of(device)
    layer(x)
    two = torch.stack((layer.w_up.detach(), 2 * layer.w_up.detach()))
    call = torch.func.functional_call
    outs = torch.vmap(lambda w: call(layer, {"w_up": w}, (x,)))(two)
    assert torch.equal(outs[0], layer(x))
    assert torch.equal(outs[1], call(layer, {"w_up": two[1]}, (x,)))


def routed(device: str) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    layer, x = layer_of(device), tokens_of(device)
    ids = torch.randint(0, EXPERTS, (TOKENS, 1), device=device)
    given = x, ids, torch.ones(TOKENS, 1, device=device)
    return given, layer.w_up.detach(), layer.w_down.detach()


def test_lists_that_moved(device: str) -> None:
    """refresh() reads the tensors of a list where they lie then."""
    given, *weights = routed(device)
    lists = [[nn.Parameter(one.clone()) for one in weight] for weight in weights]
    kept = guild.FP8Weights(guild.FP8(), *lists)
    for one in (*lists[0], *lists[1]):
        one.data = one.data * 0.5
    kept.refresh()
    with torch.no_grad():
        found = guild.routed_experts(*given, *lists, fp8=kept)
        exact = guild.routed_experts(*given, *lists)
    assert (found - exact).double().norm() < 0.1 * exact.double().norm()


@pytest.mark.parametrize("option", [{"order": "interleaved"}, {"transposed": True}])
def test_call_says_another_layout(option: dict, device: str) -> None:
    given, w_up, w_down = routed(device)
    kept = guild.FP8Weights(guild.FP8(), w_up, w_down)
    if "transposed" in option:
        w_up, w_down = w_up.mT, w_down.mT
    with pytest.raises(ValueError, match=f"^{next(iter(option))}: expected .* like the FP8Weights"):
        guild.routed_experts(*given, w_up, w_down, fp8=kept, **option)


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_keeps_no_codes_that_it_does_not_read(recompute: bool, device: str) -> None:
    """Of the codes that a forward makes, one order is kept; both of w_up to recompute H."""
    place = {"dtype": torch.bfloat16, "device": device}
    layer = guild.MoE(HIDDEN, SIZE, EXPERTS, 2, fp8=guild.FP8(), recompute=recompute, **place)
    ids, scores = guild.route(torch.randn(TOKENS, EXPERTS, device=device), 2)
    weights = layer.w_up, layer.w_down

    def experts_alone(x: Tensor) -> Tensor:
        given = {"fp8": layer.fp8, "recompute": recompute}
        return guild.routed_experts(x, ids, scores, *weights, **given)

    for call in (layer, experts_alone):
        kept: dict[int, tuple[int, ...]] = {}

        def keep(tensor: Tensor, kept: dict = kept) -> Tensor:
            if tensor.dtype is torch.uint8 and tensor.dim() == 3:
                kept[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = call(tokens_of(device))
        up_transposed, down_transposed = (EXPERTS, HIDDEN, 2 * SIZE), (EXPERTS, SIZE, HIDDEN)
        wanted = [down_transposed, up_transposed]
        wanted += [(EXPERTS, 2 * SIZE, HIDDEN)] if recompute else []
        assert sorted(kept.values()) == sorted(wanted)
        out.sum().backward()


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("gradients", [True, False])
def test_conversions_that_swap_tensors(gradients: bool, device: str) -> None:
    layer, x = layer_of(device), tokens_of(device)
    with torch.set_grad_enabled(gradients):
        before = layer(x).detach()
        layer.to(torch.float16)
        assert layer(x.half()).dtype == torch.float16
        layer.to(torch.bfloat16)
        assert torch.equal(layer(x), before)
        with torch.no_grad():
            layer.w_up.mul_(2)
        with pytest.raises(RuntimeError, match=r"^fp8: expected refresh_fp8\(\)"):
            layer(x)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("assign", [False, True])
def test_loads_that_swap_tensors(assign: bool, device: str) -> None:
    layer, x = layer_of(device), tokens_of(device)
    before = layer(x).detach()  # a graph refers to the tensors, too
    layer.load_state_dict({n: 2 * t for n, t in layer.state_dict().items()}, assign=assign)
    assert not torch.equal(layer(x), before)
    expect_near_bf16(layer, x, layer(x))


def test_a_swapped_tensor(device: str) -> None:
    """The parameter is the same object, and its new tensor may have the version of the old one."""
    layer, x = layer_of(device), tokens_of(device)
    layer(x)
    other = nn.Parameter(torch.randn_like(layer.w_up))
    while other._version < layer.w_up._version:
        torch.autograd.graph.increment_version(other)
    torch.utils.swap_tensors(layer.w_up, other)
    expect_near_bf16(layer, x, layer(x))


def test_a_conversion_frees_the_old_weights() -> None:
    layer, x = layer_of("cpu"), tokens_of("cpu")
    memory = np.ones(tuple(layer.w_up.shape), np.int16)
    lives = weakref.ref(memory)
    layer.w_up.data = torch.from_numpy(memory).view(torch.bfloat16)
    del memory
    with torch.no_grad():
        layer(x)
    assert lives() is not None
    layer.half()
    assert lives() is None


@pytest.mark.usefixtures("swapping")
def test_conversion_of_layers_that_share_a_weight(device: str) -> None:
    layers, x = [layer_of(device), layer_of(device)], tokens_of(device)
    layers[1].w_up = layers[0].w_up
    for layer in layers:
        layer(x)
    nn.Sequential(*layers).half()
    for layer in layers:
        expect_near_bf16(layer, x.half(), layer(x.half()))


def test_attributes_assigned_later(device: str) -> None:
    """They are checked before they are used; a name of an activation works as without FP8."""
    layer, x = layer_of(device), tokens_of(device)
    layer(x)
    w_down = layer.w_down
    for name, value, error, message in (
        ("activation", "swish", ValueError, "activation: expected one of"),
        ("activation", None, TypeError, "activation: expected a name or a guild.Activation"),
        ("order", "mixed", ValueError, "order: expected"),
        ("transposed", "no", TypeError, "transposed: expected"),
        ("w_down", None, TypeError, "w_down: expected a torch.Tensor, got NoneType"),
        ("w_down", nn.Parameter(w_down[0].detach()), ValueError, "w_down: expected 3 dimensions"),
        ("w_down", nn.Parameter(w_down.to("meta")), ValueError, "w_down: expected a tensor on"),
    ):
        kept = getattr(layer, name)
        setattr(layer, name, value)
        with pytest.raises(error, match=f"^{message}"):
            layer(x)
        setattr(layer, name, kept)
    layer.activation = "relu2_ungated"
    layer.w_up = nn.Parameter(torch.randn_like(layer.w_up[:, :SIZE]))
    expect_near_bf16(layer, x, layer(x))
