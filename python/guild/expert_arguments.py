"""Checks the arguments of expert layers and turns them into what the ops take."""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.checks import (
    MOST_EXPERTS,
    expect_device,
    expect_dims,
    expect_flag,
    expect_floating,
    expect_indices,
    expect_like,
    expect_offsets,
    expect_rows,
    expect_shape,
    expect_tensor,
)
from guild._torch.expert_lists import (
    Listed,
    Placed,
    is_pair,
    joined,
    joined_halves,
    table_of,
    touching,
)
from guild._torch.gradient_targets import decided, wanting
from guild._torch.layer_arguments import Halves, expect_out
from guild._torch.low_rank import LowRank
from guild._torch.operators import LayerFlags, autocast
from guild.activations import is_interleaved
from guild.lora import LoRA, LoRAHalves, low_rank
from guild.weight_gradients import Sink, WeightGradients, expect_sink


def expect_routing(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, token_offsets: Tensor | None
) -> None:
    """Raise unless ids and weights fit x's tokens, as `routed_experts` takes them."""
    if token_offsets is None:
        expect_dims("topk_ids", topk_ids, 2, what="(tokens, top_k)")
        if not 1 <= topk_ids.shape[1] <= MOST_EXPERTS:
            raise ValueError(
                f"topk_ids: expected 1 to {MOST_EXPERTS} experts per token, got shape "
                f"{tuple(topk_ids.shape)}"
            )
    else:
        expect_tensor("token_offsets", token_offsets)
        expect_dims("topk_ids", topk_ids, 1, what="(slots,) with token_offsets")
        expect_offsets("token_offsets", token_offsets, x)
        expect_shape("token_offsets", token_offsets, (x.shape[0] + 1,))
    expect_indices("topk_ids", topk_ids, x, torch.int32, torch.int64)
    if token_offsets is None and topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_ids: expected {x.shape[0]} tokens as in x, got shape {tuple(topk_ids.shape)}"
        )
    expect_shape("topk_weights", topk_weights, tuple(topk_ids.shape))
    expect_device("topk_weights", topk_weights, x)
    expect_floating("topk_weights", topk_weights)


def expect_backward_options(recompute: bool, weight_gradients: WeightGradients | None) -> None:
    """Raise TypeError if the type of one is wrong, even where no gradient is wanted."""
    expect_flag("recompute", recompute)
    if weight_gradients is not None:
        expect_sink(weight_gradients)


def low_rank_terms(
    lora_up: LoRA | LoRAHalves | None, lora_down: LoRA | None, x: Tensor, layer: list
) -> LowRank | None:
    """The low-rank terms, checked, in the dtype of x, which is already cast."""
    if lora_up is None and lora_down is None:
        return None
    _, w_gate, w_down, _, _, *flags = layer
    return low_rank(lora_up, lora_down, x, w_down, LayerFlags(*flags), w_gate is not None)


def residual_like(residual: Tensor | None, x: Tensor) -> Tensor | None:
    """The residual, checked but for its strides, in the autocast dtype, which x already has."""
    if residual is None:
        return None
    expect_shape("residual", residual, tuple(x.shape), "(tokens, hidden)")
    _, residual = autocast(x, residual)
    expect_like("residual", residual, x)
    return residual


def residual_of(residual: Tensor | None, x: Tensor) -> Tensor | None:
    """`residual_like`, with rows as the kernels read them."""
    residual = residual_like(residual, x)
    if residual is not None:
        expect_rows("residual", residual)
    return residual


def expect_output(
    out: Tensor,
    keep: bool,
    x: Tensor,
    layer: list,
    x_name: str = "x",
    lists: tuple | None = None,
    **operands: Tensor | None,
) -> None:
    """Raise unless the layer's output can be written to out; keep: as `sink_of` returns it.

    lists: the caller's weights, if one is a list whose strided view spans other memory too.
    """
    if lists is not None and isinstance(out, Tensor):
        w_up, w_down, *_ = lists
        operands |= touching(out, "w_up", w_up) | touching(out, "w_down", w_down)
        layer = [None, None, None, *layer[3:]]
    expect_out(out, x, layer, x_name, **operands)
    if keep:  # a gradient bypasses autograd, or is that of tensors in a list, say
        raise ValueError(
            "out: expected None since a weight, a bias or a LoRA term requires a gradient (or call "
            "under torch.no_grad())"
        )


def whole_of(
    w_up: Listed | Halves,
    w_down: Listed,
    b_up: Listed | Halves | None,
    b_down: Listed | None,
    weight_gradients: WeightGradients | None,
) -> tuple[tuple, Tensor | None]:
    """Weights and biases with each list of experts' tensors as one tensor, and `experts_at`.

    `experts_at` tells the ops where the tensors of unevenly spaced lists lie.
    """
    given = w_up, w_down, b_up, b_down
    if all(value is None or isinstance(value, Tensor) for value in given):  # the usual case
        return given, None
    attached = weight_gradients is None  # otherwise autograd reaches the list's tensors directly
    up = joined_halves("w_up", w_up, 2, attached)
    down = joined("w_down", w_down, 2, attached)
    biases = joined_halves("b_up", b_up, 1, attached), joined("b_down", b_down, 1, attached)
    whole = tuple(_tensors(value) for value in (up, down, *biases))
    gate, up = (None, up) if isinstance(up, Placed) else up
    return whole, table_of(up, gate, down)


def _tensors(value: Placed | tuple[Placed, ...]) -> Tensor | tuple[Tensor, ...]:
    return value.tensor if isinstance(value, Placed) else tuple(half.tensor for half in value)


def sink_of(
    wanted: bool, weight_gradients: WeightGradients | None, given: tuple, order: str
) -> tuple[bool, Sink | None]:
    """Whether the layer's backward will run, and where its weight gradients go if not to autograd.

    wanted: something that autograd sees wants a gradient; given: the weights and biases as the
    caller gave them.
    """
    if not torch.is_grad_enabled():
        return False, None
    if weight_gradients is None:
        return wanted, None
    parameters, reached = _parameters(weight_gradients, *given, order)
    if not wanted and not wanting(reached):
        return False, None
    return True, Sink(weight_gradients, decided(parameters), reached)


def _parameters(
    weight_gradients: WeightGradients,
    w_up: Listed | Halves,
    w_down: Listed,
    b_up: Listed | Halves | None,
    b_down: Listed | None,
    order: str,
) -> tuple[tuple[Listed | None, ...], list[Tensor]]:
    """The parameters: w_up, its gate if that is apart, w_down, b_up, b_down.

    Also those of them that autograd should reach: see `WeightGradients.reached_by_autograd`.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "weight_gradients: expected None under torch.func's transforms, which return gradients "
            "whereas it writes them to parameters"
        )
    w_gate = None
    if is_pair(w_up):
        w_gate, w_up = w_up
        if b_up is not None and is_interleaved(order):
            raise ValueError(
                "order: expected 'concatenated' for the bias of a pair of weights with "
                f"weight_gradients, got {order!r}"
            )
    if is_pair(b_up, 1):
        raise ValueError("b_up: expected one tensor with weight_gradients, got a pair")
    parameters = w_up, w_gate, w_down, b_up, b_down
    weight_gradients.expect_targets(parameters)
    return parameters, weight_gradients.reached_by_autograd(parameters)
