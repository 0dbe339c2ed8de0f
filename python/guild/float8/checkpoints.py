"""`guild.routed_experts` with weights that are codes already, as in FP8 checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import ParameterList

from guild._torch.autograd import wants_gradient
from guild._torch.checks import (
    MOST_ROUTED_ON_CUDA,
    dtype_name,
    expect_device,
    expect_dims,
    expect_flag,
    expect_like,
    expect_rows,
    expect_shape,
    expect_tensor,
)
from guild._torch.float8_formats import as_bytes, blocks
from guild._torch.float8_steps import Codes, forward
from guild._torch.layer_arguments import expect_out, joined_bias, local_ids
from guild._torch.operators import LayerFlags, autocast, score_dtype
from guild.activations import Activation, as_activation, is_interleaved
from guild.expert_arguments import expect_routing, residual_of, whole_of
from guild.float8.experts import expect_rows_of_codes
from guild.float8.quantization import Quantized
from guild.float8.settings import FP8
from guild.routed_call import RoutedArguments


def are_codes(w_up: object, w_down: object) -> bool:
    """Whether one of them is quantised."""
    pair = w_up if type(w_up) in (tuple, list) else ()
    return any(isinstance(w, Quantized) for w in (w_up, w_down, *pair))


@torch.no_grad()
def routed_experts_of_codes(given: RoutedArguments) -> tuple[Tensor, Tensor]:
    """`guild.experts.routed_experts_and_offsets` with weights that are `Quantized`."""
    fp8, out = FP8() if given.fp8 is None else given.fp8, given.out
    if not isinstance(fp8, FP8):
        raise TypeError(f"fp8: expected guild.FP8 with quantised weights, got {type(fp8).__name__}")
    expect_dims("x", given.x, 2, what="(tokens, hidden)")
    expect_routing(given.x, given.topk_ids, given.topk_weights, given.token_offsets)
    topk_ids = local_ids(given.topk_ids, given.expert_map)
    (x,) = autocast(given.x)
    expect_rows("x", x)
    activation = as_activation(given.activation)
    expect_flag("transposed", given.transposed)
    if given.transposed or is_interleaved(given.order):
        raise ValueError(
            "order, transposed: expected 'concatenated' and False with quantised weights, got "
            f"{given.order!r} and {given.transposed!r}"
        )
    down = _codes("w_down", given.w_down, x)
    experts, hidden, size = down.codes.shape
    if x.is_cuda and experts > MOST_ROUTED_ON_CUDA:
        raise ValueError(f"w_down: expected at most {MOST_ROUTED_ON_CUDA} experts, got {experts}")
    if hidden != x.shape[1]:
        raise ValueError(f"w_down: expected {x.shape[1]} rows to match x's columns, got {hidden}")
    expect_rows_of_codes(x, size)
    halves = _halves(given.w_up, activation, (experts, size, hidden), x)
    biases = _biases(given, activation, size, (experts, hidden), x)
    residual = residual_of(given.residual, x)
    scores = given.topk_weights.to(score_dtype(x.dtype)).contiguous()
    if out is not None:
        read = {"residual": residual, "topk_ids": topk_ids, "topk_weights": scores}
        read |= {"b_up": biases[0], "b_down": biases[1], "w_down.codes": down.codes}
        read |= {f"w_up.codes[{i}]": half.codes for i, half in enumerate(halves)}
        expect_out(out, x, [], "x", **read)
    flags = LayerFlags(*activation.scalars, False, False)
    tokens = x, topk_ids.contiguous(), scores, given.token_offsets, residual
    made, _, _, routing = forward(tokens, halves, down, biases, flags, fp8.recipe(), keep=False)
    return made if out is None else out.copy_(made), routing.offsets


def expect_no_gradient(*given: object) -> None:
    """Raise ValueError if one of these tensors, in a pair, list or Quantized, wants a gradient."""
    if torch.is_grad_enabled() and any(_wants_gradient(value) for value in given):
        raise ValueError(
            "w_up, w_down: quantised weights have no gradients and hand none on; call under "
            "torch.no_grad(), or pass the weights themselves with fp8=guild.FP8()"
        )


def _wants_gradient(value: object) -> bool:
    if isinstance(value, Tensor):
        return wants_gradient(value)
    if isinstance(value, Quantized):
        return _wants_gradient(value.scales)
    return type(value) in (tuple, list, ParameterList) and any(map(_wants_gradient, value))


def _codes(name: str, weight: object, x: Tensor) -> Codes:
    """A weight's codes as bytes, and its scales, checked."""
    if not isinstance(weight, Quantized):
        raise TypeError(
            f"{name}: expected guild.Quantized like the other weights, got {type(weight).__name__}"
        )
    codes, scales, *_ = weight
    expect_dims(f"{name}.codes", codes, 3, what="(experts, out, in)")
    if codes.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"{name}.codes: expected dtype float8_e4m3fn, got {dtype_name(codes.dtype)}"
        )
    experts, out, inner = codes.shape
    if not codes.numel() or (inner > 1 and codes.stride(2) != 1):
        raise ValueError(
            f"{name}.codes: expected sizes of at least 1 and contiguous rows, got shape "
            f"{tuple(codes.shape)} with strides {codes.stride()}"
        )
    expect_shape(f"{name}.scales", scales, (experts, blocks(out), blocks(inner)))
    if scales.dtype != torch.float32:
        raise TypeError(f"{name}.scales: expected dtype float32, got {dtype_name(scales.dtype)}")
    for part, tensor in (("codes", codes), ("scales", scales)):
        expect_device(f"{name}.{part}", tensor, x)
    return Codes(as_bytes(f"{name}.codes", codes), scales)


