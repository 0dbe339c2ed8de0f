"""guild.router_logits: float32 logits of 16-bit operands, their gradients, and wrong calls."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import guild
from guild._torch.operators import ops
from guild.routing import SCORES, router_scalars

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def named(dtype: torch.dtype) -> str:
    """A dtype's name for test ids."""
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("shape", [(50,), (2, 3, 4), (), (0,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", _DTYPES, ids=named)
def test_against_float64(
    dtype: torch.dtype, bias: bool, shape: tuple[int, ...], device: str
) -> None:
    """Products of the operands as they are, without rounding the result to 16 bits."""
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=named)
@pytest.mark.parametrize(("hidden", "experts"), [(72, 5), (520, 37), (4104, 8), (1152, 37)])
def test_a_token_has_the_same_bits_in_any_company(
    hidden: int, experts: int, dtype: torch.dtype, device: str
) -> None:
    """Whatever the number of tokens, the token's position, and the strides of its row."""
    torch.manual_seed(1)
    x = torch.randn(1000, hidden, dtype=torch.float64).to(device, dtype)
    weight = torch.randn(experts, hidden, dtype=torch.float64).to(device, dtype)
    everyone = guild.router_logits(x, weight)
    for tokens in (1, 2, 7, 8, 17, 64, 65, 130, 300):
        for first in (0, 500 - tokens // 2, 1000 - tokens):
            some = slice(first, first + tokens)
            assert torch.equal(guild.router_logits(x[some], weight), everyone[some]), tokens
    wide = torch.empty(1000, hidden + 24, device=device, dtype=dtype)
    wide[:, :hidden] = x
    shifted = torch.empty(1000 * hidden + 1, device=device, dtype=dtype)[1:].view(1000, hidden)
    shifted.copy_(x)
    for view in (wide[:, :hidden], shifted, x.t().contiguous().t(), x.view(10, 100, hidden)):
        assert torch.equal(guild.router_logits(view, weight).view(1000, experts), everyone)
    row = x[:1].expand(300, hidden)
    assert torch.equal(guild.router_logits(row, weight), everyone[:1].expand(300, experts))
    assert torch.equal(guild.router_logits(x, weight.t().contiguous().t()), everyone)


@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_few_tokens_of_many_experts(tokens: int, gpu: str) -> None:
    """Tiles of 16 experts would be more than the multiprocessors, so they have 32."""
    torch.manual_seed(1)
    x = torch.randn(130, 4160, device=gpu, dtype=torch.bfloat16)
    weight = torch.randn(433, 4160, device=gpu, dtype=torch.bfloat16)
    everyone = guild.router_logits(x, weight)
    assert torch.equal(guild.router_logits(x[:tokens], weight), everyone[:tokens])


@pytest.mark.parametrize("name", ["softmax", "deepseek_v3", "ernie4_5", "deepseek_v4"])
def test_in_one_op_with_the_choice(name: str, device: str) -> None:
    """The layer's op chooses as `guild.route` does from separate logits, also at padding."""
    torch.manual_seed(2)
    router = guild.Router.named(name)
    x = torch.randn(300, 520, device=device).bfloat16()
    weight = torch.randn(48, 520, device=device).bfloat16() / 520**0.5
    bias = torch.randn(48, device=device) / 10 if router.selection_bias else None
    mask = torch.rand(300, device=device) < 0.8
    added = None, torch.randn(48, device=device).bfloat16(), torch.randn(48, device=device)
    for plus in added:
        logits = guild.router_logits(x, weight, plus)
        for tokens, some in itertools.product((0, 1, 3, 64, 300), (None, mask)):
            arguments = bias, None if some is None else some[:tokens], *router_scalars(6, router)
            got = ops.route_tokens(x[:tokens], weight, plus, *arguments)
            for value, expected in zip(got, ops.route(logits[:tokens], *arguments), strict=True):
                assert torch.equal(value, expected)


def test_sizes_that_have_no_fast_product(device: str) -> None:
    """Rows of odd lengths, and more experts than a GPU routes, still give correct logits."""
    for hidden, experts in ((33, 4), (64, 1100)):
        x = torch.randn(20, hidden, device=device).bfloat16()
        weight = torch.randn(experts, hidden, device=device).bfloat16()
        logits = guild.router_logits(x, weight)
        torch.testing.assert_close(logits, x.float() @ weight.float().t(), atol=1e-3, rtol=1e-4)


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
    """A bias is added in the logits' dtype and gets its gradient in its own."""
    x = torch.randn(6, 16, device=device, dtype=torch.bfloat16)
    weight = torch.randn(4, 16, device=device, dtype=torch.bfloat16)
    bias = torch.randn(4, device=device, dtype=dtype, requires_grad=True)
    logits = guild.router_logits(x, weight, bias)
    torch.testing.assert_close(logits, guild.router_logits(x, weight) + bias.float())
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert bias.grad.dtype == dtype and torch.equal(bias.grad, torch.full_like(bias, 6))


def test_compiled(device: str) -> None:
    """One graph, with eager mode's bits."""
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
        "x: expected dtype bfloat16 like weight, got float16",
    ),
    "integers": (
        lambda x, w: guild.router_logits(x.int(), w.int()),
        TypeError,
        "x: expected dtype bfloat16, float16, float32 or float64, got int32",
    ),
    "another width": (
        lambda x, w: guild.router_logits(x[:, 1:], w),
        ValueError,
        r"x: expected shape \(..., 16\) \(hidden\) to match weight, got \(6, 15\)",
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
    "too many experts": (
        lambda x, w: guild.router_logits(x, w.new_zeros(5000, 16)),
        ValueError,
        "weight: expected 1 to 4096 experts, got 5000",
    ),
    "another device": (
        lambda x, w: guild.router_logits(x, w.to("meta")),
        ValueError,
        "weight: expected a tensor on .* like x, got one on meta",
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
    """A sum over no inputs is zero in every dtype."""
    x, weight = (torch.zeros(*s, 0, dtype=dtype, requires_grad=True) for s in ((2, 3), (4,)))
    logits = guild.router_logits(x, weight)
    assert logits.shape == (2, 3, 4) and not logits.any()
    logits.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


@pytest.mark.parametrize("logits", ["random", "alike", "same", "nan"])
def test_few_tokens_are_routed_as_their_logits_are(logits: str, device: str) -> None:
    """With every kind of router, ties and NaN, where few tokens have kernels of their own."""
    torch.manual_seed(6)
    place = {"device": device, "dtype": torch.bfloat16}
    routers = itertools.product((257, 320, 512), SCORES, (False, True), (1, 4), (False, True))
    for experts, score, renormalize, groups, biased in routers:
        if experts % groups:
            continue
        x, weight = torch.randn(5, 576, **place), torch.randn(experts, 576, **place) / 24
        if logits == "alike":
            x, weight = x.sign() * (x.abs() > 2), weight.sign() * (weight.abs() > 0.1)
        elif logits == "same":
            weight[:] = weight[0]
        elif logits == "nan":
            weight[experts // 3], x[2] = float("nan"), float("nan")
        bias = torch.randn(experts, device=device) / 20 if biased else None
        mask = torch.tensor([True, True, False, True, True], device=device)
        top_groups = max(1, groups // 2)
        router = guild.Router(
            score, renormalize, 2.5, biased, groups, top_groups, group_score="max"
        )
        scalars = router_scalars(10, router)
        plus = torch.randn(experts, **place) if groups == 1 else None
        found = ops.route_tokens(x, weight, plus, bias, mask, *scalars)
        wanted = ops.route(ops.router_logits(x, weight, plus), bias, mask, *scalars)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0)), (experts, router)
