"""GroupedLinear, called as Transformer Engine's is, beside one torch linear layer per group."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

import guild
from guild._torch.expert_lists import view_of
from guild.integrations.transformer_engine import GroupedLinear

GROUPS, IN, OUT = 4, 16, 24
SPLITS = [9, 0, 5, 8]


@pytest.fixture(autouse=True)
def copies_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", guild.CopiedWeightsWarning)
        yield


def make(device: str, **more: object) -> GroupedLinear:
    torch.manual_seed(0)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    layer = GroupedLinear(GROUPS, IN, OUT, params_dtype=dtype, device=device, **more)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def by_hand(layer: GroupedLinear, x: Tensor) -> Tensor:
    parts = []
    for e, rows in enumerate(x.split(SPLITS)):
        bias = getattr(layer, f"bias{e}", None) if layer.apply_bias else None
        parts.append(F.linear(rows, getattr(layer, f"weight{e}"), bias))
    return torch.cat(parts)


def rows_for(layer: GroupedLinear) -> Tensor:
    torch.manual_seed(1)
    weight = layer.weight0
    return torch.randn(sum(SPLITS), IN, device=weight.device, dtype=weight.dtype).requires_grad_()


def close(device: str) -> dict[str, float]:
    return {"rtol": 1e-9, "atol": 1e-9} if device == "cpu" else {"rtol": 2e-2, "atol": 6e-2}


def expected(layer: GroupedLinear) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Result, dX and the parameters' gradients, by hand."""
    twin = copy.deepcopy(layer)
    x = rows_for(twin)
    out = by_hand(twin, x)
    out.square().sum().backward()
    gradients = {n: torch.zeros_like(p) for n, p in twin.named_parameters()}
    found = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, gradients | found


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_like_linear_layers(device: str, bias: bool, as_tensor: bool) -> None:
    layer = make(device, bias=bias)
    out, dx, gradients = expected(layer)
    x = rows_for(layer)
    splits = torch.tensor(SPLITS, device=device) if as_tensor else SPLITS
    ours = layer(x, splits, is_first_microbatch=True)
    ours.square().sum().backward()
    torch.testing.assert_close(ours, out, **close(device))
    torch.testing.assert_close(x.grad, dx, **close(device))
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], **close(device))


def test_batched_gradients_are_refused(device: str) -> None:
    layer = make(device, delay_wgrad_compute=True)
    x = rows_for(layer)
    out = layer(x, SPLITS)
    many = torch.ones(3, *out.shape, device=device, dtype=out.dtype)
    with pytest.raises(NotImplementedError, match=r"GroupedLinear: .* without is_grads_batched"):
        torch.autograd.grad(out, x, many, is_grads_batched=True)
    layer.backward_dw()  # there is nothing to compute
    assert layer.weight0.grad is None


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_elsewhere_or_later(device: str, fused: bool, delayed: bool) -> None:
    """Two passes; with delayed gradients `backward_dw` comes after both and then runs the hooks.

    Only weights have a `main_grad`, as in Transformer Engine.
    """
    layer = make(device, fuse_wgrad_accumulation=fused, delay_wgrad_compute=delayed)
    _, _, gradients = expected(layer)
    assert all(p.skip_backward_post_hook is delayed for p in layer.parameters())
    weights = [getattr(layer, f"weight{e}") for e in range(GROUPS)]
    mains = torch.ones(GROUPS, *weights[0].shape, device=device)
    for weight, main in zip(weights, mains, strict=True):
        weight.main_grad, weight.grad_added_to_main_grad = main, False
    called = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    for _ in range(2):
        layer(rows_for(layer), SPLITS).square().sum().backward()
    assert layer.need_backward_dw() is delayed
    if delayed and fused:
        assert all((w.main_grad == 1).all() for w in weights)
    layer.backward_dw()
    assert len(called) == delayed
    for name, parameter in layer.named_parameters():
        wanted = 2 * gradients[name].float()
        if fused and name.startswith("weight"):
            assert parameter.grad_added_to_main_grad and parameter.grad is not None
            got = parameter.main_grad - 1
        else:
            assert not getattr(parameter, "grad_added_to_main_grad", False)
            got = parameter.grad.float()
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-4 if device == "cpu" else 0.2)


