"""layer.router: called as a module where it is more than a weight; its selection bias."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import guild
from guild.logits import RouterLinear
from layers import moved

_BIASED = guild.Router("sigmoid", selection_bias=True)


def layer_of(router: guild.Router | None = None, **more: object) -> guild.MoE:
    """A layer of 6 experts, 16 wide."""
    torch.manual_seed(0)
    moe = guild.MoE(16, 8, 6, 2, router=router, shared_experts=1, **more)
    if moe.routing.selection_bias:
        moe.router.selection_bias.normal_(std=0.1)
    return moe


def by_hand(moe: guild.MoE, x: Tensor, logits: Tensor, bias: Tensor | None) -> Tensor:
    """The layer's result from these logits and this selection bias."""
    r = moe.routing
    given = {"score": r.score, "renormalize": r.renormalize, "scale": r.scale}
    ids, scores = guild.route(logits, moe.top_k, selection_bias=bias, **given)
    return guild.routed_experts(x, ids, scores, moe.w_up, moe.w_down, residual=moe.shared(x))


class Wrapped(nn.Module):
    """Stands in for PEFT's wrapper of a linear layer: the layer plus a low-rank product."""

    def __init__(self, inner: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = inner
        self.lora_a = nn.Linear(inner.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, inner.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


class Doubled(nn.Module):
    """A parametrisation that doubles a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def assign_bias(moe: guild.MoE, x: Tensor) -> Tensor:
    moe.router.bias = nn.Parameter(torch.randn(6))
    return x @ moe.router.weight.t() + moe.router.bias


def wrap(moe: guild.MoE, x: Tensor) -> Tensor:
    moe.router = Wrapped(moe.router)
    return x @ moe.router.weight.t() + moe.router.lora_b(moe.router.lora_a(x))


def double_weight(moe: guild.MoE, x: Tensor) -> Tensor:
    original = moe.router.weight
    parametrize.register_parametrization(moe.router, "weight", Doubled())
    return x @ (2 * original).t()


def prune_weight(moe: guild.MoE, x: Tensor) -> Tensor:
    prune.l1_unstructured(moe.router, "weight", amount=0.5)
    return x @ (moe.router.weight_orig * moe.router.weight_mask).t()


def hook_output(moe: guild.MoE, x: Tensor) -> Tensor:
    moe.router.register_forward_hook(lambda module, args, out: 3 * out)
    return 3 * (x @ moe.router.weight.t())


def hook_input(moe: guild.MoE, x: Tensor) -> Tensor:
    moe.router.register_forward_pre_hook(lambda module, args: (-args[0],))
    return -x @ moe.router.weight.t()


def replace_forward(moe: guild.MoE, x: Tensor) -> Tensor:
    plain = moe.router.forward
    moe.router.forward = lambda x: plain(x).tanh()  # as accelerate's hooks do
    return (x @ moe.router.weight.t()).tanh()


def replace_module(moe: guild.MoE, x: Tensor) -> Tensor:
    bias = getattr(moe.router, "selection_bias", None)
    moe.router = nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 6))
    if bias is not None:
        moe.router.register_buffer("selection_bias", bias)
    return moe.router(x)


class Tempered(RouterLinear):
    """A router class derived from the layer's own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 3


def derive_class(moe: guild.MoE, x: Tensor) -> Tensor:
    moe.router.__class__ = Tempered
    return x @ moe.router.weight.t() / 3


CHANGES: dict[str, Callable[[guild.MoE, Tensor], Tensor]] = {
    "bias": assign_bias,
    "parametrised": double_weight,
    "pruned": prune_weight,
    "forward hook": hook_output,
    "forward pre-hook": hook_input,
    "another forward": replace_forward,
    "another module": replace_module,
    "another class": derive_class,
    "LoRA": wrap,
}


@pytest.mark.parametrize("router", [None, _BIASED], ids=["softmax", "selection_bias"])
@pytest.mark.parametrize("name", list(CHANGES))
def test_change_is_honoured(name: str, router: guild.Router | None) -> None:
    """Whatever is changed about the router affects the output and gets its gradients."""
    moe = layer_of(router)
    x = torch.randn(9, 16, requires_grad=True)
    before = moe(x)
    bias = getattr(moe.router, "selection_bias", None)
    logits = CHANGES[name](moe, x)
    out, expected = moe(x), by_hand(moe, x, logits, bias)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, before)
    wanted = (x, *moe.parameters())
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, wanted, dout)
    for value, truth in zip(got, torch.autograd.grad(expected, wanted, dout), strict=True):
        torch.testing.assert_close(value, truth)
        assert truth.any()


