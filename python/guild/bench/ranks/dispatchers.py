"""Layers over ranks whose tokens are sent by other libraries, to be timed beside Guild's engines.

Router and experts are Guild's in all of them. They differ in how rows get to the experts, and
results back:

    deepep            DeepEP 1 on one host: a token goes once to a rank, which adds its experts'
                      results; the host waits until it knows how many tokens come
    deepep-static     the same with room for all ranks' tokens, and without that wait
    torchtitan        its all-to-all dispatcher on NCCL: a row for each of a token's experts
    torchtitan-async  its MinimalAsyncEP: such rows through symmetric memory, without a wait

https://github.com/deepseek-ai/DeepEP, https://github.com/pytorch/torchtitan.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

import guild
from guild.bench.presets import Shape
from guild.routing import route_tokens

# The fastest of 20 (its default), 24, 32 and 48 on layers of 2,048 and 7,168 columns.
_DEEPEP_MULTIPROCESSORS = 48


class DispatchedLayer:
    """A layer's router, followed by `routed`, which a subclass defines.

    Parameters
    ----------
    shape : Shape
        Tokens of this rank, and the whole layer's sizes.
    layer : guild.MoE
        The layer whose router and weights it uses: this rank's experts.
    """

    def __init__(self, shape: Shape, layer: guild.MoE) -> None:
        self.shape, self.layer = shape, layer

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, hidden) of this rank's tokens."""
        layer = self.layer
        router = layer.router.weight, None, layer.top_k, layer.routing, None, None
        return self.routed(x, *route_tokens(x, *router))

    def routed(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """Sums of the results of each token's experts, with all experts' ids."""
        raise NotImplementedError


class DeepEPLayer(DispatchedLayer):
    """A layer with DeepEP's kernels between the GPUs of one host.

    Parameters
    ----------
    shape, layer
        As `DispatchedLayer` takes them.
    static : bool
        Room for all ranks' tokens, so that the host need not wait.
    """

    def __init__(self, shape: Shape, layer: guild.MoE, static: bool) -> None:
        from deep_ep import Buffer

        super().__init__(shape, layer)
        ranks = dist.get_world_size()
        Buffer.set_num_sms(_DEEPEP_MULTIPROCESSORS)  # as both configs say
        configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
        row = shape.hidden * layer.w_down.element_size()
        size = max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs)
        self.buffer = Buffer(dist.group.WORLD, size)
        self.room = ranks * shape.tokens if static else 0

    def routed(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """As `DispatchedLayer.routed`."""
        trip: dict[str, Any] = {}
        rows, ids, scores = _Dispatch.apply(x, scores, ids.long(), self, trip)
        weights = self.layer.w_up, self.layer.w_down
        sums = guild.routed_experts(rows, ids, scores, *weights)
        return _Combine.apply(sums, self.buffer, trip)


class _Dispatch(torch.autograd.Function):
    """Tokens to DeepEP's rows here, with the scores and numbers of their experts here, or -1."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, scores: Tensor, ids: Tensor, layer: DeepEPLayer, trip: dict
    ) -> tuple[Tensor, Tensor, Tensor]:
        buffer = layer.buffer
        per_rank, _, per_expert, goes, _ = buffer.get_dispatch_layout(ids, layer.shape.experts)
        rows, ids, scores, _, trip["handle"], _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=scores,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=goes,
            num_worst_tokens=layer.room,
        )
        ctx.buffer, ctx.trip = buffer, trip
        ctx.mark_non_differentiable(ids)
        return rows, ids, scores

    @staticmethod
    def backward(ctx: Any, drows: Tensor, _: None, dscores: Tensor) -> tuple:
        dx, dscores, _ = ctx.buffer.combine(drows, ctx.trip["handle"], topk_weights=dscores)
        return dx, dscores, None, None, None


class _Combine(torch.autograd.Function):
    """DeepEP's rows to their tokens, where those of all ranks are added."""

    @staticmethod
    def forward(ctx: FunctionCtx, sums: Tensor, buffer: Any, trip: dict) -> Tensor:
        ctx.buffer, ctx.trip = buffer, trip
        return buffer.combine(sums, trip["handle"])[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        rows = ctx.buffer.dispatch(dout.contiguous(), handle=ctx.trip["handle"])[0]
        return rows, None, None


class TorchtitanLayer(DispatchedLayer):
    """A layer with torchtitan's all-to-all dispatcher."""

    def __init__(self, shape: Shape, layer: guild.MoE) -> None:
        from torchtitan.distributed.utils import set_spmd_backend

        super().__init__(shape, layer)
        set_spmd_backend("default")  # groups come from meshes
        device = layer.w_down.device
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
        self.dispatcher = self.make_dispatcher(shape, layer)
        self.dispatcher.wire_meshes(ep_mesh=mesh)

    def make_dispatcher(self, shape: Shape, _: guild.MoE) -> Any:
        """The dispatcher of all experts, not yet on any ranks."""
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher as Dispatcher

        return Dispatcher(Dispatcher.Config(num_experts=shape.experts, top_k=shape.top_k))

    def routed(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """As `DispatchedLayer.routed`."""
        return self.sent(x, ids, scores, self.layer.w_up, self.layer.w_down)

    def sent(
        self,
        x: Tensor,
        ids: Tensor,
        scores: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        copied: bool = False,
    ) -> Tensor:
        """`routed` with the weights as arguments; copied: experts keep a copy of their rows."""
        ids = ids.long()
        counts = ids.new_zeros(self.shape.experts)
        counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids).flatten())
        rows, counts, facts = self.dispatcher.dispatch(x, scores, ids, counts)
        offsets = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        results = guild.experts_mlp(rows.clone() if copied else rows, offsets, w_up, w_down)
        return self.dispatcher.combine(results, facts, x)


class AsyncTorchtitanLayer(TorchtitanLayer):
    """A layer with MinimalAsyncEP, whose rows lie where the next exchange writes.

    So the whole layer has to be computed again in backward. That is done here, with the one copy of
    rows that the gradients of weights need.
    """

    def make_dispatcher(self, shape: Shape, layer: guild.MoE) -> Any:
        """As `TorchtitanLayer.make_dispatcher`."""
        from torchtitan.distributed.minimal_async_ep import api
        from torchtitan.models.common.token_dispatcher import (
            MinimalAsyncEPTokenDispatcher as Dispatcher,
        )

        api._buffer_key = api._buffer_state = None  # else a process supports only one layer size
        config = Dispatcher.Config(
            num_experts=shape.experts,
            top_k=shape.top_k,
            hidden_dim=shape.hidden,
            num_max_tokens_per_rank=shape.tokens,
            dtype=layer.w_down.dtype,
            device=layer.w_down.device,
        )
        return Dispatcher(config)

    def routed(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """As `DispatchedLayer.routed`."""
        return _Again.apply(self, x, ids, scores, self.layer.w_up, self.layer.w_down)


class _Again(torch.autograd.Function):
    """`TorchtitanLayer.sent`, keeping nothing but the arguments."""

    @staticmethod
    def forward(ctx: FunctionCtx, layer: TorchtitanLayer, *tensors: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*tensors)
        return layer.sent(*tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.layer.sent(*tensors, copied=True)
        x, _, scores, *weights = tensors
        dx, dscores, *dweights = torch.autograd.grad(out, (x, scores, *weights), dout)
        return None, dx, None, dscores, *dweights


# The constructor of a layer, and the package that it needs.
DISPATCHERS: dict[str, tuple[Callable[[Shape, guild.MoE], DispatchedLayer], str]] = {
    "deepep": (partial(DeepEPLayer, static=False), "deep_ep"),
    "deepep-static": (partial(DeepEPLayer, static=True), "deep_ep"),
    "torchtitan": (TorchtitanLayer, "torchtitan"),
    "torchtitan-async": (AsyncTorchtitanLayer, "torchtitan"),
}

_DEEPEP_COLUMNS = 256  # that a warp of its combine kernel adds at once, with all 32 lanes


def unfit(name: str, shape: Shape) -> str:
    """Why a dispatcher cannot take a shape; "" if it can."""
    if name.startswith("deepep") and shape.hidden % _DEEPEP_COLUMNS != 0:
        return f"DeepEP's combine takes multiples of {_DEEPEP_COLUMNS} columns, not {shape.hidden}"
    return ""


def why_not(name: str, device: torch.device) -> str:
    """Why a dispatcher cannot be timed here, the same on all ranks; "" if it can."""
    package = DISPATCHERS[name][1]
    reason = ""
    if importlib.util.find_spec(package) is None:
        reason = f"the package {package} is not installed"
    elif device.type != "cuda" and name != "torchtitan":
        reason = "it needs GPUs"
    said: list = [None] * dist.get_world_size()
    dist.all_gather_object(said, reason)
    return next(filter(None, said), "")
