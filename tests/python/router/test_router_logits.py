"""guild.router_logits: float32 logits of 16-bit operands, their gradients, and wrong calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import guild

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def named(dtype: torch.dtype) -> str:
    """For the name of a test."""
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("shape", [(50,), (2, 3, 4), (), (0,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", _DTYPES, ids=named)
def test_against_float64(
    dtype: torch.dtype, bias: bool, shape: tuple[int, ...], device: str
) -> None:
    """Products of the operands as they are, with none of a 16-bit result's rounding."""
    torch.manual_seed(0)
    place = {"device": device, "dtype": dtype}
    x, weight = torch.randn(*shape, 128, **place), torch.randn(8, 128, **place)
    given = (x, weight, torch.randn(8, **place)) if bias else (x, weight)
    leaves = [t.requires_grad_() for t in given]
    logits = guild.router_logits(*leaves)
    assert logits.shape == (*shape, 8)
    assert logits.dtype == (dtype if dtype == torch.float64 else torch.float32)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = F.linear(*exact)
    close = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(logits.double(), expected, atol=close, rtol=close)
    dlogits = torch.randn_like(logits)
    got = torch.autograd.grad(logits, leaves, dlogits)
    truth = torch.autograd.grad(expected, exact, dlogits.double())
    unit = 0.006 if dtype.itemsize == 2 else close
    for value, gradient in zip(got, truth, strict=True):
        assert value.dtype == dtype
        assert (value.double() - gradient).norm() <= unit * gradient.norm()


def test_autocast(device: str) -> None:
    """Operands in the autocast dtype, logits in float32; gradients in the operands' own dtypes."""
    torch.manual_seed(0)
    x, weight = torch.randn(20, 64, device=device), torch.randn(8, 64, device=device)
    bias = torch.randn(8, device=device)
    expected = guild.router_logits(x.bfloat16(), weight.bfloat16(), bias)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = guild.router_logits(*leaves)
        assert torch.equal(logits, expected) and logits.dtype == torch.float32
        assert torch.equal(guild.router_logits(x.bfloat16(), weight, bias), expected)
    for gradient in torch.autograd.grad(logits.square().sum(), leaves):
        assert gradient.dtype == torch.float32 and gradient.norm() > 0


@pytest.mark.parametrize("dtype", _DTYPES, ids=named)
def test_bias_of_another_dtype(dtype: torch.dtype, device: str) -> None:
    """It is added in the logits' dtype, and gets its gradient in its own."""
    x = torch.randn(6, 16, device=device, dtype=torch.bfloat16)
    weight = torch.randn(4, 16, device=device, dtype=torch.bfloat16)
    bias = torch.randn(4, device=device, dtype=dtype, requires_grad=True)
    logits = guild.router_logits(x, weight, bias)
    assert torch.equal(logits, guild.router_logits(x, weight) + bias.float())
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert bias.grad.dtype == dtype and torch.equal(bias.grad, torch.full_like(bias, 6))


def test_compiled(device: str) -> None:
    """One graph, eager's bits."""
    torch._dynamo.reset()
    x = torch.randn(6, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(4, device=device, requires_grad=True)
    compiled = torch.compile(guild.router_logits, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, guild.router_logits):
        logits = call(x, weight, bias)
        results.append((logits, *torch.autograd.grad(logits.square().sum(), (x, weight, bias))))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


WRONG = {
    "another dtype": (
        lambda x, w: guild.router_logits(x.half(), w),
        TypeError,
        "x: expected dtype bfloat16 as weight has, got float16",
    ),
    "integers": (
        lambda x, w: guild.router_logits(x.int(), w.int()),
        TypeError,
        "x: expected dtype bfloat16, float16, float32 or float64, got int32",
    ),
    "another width": (
        lambda x, w: guild.router_logits(x[:, 1:], w),
        ValueError,
        r"x: expected shape \(..., 16\) \(hidden\) as weight has, got \(6, 15\)",
    ),
    "a vector for the weight": (
        lambda x, w: guild.router_logits(x, w[0]),
        ValueError,
        r"weight: expected 2 dimensions \(experts, hidden\), got shape \(16,\)",
    ),
    "a list": (
        lambda x, w: guild.router_logits([1.0], w),
        TypeError,
        "x: expected a torch.Tensor, got list",
    ),
    "a long bias": (
        lambda x, w: guild.router_logits(x, w, torch.zeros(5, device=x.device)),
        ValueError,
        r"bias: expected shape \(4,\), got \(5,\)",
    ),
    "a bias of integers": (
        lambda x, w: guild.router_logits(x, w, torch.zeros(4, device=x.device).int()),
        TypeError,
        "bias: expected a floating dtype, got int32",
    ),
    "another device": (
        lambda x, w: guild.router_logits(x, w.to("meta")),
        ValueError,
        "weight: expected a tensor on .* as x is, got one on meta",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_call(name: str, device: str) -> None:
    """An error that names the argument."""
    call, kind, message = WRONG[name]
    place = {"device": device, "dtype": torch.bfloat16}
    with pytest.raises(kind, match=f"^{message}"):
        call(torch.zeros(6, 16, **place), torch.zeros(4, 16, **place))


@pytest.mark.parametrize("dtype", _DTYPES, ids=named)
def test_no_inputs(dtype: torch.dtype) -> None:
    """A sum of nothing is zero, in every dtype."""
    x, weight = (torch.zeros(*s, 0, dtype=dtype, requires_grad=True) for s in ((2, 3), (4,)))
    logits = guild.router_logits(x, weight)
    assert logits.shape == (2, 3, 4) and not logits.any()
    logits.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
