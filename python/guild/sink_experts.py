"""Experts whose weights' gradients go to a `guild.WeightGradients`, instead of through autograd."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guild._torch.autograd import expect_one_backward, rows_of, with_lists, without_lists
from guild._torch.expert_lists import Listed, Placed, table_of
from guild._torch.gradient_targets import decided, in_one_dtype, unwanted, wanting
from guild._torch.gradients import pre_activations, wanted_bits
from guild._torch.operators import LayerFlags, ops
from guild._torch.router_gradients import Weighing, router_gradients
from guild._torch.row_routing import RowRouting
from guild._torch.versions import Versions
from guild.weight_gradients import Sink, WeightGradients

_LAYER = 5 + len(LayerFlags._fields)  # arguments of a layer: weights, biases, flags


class Unchanged:
    """Tensors that the layer does not own, and their versions when backward used them."""

    def __init__(
        self, x: Tensor | None, dout: Tensor | None, offsets: Tensor | None = None
    ) -> None:
        x_name = "x" if offsets is None else "x_sorted"
        named = ((x_name, x), ("the output's gradient", dout), ("offsets", offsets))
        # Writes to tensors of inference mode are not counted.
        tensors = [(name, t) for name, t in named if t is not None and not t.is_inference()]
        self._tensors = [(name, t, t._version) for name, t in tensors]

    def expect_unchanged(self) -> None:
        """Raise RuntimeError naming a tensor that was overwritten."""
        for name, tensor, version in self._tensors:
            if tensor._version != version:
                raise RuntimeError(
                    f"{name}: expected to find it as backward left it (version {version}) in "
                    f"WeightGradients.compute(), got one overwritten since (version "
                    f"{tensor._version}); overwrite a copy, or call compute() first"
                )


def experts_with_sink(
    sink: Sink,
    recompute: bool,
    x: Tensor,
    layer: list[Any],
    *,
    router_weight: Tensor | None = None,
    router_bias: Tensor | None = None,
    router: tuple | None = None,
    ids: Tensor | None = None,
    scores: Tensor | None = None,
    token_offsets: Tensor | None = None,
    residual: Tensor | None = None,
    offsets: Tensor | None = None,
    experts_at: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The layer's output and offsets, of tokens or of rows that offsets say are sorted.

    layer: weights, biases and flags in the ops' order; router: the arguments of route_tokens after
    the bias, for tokens without ids and scores; experts_at: for weights that are lists.
    """
    return _Experts.apply(
        sink.gradients,
        sink.parameters,
        recompute,
        x,
        router_weight,
        router_bias,
        router,
        ids,
        scores,
        token_offsets,
        residual,
        offsets,
        experts_at,
        *layer,
        *sink.reached,
    )