@pytest.mark.parametrize("name", ["bias", "parametrised", "forward hook", "LoRA"])
def test_change_is_compiled(name: str) -> None:
    """One graph that contains the change."""
    torch._dynamo.reset()
    moe = layer_of(_BIASED)
    x = torch.randn(9, 16)
    CHANGES[name](moe, x)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), moe(x))


def test_backward_hooks() -> None:
    """They see the gradient of the logits, and may change it."""
    moe = layer_of()
    x = torch.randn(9, 16, requires_grad=True)
    moe(x).square().sum().backward()
    expected = moe.router.weight.grad.clone()
    moe.router.weight.grad = None
    seen = []
    moe.router.register_full_backward_hook(lambda module, dx, dout: seen.append(dout[0]))
    moe(x).square().sum().backward()
    assert len(seen) == 1 and seen[0].shape == (9, 6)
    torch.testing.assert_close(moe.router.weight.grad, expected)


def test_backward_pre_hooks() -> None:
    """They may change the gradient of the logits."""
    moe = layer_of()
    x = torch.randn(9, 16, requires_grad=True)
    moe(x).square().sum().backward()
    expected = 2 * moe.router.weight.grad
    moe.router.weight.grad = None
    moe.router.register_full_backward_pre_hook(lambda module, dout: (2 * dout[0],))
    moe(x).square().sum().backward()
    torch.testing.assert_close(moe.router.weight.grad, expected)


def test_hooks_of_all_modules() -> None:
    """torch's global hooks see the router, as they see every other module."""
    moe, seen = layer_of(), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(module)
    )
    moe(torch.randn(3, 16))
    handle.remove()
    assert moe.router in seen and moe in seen


def test_removed_hook() -> None:
    """The single op runs again, with the same bits as before."""
    moe = layer_of()
    x = torch.randn(9, 16)
    before = moe(x)
    hook_output(moe, x).detach()
    (key,) = moe.router._forward_hooks
    del moe.router._forward_hooks[key]
    assert moe.router.is_plain() and torch.equal(moe(x), before)


def test_it_is_a_linear_layer() -> None:
    """LoRA, quantisation and initialisation look for linear layers; logits stay float32."""
    moe = layer_of(dtype=torch.bfloat16, router_bias=True)
    assert isinstance(moe.router, nn.Linear)
    x = torch.randn(2, 3, 16).bfloat16()
    logits = moe.router(x)
    assert logits.shape == (2, 3, 6) and logits.dtype == torch.float32
    assert torch.equal(logits, guild.router_logits(x, moe.router.weight, moe.router.bias))


class RouterTo(nn.Linear):
    """Returns logits in a dtype or on a device."""

    def __init__(self, kind: torch.dtype | str) -> None:
        super().__init__(16, 6)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach().to(self.kind)


@pytest.mark.parametrize(
    "router, message",
    [
        (RouterTo(torch.int64), "router: logits: expected a floating dtype, got int64"),
        (RouterTo("meta"), "router: logits: expected a tensor on cpu like x, got one on meta"),
        (nn.Linear(16, 5), r"router: logits: expected shape \(3, 6\), got \(3, 5\)"),
        (nn.LSTM(16, 6), "router: logits: expected a torch.Tensor, got tuple"),
    ],
    ids=["integers", "elsewhere", "five experts", "a tuple"],
)
def test_router_that_returns_no_logits(router: nn.Module, message: str) -> None:
    """An error, rather than experts that no logit chose."""
    moe = layer_of()
    moe.router = router
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        moe(torch.randn(3, 16))


def test_router_without_its_selection_bias() -> None:
    """A custom router must have the bias that the options require."""
    moe = layer_of(_BIASED)
    x = torch.randn(3, 16)
    moe(x)
    moe.router = nn.Linear(16, 6)
    message = "^router.selection_bias: expected a buffer .* got a Linear without one"
    for call in (lambda: moe(x), moe.balance):
        with pytest.raises(ValueError, match=message):
            call()


# ---- the selection bias stays float32 -----------------------------------------------------------


def to_empty_and_back(moe: guild.MoE) -> guild.MoE:
    state = copy.deepcopy(moe.state_dict())
    moe.to("meta", torch.bfloat16)
    assert moe.router.selection_bias.is_meta
    moe.to_empty(device="cpu").load_state_dict(state)
    return moe


