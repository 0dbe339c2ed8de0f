"""WeightGradients and the dtypes of `.grad`: those of the parameters, others, and mixtures."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import guild
from guild import WeightGradients

WEIGHTS = "w_up", "w_down", "b_up", "b_down"
needs_grad_dtype = pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="this torch gives gradients their tensor's dtype"
)


def start(parameter: Tensor, form: str) -> None:
    """Gives the parameter a gradient to add to."""
    if form == "none":
        return
    if form == "float32":
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
        return
    many = torch.ones(*parameter.shape, 2, dtype=parameter.dtype, device=parameter.device)
    grad = many[..., 0]
    parameter.grad = grad._neg_view() if form == "negated" else grad


FORMS = ["none", "strided", "negated"]
if hasattr(Tensor, "grad_dtype"):
    FORMS += ["float32"]


@pytest.mark.parametrize("forms", [*itertools.product(FORMS, FORMS)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("delayed", [False, True])
def test_mixed_gradients_of_biases(
    delayed: bool, dtype: torch.dtype, forms: tuple[str, str], device: str
) -> None:
    """One op sums both biases' gradients: of one dtype, written by rows."""
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("the GPU has no float64")
    x, found = None, []
    for sink in (None, WeightGradients(delayed=delayed)):
        torch.manual_seed(0)
        layer = guild.MoE(16, 8, 4, 2, bias=True, dtype=dtype, device=device)
        layer.weight_gradients = sink
        x = torch.randn(6, 16, dtype=dtype, device=device)
        for name, form in zip(("b_up", "b_down"), forms, strict=True):
            start(getattr(layer, name), form)
        layer(x).sum().backward()
        if delayed and sink is not None:
            sink.compute()
        found.append([getattr(layer, name).grad for name in WEIGHTS])
    close = 1e-13 if dtype is torch.float64 and "float32" not in forms else 2e-2
    for own, other in zip(*found, strict=True):
        assert own.dtype is other.dtype
        torch.testing.assert_close(other, own, rtol=close, atol=close)


@pytest.mark.parametrize("form", ["strided", "negated"])
def test_float64_stays_exact(form: str) -> None:
    """What has to be moved to its place is not rounded on the way."""
    found = []
    for sink in (None, WeightGradients()):
        torch.manual_seed(0)
        layer = guild.MoE(16, 8, 4, 2, bias=True, dtype=torch.float64)
        layer.weight_gradients = sink
        x = torch.randn(6, 16, dtype=torch.float64)
        for name in WEIGHTS:
            start(getattr(layer, name), form)
        layer(x).sum().backward()
        found.append([getattr(layer, name).grad for name in WEIGHTS])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(other, own, rtol=1e-13, atol=1e-13)


@needs_grad_dtype
@pytest.mark.parametrize("how", ["whole", "lists", "delayed", "some"])
def test_grad_dtype(how: str, device: str) -> None:
    """`.grad` is made in `grad_dtype`: float32 for bfloat16 parameters, or for some of them."""
    torch.manual_seed(0)
    made = {"dtype": torch.bfloat16, "device": device}
    x, scores = torch.randn(20, 32, **made), torch.rand(20, 2, device=device)
    ids = torch.randint(4, (20, 2), device=device)
    shapes = [(4, 32, 32), (4, 32, 16), (4, 32), (4, 32)]
    values, found = [torch.randn(s, **made) for s in shapes], []
    for sink in (None, WeightGradients(delayed=how == "delayed")):
        ws = [w.clone().requires_grad_() for w in values]
        if how == "lists":
            ws = [[t.clone().requires_grad_() for t in w] for w in values]
        flat = [t for w in ws for t in (w if how == "lists" else [w])]
        for t in flat[::2] if how == "some" else flat:
            t.grad_dtype = torch.float32
        guild.routed_experts(x, ids, scores, *ws, weight_gradients=sink).sum().backward()
        if how == "delayed" and sink is not None:
            sink.compute()
        found.append([t.grad for t in flat])
    for own, other in zip(*found, strict=True):
        assert own.dtype is other.dtype
        torch.testing.assert_close(other, own, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("first", ["bfloat16", pytest.param("frozen", marks=needs_grad_dtype)])
def test_no_wide_gradient_of_a_list_is_rounded(first: str, delayed: bool, device: str) -> None:
    """Whatever the list's first tensor wants: the others' float32 has all its bits."""
    frozen, found = first == "frozen", []
    for mixed in (False, True):
        torch.manual_seed(0)
        made = {"dtype": torch.bfloat16, "device": device}
        lists = [list(torch.randn(3, *s, **made) / 8) for s in ((32, 16), (16, 16))]
        lists = [[torch.nn.Parameter(t.clone()) for t in parts] for parts in lists]
        for part in (part for parts in lists for part in parts):
            if frozen:
                part.grad_dtype = torch.float32
            else:
                part.main_grad = torch.zeros_like(part, dtype=torch.float32)
        for parts in lists if mixed else ():
            if frozen:
                parts[0].requires_grad_(False)
            else:
                parts[0].main_grad = torch.zeros_like(parts[0])
        x, ids = torch.randn(50, 16, **made), torch.arange(50, device=device)[:, None] % 3
        sink = WeightGradients(main_grad=not frozen, delayed=delayed)
        scores = torch.ones(50, 1, device=device)
        out = guild.routed_experts(x, ids, scores, *lists, weight_gradients=sink)
        out.backward(torch.randn(50, 16, **made))
        if delayed:
            sink.compute()
        others = [part for parts in lists for part in parts[1:]]
        found.append([part.grad if frozen else part.main_grad for part in others])
    for own, other in zip(*found, strict=True):
        assert own.dtype == torch.float32 and not torch.equal(own, own.bfloat16().float())
        assert torch.equal(own, other)
