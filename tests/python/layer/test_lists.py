"""Tokens with lists of any length: the same layer as with ids padded to one length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import guild
from guild._torch.gradients import ops
from layers import ACTIVATIONS, Case, Layer, make_layer

NAMES = ("x", "scores", "w_up", "w_down", "b_up", "b_down")


def lists_of(ids: Tensor, scores: Tensor, spare: int) -> tuple[Tensor, Tensor, Tensor]:
    """The valid ids of (T, K) as lists, their scores and offsets; spare slots are valid too."""
    valid = (ids >= 0) & (ids < 5)
    ends = valid.sum(1).cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends)).int()
    of_nobody = ids.new_full((spare,), 2)
    list_ids = torch.cat((ids[valid], of_nobody)).int()
    return list_ids, torch.cat((scores[valid], scores.new_ones(spare))), offsets


def run(layer: Layer, ids: Tensor, scores: Tensor, offsets: Tensor | None) -> dict[str, Tensor]:
    """Output and gradients of the layer with these ids."""
    a = layer.arguments("concatenated")
    tensors = (layer.x, scores, a["w_up"], a["w_down"], a["b_up"], a["b_down"])
    x, scores, *weights = (t.detach().clone().requires_grad_() for t in tensors)
    out = guild.routed_experts(
        x, ids, scores, *weights, activation="gpt_oss", token_offsets=offsets
    )
    gradients = torch.autograd.grad(out, (x, scores, *weights), layer.dout)
    return {"out": out.detach(), **dict(zip(NAMES, gradients, strict=True))}


@pytest.mark.parametrize("spare", [0, 7])
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_layer(tokens: int, spare: int, device: str) -> None:
    """The results agree bit for bit: sums are over the same rows in the same order."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = Case("lists", tokens, 32, 16, 5, 4, "sentinel", frozenset())
    layer = make_layer(case, ACTIVATIONS["gpt_oss"], dtype, device)
    expected = run(layer, layer.ids, layer.scores, None)
    ids, scores, offsets = lists_of(layer.ids, layer.scores, spare)
    got = run(layer, ids, scores, offsets)
    valid = (layer.ids >= 0) & (layer.ids < 5)
    assert not got["scores"][offsets[-1] :].any()
    got["scores"] = got["scores"][: offsets[-1]]
    expected["scores"] = expected["scores"][valid]
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_sort(device: str) -> None:
    """Rows name the lists' tokens; slots that belong to no token get no row."""
    ids = torch.tensor([2, 0, 2, 9, 1, 2, 0], dtype=torch.int32, device=device)
    scores = torch.arange(7.0, device=device)
    lists = torch.tensor([0, 0, 3, 3, 5], dtype=torch.int32, device=device)
    offsets, row_token, slot_row, row_score = ops.sort_by_expert(ids, scores, 3, lists)
    assert offsets.tolist() == [0, 1, 2, 4]
    assert row_token.tolist() == [1, 3, 1, 1, 0, 0, 0]
    assert slot_row.tolist() == [2, 0, 3, -1, 1, -1, -1]
    assert row_score.tolist() == [1, 4, 0, 2, 0, 0, 0]