def test_biases_that_are_returned(device: str) -> None:
    layer = make(device, return_bias=True)
    out, biases = layer(rows_for(layer), SPLITS)
    torch.testing.assert_close(out, by_hand(layer, rows_for(layer)), **close(device))
    assert [b is getattr(layer, f"bias{e}") for e, b in enumerate(biases)] == [True] * GROUPS


def test_rows_past_the_groups(device: str) -> None:
    """Group sizes in a device tensor are not summed on the host: rows past them give zeros."""
    layer = make(device)
    splits = torch.tensor([9, 0, 5, 2], device=device)
    x = rows_for(layer)
    out = layer(x, splits)
    assert not out[16:].any() and out[:16].any()
    out.sum().backward()
    assert not x.grad[16:].any()


def test_leading_dimensions_and_autocast() -> None:
    layer = GroupedLinear(2, IN, OUT, device="cpu", fuse_wgrad_accumulation=True)
    plain = GroupedLinear(2, IN, OUT, device="cpu")
    plain.load_state_dict(layer.state_dict())
    for e, main in enumerate(torch.zeros(2, OUT, IN)):
        getattr(layer, f"weight{e}").main_grad = main
    x = torch.randn(3, 4, IN)
    outs = []
    for one in (plain, layer):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs.append(one(x, [5, 7]))
        assert outs[-1].shape == (3, 4, OUT) and outs[-1].dtype == torch.bfloat16
        outs[-1].float().square().sum().backward()
    assert torch.equal(*outs)
    for name, parameter in plain.named_parameters():
        other = layer.get_parameter(name)
        gradient = other.main_grad if name.startswith("weight") else other.grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=2e-2, atol=2e-2)


def test_state_dict_is_that_of_transformer_engine() -> None:
    layer = make("cpu")
    names = {f"{kind}{e}" for kind in ("weight", "bias") for e in range(GROUPS)}
    state = layer.state_dict()
    assert set(state) == names
    state["_extra_state"] = torch.zeros(3)
    other = make("cpu")
    other.load_state_dict(state)
    assert torch.equal(other.weight3, layer.weight3)


def moves() -> list[Callable]:
    return [lambda m: m.bfloat16(), lambda m: m.to_empty(device="cpu"), copy.deepcopy]


@pytest.mark.parametrize("move", moves())
def test_parameters_lie_in_the_experts_order(move: Callable) -> None:
    """Also after a move, and in a buffer that was filled from the last parameter to the first."""
    layer = move(make("cpu"))
    for kind in ("weight", "bias"):
        assert view_of([getattr(layer, f"{kind}{e}") for e in range(GROUPS)]) is not None
    parameters = list(layer.parameters())[::-1]
    buffer = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    begin = 0
    for p in parameters:
        p.data = buffer[begin : begin + p.numel()].view(p.shape).copy_(p.data)
        begin += p.numel()
    places = [p.data_ptr() for p in parameters]
    layer.to("cpu")  # nothing moves, so the buffer stays theirs
    assert [p.data_ptr() for p in parameters] == places
    for kind in ("weight", "bias"):
        assert view_of([getattr(layer, f"{kind}{e}") for e in range(GROUPS)]) is not None


