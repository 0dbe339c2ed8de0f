"""guild.MoE: state dict, meta device, autocast, balancing, and the same layer in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import guild
from guild.bench.memory import saved_bytes, saved_tensors
from oracle.layer import of_module

ROUTERS = {
    "default": guild.Router(),
    "plain_softmax": guild.Router(renormalize=False),
    "deepseek": guild.Router("sigmoid", scale=2.5, selection_bias=True, groups=3, top_groups=2),
    "llama4": guild.Router.named("llama4"),
}


@pytest.mark.parametrize("router", list(ROUTERS))
@pytest.mark.parametrize("activation", ["silu", "gpt_oss", "relu2_ungated"])
@pytest.mark.parametrize("shared", [0, 2])
def test_against_plain_pytorch(router: str, activation: str, shared: int) -> None:
    """Output and every gradient in float64, for biases and shared experts too."""
    torch.manual_seed(0)
    top_k = 1 if router == "llama4" else 2
    moe = guild.MoE(
        24,
        16,
        6,
        top_k,
        activation,
        bias=True,
        router=ROUTERS[router],
        shared_experts=shared,
        dtype=torch.float64,
    )
    with torch.no_grad():
        for name, value in moe.named_parameters():
            if name.startswith("b_"):
                value.normal_()
        if moe.routing.selection_bias:
            moe.router.selection_bias.normal_(std=0.3)
    x = torch.randn(5, 7, 24, dtype=torch.float64, requires_grad=True)
    inputs = (x, *moe.parameters())
    out, expected = moe(x), of_module(moe, x)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    got, truth = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout)
    for value, gradient in zip(got, truth, strict=True):
        torch.testing.assert_close(value, gradient, atol=1e-6, rtol=1e-6)
    ids = moe.expert_counts
    assert ids.dtype == torch.int32 and ids.shape == (6,) and int(ids.sum()) == 35 * top_k


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "llama4"])
def test_one_op_and_two(router: str) -> None:
    """Balancing routes outside the experts' op, with the same output and gradients."""
    torch.manual_seed(0)
    made = {"router": ROUTERS[router], "shared_experts": 1, "dtype": torch.float64}
    one = guild.MoE(24, 16, 6, 2, **made)
    two = guild.MoE(24, 16, 6, 2, balance_over="batch", **made)
    two.load_state_dict(one.state_dict())
    x = torch.randn(5, 7, 24, dtype=torch.float64, requires_grad=True)
    results = []
    for moe in (one, two):
        out = moe(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, *moe.parameters()))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("frozen", ["x", "router", "both", "experts", "all"])
@pytest.mark.parametrize("later", [None, guild.WeightGradients()])
def test_frozen(frozen: str, later: guild.WeightGradients | None) -> None:
    """Frozen parts get no gradient; the others get the same as without freezing."""
    torch.manual_seed(0)
    moe = guild.MoE(24, 16, 6, 2, shared_experts=1, dtype=torch.float64)
    x = torch.randn(9, 24, dtype=torch.float64)
    experts, router = [moe.w_up, moe.w_down], [moe.router.weight]
    everything = [x, *moe.parameters()]
    x.requires_grad_()
    moe(x).square().sum().backward()
    truth = [t.grad.clone() for t in everything]
    for t in everything:
        t.grad = None
    groups = {"x": [x], "router": router, "both": [x, *router], "experts": experts}
    still = groups.get(frozen, [x, *router, *experts])
    for t in still:
        t.requires_grad_(False)
    moe.weight_gradients = later
    moe(x).square().sum().backward()
    for t, expected in zip(everything, truth, strict=True):
        if any(t is s for s in still):
            assert t.grad is None
        else:
            torch.testing.assert_close(t.grad, expected)
    assert moe.shared.w_up.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sixteen_bits(dtype: torch.dtype, device: str) -> None:
    """Output near float64's wherever the choice of experts is not a matter of rounding."""
    torch.manual_seed(0)
    moe = guild.MoE(64, 48, 8, 2, shared_experts=1, device=device, dtype=dtype)
    x = torch.randn(40, 64, device=device, dtype=dtype, requires_grad=True)
    out = moe(x)
    assert out.dtype == dtype
    error = errors(moe, x, out)
    assert error.pop("out") < 0.01
    assert max(error.values()) < 0.02, error
    for name, value in moe.named_parameters():
        assert value.grad.dtype == dtype, name


