"""Outputs must have memory of their own: `experts_mlp(out=...)`, and ops called directly."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import guild
from guild._torch.layer_operator import ops

ROWS, HIDDEN, INNER, EXPERTS = 9, 16, 8, 4
FLAGS = (0, True, 1.0, float("inf"), 0.0, False, False, False)
ROUTER = (2, 0, True, 1.0, 1, 1, 0.0, 0)


@pytest.fixture
def given(device: str) -> SimpleNamespace:
    torch.manual_seed(2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    return SimpleNamespace(
        x=draw(ROWS, HIDDEN),
        offsets=torch.tensor([1, 3, 3, 6, 7], dtype=torch.int32, device=device),
        up=draw(EXPERTS, 2 * INNER, HIDDEN),
        down=draw(EXPERTS, HIDDEN, INNER),
        dh=draw(ROWS, 2 * INNER),
        ids=torch.zeros(ROWS, 2, dtype=torch.int32, device=device),
        scores=torch.rand(ROWS, 2, device=device),
        router=draw(EXPERTS, HIDDEN),
        floats=torch.zeros(EXPERTS, 2 * INNER, HIDDEN, device=device),
        codes=torch.zeros(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.uint8, device=device),
        ones=torch.ones(EXPERTS, ROWS, 1, device=device),
    )


# ---- experts_mlp --------------------------------------------------------------------------------


def test_out_of_experts_mlp(given: SimpleNamespace) -> None:
    """Written to and returned, with zeros in rows of nobody; packed or in longer rows."""
    weights = given.x, given.offsets, given.up, given.down
    wanted = guild.experts_mlp(*weights)
    with torch.no_grad():
        for longer in (0, 8):
            wide = torch.full((ROWS, HIDDEN + longer), 7.0).to(given.x)
            out = wide[:, :HIDDEN]
            version = out._version
            assert guild.experts_mlp(*weights, out=out) is out
            assert torch.equal(out, wanted) and (out[[0, 7, 8]] == 0).all()
            assert (wide[:, HIDDEN:] == 7).all() and out._version > version
        low = guild.LoRA(given.up.new_ones(4, 8, HIDDEN), given.up.new_ones(4, 2 * INNER, 8))
        with_low = guild.experts_mlp(*weights, lora_up=low)
        assert guild.experts_mlp(*weights, lora_up=low, out=out) is out
        assert torch.equal(out, with_low)


def test_out_of_experts_mlp_is_compiled(given: SimpleNamespace) -> None:
    def call(x: Tensor, out: Tensor) -> Tensor:
        return guild.experts_mlp(x, given.offsets, given.up, given.down, out=out)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = torch.full_like(given.x, torch.nan)
        assert compiled(given.x, out) is out
        assert torch.equal(out, call(given.x, torch.empty_like(out)))


WRONG: dict[str, Callable[[SimpleNamespace], Any]] = {
    "expected shape": lambda g: g.x.new_empty(ROWS - 1, HIDDEN),
    "expected dtype .* like x_sorted": lambda g: g.x.double(),
    r"expected rows .* got strides \(1, \d+\)$": lambda g: g.x.new_empty(HIDDEN, ROWS).mT,
    "expected a torch.Tensor": lambda g: 3,
    "expected memory not shared with other arguments, .* with x_sorted": lambda g: g.x,
    "expected memory not shared with other arguments, .* with w_up": lambda g: g.up.flatten()[
        : g.x.numel()
    ].view(g.x.shape),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_out_of_experts_mlp(message: str, given: SimpleNamespace) -> None:
    out = WRONG[message](given)
    with pytest.raises((TypeError, ValueError), match=f"out: {message}"), torch.no_grad():
        guild.experts_mlp(given.x, given.offsets, given.up, given.down, out=out)


def test_a_wrong_call_leaves_out_as_it_is(given: SimpleNamespace) -> None:
    out = torch.full_like(given.x, 7)
    weights = given.up, None, given.down
    for b_up, alpha, name in ((given.up.new_zeros(2, 3), 1.0, "b_up"), (None, 1e-40, "alpha")):
        rest = b_up, None, 0, True, alpha, torch.inf, 0.0, False, False, False, out
        with pytest.raises(RuntimeError, match=f"{name}: expected"), torch.no_grad():
            ops.experts_forward_out(given.x, given.offsets, *weights, *rest)
        assert (out == 7).all()


def test_out_of_experts_mlp_has_no_gradient(given: SimpleNamespace) -> None:
    out = torch.empty_like(given.x)
    with pytest.raises(ValueError, match=r"out: expected None since .* requires a gradient"):
        guild.experts_mlp(given.x.requires_grad_(), given.offsets, given.up, given.down, out=out)


# ---- raw ops ------------------------------------------------------------------------------------


def rows_in(tensor: Tensor) -> Tensor:
    """Rows that begin in another tensor's memory."""
    return tensor.view(-1)[: ROWS * HIDDEN].view(ROWS, HIDDEN)


