"""A layer's tokens, what its router decides about them, and what it may keep of that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from guild._torch.checks import (
    dtype_name,
    expect_choice,
    expect_count,
    expect_device,
    expect_flag,
    expect_like,
    expect_out_apart,
    expect_shape,
    expect_tensor,
    has_plain_rows,
)
from guild._torch.operators import autocast
from guild.balancing import balance_sums
from guild.logits import RouterLinear, addable
from guild.rounding import round_tokens
from guild.routing import ROUTERS, Router, route_logits, route_tokens, token_flags

BALANCE_OVER = (None, "batch", "sequence")


class Routing(NamedTuple):
    """What a layer's router decided: `layer(x, return_routing=True)`.

    Scores and logits are differentiable. With token rounding in training, tokens have lists of
    experts of any length, as `guild.round_tokens` makes them.

    Attributes
    ----------
    ids : torch.Tensor
        int32 (..., top_k), best first, -1 at padding; (slots,) with lists.
    scores : torch.Tensor
        float32 (float64 in float64) of the same shape: the weights.
    logits : torch.Tensor
        (..., experts), float32 (float64 in float64) unless the router is your own module; 0 at
        padding.
    token_offsets : torch.Tensor or None
        int32 (tokens + 1) with lists.
    """

    ids: Tensor
    scores: Tensor
    logits: Tensor
    token_offsets: Tensor | None = None


def as_router(router: Router | str | None, experts: int, top_k: int) -> Router:
    """The Router that a layer's argument gives, by name or not; checked against the sizes."""
    if isinstance(router, str):
        expect_choice("router", router, ROUTERS)
        router = Router.named(router)
    if not isinstance(router, Router | None):
        raise TypeError(f"router: expected a guild.Router or a name, got {router!r}")
    router = router or Router()
    router.expect_sizes(experts, top_k)
    return router


def expect_call(layer: nn.Module, return_routing: object) -> None:
    """Raise for a flag that is no bool, or for attributes of a layer that no longer fit it."""
    if not isinstance(layer.routing, Router):
        raise TypeError(f"routing: expected a guild.Router, got {layer.routing!r}")
    if layer.router is None:
        raise TypeError("router: expected a torch.nn.Module, got None")
    expect_count("hidden", layer.hidden, 1)
    expect_count("experts", layer.experts, 1)
    expect_count("top_k", layer.top_k, 1, layer.experts)
    layer.routing.expect_sizes(layer.experts, layer.top_k)
    expect_choice("balance_over", layer.balance_over, BALANCE_OVER)
    expect_flag("return_routing", return_routing)