def errors(moe: guild.MoE, x: torch.Tensor, out: torch.Tensor) -> dict[str, float]:
    """Relative errors of a layer's output and of all gradients, against float64."""
    exact, leaf = copy.deepcopy(moe).cpu().double(), x.detach().cpu().double().requires_grad_()
    expected = of_module(exact, leaf)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(dout.to(out))
    expected.backward(dout.to(out.dtype).double())
    pairs = {"out": (out, expected), "x": (x.grad, leaf.grad)}
    for name, value in exact.named_parameters():
        pairs[name] = moe.get_parameter(name).grad, value.grad
    return {
        name: ((value.cpu().double() - truth).norm() / truth.norm()).item()
        for name, (value, truth) in pairs.items()
    }


def test_autocast(device: str) -> None:
    """float32 parameters under autocast: bfloat16 out, float32 gradients."""
    torch.manual_seed(0)
    moe = guild.MoE(64, 48, 8, 2, bias=True, shared_experts=1, device=device)
    x = torch.randn(40, 64, device=device).bfloat16().float().requires_grad_()
    with torch.no_grad():
        for value in moe.parameters():  # casts are exact, and so all choose the same experts
            value.copy_(value.bfloat16())
    with torch.autocast(device, dtype=torch.bfloat16):
        out = moe(x)
    assert out.dtype == torch.bfloat16
    error = errors(moe, x, out)
    assert error.pop("out") < 0.01
    assert max(error.values()) < 0.02, error
    for value in (x, *moe.parameters()):
        assert value.grad.dtype == torch.float32


@pytest.mark.parametrize("name", [n for n in guild.routing.ROUTERS if n != "llama4"])
def test_saved_for_backward(name: str, device: str) -> None:
    """x, h and 24 bytes a slot, whatever the router: never its logits."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    moe = guild.MoE(16, 8, 128, 2, router=name, device=device, dtype=dtype)
    x = torch.randn(50, 16, device=device, dtype=dtype)
    kept = saved_bytes(saved_tensors(lambda: moe(x), moe.parameters()))
    slots = 50 * 2
    of_experts = (50 * 16 + slots * 2 * 8) * dtype.itemsize
    assert kept <= of_experts + 24 * slots + 4 * (moe.experts + 1)


def test_state_dict_is_stable() -> None:
    """Names and shapes that checkpoints rely on."""
    moe = guild.MoE(
        16, 8, 4, 2, bias=True, shared_experts=2, router=guild.Router(selection_bias=True)
    )
    shapes = {name: tuple(value.shape) for name, value in moe.state_dict().items()}
    assert shapes == {
        "router.weight": (4, 16),
        "router.selection_bias": (4,),
        "w_up": (4, 16, 16),
        "w_down": (4, 16, 8),
        "b_up": (4, 16),
        "b_down": (4, 16),
        "shared.w_up": (32, 16),
        "shared.w_down": (16, 16),
    }
    assert list(guild.MoE(16, 8, 4, 2).state_dict()) == ["w_up", "w_down", "router.weight"]
    other = guild.MoE(
        16, 8, 4, 2, bias=True, shared_experts=2, router=guild.Router(selection_bias=True)
    )
    other.load_state_dict(moe.state_dict())
    x = torch.randn(6, 16)
    assert torch.equal(moe(x), other(x))


def test_meta_device(device: str) -> None:
    """Made without memory, then given memory and values."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    router = guild.Router(selection_bias=True)
    moe = guild.MoE(
        32, 16, 4, 2, bias=True, shared_experts=1, router=router, device="meta", dtype=dtype
    )
    assert all(t.is_meta for t in moe.state_dict().values())
    moe.to_empty(device=device)
    moe.reset_parameters()
    values = moe.state_dict()
    assert all(v.isfinite().all() for v in values.values())
    assert not values["b_up"].any() and not values["router.selection_bias"].any()
    for name, inputs in (("w_up", 32), ("w_down", 16), ("shared.w_down", 16)):
        assert abs(values[name].float().std().item() * inputs**0.5 - 1) < 0.2, name
    x = torch.randn(6, 32, device=device, dtype=dtype)
    assert moe(x).isfinite().all()


