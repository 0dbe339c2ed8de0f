"""The second line of defence: ops called directly, past Python's checks, stay within bounds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from guild._torch.gradients import ops
from guild._torch.operators import WANT_DOWN, WANT_ROWS, WANT_SCORES, WANT_X
from test_errors import right


def codes_of(r: SimpleNamespace, *shape: int) -> torch.Tensor:
    """Codes of zeros."""
    return torch.zeros(shape, dtype=torch.uint8, device=r.x.device)


def floats_of(r: SimpleNamespace, *shape: int) -> torch.Tensor:
    """Scales."""
    return torch.ones(shape, device=r.x.device)


def alone(r: SimpleNamespace) -> tuple[torch.Tensor, list[int]]:
    """`peers` and `memory` of one rank with room for 3 tokens of 2 choices each."""
    memory = [0, 3, 2, r.x.shape[1] * r.x.element_size(), 2]
    r.own = codes_of(r, ops.peer_memory_sizes(1, memory)[0])
    return torch.tensor([r.own.data_ptr()], device=r.x.device), memory


def push_lists(r: SimpleNamespace, slots: int) -> None:
    """Push r.x's 6 rows by lists with so many slots."""
    offsets = torch.tensor([0, 2, 4, slots], dtype=torch.int32, device=r.x.device)
    row_of, counts = offsets.new_zeros(slots), offsets.new_full((1,), 3)
    ops.peer_push(*alone(r), r.x, row_of, None, offsets, counts, False)


def routing_of(r: SimpleNamespace, tokens: int = 6) -> list[torch.Tensor]:
    """offsets, row_token, slot_row and row_score."""
    return ops.sort_by_expert(r.ids[:tokens].int(), r.weights[:tokens].float(), 4)


def peer_backward(r: SimpleNamespace, dout: torch.Tensor) -> None:
    """The backward of a layer on one rank's 3 tokens."""
    numbers = [torch.zeros(shape, dtype=torch.int32, device=r.x.device) for shape in ((3, 1), 1)]
    report = torch.zeros(16, dtype=torch.int64, device=r.x.device)
    ops.peer_backward(
        *(*alone(r), 1.0, [], [], report, [], dout, r.x[:3], r.x.new_zeros(6, 32)),
        *(*routing_of(r, 3), numbers[0], r.ids[:3].int(), numbers[1]),
        *(r.up, None, r.down, None, None, *FLAGS, WANT_ROWS),
    )