def test_no_slots(device: str) -> None:
    """Empty lists everywhere: zeros."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(3, 16, device=device).to(dtype).requires_grad_()
    up, down = (torch.randn(s, device=device).to(dtype) for s in ((2, 16, 16), (2, 16, 8)))
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    offsets = torch.zeros(4, dtype=torch.int32, device=device)
    out = guild.routed_experts(x, empty, empty.float(), up, down, token_offsets=offsets)
    out.sum().backward()
    assert out.shape == (3, 16) and not out.any() and not x.grad.any()


WRONG = {
    "topk_ids: expected 1 dimensions": {"topk_ids": torch.zeros(3, 2, dtype=torch.int32)},
    "token_offsets: expected dtype int32": {"token_offsets": torch.zeros(4, dtype=torch.int64)},
    r"token_offsets: expected shape \(4,\)": {"token_offsets": torch.zeros(3, dtype=torch.int32)},
    r"topk_weights: expected shape \(5,\)": {"topk_weights": torch.zeros(6)},
}


@pytest.mark.parametrize("message", list(WRONG))
def test_wrong_call(message: str, device: str) -> None:
    """An error that names the argument."""
    given = {
        "topk_ids": torch.zeros(5, dtype=torch.int32),
        "topk_weights": torch.zeros(5),
        "token_offsets": torch.zeros(4, dtype=torch.int32),
    } | WRONG[message]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, up, down = (
        torch.randn(s, device=device).to(dtype) for s in ((3, 16), (2, 16, 16), (2, 16, 8))
    )
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        guild.routed_experts(x, w_up=up, w_down=down, **{k: v.to(device) for k, v in given.items()})


@pytest.mark.parametrize("how", ["plain", "recompute", "main_grad", "both"])
@pytest.mark.parametrize("slots", [0, 40, 299, 900])
def test_slots_unlike_tokens(slots: int, how: str, device: str) -> None:
    """Fewer slots than tokens and more: the steps of backward know both numbers."""
    torch.manual_seed(slots)
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    tokens, experts = 300, 4
    owner = torch.randint(tokens, (slots,)).sort().values
    counts = torch.bincount(owner, minlength=tokens)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    made = [torch.randn(s).to(dtype) for s in ((tokens, 64), (experts, 64, 64), (experts, 64, 32))]
    made += [torch.randn(s).to(dtype) for s in ((experts, 64), (experts, 64))]
    ids, scores = torch.randint(experts, (slots,)).int(), torch.rand(slots)
    dout = torch.randn(tokens, 64).to(dtype)

    def gradients(where: str, exact: torch.dtype, options: dict) -> list[Tensor]:
        x, *weights = (t.detach().to(where, exact).requires_grad_() for t in made)
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape, device=where)
        weighing = scores.clone().to(where).requires_grad_()
        given = x, ids.to(where), weighing, *weights
        out = guild.routed_experts(*given, token_offsets=offsets.to(where), **options)
        out.backward(dout.to(where, exact))
        named = "weight_gradients" in options
        got = [w.main_grad if named else w.grad for w in weights]
        return [t.detach().cpu().double() for t in (out, x.grad, weighing.grad, *got)]

    options = {"recompute": how in ("recompute", "both")}
    if how in ("main_grad", "both"):
        options["weight_gradients"] = guild.WeightGradients(main_grad=True)
    truth = gradients("cpu", torch.float64, {})
    close = 1e-6 if device == "cpu" else 2e-2
    for got, expected in zip(gradients(device, dtype, options), truth, strict=True):
        assert (got - expected).norm() <= close * expected.norm()


@pytest.mark.parametrize("how", ["plain", "recompute", "main_grad"])
def test_slice_of_lists(how: str, device: str) -> None:
    """Lists that begin and end inside of longer ones: the slots around them belong to nobody."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    whole = torch.tensor([0, 3, 3, 7, 12, 14, 20], dtype=torch.int32, device=device)
    x, up, down = (
        torch.randn(s, device=device).to(dtype) for s in ((3, 32), (5, 32, 32), (5, 32, 16))
    )
    ids = torch.randint(-1, 6, (20,), device=device).int()
    scores = torch.rand(20, device=device)
    dout = torch.randn_like(x)

    def gradients(part: slice, offsets: Tensor) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, scores[part], up, down)]
        options: dict = {"recompute": how == "recompute"}
        if how == "main_grad":
            for weight in leaves[2:]:
                weight.main_grad = torch.zeros(weight.shape, device=device)
            options["weight_gradients"] = guild.WeightGradients(main_grad=True)
        given = leaves[0], ids[part], *leaves[1:]
        out = guild.routed_experts(*given, token_offsets=offsets, **options)
        out.backward(dout)
        weights = [w.main_grad if how == "main_grad" else w.grad for w in leaves[2:]]
        return [out.detach(), leaves[0].grad, leaves[1].grad, *weights]

    slots = slice(3, 14)
    expected = gradients(slots, whole[2:6] - 3)
    got = gradients(slice(None), whole[2:6].contiguous())
    assert not got[2][:3].any() and not got[2][14:].any()
    got[2] = got[2][slots]
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["plain", "recompute", "main_grad"])
def test_no_tokens_with_slots(how: str, device: str) -> None:
    """T = 0: slots of nobody, gradients of zero."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = [torch.randn(s, device=device).to(dtype) for s in ((0, 16), (2, 16, 16), (2, 16, 8))]
    x, up, down = (t.requires_grad_() for t in made)
    options: dict = {"recompute": how == "recompute"}
    for weight in (up, down):
        weight.main_grad = torch.full(weight.shape, 3.0, device=device)
    if how == "main_grad":
        options["weight_gradients"] = guild.WeightGradients(main_grad=True)
    ids = torch.tensor([0, 1, 0], dtype=torch.int32, device=device)
    scores = torch.ones(3, device=device, requires_grad=True)
    offsets = torch.zeros(1, dtype=torch.int32, device=device)
    out = guild.routed_experts(x, ids, scores, up, down, token_offsets=offsets, **options)
    out.sum().backward()
    assert out.shape == (0, 16) and not scores.grad.any()
    for weight in (up, down):
        assert how == "main_grad" or not weight.grad.any()
        assert (weight.main_grad == 3).all()
