"""Calls with wrong dtypes, devices, layouts or values; see wrong_shapes.py."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import guild
from wrong_shapes import E, H, I, T, Wrong, elsewhere, mlp, pair_down, pair_up, product, routed


def layer_with(r: SimpleNamespace, router: str = "softmax", **changed: torch.Tensor) -> object:
    """Call a layer whose router was given other tensors."""
    moe = guild.MoE(H, I, E, 2, router=router, device=r.x.device, dtype=r.x.dtype)
    moe(r.x)
    for name, tensor in changed.items():
        value = tensor.to(r.x.device)
        setattr(moe.router, name, torch.nn.Parameter(value) if name == "weight" else value)
    return moe(r.x)


VALUES: dict[str, Wrong] = {
    # dtypes
    "x of integers": (
        lambda r: routed(r, x=r.x.int()),
        TypeError,
        "x: expected dtype bfloat16, float16, float32 or float64, got int32",
    ),
    "w_up of another dtype": (
        lambda r: routed(r, w_up=r.up.half()),
        TypeError,
        "w_up: expected dtype bfloat16 like x, got float16",
    ),
    "b_down of another dtype": (
        lambda r: routed(r, b_down=r.b_down.float()),
        TypeError,
        "b_down: expected dtype bfloat16 like x, got float32",
    ),
    "ids of floats": (
        lambda r: routed(r, topk_ids=r.ids.float()),
        TypeError,
        "topk_ids: expected dtype int32 or int64, got float32",
    ),
    "weights of integers": (
        lambda r: routed(r, topk_weights=r.ids),
        TypeError,
        "topk_weights: expected a floating dtype, got int64",
    ),
    "long offs": (
        lambda r: product(r, offs=r.offs.long()),
        TypeError,
        "offs: expected dtype int32, got int64",
    ),
    "out_dtype float16": (
        lambda r: product(r, out_dtype=torch.float16),
        TypeError,
        "out_dtype: expected bfloat16 or float32, got float16",
    ),
    "logits of integers": (
        lambda r: guild.route(r.logits.int(), 2),
        TypeError,
        "logits: expected a floating dtype, got int32",
    ),
    "a list for x": (
        lambda r: routed(r, x=[[1.0]]),
        TypeError,
        "x: expected a torch.Tensor, got list",
    ),
    # devices
    "ids elsewhere": (
        lambda r: routed(r, topk_ids=elsewhere(r.ids)),
        ValueError,
        r"topk_ids: expected a tensor on \S+ like x, got one on meta",
    ),
    "weights elsewhere": (
        lambda r: routed(r, w_down=elsewhere(r.down)),
        ValueError,
        r"w_down: expected a tensor on \S+ like x, got one on meta",
    ),
    "offs elsewhere": (
        lambda r: pair_up(r, offs=elsewhere(r.offs)),
        ValueError,
        r"offs: expected a tensor on \S+ like x, got one on meta",
    ),
    "bias elsewhere": (
        lambda r: product(r, bias=elsewhere(r.b_up)),
        ValueError,
        r"bias: expected a tensor on \S+ like mat_a, got one on meta",
    ),
    # layouts
    "x by columns": (
        lambda r: routed(r, x=r.x.t().contiguous().t()),
        ValueError,
        r"x: expected rows with contiguous columns .* got strides \(1, 6\)",
    ),
    "x of one row": (
        lambda r: mlp(r, x_sorted=r.x[:1].expand(T, H)),
        ValueError,
        r"x_sorted: expected rows with contiguous columns .* got strides \(0, 1\)",
    ),
    "every other offset": (
        lambda r: mlp(r, offsets=r.offsets.repeat_interleave(2)[::2]),
        ValueError,
        r"offsets: expected a contiguous tensor, got strides \(2,\)",
    ),
    "b_up by columns": (
        lambda r: routed(r, b_up=r.b_up.t().contiguous().t()),
        ValueError,
        r"b_up: expected rows with contiguous columns",
    ),
    # values
    "top_k zero": (lambda r: guild.route(r.logits, 0), ValueError, "top_k: expected 1 to 4, got 0"),
    "top_k negative": (
        lambda r: guild.MoE(H, I, E, -1),
        ValueError,
        "top_k: expected 1 to 4, got -1",
    ),
    "top_k too large": (
        lambda r: guild.MoE(H, I, E, 5),
        ValueError,
        "top_k: expected 1 to 4, got 5",
    ),
    "no experts": (
        lambda r: guild.MoE(H, I, 0, 1),
        ValueError,
        "experts: expected 1 to 4096, got 0",
    ),
    "negative hidden": (
        lambda r: guild.MoE(-8, I, E, 1),
        ValueError,
        "hidden: expected at least 1, got -8",
    ),
    "width of a float": (
        lambda r: guild.MoE(H, 16.0, E, 1),
        TypeError,
        "intermediate: expected an int, got float 16.0",
    ),
    "unknown activation": (
        lambda r: routed(r, activation="swish"),
        ValueError,
        "activation: expected one of silu, .* got 'swish'",
    ),
    "activation of no kind": (
        lambda r: routed(r, activation=3),
        TypeError,
        "activation: expected a name or a guild.Activation, got 3",
    ),
    "negative limit": (
        lambda r: guild.Activation("silu", limit=-1.0),
        ValueError,
        "limit: expected a positive number, got -1.0",
    ),
    "alpha NaN": (
        lambda r: pair_up(r, swiglu_alpha=float("nan")),
        ValueError,
        "^swiglu_alpha: expected 0 or a number in float32's normal range, got nan",
    ),
    "alpha beyond float32": (
        lambda r: guild.Activation("silu", alpha=1e300),
        ValueError,
        "^alpha: expected 0 or a number in float32's normal range, got 1e\\+300",
    ),
    "limit below float32": (
        lambda r: pair_up(r, swiglu_limit=1e-300),
        ValueError,
        "^swiglu_limit: expected 0 or a number in float32's normal range, got 1e-300",
    ),
    "limit negative, of the pair": (
        lambda r: pair_up(r, swiglu_limit=-1),
        ValueError,
        "^swiglu_limit: expected a positive number, got -1",
    ),
    "two activations": (
        lambda r: pair_up(r, swiglu_alpha=1.0, activation="gelu"),
        ValueError,
        "activation: expected None together with swiglu_alpha, got 'gelu'",
    ),
    "unknown order": (
        lambda r: routed(r, order="mixed"),
        ValueError,
        "order: expected 'concatenated' or 'interleaved', got 'mixed'",
    ),
    "unknown score": (
        lambda r: guild.route(r.logits, 1, score="tanh"),
        ValueError,
        "score: expected 'softmax', 'sigmoid' or 'sqrtsoftplus', got 'tanh'",
    ),
    "scale infinite": (
        lambda r: guild.Router(scale=float("inf")),
        ValueError,
        "scale: expected 0 or a number in float32's normal range, got inf",
    ),
    "groups of no equal size": (
        lambda r: guild.route(r.logits, 1, groups=3),
        ValueError,
        r"groups: expected a divisor of 4 \(experts\), got 3",
    ),
    "more groups than there are": (
        lambda r: guild.Router(groups=2, top_groups=3),
        ValueError,
        "top_groups: expected 1 to 2, got 3",
    ),
    "groups too small": (
        lambda r: guild.MoE(H, I, E, 3, router=guild.Router(groups=2)),
        ValueError,
        r"top_groups: expected groups of at least 3 experts \(top_k\), got 1 of 2",
    ),
    "input weighted by two": (
        lambda r: guild.MoE(H, I, E, 2, router="llama4"),
        ValueError,
        "top_k: expected 1 where the router's weights are applied to the input, got 2",
    ),
    "unknown router": (
        lambda r: guild.MoE(H, I, E, 2, router="switch"),
        ValueError,
        "router: expected 'softmax', .* or 'llama4', got 'switch'",
    ),
    "mask of numbers": (
        lambda r: guild.route(r.logits, 1, token_mask=torch.ones(T, device=r.logits.device)),
        TypeError,
        "token_mask: expected dtype bool, got float32",
    ),
    "mask too short": (
        lambda r: guild.MoE(H, I, E, 2, device=r.x.device, dtype=r.x.dtype)(
            r.x, torch.ones(3, dtype=torch.bool, device=r.x.device)
        ),
        ValueError,
        r"token_mask: expected shape \(6,\), got \(3,\)",
    ),
    "accumulate into nothing": (
        lambda r: product(r, accumulate=True),
        ValueError,
        "accumulate: expected False without out, got True",
    ),
    "out with a gradient": (
        lambda r: product(r, mat_a=r.x.clone().requires_grad_(), out=torch.empty(T, 2 * I).to(r.x)),
        ValueError,
        "out: expected None since",
    ),
    "aux of nothing": (
        lambda r: pair_down(r, aux_biased_acc=r.x),
        ValueError,
        "aux_biased_acc: expected the aux that grouped_mm_swiglu returned",
    ),
    "module fed another width": (
        lambda r: guild.MoE(24, I, E, 2, device=r.x.device, dtype=r.x.dtype)(r.x),
        ValueError,
        r"x: expected shape \(..., 24\) \(hidden\), got \(6, 32\)",
    ),
    "module with shared experts elsewhere": (
        lambda r: guild.MoE(H, I, E, 2, shared_experts=1, device="meta", dtype=r.x.dtype)(r.x),
        ValueError,
        "^x: expected a tensor on meta like w_up, got one on",
    ),
    "module with shared experts fed another dtype": (
        lambda r: guild.MoE(H, I, E, 2, shared_experts=1, device=r.x.device, dtype=torch.float16)(
            r.x
        ),
        TypeError,
        "^x: expected dtype float16 like w_up, got bfloat16",
    ),
    "module fed another dtype": (
        lambda r: guild.MoE(H, I, E, 2, device=r.x.device, dtype=torch.float16)(r.x),
        TypeError,
        "x: expected dtype float16 like w_up, got bfloat16",
    ),
    "router of more experts": (
        lambda r: layer_with(r, weight=torch.zeros(E + 2, H, dtype=r.x.dtype)),
        ValueError,
        r"^router\.weight: expected shape \(4, 32\), got \(6, 32\)",
    ),
    "router of fewer experts": (
        lambda r: layer_with(r, weight=torch.zeros(E - 1, H, dtype=r.x.dtype)),
        ValueError,
        r"^router\.weight: expected shape \(4, 32\), got \(3, 32\)",
    ),
    "router of another width": (
        lambda r: layer_with(r, weight=torch.zeros(E, H + 1, dtype=r.x.dtype)),
        ValueError,
        r"^router\.weight: expected shape \(4, 32\), got \(4, 33\)",
    ),
    "router of another dtype": (
        lambda r: layer_with(r, weight=torch.zeros(E, H)),
        TypeError,
        r"^router\.weight: expected dtype bfloat16 like x, got float32",
    ),
    "selection bias of more experts": (
        lambda r: layer_with(r, "sigmoid", selection_bias=torch.zeros(E + 1)),
        ValueError,
        r"^router\.selection_bias: expected shape \(4,\), got \(5,\)",
    ),
}
