"""torch.library.opcheck on every op: schema, autograd registration, fake kernel, AOT dispatch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.library import opcheck

from float8_calls import FLOAT8_CALLS
from guild import experts  # noqa: F401 - registers every op
from guild._torch.layer_operator import ops
from guild._torch.operators import WANT_DOWN_BIAS, WANT_ROWS, WANT_SCORES, WANT_UP, WANT_X
from layers import ACTIVATIONS, Case, Layer, make_layer, pack

# No sentinel ids: opcheck compares every element, and rows that belong to nobody are not written.
CASE = Case("opcheck", 12, 16, 8, 4, 2, "random", frozenset())
SCALARS = ACTIVATIONS["gpt_oss"].scalars
FLAGS = (*SCALARS, False, False)
TRANSPOSED = (*SCALARS, False, True)
ROUTER = (2, 0, True, 1.0, 1, 1, 0.0, 0)

Arguments = tuple


class Inputs:
    """One layer and what its steps pass on."""

    def __init__(self, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.layer: Layer = make_layer(CASE, ACTIVATIONS["gpt_oss"], dtype, device)
        layer = self.layer
        self.w_up = pack(layer.gate, layer.up, 1, "concatenated")
        self.b_up = pack(layer.gate_bias, layer.up_bias, 1, "concatenated")
        self.logits = torch.randn(12, 4, device=device)
        self.offsets, self.row_token, self.slot_row, self.row_score = ops.sort_by_expert(
            layer.ids, layer.scores, CASE.experts
        )
        self.rows = torch.randn(24, 16, device=device).to(dtype)
        self.a = torch.randn(24, 8, device=device).to(dtype)
        self.h = torch.randn(24, 16, device=device).to(dtype)
        self.weights = (self.w_up, None, layer.down)
        self.router = layer.down[:, :, 0].contiguous()
        self.pair = (layer.up, layer.gate, layer.down)
        self.biases = (self.b_up, layer.down_bias)
        self.routing = (self.offsets, self.row_token, self.slot_row, self.row_score)
        ranks = {"a_up": (8, 16), "b_up": (16, 8), "a_down": (8, 8), "b_down": (16, 8)}
        self.low = tuple(torch.randn(4, *s, device=device).to(dtype) for s in ranks.values())


def wanting(*tensors: torch.Tensor | None) -> tuple:
    """Copies that require a gradient."""
    return tuple(t if t is None else t.detach().clone().requires_grad_() for t in tensors)


def down_gradient_arguments(i: Inputs) -> Arguments:
    """Arguments for gathered rows with scores, without biases."""
    layer = i.layer
    return (layer.dout, i.h, i.offsets, i.row_token, i.row_score, layer.down, *FLAGS)


# By the op's name, and what is special about the call where an op has several.
CALLS: dict[str, Callable[[Inputs], Arguments]] = {
    "route": lambda i: (
        *wanting(i.logits),
        *(None, i.logits[:, 0] > -1, 2, 1, True, 1.0, 2, 1, 0.1, 1),
    ),
    "route_backward": lambda i: (
        torch.randn_like(i.logits[:, :2]).contiguous(),
        i.logits[:, :2].contiguous(),
        i.layer.ids.int(),
        None,
        i.logits,
        i.logits.shape[1],
        0,
        False,
        2.0,
    ),
    "route_backward in another dtype": lambda i: (
        torch.randn_like(i.logits[:, :2]).contiguous(),
        i.logits[:, :2].contiguous(),
        i.layer.ids.int(),
        None,
        None,
        i.logits.shape[1],
        0,
        True,
        2.0,
        None,
        i.rows.bfloat16(),
    ),
    "round_tokens": lambda i: (
        *wanting(i.logits),
        i.layer.ids.int(),
        None,
        1,
        True,
        2.0,
        0,
        4,
        0.0,
    ),
    "balance_sums": lambda i: (
        *wanting(i.logits),
        i.layer.ids.int(),
        i.logits[:, 0] > -1,
        1,
        3,
    ),
    "balance_sums_backward": lambda i: (i.logits[:3], i.logits[:3, 0].clone(), i.logits, None, 0),
    "sort_by_expert": lambda i: (i.layer.ids, i.layer.scores, 4),
    "moe_forward": lambda i: (
        *wanting(i.layer.x),
        i.layer.ids,
        *wanting(i.layer.scores, None, i.layer.x, *i.weights, *i.biases),
        *FLAGS,
        True,
    ),
    "moe_backward": lambda i: (
        *(i.layer.dout, i.layer.x, i.h, *i.routing, None),
        *(*i.weights, i.layer.down_bias, *FLAGS, 63),
    ),
    "moe_forward transposed": lambda i: (
        *wanting(i.layer.x),
        i.layer.ids,
        *wanting(i.layer.scores, None, None, i.layer.up.mT, i.layer.gate.mT, i.layer.down.mT),
        *wanting(*i.biases),
        *TRANSPOSED,
        True,
    ),
    "moe_backward of a pair by row": lambda i: (
        i.layer.dout,
        i.layer.x,
        i.h,
        *i.routing,
        None,
        *i.pair,
        i.layer.down_bias,
        *FLAGS,
        WANT_ROWS | WANT_SCORES | WANT_UP,
    ),
    "moe_backward of nothing but a bias": lambda i: (
        *(i.layer.dout, i.layer.x, i.h, *i.routing, None),
        *(*i.weights, i.layer.down_bias, *FLAGS, WANT_DOWN_BIAS),
    ),
    "experts_forward": lambda i: (
        *wanting(i.rows),
        i.offsets,
        *wanting(*i.weights, *i.biases),
        *FLAGS,
        True,
    ),
    "experts_backward": lambda i: (i.rows, i.rows, i.h, i.offsets, *i.weights, *FLAGS, 61),
    "data_gradients": lambda i: (
        *(i.layer.dout, i.h, *i.routing, None, *i.weights, i.layer.down_bias, *FLAGS),
        WANT_X | WANT_SCORES,
        torch.zeros_like(i.b_up, dtype=torch.float32),
        torch.zeros_like(i.layer.down_bias, dtype=torch.float32),
        True,
    ),
    "data_gradients by row": lambda i: (
        *(i.layer.dout, i.h, *i.routing, None, *i.weights, None, *FLAGS),
        WANT_ROWS | WANT_SCORES,
    ),
    "data_gradients of sorted rows": lambda i: (
        *(i.rows, i.h, i.offsets, *(None,) * 4, *i.weights, None, *FLAGS),
        WANT_X,
        None,
        torch.zeros_like(i.layer.down_bias),
    ),
    "data_gradients for the weights alone": lambda i: (
        *(i.rows, i.h, i.offsets, *(None,) * 4, *i.weights, None, *FLAGS, 0),
    ),
    "lora_forward": lambda i: (
        *wanting(i.layer.x, i.layer.scores, i.layer.x, *i.weights, *i.biases, *i.low),
        *(*i.routing, None, *FLAGS, True),
    ),
    "lora_forward of sorted rows": lambda i: (
        *wanting(i.rows, None, None, *i.pair, None, None, *i.low[:2], None, None),
        *(i.offsets, *(None,) * 4, *FLAGS, True),
    ),
    "lora_backward": lambda i: (
        *(i.layer.dout, i.layer.x, i.h, i.a, *i.weights, *i.biases, *i.low),
        *(*i.routing, None, *FLAGS, (1 << 11) - 1),
    ),
    "lora_backward of sorted rows": lambda i: (
        *(i.rows, i.rows, i.h, i.a[:0, :0], *i.pair, None, None, None, None, *i.low[2:]),
        *(i.offsets, *(None,) * 4, *FLAGS, 1 | 1 << 2 | 3 << 9),
    ),
    "up_projection": lambda i: (
        i.layer.x,
        i.offsets,
        i.row_token,
        *i.weights[:2],
        i.b_up,
        *FLAGS,
        True,
    ),
    "up_projection of a pair": lambda i: (
        *(i.layer.x, i.offsets, i.row_token, *i.pair[:2], i.b_up),
        *(*FLAGS, True),
    ),
    "up_projection of a pair transposed": lambda i: (
        *(i.layer.x, i.offsets, i.row_token, i.layer.up.mT, i.layer.gate.mT, i.b_up),
        *(*TRANSPOSED, False),
    ),
    "up_projection without a gate": lambda i: (
        *(i.layer.x, i.offsets, i.row_token, i.layer.up, None, i.layer.up_bias),
        *(3, False, *FLAGS[2:], True),
    ),
    "down_projection transposed": lambda i: (i.a, i.offsets, i.layer.down.mT, None, True),
    "down_projection": lambda i: (i.a, i.offsets, i.layer.down, i.layer.down_bias, False),
    "combine": lambda i: (i.rows, i.slot_row, i.layer.scores, None, i.layer.x),
    "combine with a router": lambda i: (
        i.rows,
        i.slot_row,
        *(None,) * 3,
        i.rows[:12, :4],
        i.slot_row,
        i.rows[:4],
    ),
    "down_gradient": down_gradient_arguments,
    "down_gradient transposed": lambda i: (
        *(i.layer.dout, i.h, i.offsets, i.row_token, i.row_score),
        *(i.layer.down.mT, *TRANSPOSED),
    ),
    "down_gradient with biases": lambda i: (
        *down_gradient_arguments(i),
        torch.zeros_like(i.b_up, dtype=torch.float32),
        torch.zeros_like(i.layer.down_bias, dtype=torch.float32),
        True,
    ),
    "down_gradient with one bias": lambda i: (
        *(i.rows, i.h, i.offsets, None, None),
        i.layer.down,
        *FLAGS,
        None,
        torch.zeros_like(i.layer.down_bias),
    ),
    "score_gradient": lambda i: (
        torch.randn(24, 1, device=i.rows.device),
        i.slot_row,
        i.offsets,
        i.layer.dout,
        i.layer.down_bias,
        8,
    ),
    "up_gradient transposed": lambda i: (
        *(i.h, i.offsets, i.layer.up.mT, i.layer.gate.mT),
        *(True, False, True),
    ),
    "up_gradient": lambda i: (i.h, i.offsets, i.w_up, None, True, False, False),
    "weight_gradients_out": lambda i: (
        *(i.layer.x, i.layer.dout, i.h, i.a, i.offsets, i.row_token),
        torch.zeros_like(i.w_up),
        None,
        torch.zeros_like(i.layer.down),
        *(True, False, False, True),
    ),
    "weight_gradients_out of one": lambda i: (
        *(i.rows, i.rows, i.h, i.a, i.offsets, None, None, None),
        torch.zeros_like(i.layer.down, dtype=torch.float32),
        *(True, False, False, False),
    ),
    "up_weight_gradient_out": lambda i: (
        i.layer.x,
        i.h,
        i.offsets,
        i.row_token,
        torch.zeros_like(i.w_up),
        None,
        True,
        False,
        False,
        True,
    ),
    "down_weight_gradient_out": lambda i: (
        i.layer.dout,
        i.a,
        i.offsets,
        i.row_token,
        torch.zeros_like(i.layer.down),
        False,
        True,
    ),
    "bias_gradient": lambda i: (*wanting(i.h), i.offsets),
    "tie": lambda i: (i.h, i.layer.scores),
    "bias_gradient_out": lambda i: (
        i.h,
        i.offsets,
        None,
        i.row_score,
        torch.zeros_like(i.b_up),
        False,
    ),
    "grouped_mm": lambda i: (
        *wanting(i.rows, i.layer.down),
        i.offsets[1:].clone(),
        None,
        False,
    ),
    "grouped_mm_out": lambda i: (
        i.rows,
        i.layer.down,
        i.offsets[1:].clone(),
        None,
        torch.zeros(24, 8, device=i.rows.device),
        True,
    ),
    "pair_up": lambda i: (
        *wanting(i.rows, i.w_up.mT),
        i.offsets,
        *wanting(i.b_up),
        *SCALARS,
        True,
    ),
    "pair_down": lambda i: (
        *wanting(i.a, i.h, i.layer.down.mT),
        i.offsets,
        *wanting(i.layer.down_bias),
        *SCALARS,
        True,
    ),
    "moe_forward of lists": lambda i: (*CALLS["moe_forward"](i), i.offsets[:1].repeat(3, 4)),
    "router_logits": lambda i: wanting(
        *(t.to(torch.bfloat16) for t in (i.layer.x, i.layer.down[:, :, 0], i.layer.down[:, 0, 0]))
    ),
    "moe_layer": lambda i: (
        *wanting(i.layer.x, i.router, i.router[:, 0]),
        *(None, i.logits[:, 0] > -9, 2, 1, False, 1.0, 1, 1, 0.0, 0),
        *wanting(i.layer.x, *i.weights, *i.biases),
        *FLAGS,
        True,
    ),
    "route_tokens": lambda i: (
        *wanting(i.layer.x, i.router, i.router[:, 0]),
        *(None, i.logits[:, 0] > -1, 2, 0, False, 1.0, 1, 1, 0.0, 0),
    ),
}

# Without gradients.
CALLS |= {
    "moe_forward_out": lambda i: (
        *(i.layer.x, i.layer.ids, i.layer.scores, None, i.layer.dout, *i.weights, *i.biases),
        *(*FLAGS, torch.empty_like(i.layer.x)),
    ),
    "moe_layer_out": lambda i: (
        *(i.layer.x, i.router, i.router[:, 0].contiguous(), None, None, *ROUTER, i.layer.dout),
        *(i.w_up, i.layer.down, *i.biases, *FLAGS, torch.empty_like(i.layer.x)),
    ),
    "experts_forward_out": lambda i: (
        *(i.rows, i.offsets, *i.weights, *i.biases, *FLAGS, torch.empty_like(i.rows)),
    ),
    "infer_experts": lambda i: (
        *(i.layer.x, i.layer.ids, i.layer.scores, i.layer.dout, i.w_up, i.layer.down, *i.biases),
        torch.tensor(FLAGS, dtype=torch.float64),
    ),
    "infer_layer": lambda i: (
        *(i.layer.x, i.router, i.router[:, 0].contiguous(), None, i.layer.dout, *(None,) * 4),
        *(i.w_up, i.layer.down, *i.biases, torch.tensor((*FLAGS, *ROUTER), dtype=torch.float64)),
    ),
    "infer_shared": lambda i: (
        *(i.layer.x, i.w_up[0], i.layer.down[0], torch.tensor(FLAGS, dtype=torch.float64)),
    ),
    "infer_layer with shared experts": lambda i: (
        *(i.layer.x, i.router, None, None, None, i.w_up[0], i.layer.down[0], None, None),
        *(i.w_up, i.layer.down),
        *(None, None, torch.tensor((*FLAGS, *ROUTER), dtype=torch.float64)),
    ),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_op(name: str, device: str) -> None:
    """One op."""
    opcheck(getattr(ops, name.split()[0]).default, CALLS[name](Inputs(device)))


def test_every_op_is_here() -> None:
    """A new op needs a line in CALLS, unless it makes no tensor or is for addresses alone."""
    registered = {
        name.removeprefix("guild::").removesuffix(".default")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("guild::") and "::peer_" not in name  # they move what torch cannot see
    }
    others = "cuda_built", "cuda_reason", "num_sms", "set_num_sms", "expert_table", "expert_view"
    assert registered - {*others} == {name.split()[0] for name in (*CALLS, *FLOAT8_CALLS)}