class _Experts(torch.autograd.Function):
    """The expert layer in steps, on tokens (ids, scores, token_offsets) or on sorted rows.

    With `router`, the arguments of route_tokens after the bias, the whole layer: see
    guild::moe_layer.
    """

    @staticmethod
    def forward(
        ctx,
        sink,
        parameters,
        recompute,
        x,
        router_weight,
        router_bias,
        router,
        ids,
        scores,
        token_offsets,
        residual,
        offsets,
        experts_at,
        *layer,
    ):
        """(out, offsets) of `routed_experts` (ids, scores) or of `experts_mlp` (offsets).

        The layer is followed by the parameters that autograd must reach: `reached_by_autograd`.
        """
        layer, reached = layer[:_LAYER], layer[_LAYER:]
        w_up, w_gate, w_down, b_up, b_down, *flags = layer
        row_token = slot_row = row_score = None
        routed = ()
        if router is not None:
            scores, ids, slopes = ops.route_tokens(x, router_weight, router_bias, *router)
            ctx.weighing = Weighing.of(router[3:])
            routed = router_weight, router_bias, scores, ids, ctx.weighing.kept(slopes)
        if offsets is None:
            out, h, offsets, row_token, slot_row, row_score = ops.moe_forward(
                x, ids, scores, token_offsets, residual, *layer, not recompute, experts_at
            )
        else:
            out, h = ops.experts_forward(x, offsets, *layer, not recompute, experts_at)
        ctx.sink, ctx.parameters, ctx.flags = sink, parameters, LayerFlags(*flags)
        ctx.kept = not recompute
        rows = offsets, row_token, slot_row, row_score, token_offsets
        ctx.reached, ctx.versions = reached, Versions("weights", reached)
        weights = without_lists(ctx, experts_at, w_up, w_gate, w_down)
        ctx.save_for_backward(x, h, *rows, *weights, b_up, b_down, *routed)
        ctx.mark_non_differentiable(offsets)
        ctx.set_materialize_grads(False)
        return out, offsets

    @staticmethod
    def backward(ctx, dout, _):
        """dX, dscores and the router's gradient; the weight gradients go to the sink."""
        expect_one_backward(dout)
        if dout is None:
            return (None,) * (13 + _LAYER + len(ctx.reached))
        ctx.versions.expect_unchanged()
        x, h, *rest = ctx.saved_tensors
        rows, rest = RowRouting(*rest[:5]), rest[5:]
        w_up, w_gate, w_down = with_lists(ctx, *rest[:3])
        b_up, b_down, *routed = rest[3:]
        want_x, *want_router, _, _, want_scores, _, want_residual = ctx.needs_input_grad[3:11]
        want_scores = want_scores or (bool(routed) and (want_x or any(want_router)))
        lists = ctx.experts_at
        again = x, rows.offsets, rows.row_token, w_up, w_gate, b_up, ctx.flags, lists
        h = pre_activations(h, ctx.kept, *again)
        dresidual = dout if want_residual else None
        dout = rows_of(dout)
        given = parameters = decided(ctx.parameters)
        biases = None, None
        if not ctx.sink.delayed:  # the op that makes dH sums those of the biases, too
            biases = parameters[3:]
            parameters = *parameters[:3], None, None
        wanted = wanted_bits(want_x, want_scores, by_row=bool(routed))
        with ctx.sink._targets(dout.dtype, 3, *biases, alike=True) as (biases, add):
            db = [bias and bias.tensor for bias in biases]
            dx, dscores, dh, a = ops.data_gradients(
                dout, h, *rows, w_up, w_gate, w_down, b_down, *ctx.flags, wanted, *db, add, lists
            )
        dx, dscores = dx if want_x else None, dscores if want_scores else None
        drouter = None, None
        if routed and dscores is not None:
            operands, routed = (x, *routed[:2]), routed[2:]
            dx, *drouter = router_gradients(
                dx, rows.slot_row, dscores, routed, operands, ctx.weighing, want_router
            )
            dscores = None
        borrowed = Unchanged(x, dout, rows.offsets if rows.slot_row is None else None)
        operands = Operands(x, dout, dh, a, rows.offsets, rows.row_token, rows.row_score)
        check = partial(expect_computable, ctx.sink, given, borrowed)
        ctx.sink.take(given, check, gradient_steps(ctx.sink, parameters, ctx.flags, operands))
        late = ctx.sink.gradients_without_meaning(ctx.reached)
        layer = (None,) * (2 + _LAYER)
        scores = None, None, dscores, None
        return None, None, None, dx, *drouter, *scores, dresidual, *layer, *late


class Operands(NamedTuple):
    """What weight gradients are computed from."""

    x: Tensor  # (T, H), or (R, H) without row_token
    dout: Tensor  # the same
    dh: Tensor  # (R, W)
    a_scaled: Tensor  # (R, I)
    offsets: Tensor  # (E + 1)
    row_token: Tensor | None  # (R)
    row_score: Tensor | None  # (R)


def expect_computable(
    sink: WeightGradients, parameters: tuple[Listed | None, ...], borrowed: Unchanged
) -> None:
    """Raise if gradients cannot be written, or what they are computed from was overwritten."""
    sink.expect_targets(parameters)
    borrowed.expect_unchanged()


