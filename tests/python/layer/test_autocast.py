"""Autocast and float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import guild
from guild import grouped_mm_downproj, grouped_mm_swiglu


def test_autocast_leaves_float64_alone() -> None:
    """As under torch's own rules: every function gives the same bits as without autocast."""
    torch.manual_seed(0)

    def double(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    x, w_up, w_down = double(12, 8), double(3, 12, 8), double(3, 8, 6)
    ends = torch.tensor([4, 7, 12], dtype=torch.int32)
    ids = torch.arange(12)[:, None] % 3
    moe = guild.MoE(8, 6, 3, 2, bias=True, shared_experts=1, dtype=torch.float64)

    def results() -> list[Tensor]:
        a, aux = grouped_mm_swiglu(x, w_up.mT, ends, double(3, 12) * 0)
        return [
            guild.grouped_mm(x, w_up.mT, ends),
            grouped_mm_downproj(a, w_down.mT, ends, aux_biased_acc=aux),
            guild.experts_mlp(x, torch.nn.functional.pad(ends, (1, 0)), w_up, w_down),
            guild.routed_experts(x, ids, torch.ones(12, 1), w_up, w_down, residual=x),
            moe(x),
        ]

    expected = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, truth in zip(results(), expected, strict=True):
            assert got.dtype == torch.float64 and torch.equal(got, truth)


def test_autocast_does_not_make_numbers_of_integers() -> None:
    """Integer tensors are the same error as without autocast."""
    moe = guild.MoE(8, 6, 3, 2)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    rows, weights = torch.ones(3, 8, dtype=torch.int64), torch.ones(2, 8, 8, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match=r"^x: expected dtype bfloat16 under .* got int64"):
            moe(rows)
        with pytest.raises(TypeError, match=r"^mat_a: expected dtype bfloat16, .* got int64"):
            guild.grouped_mm(rows, weights, ends)


@pytest.mark.parametrize("grad", [False, True])
def test_dtypes_in_errors_are_the_callers(grad: bool) -> None:
    """Not those of tensors that autocast has made of them."""
    single, double = torch.ones(3, 8), torch.ones(3, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grad):
        with pytest.raises(TypeError, match=r"^x: expected dtype float64 like w_up, got float32$"):
            guild.MoE(8, 6, 3, 2, dtype=torch.float64)(single)
        wanted = r"^x: expected dtype bfloat16 under autocast, got float64$"
        with pytest.raises(TypeError, match=wanted):
            guild.MoE(8, 6, 3, 2)(double)
        ids, scores = guild.route(single[:, :3], 2)
        w_up, w_down = torch.ones(3, 12, 8), torch.ones(3, 8, 6)
        offs = torch.tensor([1, 2, 3], dtype=torch.int32)
        for call, name in (
            (lambda: guild.routed_experts(double, ids, scores, w_up, w_down), "x"),
            (lambda: guild.routed_experts(single, ids, scores, w_up.double(), w_down), "w_up"),
            (lambda: guild.grouped_mm(double, w_up.mT, offs), "mat_a"),
            (lambda: guild.grouped_mm(single, w_up.mT.double(), offs), "mat_b"),
            (lambda: guild.router_logits(double, torch.ones(3, 8)), "x"),
            (lambda: guild.router_logits(single, torch.ones(3, 8).double()), "weight"),
        ):
            with pytest.raises(TypeError, match=wanted.replace("x:", f"{name}:")):
                call()


@pytest.mark.parametrize(("dtype", "cast"), [("float16", "bfloat16"), ("bfloat16", "float16")])
@pytest.mark.parametrize("grad", [False, True])
def test_lists_and_pairs_of_the_other_16_bit_type(
    dtype: str, cast: str, grad: bool, device: str
) -> None:
    """They are gathered in their own dtype, where torch's autocast would refuse to."""
    torch.manual_seed(0)
    place = {"device": device, "dtype": getattr(torch, dtype)}
    x, ids = torch.randn(6, 32, **place), torch.randint(0, 4, (6, 2), device=device)
    scores = torch.rand(6, 2, device=device)
    w_up, w_down = torch.randn(4, 48, 32, **place), torch.randn(4, 32, 24, **place)
    b_up, b_down = torch.randn(4, 48, **place), torch.randn(4, 32, **place)
    lists = [[t.clone() for t in whole] for whole in (w_up, w_down, b_up, b_down)]
    gate, up = (half.contiguous() for half in w_up.chunk(2, 1))
    halves = gate, up
    biases = tuple(half.contiguous() for half in b_up.chunk(2, 1))
    alternate = torch.stack(biases, 2).flatten(1)
    for t in (w_up, w_down, b_up, b_down, *(t for one in lists for t in one), *biases, *halves):
        t.requires_grad_(grad)
    with torch.autocast(device, getattr(torch, cast)), warnings.catch_warnings():
        warnings.simplefilter("ignore", guild.CopiedWeightsWarning)
        want = guild.routed_experts(x, ids, scores, w_up, w_down, b_up, b_down)
        assert want.dtype == getattr(torch, cast)
        for given in (lists, (halves, lists[1], biases, lists[3]), (w_up, w_down, biases, b_down)):
            assert torch.equal(guild.routed_experts(x, ids, scores, *given), want)
        given = halves, w_down, alternate, b_down
        assert torch.equal(guild.routed_experts(x, ids, scores, *given, order="interleaved"), want)
        guild.lay_evenly(lists[0])
