"""Wrong calls: each is an error that names the argument, what it is and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import guild
from guild._gradients import ops
from wrong_shapes import SHAPES, mlp, pair_down, pair_up, product, right, routed
from wrong_values import VALUES

WRONG = {**SHAPES, **VALUES}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_call(name: str, device: str) -> None:
    """One wrong call; a right one goes before it, so that the mistake is the only one."""
    call, exception, message = WRONG[name]
    r = right(device)
    for works in (routed, mlp, product, pair_up, pair_down):
        works(r)
    with pytest.raises(exception, match=message):
        call(r)


def test_float32_on_a_gpu(gpu: str) -> None:
    """Names the dtype, what is supported, and autocast."""
    r = right(gpu)
    with pytest.raises(
        TypeError, match=r"x: expected bfloat16 or float16 on a CUDA device, got fl"
    ):
        routed(r, x=r.x.float())
    with pytest.raises(TypeError, match="autocast"):
        product(r, mat_a=r.x.double())


def test_ids_on_the_cpu(gpu: str) -> None:
    """The commonest mistake of all."""
    r = right(gpu)
    with pytest.raises(
        ValueError, match=r"topk_ids: expected a tensor on cuda:0 .* got one on cpu"
    ):
        routed(r, topk_ids=r.ids.cpu())


def test_odd_sizes_on_a_gpu(gpu: str) -> None:
    """Rows that are no multiple of 16 bytes."""
    moe = guild.MoE(20, 12, 4, 2, device=gpu, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="hidden: expected a multiple of 8 on CUDA, got 20"):
        moe(torch.zeros(3, 20, device=gpu, dtype=torch.bfloat16))


# ---- the second line: ops called directly never read out of bounds ------------------------------

FLAGS = (0, True, 1.0, float("inf"), 0.0, False, False, False)

RAW: dict[str, tuple[Callable[[SimpleNamespace], object], str]] = {
    "w_up": (
        lambda r: ops.moe_forward(
            r.x, r.ids, r.weights, None, None, r.up[:3], None, r.down, None, None, *FLAGS, True
        ),
        r"w_up: expected shape \(4, 32, 32\), got \(3, 32, 32\)",
    ),
    "scores": (
        lambda r: ops.moe_forward(
            r.x, r.ids, r.weights.double(), None, None, r.up, None, r.down, None, None, *FLAGS, True
        ),
        "scores: expected dtype float32, got float64",
    ),
    "h": (
        lambda r: ops.experts_backward(
            r.x, r.x, r.x[:2], r.offsets, r.up, None, r.down, *FLAGS, 63
        ),
        r"h: expected shape \(6, 32\), got \(2, 32\)",
    ),
    "offsets": (
        lambda r: ops.up_gradient(r.x, r.offs, r.up, None, True, False, False),
        r"offsets: expected shape \(5,\), got \(4,\)",
    ),
    "slot_row": (
        lambda r: ops.combine(r.x[:, ::2], r.ids[:3].int(), None),
        r"y: expected contiguous columns \(stride 1\), got strides \(32, 2\)",
    ),
    "router": (
        lambda r: ops.combine(
            r.x, r.ids[:3].int(), None, None, None, r.x[:3, :4], r.ids[:3].int(), r.up[0]
        ),
        r"dlogits: expected shape \(3, 32\), got \(3, 4\)",
    ),
    "router alone": (
        lambda r: ops.combine(r.x, r.ids[:3].int(), None, None, None, None, None, r.up[0]),
        "dlogits: expected a tensor with router, got none",
    ),
    "dlogits alone": (
        lambda r: ops.combine(r.x, r.ids[:3].int(), None, None, None, r.x[:3]),
        "dlogits: expected none without router, got a tensor",
    ),
    "like": (
        lambda r: ops.route_backward(
            r.weights, r.weights, r.ids.int(), None, None, 4, 0, True, 1.0, None, r.ids
        ),
        "like: expected dtype bfloat16",
    ),
    "kind": (
        lambda r: ops.experts_forward(
            r.x, r.offsets, r.up, None, r.down, None, None, 9, *FLAGS[1:], True
        ),
        r"activation kind: expected 0 .. 4, got 9",
    ),
    "row_token": (
        lambda r: ops.bias_gradient_out(
            r.x, r.offsets, r.offsets.long(), None, torch.zeros_like(r.b_down), False
        ),
        "row_token: expected dtype int32",
    ),
    "db_up": (
        lambda r: ops.down_gradient(
            r.x, r.x, r.offsets, None, None, r.down, *FLAGS, torch.zeros_like(r.b_up[:3])
        ),
        r"db_up: expected shape \(4, 32\), got \(3, 32\)",
    ),
    "db_down": (
        lambda r: ops.down_gradient(
            r.x, r.x, r.offsets, None, None, r.down, *FLAGS, r.b_up.float(), r.b_down
        ),
        "db_down: expected dtype float32, got bfloat16",
    ),
    "db_dtype": (
        lambda r: ops.down_gradient(
            r.x, r.x, r.offsets, None, None, r.down, *FLAGS, None, r.b_down.half()
        ),
        "db_dtype: expected bfloat16 or float32, got float16",
    ),
    "dw_down": (
        lambda r: ops.down_weight_gradient_out(
            r.x, r.a, r.offsets, None, torch.zeros_like(r.up), False, False
        ),
        r"w_down: expected shape \(4, 32, 16\), got \(4, 32, 32\)",
    ),
}


@pytest.mark.parametrize("name", list(RAW))
def test_wrong_raw_call(name: str, device: str) -> None:
    """The compiled op's own check: exactly our text, as a RuntimeError."""
    call, message = RAW[name]
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call(right(device))


def test_num_sms() -> None:
    """The budget is a whole number, 0 or more, and stays as it was after a wrong call."""
    with pytest.raises(ValueError, match="count: expected at least 0, got -1"):
        guild.set_num_sms(-1)
    with pytest.raises(TypeError, match="count: expected an int, got float 1.5"):
        guild.set_num_sms(1.5)
    assert guild.num_sms() == 0
    guild.set_num_sms(116)
    assert guild.num_sms() == 116
    guild.set_num_sms(0)
