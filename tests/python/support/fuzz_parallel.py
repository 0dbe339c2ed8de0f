"""Random layers with their experts on several ranks, compared with the same layer in one process.

A rank runs the whole layer on its own tokens. That gives the outputs and gradients of its tokens;
the experts' gradients are sums over the ranks.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import guild
from fuzz_draw import Draw
from fuzz_moe import NAMED
from guild import Router

EXPERT_WEIGHTS = ("w_up", "w_down", "b_up", "b_down")


@dataclass(frozen=True)
class ParallelCase:
    """A layer, and how many tokens each rank has."""

    seed: int
    tokens: tuple[int, ...]
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    router: Router | str
    mask: float | None  # share of real tokens
    wants_x: bool
    frozen: bool  # experts
    dtype: torch.dtype
    autocast: bool
    options: dict[str, Any]

    @staticmethod
    def drawn(seed: int, ranks: int) -> ParallelCase:
        """The case of a seed, the same on every rank."""
        draw = Draw(seed)
        experts = ranks * draw.between(1, 3)
        top_k = draw.top_k(experts)
        router: Router | str = Router(
            draw.pick("softmax", "sigmoid"), rounding=draw.pick(None, None, "nearest"), tile=4
        )
        if draw.chance(0.3):
            router = draw.pick(*(n for n, r in NAMED.items() if experts % r.groups == 0))
            if NAMED[router].applied_to == "input":
                top_k = 1
            routing = NAMED[router]
            top_k = min(top_k, experts // routing.groups * routing.top_groups)
        autocast = draw.chance(0.2)
        return ParallelCase(
            seed=seed,
            tokens=tuple(draw.pick(0, 1, draw.between(2, 40)) for _ in range(ranks)),
            hidden=draw.width(),
            intermediate=draw.width(),
            experts=experts,
            top_k=top_k,
            router=router,
            mask=draw.pick(None, None, 0.7, 0.0),
            wants_x=draw.chance(0.8),
            frozen=draw.chance(0.15),
            dtype=torch.float32 if autocast else torch.float64,
            autocast=autocast,
            options={
                "activation": draw.activation(),
                "bias": draw.chance(0.5),
                "order": draw.pick("concatenated", "interleaved"),
                "transposed": draw.chance(0.3),
                "shared_intermediate": draw.pick(None, None, draw.width()),
                "router_bias": draw.chance(0.2),
                "recompute": draw.chance(0.3),
                "balance_over": draw.pick(None, None, "batch"),
            },
        )

    def layers(self, group: guild.ExpertParallel) -> tuple[guild.MoE, guild.MoE]:
        """The whole layer, and the one over the ranks with the same weights."""
        sizes = self.hidden, self.intermediate, self.experts, self.top_k
        options = self.options | {"router": self.router, "dtype": self.dtype}
        torch.manual_seed(self.seed)
        whole = guild.MoE(*sizes, **options)
        for name in ("b_up", "b_down"):
            if getattr(whole, name) is not None:
                torch.nn.init.normal_(getattr(whole, name))
        shared = guild.MoE(*sizes, **options, expert_group=group)
        state, mine = whole.state_dict(), group.local_experts(self.experts)
        for name in EXPERT_WEIGHTS:
            if name in state:
                state[name] = state[name][mine.start : mine.stop]
        shared.load_state_dict(state)
        for layer in (whole, shared):
            for name in EXPERT_WEIGHTS:
                if self.frozen and getattr(layer, name) is not None:
                    getattr(layer, name).requires_grad_(False)
        return whole, shared

    def given(self, rank: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """A rank's tokens, their mask and the gradient of the output."""
        draw = torch.Generator().manual_seed(self.seed * 100 + rank)
        shape = self.tokens[rank], self.hidden
        x = torch.randn(shape, generator=draw, dtype=self.dtype)
        mask = None
        if self.mask is not None:
            mask = torch.rand(shape[0], generator=draw) < self.mask
            x = x.masked_fill(~mask[:, None], math.nan)
        return x, mask, torch.randn(shape, generator=draw, dtype=self.dtype)

    def run(self, layer: guild.MoE, rank: int) -> dict[str, Tensor | None]:
        """Output and gradients."""
        x, mask, dout = self.given(rank)
        x.requires_grad_(self.wants_x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = layer(x, mask)
        if out.requires_grad:
            out.backward(dout.to(out.dtype))
        found = {"out": out.detach(), "x": x.grad, "counts": layer.expert_counts}
        return found | {name: leaf.grad for name, leaf in layer.named_parameters()}

    def failures(self, group: guild.ExpertParallel) -> list[str]:
        """The differences on this rank, one line each."""
        whole, shared = self.layers(group)
        assert copy.deepcopy(shared).expert_group is group
        truth, got = self.run(whole, group.rank), self.run(shared, group.rank)
        failures = []
        mine = group.local_experts(self.experts)
        limit = 2e-2 if self.autocast else 1e-12
        for name, value in got.items():
            expected = truth[name]
            if (value is None) != (expected is None):
                failures.append(f"{name}: {'no ' if value is None else 'a '}gradient")
            elif value is not None:
                if name in EXPERT_WEIGHTS:
                    dist.all_reduce(expected, group=group.group)
                    expected = expected[mine.start : mine.stop]
                scale = float(expected.abs().max()) if expected.numel() else 0.0
                if not torch.allclose(value, expected, rtol=0, atol=limit * (scale + 1e-3)):
                    failures.append(f"{name}: off by {(value - expected).abs().max()}")
        return failures
