"""The expert MLP, on tokens with their expert ids or on rows already sorted by expert."""

from __future__ import annotations

from torch import Tensor

from guild._torch.checks import expect_dims, expect_offsets, expect_out_apart, expect_shape
from guild._torch.expert_lists import Listed
from guild._torch.gradient_targets import wanting
from guild._torch.layer_arguments import Halves, layer_arguments
from guild._torch.layer_operator import experts_forward_out, moe_forward_out, moe_layer_out
from guild._torch.operators import ops
from guild._torch.row_routing import RowRouting
from guild.activations import Activation
from guild.expert_arguments import (
    expect_backward_options,
    expect_output,
    low_rank_terms,
    residual_of,
    sink_of,
    whole_of,
)
from guild.float8.checkpoints import (
    are_codes,
    expect_no_gradient,
    routed_experts_of_codes,
)
from guild.float8.experts import (
    FP8Weights,
    expect_alone,
    routed_experts_in_fp8,
    routed_layer_in_fp8,
)
from guild.float8.settings import FP8
from guild.lora import LoRA, LoRAHalves, factors_of
from guild.lora_experts import experts_with_lora, sorted_rows
from guild.routed_call import RoutedArguments, RoutedCall, routed_call
from guild.routed_experts_fast_path import quick_experts
from guild.routing import Router, token_arguments
from guild.sink_experts import experts_with_sink
from guild.weight_gradients import WeightGradients

_moe_forward = ops.moe_forward.default
_moe_layer = ops.moe_layer.default
_experts_forward = ops.experts_forward.default


def routed_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Listed | Halves,
    w_down: Listed,
    b_up: Listed | Halves | None = None,
    b_down: Listed | None = None,
    *,
    activation: Activation | str = "silu",
    order: str = "concatenated",
    transposed: bool = False,
    token_offsets: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: bool = False,
    weight_gradients: WeightGradients | None = None,
    lora_up: LoRA | LoRAHalves | None = None,
    lora_down: LoRA | None = None,
    out: Tensor | None = None,
    expert_map: Tensor | None = None,
    fp8: FP8 | FP8Weights | None = None,
) -> Tensor:
    """Run every token through its chosen experts and sum their results with its weights.

        out[t] = sum over k of topk_weights[t, k] * (act(x[t] W1[e]^T + b1[e]) W2[e]^T + b2[e])

    with e = topk_ids[t, k]. Sorting, gather, both products, activation and combine are one op, and
    so is backward, for which x, the pre-activations and the routing are kept. The host never waits
    for the GPU; two runs give the same bits.

    Parameters
    ----------
    x : torch.Tensor
        (tokens T, hidden H): bfloat16 or float16; on the CPU float32 and float64 too. Rows may be
        more than H elements apart.
    topk_ids : torch.Tensor
        (T, K) int32 or int64: experts of each token, K from 1 to 4,096. Ids outside [0, E) are
        skipped, forward and backward.
    topk_weights : torch.Tensor
        (T, K), any floating dtype; used in float32 (float64 if x is).
    w_up : torch.Tensor or (torch.Tensor, torch.Tensor)
        (E, 2I, H) gate and up in the given order, (E, I, H) without a gate; or a pair (gate, up) of
        (E, I, H) each. In x's dtype; any strides on the CPU, one of the last two dimensions
        contiguous on a GPU, the same one in both halves of a pair. Read in place.
    w_down : torch.Tensor
        (E, H, I). E is 1 to 4,096, on a GPU 1 to 1,024.

        Weights may instead be codes, a `Quantized` of float8_e4m3fn with blocks of 128 x 128, as in
        FP8 checkpoints: w_up as a pair (gate, up) of (E, I, H), or as one (E, 2I, H) if 128 divides
        I. They are read in place, x is quantised at each call, and there is no gradient.

        Any weight or bias, or half of a pair, may be a list of E tensors, one per expert, each of
        which gets its own gradient. Weights are read in place wherever they lie. They are copied
        into one tensor at each call inside torch.compile and under torch.func's transforms and,
        with a `CopiedWeightsWarning`, if their strides differ, on a GPU if they are not 16-byte
        aligned, and under an autocast that casts them if they are unevenly spaced.
    b_up : torch.Tensor or (torch.Tensor, torch.Tensor), optional
        (E, 2I) in the given order, (E, I) without a gate; or a pair of (E, I).
    b_down : torch.Tensor, optional
        (E, H).
    activation : Activation or str
        See `Activation` for the names.
    order : {"concatenated", "interleaved"}
        Whether the 2I outputs are gate_0 .. gate_{I-1}, up_0 .. or gate_0, up_0, gate_1, ...; with
        a pair of weights this applies to b_up alone. Codes take "concatenated".
    transposed : bool
        Weights are (E, H, 2I) and (E, I, H) instead; not with codes.
    token_offsets : torch.Tensor, optional
        int32 (T + 1): tokens have lists of experts of any length, as `guild.round_tokens` makes
        them. topk_ids and topk_weights are then (slots,): token t has the slots from
        token_offsets[t] up to token_offsets[t + 1] (exclusive), and slots from token_offsets[T] on
        are not used.
    residual : torch.Tensor, optional
        (T, H), in x's dtype: added to each token's sum before it is rounded.
    recompute : bool
        Keep only x for backward, which computes the pre-activations, 2 T K I values, again with one
        more up projection.
    weight_gradients : WeightGradients, optional
        Where and when the gradients of weights and biases are written. Default: autograd's `.grad`,
        in backward. If given, the weights must be parameters themselves, and b_up one tensor.
    lora_up : LoRA or (LoRA, LoRA), optional
        A low-rank term of the up projection, with as many outputs as w_up; for a pair of weights a
        pair (gate, up), either of which may be None. No delta of a weight's size is made, forward
        or backward.
    lora_down : LoRA, optional
        The same for the down projection.
    out : torch.Tensor, optional
        Tensor to write the result to and return: (T, H) in the result's dtype, columns contiguous,
        sharing no memory with an input. It has no gradient: an error if one is wanted, unless under
        no_grad().
    expert_map : torch.Tensor, optional
        int32 (experts of all ranks): maps the ids in topk_ids to experts in these weights, or to -1
        for experts of other ranks, whose slots are skipped.
    fp8 : FP8 or FP8Weights, optional
        Run the products in FP8, with weights quantised in this call (`FP8`) or before
        (`FP8Weights`), not FP8(cached=True). x must be bfloat16 or float16; weights may be float32
        too. Not with low-rank terms.

    Returns
    -------
    torch.Tensor
        (T, H) in x's dtype; the autocast dtype under autocast.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    NotImplementedError
        For low-rank terms with fp8 or codes, for weight_gradients with codes, for out or
        weight_gradients under torch.func's transforms, and under forward-mode AD.

    Notes
    -----
    Gradients flow to x, topk_weights, weights, biases, residual and low-rank terms, each in its own
    dtype, and nothing is computed for inputs that want none, such as frozen weights. The method is
    SonicMoE's (arXiv:2512.14080, section 3).
    """
    if (
        token_offsets
        is weight_gradients
        is lora_up
        is lora_down
        is out
        is expert_map
        is fp8
        is None
        and recompute is False
    ):
        weights, layout = (w_up, w_down, b_up, b_down), (activation, order, transposed)
        found = quick_experts(x, topk_ids, topk_weights, *weights, *layout, residual)
        if found is not None:
            return found[0]
    given = RoutedArguments(
        x=x,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        w_up=w_up,
        w_down=w_down,
        b_up=b_up,
        b_down=b_down,
        activation=activation,
        order=order,
        transposed=transposed,
        token_offsets=token_offsets,
        residual=residual,
        recompute=recompute,
        weight_gradients=weight_gradients,
        lora_up=lora_up,
        lora_down=lora_down,
        out=out,
        expert_map=expert_map,
        fp8=fp8,
    )
    return routed_experts_and_offsets(given)[0]