FLAGS = (0, True, 1.0, float("inf"), 0.0, False, False, False)
ROUTER = (2, 0, True, 1.0, 1, 1, 0.0, 0)  # top_k, score, renormalize, scale, groups, ...

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
    "ids of numbers": (
        lambda r: ops.sort_by_expert(r.weights, r.weights, 4),
        "ids: expected dtype int32 or int64",
    ),
    "ids of 2 bytes": (
        lambda r: ops.sort_by_expert(r.ids.short(), r.weights, 4),
        "ids: expected dtype int32 or int64",
    ),
    "seed": (
        lambda r: ops.round_tokens(
            r.weights, r.ids[:, :1].int(), r.weights[0, :1].double(), 0, True, 1.0, 3, 4, 0.0
        ),
        "seed: expected dtype int64",
    ),
    "group_score": (
        lambda r: ops.route(r.weights, None, None, 1, 0, True, 1.0, 1, 1, 0.0, 2),
        r"group_score: expected 0 \(top2_sum\) or 1 \(max\), got 2",
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
    "db_up over dout": (
        lambda r: ops.down_gradient(
            *(r.x, r.x, r.offsets, None, None, r.down, *FLAGS, r.x[:4]),
        ),
        "db_up: expected memory not shared with other arguments, got memory shared with dout",
    ),
    "db_down over db_up": (
        lambda r: ops.data_gradients(
            *(r.x, r.x, r.offsets, *(None,) * 4, r.up, None, r.down, None, *FLAGS, 0),
            *(both := torch.zeros_like(r.b_up), both),
        ),
        "db_down: expected memory not shared with other arguments, got memory shared with db_up",
    ),
    "rows that are sorted in part": (
        lambda r: ops.data_gradients(
            *(r.x, r.x, r.offsets, r.ids.flatten().int(), None, None, None),
            *(r.up, None, r.down, None, *FLAGS, WANT_X),
        ),
        "row_token, slot_row, row_score: expected all three or none",
    ),
    "wanted weights": (
        lambda r: ops.data_gradients(
            *(r.x, r.x, r.offsets, *(None,) * 4, r.up, None, r.down, None, *FLAGS),
            WANT_X | WANT_DOWN,
        ),
        "wanted: expected only dx and dscores, got 9",
    ),
    "wanted scores": (
        lambda r: ops.data_gradients(
            *(r.x, r.x, r.offsets, *(None,) * 4, r.up, None, r.down, None, *FLAGS), WANT_SCORES
        ),
        "wanted: expected only dx for sorted rows, got 2",
    ),
    "wanted by token and by row": (
        lambda r: ops.moe_backward(
            *(r.x, r.x, r.x.new_zeros(12, 32), *routing_of(r), None, r.up, None, r.down, None),
            *(*FLAGS, WANT_X | WANT_ROWS),
        ),
        "wanted: expected dx by token or by row, got 65",
    ),
    "wanted by row": (
        lambda r: ops.experts_backward(
            *(r.x, r.x, r.x, r.offsets, r.up, None, r.down, *FLAGS, WANT_ROWS)
        ),
        "wanted: expected dx, which is by row, got 64",
    ),
    "row_token of no dimension": (
        lambda r: ops.up_projection(
            *(r.x, r.offsets, r.offsets[0], r.up, None, None, *FLAGS, True),
        ),
        r"row_token: expected 1 dimensions, got shape \(\)",
    ),
    "experts below zero": (
        lambda r: ops.route_backward(
            *(r.weights.float(), r.weights.float(), r.ids.int(), None, None, -1, 0, True, 1.0)
        ),
        "experts: expected 0 or more, got -1",
    ),
    "a_scaled": (
        lambda r: ops.weight_gradients_out(
            *(r.x, r.x, r.x, r.a[:3], r.offsets, None, torch.zeros_like(r.up), None, None),
            *(True, False, False, False),
        ),
        r"x: expected shape \(3, 32\), got \(6, 32\)",
    ),
    "dw_gate": (
        lambda r: ops.weight_gradients_out(
            *(r.x, r.x, r.x, r.a, r.offsets, None, None, torch.zeros_like(r.up), None),
            *(True, False, False, False),
        ),
        "dw_gate: expected none without dw_up",
    ),
    "dw of two dtypes": (
        lambda r: ops.weight_gradients_out(
            *(r.x, r.x, r.x, r.a, r.offsets, None),
            *(torch.zeros_like(r.up), None, torch.zeros_like(r.down, dtype=torch.float32)),
            *(True, False, False, False),
        ),
        "w_down: expected dtype bfloat16, got float32",
    ),
    "tokens of slot_row": (
        lambda r: ops.score_gradient(
            r.x.new_zeros(12, 1).float(), r.ids[:3].int(), r.offsets, r.x, None, 16
        ),
        "slot_row: expected 6 tokens as in dout, got 3",
    ),
    "codes of one row": (
        lambda r: ops.scaled_grouped_mm_out(
            *(codes_of(r, 1, 32).expand(6, 32), floats_of(r, 6, 1), 0),
            *(codes_of(r, 4, 16, 32), floats_of(r, 4, 1, 1), 0, r.offs, r.x.new_empty(6, 16)),
        ),
        r"a: expected rows that do not overlap, got strides \(0, 1\)",
    ),
    "chunks of one slot": (
        lambda r: ops.chunk_product_out(
            *(codes_of(r, 1, 32, 128).expand(4, 32, 128), floats_of(r, 4, 1), 0),
            *(codes_of(r, 4, 16, 128), floats_of(r, 4, 1), r.offsets, 6, r.x.new_empty(4, 32, 16)),
            False,
        ),
        "a: expected slots that do not overlap, got stride 0",
    ),
    "dw_down": (
        lambda r: ops.down_weight_gradient_out(
            r.x, r.a, r.offsets, None, torch.zeros_like(r.up), False, False
        ),
        r"w_down: expected shape \(4, 32, 16\), got \(4, 32, 32\)",
    ),
    "shared_gate": (
        lambda r: ops.infer_layer(
            *(r.x, r.up[0, :4], None, None, None, r.up[0], r.down[0], None, r.x[:1, :8]),
            *(r.up, r.down, None, None, torch.tensor([*FLAGS, *ROUTER], dtype=torch.float64)),
        ),
        r"shared_gate: expected shape \(1, 32\), got \(1, 8\)",
    ),
    "dout of another dtype than a layer over ranks": (
        lambda r: peer_backward(r, r.x[:3].half()),
        "dout: expected dtype bfloat16, got float16",
    ),
    "dout of another width than a layer over ranks": (
        lambda r: peer_backward(r, r.x[:3, :16].contiguous()),
        r"dout: expected shape \(3, 32\), got \(3, 16\)",
    ),
    "a report in pieces": (
        lambda r: ops.peer_meet(
            *(*alone(r), False, 1.0, [], torch.zeros(1, dtype=torch.int64).expand(5))
        ),
        "report: expected a contiguous CPU tensor of int64",
    ),
    "codes of h as E5M2": (
        lambda r: ops.scaled_up_out(
            *(codes_of(r, 6, 32), floats_of(r, 6, 1), 0, r.offsets, None, codes_of(r, 4, 16, 32)),
            *(floats_of(r, 4, 1, 1), codes_of(r, 4, 16, 32), floats_of(r, 4, 1, 1), None),
            *(*FLAGS[:7], 1, 0, None, codes_of(r, 6, 32), floats_of(r, 6, 2)),
            *(codes_of(r, 6, 16), floats_of(r, 6, 1)),
        ),
        r"format: expected 0 \(E4M3\) with h_codes",
    ),
    "fewer slots than rows": (
        lambda r: push_lists(r, 5),
        "row_of: expected 6 slots as rows in y, got 5",
    ),
    "more slots than rows": (
        lambda r: push_lists(r, 7),
        "row_of: expected 6 slots as rows in y, got 7",
    ),
}


@pytest.mark.parametrize("name", list(RAW))
def test_wrong_raw_call(name: str, device: str) -> None:
    """The compiled op's own check: exactly our text, as a RuntimeError."""
    call, message = RAW[name]
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call(right(device))
