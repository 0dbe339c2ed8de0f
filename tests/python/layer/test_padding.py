"""token_mask of guild.MoE: padding may hold anything, goes to no expert and is not counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import guild

_MASK = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]).bool()

LAYERS: dict[str, dict[str, Any]] = {
    "renormalised": {},
    "dense softmax": {"router": "softmax"},
    "sigmoid": {"router": "sigmoid"},
    "groups": {"router": guild.Router("sigmoid", selection_bias=True, groups=2)},
    "input": {"router": "llama4"},
    "rounding": {"router": guild.Router(rounding="nearest", tile=4)},
    "rounding of sigmoids": {"router": guild.Router("sigmoid", rounding="up", tile=4)},
    "balancing": {"balance_over": "batch"},
    "balancing sequences": {"balance_over": "sequence", "router": "sigmoid"},
    "rounding, balanced": {
        "router": guild.Router(renormalize=False, rounding="down", tile=2),
        "balance_over": "batch",
    },
    "router bias": {"router_bias": True, "activation": "gpt_oss", "order": "interleaved"},
    "gated": {"shared_gate": True, "router": "softmax"},
    "recompute": {"recompute": True},
    "weight gradients": {"weight_gradients": guild.WeightGradients()},
}


def layer_of(name: str, device: str) -> guild.MoE:
    """A layer with shared experts and biases."""
    torch.manual_seed(0)
    top_k = 1 if name == "input" else 2
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = 16, 8, 4, top_k
    return guild.MoE(
        *sizes, bias=True, shared_experts=1, device=device, dtype=dtype, **LAYERS[name]
    )


def step(moe: guild.MoE, x: Tensor, mask: Tensor, dout: Tensor) -> dict[str, Tensor | None]:
    """Output and gradients of one step, the losses of balancing in it."""
    moe.zero_grad()
    x = x.detach().requires_grad_()
    out = moe(x, mask)
    loss = (out * dout).sum()
    if moe.balance_over is not None:
        loss = loss + moe.load_balancing_loss + moe.z_loss
    loss.backward()
    gradients = {name: value.grad.clone() for name, value in moe.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **gradients}


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("held", [torch.nan, torch.inf, -torch.inf, 1e38], ids=str)
def test_padding_may_hold_anything(name: str, held: float, device: str) -> None:
    """The same bits as with zeros there, in the output and in every gradient."""
    moe = layer_of(name, device)
    mask = _MASK.to(device)
    x = torch.randn(3, 7, 16, device=device).to(moe.w_up.dtype)
    dout = torch.randn_like(x)
    expected = step(moe, x.masked_fill(~mask[..., None], 0), mask, dout)
    counts = moe.expert_counts
    got = step(moe, x.masked_fill(~mask[..., None], held), mask, dout)
    for key, value in got.items():
        assert torch.equal(value, expected[key]) and value.isfinite().all(), key
        assert value.any(), key
    assert not got["out"][~mask].any() and not got["x"][~mask].any()
    assert torch.equal(moe.expert_counts, counts)


@pytest.mark.parametrize("name", list(LAYERS))
def test_gradient_at_padding_does_not_count(name: str, device: str) -> None:
    """What comes back to padding, as out of an attention that masks it, goes nowhere."""
    moe = layer_of(name, device)
    mask = _MASK.to(device)
    x = torch.randn(3, 7, 16, device=device).to(moe.w_up.dtype)
    dout = torch.randn_like(x).masked_fill(~mask[..., None], 0)
    expected = step(moe, x, mask, dout)
    got = step(moe, x, mask, dout.masked_fill(~mask[..., None], torch.nan))
    for key, value in got.items():
        assert torch.equal(value, expected[key]) and value.isfinite().all(), key


@pytest.mark.parametrize("name", [n for n in LAYERS if "rounding" not in n])
def test_padding_is_as_if_it_were_not_there(name: str, device: str) -> None:
    """The other tokens alone: their output, and all gradients."""
    moe = layer_of(name, device)
    mask = _MASK.to(device)
    if name == "balancing sequences":  # equally many tokens of each
        mask = (torch.arange(7, device=device) % 3 != 1).expand(3, 7)
    x = torch.randn(3, 7, 16, device=device).to(moe.w_up.dtype)
    dout = torch.randn_like(x)
    got = step(moe, x, mask, dout)
    counts, sums = moe.expert_counts, moe.balance_sums
    shape = (3, -1, 16)[0 if name == "balancing sequences" else 1 :]
    alone = [t[mask].view(shape) for t in (x, dout)]
    everything = torch.ones(alone[0].shape[:-1], dtype=torch.bool, device=device)
    expected = step(moe, alone[0], everything, alone[1])
    assert torch.equal(moe.expert_counts, counts)
    if sums is not None:
        for value, truth in zip(sums, moe.balance_sums, strict=True):
            torch.testing.assert_close(value, truth)
    close = {"rtol": 2e-2, "atol": 2e-2} if device == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    for key in ("out", "x"):
        got[key] = got[key][mask].view_as(expected[key])
    for key, value in got.items():
        torch.testing.assert_close(value, expected[key], **close, msg=key)


@pytest.mark.parametrize("over", [None, "batch"])
def test_rounding_leaves_padding_out(over: str | None, device: str) -> None:
    """No list holds a padded token: whole tiles of the others, and zero at padding."""
    torch.manual_seed(0)
    router = guild.Router(rounding="up", tile=4)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    moe = guild.MoE(16, 8, 4, 2, router=router, balance_over=over, device=device, dtype=dtype)
    mask = _MASK.to(device)
    x = torch.randn(3, 7, 16, device=device, dtype=dtype)
    out, routing = moe(x, mask, return_routing=True)
    lengths = routing.token_offsets.diff().view(3, 7)
    assert not lengths[~mask].any() and (lengths[mask] > 0).all()
    assert not out[~mask].any()
    assert (moe.expert_counts % 4 == 0).all() or (moe.expert_counts == mask.sum()).any()
    assert int(moe.expert_counts.sum()) == int(lengths.sum())


def test_balancing_counts_no_padding(device: str) -> None:
    """Choices, tokens and shares of the tokens alone."""
    moe = layer_of("balancing", device)
    x = torch.randn(3, 7, 16, device=device).to(moe.w_up.dtype)
    moe(x, _MASK.to(device))
    tokens = int(_MASK.sum())
    assert int(moe.balance_sums.counts.sum()) == 2 * tokens
    assert moe.balance_sums.tokens.tolist() == [tokens]
    assert moe.balance_sums.shares.sum().item() == pytest.approx(tokens, rel=1e-4)


def test_mask_under_compile(device: str) -> None:
    """NaN in the padding, one graph."""
    torch._dynamo.reset()
    moe = layer_of("renormalised", device)
    mask = _MASK.to(device)
    x = torch.randn(3, 7, 16, device=device).to(moe.w_up.dtype)
    x[~mask] = torch.nan
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    out = compiled(x, mask)
    assert torch.equal(out, moe(x, mask)) and out.isfinite().all()
    out.sum().backward()
    assert moe.router.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "mask, kind, message",
    [
        (torch.ones(3, 7), TypeError, "expected dtype bool, got float32"),
        (torch.ones(3, 7).int(), TypeError, "expected dtype bool, got int32"),
        (torch.ones(21).bool(), ValueError, r"expected shape \(3, 7\), got \(21,\)"),
        (torch.ones(3, 7, device="meta").bool(), ValueError, "expected a tensor on cpu"),
    ],
    ids=["floats", "ints", "flat", "another device"],
)
def test_wrong_mask(mask: Tensor, kind: type[Exception], message: str) -> None:
    """An error that names it."""
    with pytest.raises(kind, match=f"^token_mask: {message}"):
        guild.MoE(16, 8, 4, 2)(torch.randn(3, 7, 16), mask)