def test_balance_evens_the_load() -> None:
    """The selection bias takes rows from the crowded experts without touching the weights."""
    torch.manual_seed(0)
    router = guild.Router(score="sigmoid", selection_bias=True)
    moe = guild.MoE(16, 8, 8, 2, router=router)
    with torch.no_grad():
        moe.router.weight[0] += 0.5
        x = torch.randn(256, 16) + 0.5
        moe(x)
        crowded = moe.expert_counts.max().item()
        for _ in range(200):
            moe(x)
            moe.balance(rate=5e-3)
        moe(x)
    assert crowded > 150
    assert moe.expert_counts.max().item() < 100  # 64 each would be even


@pytest.mark.parametrize("grad", [True, False])
def test_changed_after_construction(grad: bool) -> None:
    """top_k and routing are compared with the sizes at every call."""
    x = torch.randn(2, 2)
    with torch.set_grad_enabled(grad):
        moe = guild.MoE(2, 5, 4, 1, router="llama4")
        moe.top_k = 2  # as many as hidden
        with pytest.raises(ValueError, match=r"^top_k: expected 1 where .* the input, got 2"):
            moe(x)
        moe = guild.MoE(2, 5, 4, 2)
        moe.top_k = 9
        with pytest.raises(ValueError, match=r"^top_k: expected .*4.*, got 9"):
            moe(x)
        moe.top_k, moe.routing = 2, guild.Router(groups=3)
        with pytest.raises(ValueError, match=r"^groups: expected a divisor of 4 .*, got 3"):
            moe(x)


def test_nothing_to_balance() -> None:
    """Errors that say what is missing."""
    with pytest.raises(RuntimeError, match=r"^router: expected Router\(selection_bias=True\), got"):
        guild.MoE(16, 8, 4, 2).balance()
    with pytest.raises(RuntimeError, match=r"^balance: expected a forward pass first, got none"):
        guild.MoE(16, 8, 4, 2, router="sigmoid").balance()


def test_counts_before_and_after() -> None:
    """None before the first forward, then this forward's."""
    moe = guild.MoE(16, 8, 4, 2)
    assert moe.expert_counts is None
    moe(torch.randn(3, 5, 16))
    assert int(moe.expert_counts.sum()) == 30
    moe(torch.randn(2, 16))
    assert int(moe.expert_counts.sum()) == 4


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
def test_losses_that_are_not_there() -> None:
    """AttributeError, which hasattr and all that walks through attributes expects; it says why."""
    reasons = {None: "balance_over: expected MoE", "batch": "balance_sums: expected a forward pass"}
    for over, reason in reasons.items():
        moe = guild.MoE(16, 8, 4, 2, balance_over=over)
        for name in ("load_balancing_loss", "z_loss"):
            assert not hasattr(moe, name) and getattr(moe, name, None) is None
            with pytest.raises(AttributeError, match=f"^{reason}.*, got"):
                getattr(moe, name)
        assert ("top_k", 2) in inspect.getmembers(moe)
        x = torch.randn(3, 16)
        traced = torch.jit.trace(moe, x, check_trace=False)
        torch.testing.assert_close(traced(x), moe(x))
        with pytest.raises(AttributeError, match="has no attribute 'loss'"):
            _ = moe.loss
    assert hasattr(moe, "z_loss") and moe.z_loss > 0  # after the forward