def gradient_steps(
    sink: WeightGradients,
    parameters: tuple[Listed | None, ...],
    flags: LayerFlags,
    operands: Operands,
) -> list[partial]:
    """dW and db of one backward pass, into the sink's targets."""
    weights = partial(_compute_weights, sink, parameters[:3], flags, operands)
    return [weights, *bias_steps(sink, *parameters[3:], operands)]


def bias_steps(
    sink: WeightGradients, b_up: Listed | None, b_down: Listed | None, operands: Operands
) -> list[partial]:
    """db of one backward pass, into the sink's targets."""
    _, dout, dh, _, offsets, row_token, row_score = operands
    down = partial(_compute_bias, sink, 4, b_down, dout.dtype)
    up = partial(_compute_bias, sink, 3, b_up, dout.dtype)
    return [
        partial(down, dout, offsets, row_token, row_score),
        partial(up, dh, offsets, None, None),
    ]


@torch.no_grad()
def _compute_bias(
    sink: WeightGradients,
    place: int,
    bias: Listed | None,
    dtype: torch.dtype,
    *sums: Tensor | None,
) -> list[partial]:
    later: list[partial] = []
    with sink._targets(dtype, place, bias, later=later) as ((target,), add):
        if target is not None:
            ops.bias_gradient_out(*sums, target.tensor, add)
    return later


class _SeveralProducts(Exception):  # noqa: N818 - not an error
    """These gradients are not written by one call of the op."""


@torch.no_grad()
def _compute_weights(
    sink: WeightGradients,
    weights: tuple[Listed | None, ...],
    flags: LayerFlags,
    operands: Operands,
) -> list[partial]:
    """dW1 and dW2, in one call with one schedule if both are written alike.

    Otherwise a step is returned for each call, so that none is repeated if a later one fails.
    """
    w_up, w_gate, w_down = weights
    dtype, later = operands.dout.dtype, []
    down_to = sink._targets(dtype, 2, w_down, later=later)
    up_to = sink._targets(dtype, 0, w_up, w_gate, later=later)
    try:
        with down_to as downs, up_to as ups:
            products = _products(weights, ups, downs)
            if len(products) > 1:
                raise _SeveralProducts
            for gradients, add in products:
                dw = [g and g.tensor for g in gradients]
                lists = table_of(*gradients)
                rows = operands[:6]  # without the scores
                ops.weight_gradients_out(*rows, *dw, *flags.up_weight(), add, lists)
    except _SeveralProducts:
        return [partial(_compute_weights, sink, part, flags, operands) for part in _parts(weights)]
    return later


def _products(
    weights: tuple[Listed | None, ...],
    ups: tuple[list[Placed | None], bool],
    downs: tuple[list[Placed | None], bool],
) -> list[tuple[tuple[Placed | None, ...], bool]]:
    """What each call of the op writes, (up, gate, down), and whether it adds to it."""
    w_up, w_gate, w_down = weights
    ((up, gate), add_up), ((down,), add_down) = ups, downs
    pairs = in_one_dtype(w_up, w_gate, up, gate)
    up = pairs[0][0]
    together = (
        up is not None
        and down is not None
        and len(pairs) == 1
        and (add_up, up.tensor.dtype) == (add_down, down.tensor.dtype)
        and not {id(t) for t in wanting((w_up, w_gate))} & {id(t) for t in wanting((w_down,))}
    )
    if together:
        return [((*pairs[0], down), add_up)]
    products = [((None, None, down), add_down), *(((*pair, None), add_up) for pair in pairs)]
    return [(to, add) for to, add in products if any(t is not None for t in to)]


def _parts(weights: tuple[Listed | None, ...]) -> list[tuple[Listed | None, ...]]:
    """The weights in two groups, of which one call of the op cannot write both."""
    w_up, w_gate, w_down = weights
    if wanting((w_down,)) and wanting((w_up, w_gate)):
        return [(None, None, w_down), (w_up, w_gate, None)]
    return [(w_up, unwanted(w_gate), None), (unwanted(w_up), w_gate, None)]