def choices(
    layer: nn.Module,
    x: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    shape: torch.Size,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids and scores of x, and token_offsets of rounded lists; sets the layer's `balance_sums`.

    logits: None where only ids and scores are needed. bias: of the choice. shape: of the tokens.
    """
    router: Router = layer.routing
    if logits is None:
        operands = router_operands(x, layer.router, layer.experts)
        return *route_tokens(*operands, layer.top_k, router, bias, token_mask), None
    ids, scores = route_logits(logits, layer.top_k, router, bias, token_mask)
    if not layer.training:
        return ids, scores, None
    over = layer.balance_over
    if over is not None:
        sequences = max(shape[:-1].numel(), 1) if over == "sequence" else 1
        sums = balance_sums(
            logits, ids, score=router.score, sequences=sequences, token_mask=token_mask
        )
        if not is_exporting():
            layer._balance_sums = None if is_transformed() else sums
    if router.rounding is None:
        return ids, scores, None
    return rounded_lists(logits, ids, router)


def is_router_plain(layer: nn.Module) -> bool:
    """Whether calling the router would compute x weight^T + bias and nothing else."""
    router = layer._modules.get("router")  # bypasses __getattr__, which is slow
    return isinstance(router, RouterLinear) and router.is_plain()


def shaped_like(rows: Tensor, x: Tensor) -> Tensor:
    """Rows in the shape of x: themselves where that has rows, too, as FSDP2 warns of views."""
    return rows if x.dim() == 2 else rows.view(x.shape)


def layer_tokens(
    x: Tensor, token_mask: Tensor | None, hidden: int, w_up: Tensor
) -> tuple[Tensor, Tensor | None]:
    """x as (tokens, hidden) in the products' dtype, zero at padding, and the mask as (tokens,).

    Raises TypeError or ValueError unless x and the mask fit the layer and each other.
    """
    expect_tensor("x", x)
    expect_tensor("w_up", w_up)
    if x.dim() == 0 or x.shape[-1] != hidden:
        raise ValueError(f"x: expected shape (..., {hidden}) (hidden), got {tuple(x.shape)}")
    expect_device("x", x, w_up, "w_up")
    flat = x.reshape(-1, hidden)
    if token_mask is not None:
        expect_shape("token_mask", token_mask, tuple(x.shape[:-1]))
        token_mask = token_flags(token_mask.reshape(-1), flat, "x")
    if not has_plain_rows(flat):  # reshape has already copied an x of more dimensions
        flat = flat.contiguous()
    (flat,) = autocast(flat)
    if flat.dtype != w_up.dtype:
        _, sample = autocast(flat, w_up.detach()[:0])
        if flat.dtype != sample.dtype:
            source = "like w_up" if sample.dtype is w_up.dtype else "under autocast"
            raise TypeError(
                f"x: expected dtype {dtype_name(sample.dtype)} {source}, got {dtype_name(x.dtype)}"
            )
    if token_mask is not None:
        # Gradients are zero there, but zero times NaN in x would be NaN in weights' gradients.
        flat = flat.masked_fill(~token_mask[:, None], 0)
    return flat, token_mask


def output_rows(out: Tensor, x: Tensor, layer: nn.Module) -> Tensor:
    """The caller's tensor for a layer's output, as (tokens, hidden).

    Raises TypeError or ValueError unless it has x's shape, can be viewed that way and shares no
    memory with the layer's router or shared experts; other operands are checked with the experts.
    """
    expect_shape("out", out, tuple(x.shape), "the shape of x")
    parts = ("router.", "shared.")
    expect_out_apart(out, (one for one in layer.named_parameters() if one[0].startswith(parts)))
    if out.dim() == 2:
        return out
    if not out.is_contiguous():
        raise ValueError(f"out: expected a contiguous tensor, got strides {out.stride()}")
    return out.view(x.shape[:-1].numel(), x.shape[-1])


def router_operands(
    x: Tensor, router: nn.Module, experts: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x (tokens, hidden) and the router's weight and bias as the product takes them.

    Raises TypeError or ValueError unless the parameters fit x and the layer's experts.
    """
    expect_shape(
        "router.weight", router.weight, (experts, x.shape[1]), "(experts, hidden) of the layer"
    )
    x, weight = autocast(x, router.weight)
    expect_like("router.weight", weight, x)
    if router.bias is None:
        return x, weight, None
    expect_shape("router.bias", router.bias, (experts,), "(experts,) of the layer")
    expect_device("router.bias", router.bias, x)
    return x, weight, addable(router.bias, x)


def rounded_lists(logits: Tensor, ids: Tensor, router: Router) -> tuple[Tensor, Tensor, Tensor]:
    """`guild.round_tokens` with the options of a Router."""
    return round_tokens(
        logits,
        ids,
        rounding=router.rounding,
        tile=router.tile,
        score=router.score,
        renormalize=router.renormalize,
        scale=router.scale,
        sum_floor=router.sum_floor,
    )


def is_exporting() -> bool:
    """Whether torch.export is tracing."""
    # Not torch.compiler.is_exporting(): under torch 2.11 that is true in torch.compile, too.
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_transformed() -> bool:
    """Whether torch.func.grad or vmap runs this call: its tensors cannot be kept."""
    return torch._C._are_functorch_transforms_active()