def as_indices(tensor: Tensor, count: int) -> Tensor:
    """Indices in a float32 tensor's memory."""
    return tensor.view(torch.int32).view(-1)[:count]


RAW: dict[str, Callable[[SimpleNamespace], object]] = {
    "out: .* mat_a": lambda g: ops.grouped_mm_out(
        g.x, g.up.mT, g.offsets[1:].clone(), None, g.x, False
    ),
    "out: .* mat_b": lambda g: ops.grouped_mm_out(
        g.x, g.up.mT, g.offsets[1:].clone(), None, rows_in(g.up), False
    ),
    "out: .* bias": lambda g: ops.grouped_mm_out(
        *(g.x, g.up.mT, g.offsets[1:].clone(), g.dh[:EXPERTS], g.dh, False)
    ),
    "out: .* shared with x": lambda g: ops.moe_forward_out(
        g.x, g.ids, g.scores, None, None, g.up, None, g.down, None, None, *FLAGS, g.x
    ),
    "out: .* residual": lambda g: ops.moe_forward_out(
        g.x, g.ids, g.scores, None, g.dh, g.up, None, g.down, None, None, *FLAGS, g.dh
    ),
    "out: .* router.weight": lambda g: ops.moe_layer_out(
        *(g.x, g.up[0, :EXPERTS], None, None, None, *ROUTER, None, g.up[1:2], g.down[1:2]),
        *(None, None),
        *(*FLAGS, g.up.view(-1)[: g.x.numel()].view(g.x.shape)),
    ),
    "out: .* router.bias": lambda g: ops.moe_layer_out(
        *(g.x, g.router, g.up.view(-1)[:EXPERTS], None, None, *ROUTER, None, g.up, g.down),
        *(None, None, *FLAGS, g.up.view(-1)[: g.x.numel()].view(g.x.shape)),
    ),
    "out: .* w_down": lambda g: ops.experts_forward_out(
        g.x, g.offsets, g.up, None, g.down, None, None, *FLAGS, rows_in(g.down)
    ),
    "dw_up: .* shared with x": lambda g: ops.up_weight_gradient_out(
        *(g.x, g.dh[:, :8].contiguous(), g.offsets[:2].clone(), None, g.x[:8].view(1, 8, HIDDEN)),
        *(None, False, False, False, False),
    ),
    "dw_down: .* dout": lambda g: ops.down_weight_gradient_out(
        *(g.x, g.dh[:, :8].contiguous(), g.offsets[:2].clone(), None),
        *(g.x.view(-1)[:128].view(1, HIDDEN, 8), False, False),
    ),
    "db: .* shared with m": lambda g: ops.bias_gradient_out(
        g.x, g.offsets, None, None, g.x[:EXPERTS], False
    ),
    "db: .* row_token": lambda g: ops.bias_gradient_out(
        g.x, g.offsets, as_indices(g.floats, ROWS), None, g.floats[0, :EXPERTS], False
    ),
    "db: .* row_score": lambda g: ops.bias_gradient_out(
        g.x, g.offsets, None, g.floats.view(-1)[:ROWS], g.floats[0, :EXPERTS], False
    ),
    "dw_up: .* row_token": lambda g: ops.weight_gradients_out(
        *(g.x, g.x, g.dh, g.dh[:, :INNER].contiguous(), g.offsets, as_indices(g.floats, ROWS)),
        *(g.floats, None, None, True, False, False, False),
    ),
    "dw_down: .* row_token": lambda g: ops.weight_gradients_out(
        *(g.x, g.x, g.dh, g.dh[:, :INNER].contiguous(), g.offsets, as_indices(g.floats, ROWS)),
        *(None, None, g.floats[:, :INNER].mT, True, False, False, False),
    ),
    "out: .* offs": lambda g: ops.grouped_mm_out(
        *(g.x, g.up.mT, as_indices(g.floats, EXPERTS), None, rows_in(g.floats), False, None),
        g.offsets[None, :EXPERTS],
    ),
    "dw_gate: .* dw_up": lambda g: ops.up_weight_gradient_out(
        *(g.x, g.dh, g.offsets, None, g.up[:, :8], g.up[:, 4:12], True, False, False, False)
    ),
}


UP = (0, True, 1.0, float("inf"), 0.0, False, False, 0, 0)