def routed_experts_and_offsets(given: RoutedArguments) -> tuple[Tensor, Tensor]:
    """`routed_experts`, and the int32 (E + 1) offsets of the sorted rows."""
    if are_codes(given.w_up, given.w_down):
        expect_alone(
            lora_up=given.lora_up,
            lora_down=given.lora_down,
            weight_gradients=given.weight_gradients,
        )
        weights = given.w_up, given.w_down, given.b_up, given.b_down
        expect_no_gradient(given.x, given.topk_weights, given.residual, *weights)
        expect_backward_options(given.recompute, None)
        return routed_experts_of_codes(given)
    if given.fp8 is not None:
        expect_alone(lora_up=given.lora_up, lora_down=given.lora_down)
        return routed_experts_in_fp8(given)
    call = routed_call(given)
    if isinstance(given.out, Tensor):  # ops may read copies of the factors
        expect_out_apart(given.out, factors_of(given.lora_up, given.lora_down))
    return run_routed(call, given.recompute, given.weight_gradients, given.out)


def run_routed(
    call: RoutedCall,
    recompute: bool,
    weight_gradients: WeightGradients | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`routed_experts_and_offsets` of checked arguments."""
    x, ids, scores, token_offsets, residual, layer, low, given, order, _, experts_at = call
    keep, sink = sink_of(call.wants_gradient(), weight_gradients, given, order)
    if out is not None:
        slots = {"topk_ids": ids, "topk_weights": scores, "token_offsets": token_offsets}
        lists = None if experts_at is None else given
        expect_output(out, keep, x, layer, lists=lists, residual=residual, **slots)
        if low is None:
            offsets = moe_forward_out(
                x, ids, scores, token_offsets, residual, *layer, out, experts_at
            )
            return out, offsets
    if low is not None:
        routing = sorted_rows(ids, scores, layer[2].shape[0], token_offsets)
        rows = experts_with_lora(
            x, scores, residual, layer, low, routing, keep, recompute, sink, experts_at
        )
        return rows if out is None else out.copy_(rows), routing.offsets
    if sink is not None:
        return experts_with_sink(
            sink,
            recompute,
            x,
            layer,
            ids=ids,
            scores=scores,
            token_offsets=token_offsets,
            residual=residual,
            experts_at=experts_at,
        )
    keep = keep and not recompute
    out, _, offsets, *_ = _moe_forward(
        x, ids, scores, token_offsets, residual, *layer, keep, experts_at
    )
    return out, offsets


def routed_layer(
    given: RoutedArguments,
    router_weight: Tensor,
    router_bias: Tensor | None,
    top_k: int,
    router: Router,
    selection_bias: Tensor | None,
    token_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`route_tokens` and `routed_experts_and_offsets` as one op, with one gradient for x."""
    recompute, weight_gradients, out = given.recompute, given.weight_gradients, given.out
    expect_backward_options(recompute, weight_gradients)
    product = given.x, router_weight, router_bias
    tokens = token_arguments(*product, top_k, router, selection_bias, token_mask)
    if given.fp8 is not None:
        return routed_layer_in_fp8(tokens, given)
    x, *layer, gradient = layer_arguments(
        tokens[0], *given.parameters(), *given.layout(), routed=True
    )
    residual = residual_of(given.residual, x)
    wanted = gradient or bool(wanting(product[1:]))
    keep, sink = sink_of(wanted, weight_gradients, given.parameters(), given.order)
    if out is not None:
        router_operands = {"router.weight": router_weight, "router.bias": router_bias}
        expect_output(out, keep, x, layer, residual=residual, **router_operands)
        w_up, _, *rest = layer
        return out, moe_layer_out(*tokens, residual, w_up, *rest, out)
    if sink is not None:
        return experts_with_sink(
            sink,
            recompute,
            x,
            layer,
            router_weight=router_weight,
            router_bias=router_bias,
            router=tokens[3:],
            residual=residual,
        )
    out, _, offsets, *_ = _moe_layer(*tokens, residual, *layer, keep and not recompute)
    return out, offsets


def experts_mlp(
    x_sorted: Tensor,
    offsets: Tensor,
    w_up: Listed | Halves,
    w_down: Listed,
    b_up: Listed | Halves | None = None,
    b_down: Listed | None = None,
    activation: Activation | str = "silu",
    *,
    order: str = "concatenated",
    transposed: bool = False,
    recompute: bool = False,
    weight_gradients: WeightGradients | None = None,
    lora_up: LoRA | LoRAHalves | None = None,
    lora_down: LoRA | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The expert MLP on rows that the caller has sorted by expert.

        out[r] = act(x_sorted[r] W1[e]^T + b1[e]) W2[e]^T + b2[e]    offsets[e] <= r < offsets[e+1]

    Parameters
    ----------
    x_sorted : torch.Tensor
        (rows R, hidden H), dtypes as in `routed_experts`.
    offsets : torch.Tensor
        int32 (E + 1), ascending from 0 to at most R: where each expert's rows begin, and where the
        last one's end. Rows at or past offsets[E] belong to no expert: their result and gradient
        are zero. Values are not checked, as that would wait for the GPU, but clamped: one below
        its predecessor counts as the predecessor, one above R as R. On a GPU gradients of weights
        and biases are unspecified where one is below its predecessor.
    w_up, w_down, b_up, b_down, activation, order, transposed, recompute, weight_gradients, \
lora_up, lora_down
        As in `routed_experts`, but with up to 4,096 experts on a GPU too.
    out : torch.Tensor, optional
        (R, H) in the result's dtype, otherwise as in `routed_experts`. Rows that belong to no
        expert are set to zero.

    Returns
    -------
    torch.Tensor
        (R, H) in x_sorted's dtype; the autocast dtype under autocast.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    NotImplementedError
        For out or weight_gradients under torch.func's transforms, and under forward-mode AD.
    """
    expect_dims("x_sorted", x_sorted, 2, what="(rows, hidden)")
    expect_backward_options(recompute, weight_gradients)
    given = w_up, w_down, b_up, b_down
    whole, experts_at = whole_of(*given, weight_gradients)
    x, *layer, gradient = layer_arguments(
        x_sorted, *whole, activation, order, transposed, "x_sorted"
    )
    experts = layer[2].shape[0]
    expect_offsets("offsets", offsets, x)
    expect_shape("offsets", offsets, (experts + 1,), "it holds starts and the last end")
    low = low_rank_terms(lora_up, lora_down, x, layer)
    wanted = gradient or (low is not None and low.wants_gradient())
    keep, sink = sink_of(wanted, weight_gradients, given, order)
    if out is not None:
        lists = None if experts_at is None else given
        expect_output(out, keep, x, layer, "x_sorted", lists, offsets=offsets)
        expect_out_apart(out, factors_of(lora_up, lora_down))
        if low is None:
            experts_forward_out(x, offsets, *layer, out, experts_at)
            return out
    if low is not None:
        routing = RowRouting(offsets)
        rows = experts_with_lora(
            x, None, None, layer, low, routing, keep, recompute, sink, experts_at
        )
        return rows if out is None else out.copy_(rows)
    if sink is not None:
        found = experts_with_sink(sink, recompute, x, layer, offsets=offsets, experts_at=experts_at)
        return found[0]
    return _experts_forward(x, offsets, *layer, keep and not recompute, experts_at)[0]