def _halves(
    w_up: object, activation: Activation, shape: tuple[int, int, int], x: Tensor
) -> list[Codes]:
    """Gate (if there is one) and up, (E, I, H) each."""
    experts, size, hidden = shape
    if isinstance(w_up, Quantized):
        if activation.gated and size % 128:
            raise ValueError(
                "w_up: expected a pair (gate, up) of guild.Quantized, or one tensor of a multiple "
                f"of 128 rows each, got one tensor, and w_down with {size} columns: gate and up "
                "would share blocks of scales"
            )
        packed = _codes("w_up", w_up, x)
        expect_shape("w_up.codes", packed.codes, (experts, activation.width(size), hidden))
        if not activation.gated:
            return [packed]
        return [Codes(*both) for both in zip(*(t.chunk(2, 1) for t in packed), strict=True)]
    if type(w_up) not in (tuple, list) or len(w_up) != 2 or not activation.gated:
        wanted = "a pair (gate, up) of guild.Quantized" if activation.gated else "guild.Quantized"
        raise TypeError(f"w_up: expected {wanted}, got {type(w_up).__name__}")
    names = "w_up[0] (gate)", "w_up[1] (up)"
    halves = [_codes(name, half, x) for name, half in zip(names, w_up, strict=True)]
    for name, half in zip(names, halves, strict=True):
        expect_shape(f"{name}.codes", half.codes, shape)
    return halves


def _biases(
    given: RoutedArguments, activation: Activation, size: int, down: tuple[int, int], x: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """b_up (E, W) and b_down (E, H) in x's dtype."""
    _, _, b_up, b_down = whole_of(None, None, given.b_up, given.b_down, None)[0]
    if type(b_up) in (tuple, list):
        b_up = joined_bias(b_up, activation, False)
    for name, bias in (("b_up", b_up), ("b_down", b_down)):
        if bias is not None:
            expect_tensor(name, bias)
    _, *biases = autocast(x, b_up, b_down)
    shapes = (down[0], activation.width(size)), down
    for name, bias, shape in zip(("b_up", "b_down"), biases, shapes, strict=True):
        if bias is not None:
            expect_shape(name, bias, shape)
            expect_like(name, bias, x)
            expect_rows(name, bias)
    return biases[0], biases[1]
