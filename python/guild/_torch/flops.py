"""FLOPs of the ops, for `torch.utils.flop_counter.FlopCounterMode`.

As in torch's own formulas a product of m x k and k x n counts 2 m n k. Else only the router's part
of dX counts, a sum over the weights of the chosen experts. Where the host does not know the
routing, rows are counted as if every slot had an expert: tokens times top_k, or all slots that
lists have room for. Over several ranks that is a rank's share if all send as many.

torch's RuntimeEstimator refuses ops with a formula whose results have several dtypes, as a layer's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from guild._torch.operators import WANT_DOWN, WANT_ROWS, WANT_UP, WANT_X, LayerFlags, ops

_log = logging.getLogger("torch.utils.flop_counter")  # warns at its import if Triton is missing
_level = _log.level
_log.setLevel(logging.ERROR)
from torch.utils.flop_counter import register_flop_formula  # noqa: E402

_log.setLevel(_level)

Formula = Callable[[SimpleNamespace], Any]  # of an op's arguments by name, defaults included


def count(name: str) -> None:
    """Register the op's formula, if it has one."""
    formula = FORMULAS.get(name)
    if formula is None:
        return
    op = getattr(ops, name)
    arguments = op.default._schema.arguments
    names = [a.name for a in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def of_call(*args: Any, out_val: Any = None, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        return formula(SimpleNamespace(**{**defaults, **given, **kwargs}))

    register_flop_formula(op, get_raw=True)(of_call)


def _experts(rows: Any, *weights: Tensor | None) -> Any:
    """Products of rows with their expert's matrix of each of the weights (E, outputs, inputs)."""
    return 2 * rows * sum(math.prod(w.shape[1:]) for w in weights if w is not None)


def _all(rows: Any, *weights: Tensor | None) -> Any:
    """Products of rows with weights (outputs, inputs) that all of them share."""
    return 2 * rows * sum(w.numel() for w in weights if w is not None)


def _rows(t: SimpleNamespace) -> Any:
    """Rows of a step whose operand is gathered if row_token is given."""
    return (t.x if t.row_token is None else t.row_token).shape[0]


# ---- forward ------------------------------------------------------------------------------------


def _forward(t: SimpleNamespace) -> Any:
    return _experts(t.ids.numel(), t.w_up, t.w_gate, t.w_down)


def _sorted_forward(t: SimpleNamespace) -> Any:
    return _experts(t.x.shape[0], t.w_up, t.w_gate, t.w_down)


def _layer(t: SimpleNamespace) -> Any:
    experts = t.w_up, getattr(t, "w_gate", None), t.w_down
    return _router(t) + _experts(t.x.shape[0] * t.top_k, *experts)


def _router(t: SimpleNamespace) -> Any:
    return _all(t.x.shape[0], t.router if hasattr(t, "router") else t.weight)


def _infer_experts(t: SimpleNamespace) -> Any:
    return _experts(t.ids.numel(), t.w_up, t.w_down)


def _infer_layer(t: SimpleNamespace) -> Any:
    tokens, top_k = t.x.shape[0], int(LayerFlags.and_last(t.settings)[1])
    shared = _all(tokens, t.shared_up, t.shared_down, t.shared_gate)
    return _all(tokens, t.router) + shared + _experts(tokens * top_k, t.w_up, t.w_down)


# ---- backward -----------------------------------------------------------------------------------


def _backward(t: SimpleNamespace) -> Any:
    return _gradients(t.h.shape[0], t)


def _gradients(rows: Any, t: SimpleNamespace) -> Any:
    """The down gradient always runs."""
    up, down = _experts(rows, t.w_up, t.w_gate), _experts(rows, t.w_down)
    flops = down
    if t.wanted & (WANT_X | WANT_ROWS):
        flops += up
    if t.wanted & WANT_UP:
        flops += up
    if t.wanted & WANT_DOWN:
        flops += down
    return flops


def _peer_backward(t: SimpleNamespace) -> Any:
    rows = t.dout.shape[0] * t.by_slot.shape[1]
    again = t.h.shape[0] == 0  # H, where forward kept none
    return _gradients(rows, t) + (_experts(rows, t.w_up, t.w_gate) if again else 0)


def _float8_backward(t: SimpleNamespace) -> Any:
    rows = t.row_token.shape[0]
    want_x, _, want_up, want_down, *_ = t.wanted
    up = _experts(rows, t.w_up, t.w_gate) * (int(not t.keep) + int(want_x) + int(want_up))
    return up + _experts(rows, t.w_down) * (1 + int(want_down))


def _weight_gradients(t: SimpleNamespace) -> Any:
    return _experts(t.dh.shape[0], t.dw_up, t.dw_gate, t.dw_down)


# ---- low-rank terms -----------------------------------------------------------------------------


def _lora_forward(t: SimpleNamespace) -> Any:
    layer, low = (t.w_up, t.w_gate, t.w_down), (t.a_up, t.lora_b_up, t.a_down, t.lora_b_down)
    return _experts(_rows(t), *layer, *low)


def _lora_backward(t: SimpleNamespace) -> Any:
    rows = _rows(t)
    layer = (t.w_up, t.w_gate, t.w_down, None, None, t.a_up, t.lora_b_up, t.a_down, t.lora_b_down)
    want_x, _, *want = (bool(t.wanted & 1 << i) for i in range(2 + len(layer)))
    low = t.a_up, t.lora_b_up
    flops = _experts(rows, t.w_down, t.a_down, t.lora_b_down)
    if t.h.shape[0] != rows:
        flops += _experts(rows, t.w_up, t.w_gate, *low)
    if want_x:
        flops += _experts(rows, t.w_up, t.w_gate, *low)
    elif want[5]:
        flops += _experts(rows, t.lora_b_up)
    if want[0] or want[1]:  # computed together
        want[:2] = True, True
    if want[8]:
        flops += _experts(rows, t.a_down)
    return flops + _experts(rows, *(w for w, wanted in zip(layer, want, strict=True) if wanted))


# ---- products -----------------------------------------------------------------------------------


def _grouped_mm(t: SimpleNamespace) -> Any:
    """As torch._grouped_mm: the groups split rows, columns, the inner dimension or nothing."""
    rows, inner = t.mat_a.shape[-2:]
    groups = t.mat_a.shape[0] if t.mat_a.dim() == t.mat_b.dim() == 3 else 1
    return 2 * groups * rows * inner * t.mat_b.shape[-1]


FORMULAS: dict[str, Formula] = {
    "moe_forward": _forward,
    "moe_forward_out": _forward,
    "experts_forward": _sorted_forward,
    "experts_forward_out": _sorted_forward,
    "moe_layer": _layer,
    "moe_layer_out": _layer,
    "float8_experts": _forward,
    "float8_moe": _layer,
    "peer_forward": _forward,
    "infer_experts": _infer_experts,
    "infer_layer": _infer_layer,
    "infer_shared": lambda t: _all(t.x.shape[0], t.w_up, t.w_down),
    "router_logits": _router,
    "route_tokens": _router,
    "combine": lambda t: 0 if t.router is None else 2 * t.ids.numel() * t.router.shape[1],
    "moe_backward": _backward,
    "experts_backward": _backward,
    "data_gradients": _backward,
    "peer_backward": _peer_backward,
    "float8_backward": _float8_backward,
    "weight_gradients_out": _weight_gradients,
    "up_weight_gradient_out": lambda t: _experts(t.dh.shape[0], t.dw_up, t.dw_gate),
    "down_weight_gradient_out": lambda t: _experts(t.a.shape[0], t.dw_down),
    "up_projection": lambda t: _experts(_rows(t), t.w_up, t.w_gate, t.low_rank_b),
    "down_projection": lambda t: _experts(t.a.shape[0], t.w_down, t.low_rank_b),
    "down_gradient": lambda t: _experts(t.h.shape[0], t.w_down, t.low_rank_b),
    "up_gradient": lambda t: _experts(t.dh.shape[0], t.w_up, t.w_gate, t.low_rank_b),
    "lora_forward": _lora_forward,
    "lora_backward": _lora_backward,
    "grouped_mm": _grouped_mm,
    "grouped_mm_out": _grouped_mm,
    "pair_up": lambda t: _experts(t.x.shape[0], t.w_up),
    "pair_down": lambda t: _experts(t.a.shape[0], t.w_down),
    "scaled_grouped_mm_out": lambda t: _experts(t.a.shape[0], t.b),
    "scaled_up_out": lambda t: _experts(_rows(t), t.w_up, t.w_gate),
    "scaled_down_gradient_out": lambda t: _experts(t.dh_codes.shape[0], t.w_down),
    "chunk_product_out": lambda t: 2 * t.rows * t.out.shape[1] * t.out.shape[2],
}