def saved_and_loaded(moe: guild.MoE) -> guild.MoE:
    file = io.BytesIO()
    torch.save(moe.bfloat16(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def loaded_by_assignment(moe: guild.MoE) -> guild.MoE:
    other = layer_of(_BIASED, device="meta", dtype=torch.bfloat16)
    state = {k: v.bfloat16() for k, v in moe.state_dict().items()}
    other.load_state_dict(state, assign=True)
    moe.router.selection_bias.copy_(moe.router.selection_bias.bfloat16())
    return other


def converted_in_place(moe: guild.MoE) -> guild.MoE:
    bias = moe.router.selection_bias
    bias.data = bias.to(torch.bfloat16)  # as FSDP's MixedPrecision(buffer_dtype=...)
    moe(torch.randn(3, 16))
    moe.router.selection_bias.copy_(_drawn_bias())  # as from a checkpoint
    return moe


def _drawn_bias() -> Tensor:
    return layer_of(_BIASED).router.selection_bias


CONVERSIONS: dict[str, Callable[[guild.MoE], guild.MoE]] = {
    "to a dtype": lambda moe: moe.to(torch.bfloat16),
    "to a device and a dtype": lambda moe: moe.to("cpu", torch.float16),
    "to a tensor's": lambda moe: moe.to(torch.zeros(1, dtype=torch.bfloat16)),
    "half": lambda moe: moe.half(),
    "bfloat16": lambda moe: moe.bfloat16(),
    "double": lambda moe: moe.double(),
    "there and back": lambda moe: moe.bfloat16().float(),
    "type": lambda moe: moe.type(torch.bfloat16),
    "inside of a model": lambda moe: nn.Sequential(moe).to(torch.bfloat16)[0],
    "the router alone": lambda moe: (moe.router.bfloat16(), moe)[1],
    "meta": to_empty_and_back,
    "deepcopy": lambda moe: copy.deepcopy(moe.bfloat16()),
    "pickle": lambda moe: pickle.loads(pickle.dumps(moe)).bfloat16(),
    "torch.save": saved_and_loaded,
    "FSDP's buffers": converted_in_place,
    "autocast": lambda moe: (_under_autocast(moe), moe)[1],
    "loaded by assignment": loaded_by_assignment,
}


def _under_autocast(moe: guild.MoE) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moe(torch.randn(3, 16))


@pytest.mark.parametrize("name", list(CONVERSIONS))
def test_selection_bias_stays_float32(name: str) -> None:
    """Its dtype and bits are kept, and updates too small for bfloat16 take effect."""
    expected = _drawn_bias()
    moe = layer_of(_BIASED)
    converted = CONVERSIONS[name](moe)
    bias = converted.router.selection_bias
    if name == "loaded by assignment":  # the value in the checkpoint
        expected = moe.router.selection_bias
    assert bias.dtype == torch.float32 and torch.equal(bias, expected)
    assert "router.selection_bias" in converted.state_dict()
    converted.router.selection_bias.fill_(3.0)  # bfloat16's step is 1.6e-2 there
    x = torch.randn(9, 16, dtype=converted.w_up.dtype)
    converted.to(x.dtype)(x)  # "the router alone" has another dtype than the rest
    load = converted.expert_counts
    for _ in range(5):
        converted.balance(1e-3)
    moved = 5e-3 * (load.double().mean() - load).sign()
    torch.testing.assert_close(
        converted.router.selection_bias.double() - 3, moved, atol=1e-6, rtol=0
    )
    assert moved.any()


def test_conversion_moves_the_rest() -> None:
    """Only the selection bias is exempt; nn.Module's conversions apply to everything else."""
    moe = layer_of(_BIASED, router_bias=True, bias=True).bfloat16()
    others = {k: v.dtype for k, v in moe.state_dict().items() if k != "router.selection_bias"}
    assert set(others.values()) == {torch.bfloat16} and len(others) == 8
    assert isinstance(moe.router, RouterLinear)
    assert list(dict(moe.named_buffers())) == ["router.selection_bias"]


def test_an_attribute_that_is_no_bias() -> None:
    """A user's module may have a flag of the same name as our tensor."""

    class Own(nn.Linear):
        selection_bias = True

    moe = layer_of(_BIASED)
    x = torch.randn(5, 16)
    moe.router = Own(16, 6, bias=False)
    with pytest.raises(
        ValueError, match=r"^router\.selection_bias: expected a buffer \(experts,\)"
    ):
        moe(x)
    plain = layer_of()
    plain.router = Own(16, 6, bias=False)
    plain(x)


def test_weight_anywhere(device: str) -> None:
    """A router's weight that is part of something larger gives the same bits."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    moe = layer_of(device=device, dtype=dtype)
    x = torch.randn(20, 16, device=device, dtype=dtype, requires_grad=True)
    given = moe.router.weight.detach()
    wide = torch.cat((given, given[:, :3]), 1)[:, :16]
    found = []
    for weight in (given, moved(given, 1), wide):
        moe.router.weight = nn.Parameter(weight)
        out = moe(x)
        leaves = x, *moe.parameters()
        found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)
