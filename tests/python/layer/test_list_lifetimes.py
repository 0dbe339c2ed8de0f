"""What happens between forward and backward to lists of weights that lie anywhere in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import guild
from guild import WeightGradients, grouped_mm
from listed_layers import (
    CALLS,
    apart,
    backwards,
    copies_are_errors,  # noqa: F401 - a fixture of every test here
    dtype_of,
    expected,
    sorted_call,
    through_data,
    whole_layer,
)

UNEVEN = [apart, backwards]


def frozen(parts: list[Tensor]) -> list[Tensor]:
    return [part.detach() for part in parts]


def overwritten(device: str) -> list[Tensor]:
    """Memory of all sizes that a weight or a list may have, filled with large numbers."""
    sizes = [n for of in whole_layer(device).values() for n in (of.numel(), of[0].numel())]
    return [torch.full((n,), 1e6, device=device, dtype=dtype_of(device)) for n in sizes * 8]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("made", UNEVEN)
def test_frozen_lists_live_until_backward(
    device: str, call: Callable, made: Callable, recompute: bool
) -> None:
    """Also where nothing but the call has them, as with weights dequantised for it."""
    layer = whole_layer(device)
    out, dx, _ = expected(call, layer, device)
    x, ours = call({n: frozen(made(t)) for n, t in layer.items()}, device, recompute=recompute)
    kept = overwritten(device)
    ours.square().sum().backward()
    assert kept and torch.equal(ours, out) and torch.equal(x.grad, dx)


@pytest.mark.parametrize("made", UNEVEN)
def test_products_keep_lists(device: str, made: Callable) -> None:
    weights = whole_layer(device)["w_up"]
    ends = torch.tensor([3, 3, 8, 10], dtype=torch.int32, device=device)
    x = torch.randn(10, weights.shape[2], device=device, dtype=weights.dtype, requires_grad=True)
    (want,) = torch.autograd.grad(grouped_mm(x, weights.mT, offs=ends).sum(), x)
    out = grouped_mm(x, [w.mT for w in frozen(made(weights))], offs=ends)
    kept = overwritten(device)
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert kept and torch.equal(dx, want)


@pytest.mark.parametrize("other_data", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_other_data(device: str, call: Callable, sink: bool, other_data: bool) -> None:
    """Backward reads what forward read, though the parameters have been moved meanwhile."""
    layer = whole_layer(device)
    _, dx, _ = expected(call, layer, device)
    lists = {n: backwards(t) for n, t in layer.items()}
    x, out = call(lists, device, weight_gradients=WeightGradients() if sink else None)
    for parts in lists.values():
        if other_data:
            for part in parts:
                part.data = part.data.clone()
        else:
            guild.lay_evenly(parts)
    kept = overwritten(device)
    out.square().sum().backward()
    assert kept and torch.equal(x.grad, dx)


@pytest.mark.parametrize("made", [backwards, through_data])
@pytest.mark.parametrize("listed", ["w_up", "w_down", "both"])
@pytest.mark.parametrize("written", ["w_up", "w_down"])
@pytest.mark.parametrize("how", ["autograd", "sink", "frozen", "recompute"])
@pytest.mark.parametrize("call", CALLS)
def test_writes_are_noticed(
    device: str, call: Callable, how: str, written: str, listed: str, made: Callable
) -> None:
    """In lists, wanted or frozen, and in a tensor beside one, even if only dx is computed.

    Also where a list is one view, whose tensors count their versions separately.
    """
    layer = {n: t for n, t in whole_layer(device).items() if n.startswith("w_")}
    weights = {
        n: made(t) if listed in (n, "both") else torch.nn.Parameter(t) for n, t in layer.items()
    }
    if how == "frozen":
        weights = {n: frozen(w) if isinstance(w, list) else w.detach() for n, w in weights.items()}
    options = {"recompute": how == "recompute"}
    options |= {"weight_gradients": WeightGradients()} if how == "sink" else {}
    x, out = call(weights, device, **options)
    with torch.no_grad():
        changed = weights[written]
        (changed[1] if isinstance(changed, list) else changed).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


def test_biases_of_an_even_list_are_noticed(device: str) -> None:
    """Recomputed pre-activations read them again."""
    lists = {n: through_data(t) for n, t in whole_layer(device).items()}
    x, out = sorted_call(lists, device, recompute=True)
    with torch.no_grad():
        lists["b_up"][2].mul_(2)
    with pytest.raises(RuntimeError, match=r"^b_up: .* modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


def test_an_even_list_of_grouped_mm_is_noticed(device: str) -> None:
    """Transposed, too."""
    for turned in (False, True):
        parts = through_data(whole_layer(device)["w_up"])
        x = torch.randn(5, parts[0].shape[not turned]).to(device, dtype_of(device))
        ends = torch.tensor([1, 1, 4, 5], dtype=torch.int32, device=device)
        weights = [part.mT for part in parts] if not turned else parts
        out = grouped_mm(x.requires_grad_(), weights, offs=ends)
        with torch.no_grad():
            parts[1].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), x)


def test_freed_storage(device: str) -> None:
    """As FSDP2 frees what it has gathered; in memory of its own again, a list has moved."""
    lists = {n: backwards(t) for n, t in whole_layer(device).items()}
    _, out = sorted_call(lists, device)
    storage = lists["w_up"][0].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    kept = overwritten(device)
    storage.resize_(4 * size)
    with pytest.raises(RuntimeError, match=r"w_up: the storage of experts' tensors .* has moved"):
        out.sum().backward()
    assert kept