@pytest.mark.parametrize("over", [None, "batch"])
def test_inside_of_function_transforms(over: str | None) -> None:
    """Nothing of torch.func's own tensors is kept; the next plain forward counts again."""
    moe = guild.MoE(16, 8, 4, 2, balance_over=over, router="sigmoid")
    x = torch.randn(3, 5, 16)
    moe(x)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return moe(x).square().sum()

    for transform in (torch.func.grad, torch.func.vjp, torch.func.vmap):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not every op has a rule
            transform(loss)(x) if transform is not torch.func.vjp else torch.func.vjp(loss, x)
        counts, sums = moe.expert_counts, moe.balance_sums
        assert counts is None or sum(counts.tolist()) in (10, 30)
        assert sums is None or int(sums.counts.sum()) in (10, 30)
        copy.deepcopy(moe)
    moe(x)
    assert int(moe.expert_counts.sum()) == 30
    moe.balance()


def test_copies_and_prints() -> None:
    """deepcopy after a forward, and a repr with the sizes."""
    moe = guild.MoE(16, 8, 4, 2, "gpt_oss")
    x = torch.randn(3, 16)
    out = moe(x)
    assert torch.equal(copy.deepcopy(moe)(x), out)
    assert "experts=4, top_k=2" in repr(moe) and "alpha=1.702" in repr(moe)
    assert "order" not in repr(moe) and "routing" not in repr(moe)
    other = guild.MoE(16, 8, 8, 2, router="sigmoid", order="interleaved", fp8=guild.FP8())
    for text in ("routing=Router(score='sigmoid'", "order=interleaved", "fp8=FP8(wgrad"):
        assert text in repr(other)
    shared = guild.MoE(16, 8, 4, 2, shared_experts=3).shared
    shared.w_down = torch.nn.Parameter(torch.empty(0))  # as sharded by FullyShardedDataParallel
    assert "hidden=16, intermediate=24" in repr(shared)


def test_checkpointed_activations(device: str) -> None:
    """torch.utils.checkpoint around the module: the same gradients."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    moe = guild.MoE(32, 16, 4, 2, device=device, dtype=dtype)
    x = torch.randn(9, 32, device=device, dtype=dtype, requires_grad=True)
    (plain_dx,) = torch.autograd.grad(moe(x).sum(), x)
    (dx,) = torch.autograd.grad(checkpoint(moe, x, use_reentrant=False).sum(), x)
    assert torch.equal(dx, plain_dx)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_rows_of_any_strides_go_through_shared_experts(gate: bool, context: Any) -> None:
    """Columns that are not contiguous, one row for all tokens."""
    torch.manual_seed(0)
    layer = guild.MoE(16, 8, 4, 2, shared_experts=1, shared_gate=gate)
    for x in (torch.randn(16, 5).t(), torch.randn(1, 16).expand(5, 16)):
        with context():
            got, expected = layer(x), layer(x.contiguous())
            assert torch.equal(got, expected)
            assert torch.equal(layer.shared(x), layer.shared(x.contiguous()))


def test_a_pickle_for_another_process() -> None:
    """A process that is started with the layer finds its tensors in memory that lives on here."""
    moe = guild.MoE(16, 8, 4, 2)
    moe(torch.randn(3, 16))
    state = moe.__getstate__()
    memory = [StorageWeakRef(t.untyped_storage()) for t in state.values() if torch.is_tensor(t)]
    del state
    assert memory and not any(one.expired() for one in memory)


def test_activation_from_its_fields() -> None:
    activation = guild.Activation.named("gpt_oss")
    again = guild.Activation(**dataclasses.asdict(activation))
    assert again == activation and again.scalars == activation.scalars
    assert dataclasses.replace(activation, alpha=2.0).scalars != activation.scalars


def test_no_limit_is_finite_for_ops_and_clamps_nothing() -> None:
    """A package of AOTInductor cannot hold infinity."""
    json.dumps(guild.Activation("relu").scalars, allow_nan=False)
    x = torch.tensor([[1e30, 1.0]], dtype=torch.float64, requires_grad=True)
    w_up = torch.tensor([[[1e10, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    w_down, one = torch.ones(1, 2, 1, dtype=torch.float64), torch.ones(1, 1)
    out = guild.routed_experts(x, one.int() - 1, one, w_up, w_down, activation="relu")
    assert out.tolist() == [[1e40, 1e40]]  # more than any float32
    out.sum().backward()
    assert x.grad.tolist() == [[2e10, 2e40]]