def test_sizes_and_initial_values() -> None:
    column = GroupedLinear(2, IN, OUT, device="cpu", parallel_mode="column", tp_size=2)
    row = GroupedLinear(2, IN, OUT, device="cpu", parallel_mode="row", tp_size=2)
    assert column.weight0.shape == (OUT // 2, IN) and row.weight1.shape == (OUT, IN // 2)
    assert not column.bias0.any() and 0.01 < column.weight0.std() < 0.04
    filled = GroupedLinear(2, IN, OUT, device="cpu", init_method=torch.nn.init.ones_)
    assert (filled.weight1 == 1).all()
    assert GroupedLinear(2, IN, OUT, device="meta").weight0.is_meta


@pytest.mark.parametrize(
    ("more", "splits", "x", "message"),
    [
        ({"ub_overlap_ag": True}, SPLITS, None, "ub_overlap_rs, ub_overlap_ag: expected False"),
        ({"parallel_mode": "rows"}, SPLITS, None, "parallel_mode: expected None, 'column' or"),
        ({"parallel_mode": "row", "tp_size": 3}, SPLITS, None, "in_features: expected a multiple"),
        ({}, [9, 13], None, "m_splits: expected 4 numbers of rows, got 2"),
        ({}, [9, 0, 5, 7], None, "m_splits: expected 22 rows as in inp, got 21"),
        ({}, [9, -1, 9, 5], None, "m_splits: expected integers of 0 or more, got .9, -1, 9, 5"),
        ({}, [9.5, 0.5, 5, 7], None, "m_splits: expected integers of 0 or more, got .9.5"),
        ({}, None, None, "m_splits: expected a list or a torch.Tensor, got None"),
        ({}, torch.zeros(4), None, "m_splits: expected an integer dtype, got float32"),
        ({}, torch.ones(4) > 0, None, "m_splits: expected an integer dtype, got bool"),
        ({}, torch.tensor([SPLITS]), None, r"m_splits: expected shape \(4,\), got \(1, 4\)"),
        ({"tp_size": 0}, SPLITS, None, "tp_size: expected at least 1, got 0"),
        ({}, ["a", *SPLITS[1:]], None, r"m_splits: expected integers of 0 or more, got \['a'"),
        ({}, SPLITS, [1.0], "inp: expected a torch.Tensor, got list"),
        ({}, SPLITS, torch.tensor(1.0), r"inp: expected shape \(\.\.\., 16\), got \(\)"),
        ({}, SPLITS, torch.zeros(22, 8), r"inp: expected shape \(\.\.\., 16\), got \(22, 8\)"),
        ({}, SPLITS, torch.zeros(22, 16), "inp: expected dtype torch.float64, got torch.float32"),
    ],
)
def test_wrong_arguments(more: dict, splits: list[int], x: Tensor | None, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        layer = make("cpu", **more)
        layer(rows_for(layer) if x is None else x, splits)


def parametrized(layer: GroupedLinear, name: str) -> None:
    parametrize.register_parametrization(layer, name, torch.nn.Identity())


@pytest.mark.parametrize("name", ["bias0", "bias2", "weight0", "weight2"])
@pytest.mark.parametrize("change", [prune.identity, parametrized])
def test_a_tensor_in_place_of_a_parameter(change: Callable, name: str) -> None:
    """Pruned or parametrised, an expert's tensor counts as before, and gets its gradient."""
    layer = make("cpu")
    x = rows_for(layer)
    truth, _, gradients = expected(layer)
    change(layer, name)
    out = layer(x, SPLITS)
    torch.testing.assert_close(out, truth, **close("cpu"))
    out.square().sum().backward()
    (changed,) = (p.grad for n, p in layer.named_parameters() if name in n)
    torch.testing.assert_close(changed, gradients[name], **close("cpu"))


class FailsAt(TorchDispatchMode):
    """Runs out of memory once, at the n-th op."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("once")
        return op(*args, **(kwargs or {}))


def test_nothing_is_added_twice_after_an_error(device: str) -> None:
    """Gradients of some of the weights are moved to their places one by one."""
    warnings.simplefilter("ignore", guild.CopiedWeightsWarning)
    results = []
    for at in range(25):
        layer = make(device, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
        layer.weight1.requires_grad_(False)
        trained = [layer.weight0, layer.weight2, layer.weight3]
        for weight in trained:
            weight.main_grad = torch.ones_like(weight)
        layer(rows_for(layer), SPLITS).sum().backward()
        try:
            with FailsAt(at):
                layer.backward_dw()
        except torch.OutOfMemoryError:
            layer.backward_dw()
        biases = [getattr(layer, f"bias{e}").grad for e in range(GROUPS)]
        results.append([*(weight.main_grad for weight in trained), *biases])
        for one, other in zip(results[0], results[-1], strict=True):
            assert torch.equal(one, other), at
