"""Random layers of guild.MoE."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import guild
from fuzz_compare import Truth, same_bits
from fuzz_draw import Backward, Draw, Outputs, Values, place, total, without_gradients
from fuzz_routing import draw_router, require
from fuzz_weights import exact_leaves
from guild import Activation, Router
from guild.rounding import _seed as guild_seed
from guild.routing import ROUTERS
from oracle.autograd import gradients
from oracle.experts import Experts
from oracle.float8 import Recipe
from oracle.layer import Layer, moe

NAMED = {name: Router.named(name) for name in ROUTERS}
SINKS = ("w_up", "w_down", "b_up", "b_down")  # of WeightGradients
CLEAR = 1e-5  # margin by which chosen experts must be best, for 16 bits to choose the same
TRIES = 40  # inputs drawn until they are
BALANCE_WEIGHTS = (0.5, 0.125)  # of the two losses on balance


@dataclass(frozen=True)
class MoECase:
    """A layer and its inputs."""

    seed: int
    shape: tuple[int, ...]  # of the tokens; one dimension or more
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: Activation
    order: str
    transposed: bool
    bias: bool
    router: Router | str
    router_bias: bool
    shared: int  # width of the shared experts
    shared_gate: bool
    balance_over: str | None
    training: bool
    mask: float | None  # share of real tokens
    poison: float  # what padding holds; 0: numbers like the rest
    x_layout: str
    backward: Backward
    twice: bool
    without: str | None  # called before without gradients: "no_grad", "inference", "out"
    fp8: guild.FP8 | None = None

    @staticmethod
    def drawn(draw: Draw) -> MoECase:
        experts = draw.experts()
        top_k = draw.top_k(experts)
        router: Router | str = draw_router(draw, experts, top_k, draw.chance(0.35))
        if draw.chance(0.3):
            router = draw.pick(*NAMED)
            named = NAMED[router]
            experts = named.groups * draw.between(1, 3) if named.groups > 1 else experts
            most = 1 if named.applied_to == "input" else experts // named.groups * named.top_groups
            top_k = min(top_k, most)
        mask = draw.pick(None, None, None, 0.7, 0.7, 0.2, 0.0)
        parts = [draw.between(1, 3) for _ in range(draw.pick(0, 1, 1, 2))]
        shared = draw.pick(0, 0, 1, 2, 3)
        fp8 = draw.fp8(0.25)
        case = MoECase(
            seed=draw.seed(),
            shape=(*parts, draw.tokens() // math.prod(parts)),
            hidden=draw.width(16 if fp8 else 8),
            intermediate=draw.width(16 if fp8 else 8),
            experts=experts,
            top_k=top_k,
            activation=draw.activation(),
            order=draw.pick("concatenated", "interleaved"),
            transposed=draw.chance(0.3),
            bias=draw.chance(0.5),
            router=router,
            router_bias=draw.chance(0.3),
            shared=draw.width() if shared else 0,
            shared_gate=shared > 1,
            balance_over=draw.pick(None, "batch", "sequence"),
            training=draw.chance(0.75),
            mask=mask,
            poison=0.0 if mask is None else draw.pick(0.0, math.nan, math.inf),
            x_layout=draw.rows(),
            backward=draw.backward((), ()),
            twice=draw.chance(0.15),
            without=draw.pick(None, "no_grad", "inference", "out"),
            fp8=fp8,
        )
        return replace(case, backward=draw.backward(["x", *case.shapes()], SINKS))

    @property
    def routing(self) -> Router:
        return NAMED[self.router] if isinstance(self.router, str) else self.router

    @property
    def balances(self) -> bool:
        return self.training and self.balance_over is not None

    @property
    def rounds(self) -> bool:
        return self.training and self.routing.rounding is not None

    @property
    def sequences(self) -> int:
        several = self.balance_over == "sequence" and math.prod(self.shape)
        return math.prod(self.shape[:-1]) if several else 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters."""
        experts, hidden, inner = self.experts, self.hidden, self.intermediate
        width = self.activation.width
        up, down = (experts, width(inner), hidden), (experts, hidden, inner)
        if self.transposed:
            up, down = ((e, columns, rows) for e, rows, columns in (up, down))
        shapes = {"router.weight": (experts, hidden), "w_up": up, "w_down": down}
        if self.router_bias:
            shapes["router.bias"] = (experts,)
        if self.bias:
            shapes |= {"b_up": (experts, width(inner)), "b_down": (experts, hidden)}
        if self.shared:
            shapes["shared.w_up"] = width(self.shared), hidden
            shapes["shared.w_down"] = hidden, self.shared
        if self.shared_gate:
            shapes["shared.gate.weight"] = 1, hidden
        return shapes

    def values(self, dtype: torch.dtype) -> dict[str, Any]:
        """Inputs in float64 whose choices are clear."""
        for attempt in range(TRIES):
            given = self.drawn_values(Values(self.seed + attempt, dtype))
            with torch.no_grad():
                margins = [self.exact(given["weights"], p, given).margin for p in given["passes"]]
            if min(margins) > CLEAR:
                break
        return given

    def drawn_values(self, values: Values) -> dict[str, Any]:
        later = torch.float32 if self.backward.later == "main_grad" else values.dtype
        given: dict[str, Any] = {"weights": {}, "before": {}, "passes": []}
        for name, shape in self.shapes().items():
            inputs = shape[-2 if self.transposed and name in SINKS else -1]
            scale = inputs**-0.5 if "w" in name else 0.3
            given["weights"][name] = values.normal(*shape, scale=scale)
            stored = later if name in SINKS else values.dtype
            given["before"][name] = values.normal(*shape, dtype=stored)
        given["selection_bias"] = values.normal(self.experts, scale=0.1, dtype=torch.float32)
        for _ in range(self.backward.passes):
            one = {name: values.normal(*self.shape, self.hidden) for name in ("x", "dout")}
            one["real"] = values.uniform(*self.shape) < (1.0 if self.mask is None else self.mask)
            if self.poison:
                one["x"] = one["x"].masked_fill(~one["real"][..., None], self.poison)
            given["passes"].append(one)
        return given

    def layer(self, given: dict[str, Any], device: str, dtype: torch.dtype, sink: Any) -> guild.MoE:
        made = guild.MoE(
            self.hidden,
            self.intermediate,
            self.experts,
            self.top_k,
            self.activation,
            self.bias,
            self.router,
            balance_over=self.balance_over,
            device=device,
            dtype=dtype,
            order=self.order,
            transposed=self.transposed,
            router_bias=self.router_bias,
            shared_intermediate=self.shared or None,
            shared_gate=self.shared_gate,
            recompute=self.backward.recompute,
            weight_gradients=sink,
            fp8=self.fp8,
        ).train(self.training)
        parameters = dict(made.named_parameters())
        require(parameters.keys() == self.shapes().keys(), f"parameters: got {[*parameters]}")
        for name, leaf in parameters.items():
            leaf.data.copy_(given["weights"][name])
            self.backward.prepare(name, leaf, given["before"][name], "packed", name in SINKS)
        if self.routing.selection_bias:
            made.router.selection_bias.copy_(given["selection_bias"])
        return made

    def run(self, given: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        sink = self.backward.sink()
        layer = self.layer(given, device, dtype, sink)
        torch.manual_seed(self.seed)
        results, inputs = {}, {}

        def step(i: int) -> Outputs:
            one = given["passes"][i]
            x = inputs[f"x{i}"] = place(one["x"], self.x_layout, dtype, device)
            x.requires_grad_("x" in self.backward.wants)
            mask = None if self.mask is None else one["real"].to(device)
            before = without_gradients(self.without, x, partial(layer.eval(), x, mask))
            counts = layer.expert_counts
            out = layer.train(self.training)(x, mask)
            if self.without is not None and not self.rounds:
                pair = (
                    {"out": before, "counts": counts},
                    {"out": out, "counts": layer.expert_counts},
                )
                require(not same_bits(*pair), f"{self.without}: other bits")
            results[f"out{i}"] = out.detach()
            results[f"counts{i}"] = layer.expert_counts
            outputs = [(out, one["dout"].to(dtype).to(device))]
            if self.balances:
                losses = layer.load_balancing_loss, layer.z_loss
                for name, loss, weight in zip("lz", losses, BALANCE_WEIGHTS, strict=True):
                    results[f"{name}{i}"] = loss.detach()
                    outputs.append((loss, torch.full_like(loss, weight)))
            return outputs

        with mock.patch("guild.rounding._seed", seed_of_any_device):
            self.backward.run(step, sink)
        for name, leaf in inputs.items():
            results |= self.backward.found(name, leaf, False)
        for name, leaf in layer.named_parameters():
            results |= self.backward.found(name, leaf, name in SINKS)
        return results

    def exact(
        self,
        leaves: dict[str, Tensor],
        one: dict[str, Tensor],
        given: dict[str, Any],
        counts: Tensor | None = None,
        recipe: Recipe | None = None,
    ) -> Layer:
        """The oracle's layer; counts: Guild's, where rounding allows several."""
        return moe(
            leaves,
            one["x"].reshape(-1, self.hidden),
            torch.nonzero(one["real"].flatten()).flatten(),
            Experts.of(leaves, self.activation, self.order, self.transposed),
            self.top_k,
            self.routing,
            given["selection_bias"] if self.routing.selection_bias else None,
            self.sequences,
            self.rounds,
            self.order,
            counts,
            recipe,
        )

    def truth(
        self, given: dict[str, Any], got: dict[str, Tensor], recipe: Recipe | None = None
    ) -> Truth:
        wants = self.backward.wants
        weights = exact_leaves(given["weights"], wants)
        leaves = {n: t for n, t in weights.items() if n in wants}
        truth, outputs, kept = Truth({}), [], []
        for i, one in enumerate(given["passes"]):
            one = one | exact_leaves({"x": one["x"]}, wants)
            if "x" in wants:
                leaves[f"x{i}"] = one["x"]
            counts = got[f"counts{i}"].cpu() if self.rounds else None
            layer = self.exact(weights, one, given, counts, recipe)
            if self.rounds:
                least, most = layer.rounded
                require(((counts == least) | (counts == most)).all(), "expert_counts: whole tiles")
            truth.values |= {f"out{i}": layer.out.detach().view(one["x"].shape)}
            truth.values[f"counts{i}"] = layer.counts.double()
            outputs.append((layer.out, one["dout"].reshape(layer.out.shape)))
            if self.balances:
                losses = layer.balance.load_balancing_loss(), layer.balance.z_loss()
                for name, loss, weight in zip("lz", losses, BALANCE_WEIGHTS, strict=True):
                    truth.values[f"{name}{i}"] = loss.detach()
                    outputs.append((loss, torch.full_like(loss, weight)))
            kept.append((layer.scores, one))
            padding = ~one["real"][..., None]
            truth.zeros |= {f"out{i}": padding} | ({f"x{i}": padding} if "x" in wants else {})
        self.add_gradients(truth, total(outputs), leaves, given, kept)
        return truth

    def add_gradients(self, truth, loss, leaves, given, kept) -> None:
        """Gradients of the loss; scales: the router's before those of its weights' sum cancel."""
        scores = {str(i): s for i, (s, _) in enumerate(kept) if s.requires_grad}
        sizes = {"router.weight": 0.0}
        for i, dscores in (gradients_kept(loss, scores) if scores else {}).items():
            size = float((dscores * kept[int(i)][0]).detach().norm())
            one = kept[int(i)][1]
            sizes["router.weight"] += size * float(one["x"][one["real"]].detach().norm())
            sizes[f"x{i}"] = size * float(given["weights"]["router.weight"].norm())
        for name, gradient in gradients(loss, leaves).items():
            before = self.backward.starts_with(name, name in SINKS)
            truth.values[name] = gradient + given["before"][name] if before else gradient
            if name in sizes:
                truth.scales[name] = sizes[name]


def seed_of_any_device(seed: None, logits: Tensor) -> Tensor:
    """The seed of "stochastic" rounding, drawn by the CPU's generator for every device.

    A GPU's own generator draws other numbers; the reference on the CPU would then round other
    experts up, and its error would be that of another layer.
    """
    return guild_seed(seed, logits.cpu()).to(logits.device)


def gradients_kept(loss: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of tensors in the middle of the graph."""
    found = torch.autograd.grad(loss, list(tensors.values()), retain_graph=True, allow_unused=True)
    return {n: t for n, t in zip(tensors, found, strict=True) if t is not None}