# Of quantised operands: 9 rows of 16 codes, with a scale each.
QUANTISED: list[tuple[str, Callable[[SimpleNamespace], object]]] = [
    (
        "codes: .* shared with x",
        lambda g: ops.quantize_rows_out(g.x, 0, 0, g.x.view(torch.uint8)[:, :HIDDEN], g.ones[0]),
    ),
    (
        "scales: .* codes",
        lambda g: ops.quantize_rows_out(
            g.x, 0, 0, rows_in(g.floats.view(torch.uint8)), g.floats[0, :ROWS, :1]
        ),
    ),
    (
        "codes: .* shared with w",
        lambda g: ops.quantize_weights_out(
            *(g.up, 0, 0, g.up.view(torch.uint8).view(-1)[: g.up.numel()].view(g.up.shape)),
            *(None, g.ones[:, :1]),
        ),
    ),
    (
        "transposed: .* codes",
        lambda g: ops.quantize_weights_out(
            g.up, 0, 0, g.codes, g.codes.view(EXPERTS, HIDDEN, 2 * INNER), g.ones[:, :1]
        ),
    ),
    (
        "scales: .* row_token",
        lambda g: ops.quantize_chunks_out(
            *(g.x, None, g.offsets, as_indices(g.floats, ROWS), 1, 0, 0),
            *(g.codes.new_empty(EXPERTS, HIDDEN, 128), g.floats[0, :EXPERTS, :1]),
        ),
    ),
    (
        "codes: .* shared with x",
        lambda g: ops.quantize_micro_out(
            *(g.x, 0, 0, 0, g.x.view(torch.uint8)[:, :HIDDEN], g.codes.view(-1)[:ROWS], None, False)
        ),
    ),
    (
        "global_scale: .* scales",
        lambda g: ops.quantize_micro_out(
            *(
                g.x,
                2,
                0,
                0,
                rows_in(g.codes)[:, :INNER],
                g.floats.view(torch.uint8).view(-1)[:ROWS],
            ),
            *(g.floats.view(-1)[:1], False),
        ),
    ),
    (
        "scales: .* x_scales",
        lambda g: ops.regroup_micro_out(
            *(rows_in(g.codes), g.floats.view(torch.uint8).view(-1)[:ROWS, None], 0),
            *(torch.empty_like(rows_in(g.codes)), g.floats[0, :ROWS, :1]),
        ),
    ),
    (
        "out: .* bias",
        lambda g: ops.scaled_grouped_mm_out(
            *(rows_in(g.codes), g.ones[0], 0, g.codes, g.ones[:, :1], 0, g.offsets[1:].clone()),
            *(g.dh, 1, g.dh[:EXPERTS]),
        ),
    ),
    (
        "a: .* shared with x",
        lambda g: ops.scaled_up_out(
            *(rows_in(g.codes), g.ones[0], 0, g.offsets, None),
            *(g.codes[:, INNER:], g.ones[:, :1], g.codes[:, :INNER], g.ones[:, :1], None, *UP),
            *(None, None, None, rows_in(g.codes)[:, :INNER], torch.empty_like(g.ones[0])),
        ),
    ),
    (
        "dh: .* shared with h",
        lambda g: ops.scaled_down_gradient_out(
            *(rows_in(g.codes), g.ones[0], 0, g.offsets, None, None),
            *(g.codes[:, :INNER].mT, g.ones[:, :1], g.dh, None, None, *UP),
            *(torch.empty_like(rows_in(g.codes)), torch.ones_like(g.ones[:2, :, 0].mT), g.dh),
            *(None, None),
        ),
    ),
]


@pytest.mark.parametrize(("message", "call"), [*RAW.items(), *QUANTISED])
def test_ops_write_to_memory_of_their_own(
    message: str, call: Callable[[SimpleNamespace], object], given: SimpleNamespace
) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(given)


def test_elements_of_their_own(given: SimpleNamespace) -> None:
    offs = given.offsets[1:].clone()
    out = given.dh.new_empty(1, 2 * INNER).expand(ROWS, 2 * INNER)
    with pytest.raises(RuntimeError, match="out: expected elements that do not overlap"):
        ops.grouped_mm_out(given.x, given.up.mT, offs, None, out, False)


def test_neighbours_are_no_overlap(given: SimpleNamespace) -> None:
    """Columns of the same rows, every other row, halves of one weight."""
    offs = given.offsets[1:].clone()
    wanted = ops.grouped_mm(given.x, given.up.mT, offs, None, False)
    whole = torch.cat((given.x, torch.zeros_like(given.dh)), 1)
    ops.grouped_mm_out(whole[:, :HIDDEN], given.up.mT, offs, None, whole[:, HIDDEN:], False)
    assert torch.equal(whole[1:7, HIDDEN:], wanted[1:7])
    rows = torch.stack((given.x, torch.zeros_like(given.x)), 1)
    ops.grouped_mm_out(rows[:, 0], given.up.mT, offs, None, rows[:, 1], False)
    assert torch.equal(rows[1:7, 1], wanted[1:7])
    dw = torch.empty_like(given.up)
    arguments = given.x, given.dh, given.offsets, None
    ops.up_weight_gradient_out(*arguments, dw, None, True, False, False, False)
    split = torch.empty_like(given.up)
    halves = split[:, INNER:], split[:, :INNER]
    ops.up_weight_gradient_out(*arguments, *halves, True, False, False, False)
    assert torch.equal(split, dw)
