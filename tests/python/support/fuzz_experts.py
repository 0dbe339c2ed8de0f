"""Random calls of guild.routed_experts and guild.experts_mlp."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import guild
from fuzz_compare import Truth, same_bits
from fuzz_draw import (
    Backward,
    Draw,
    Outputs,
    Values,
    place,
    score_dtype,
    total,
    without_gradients,
)
from fuzz_routing import require
from fuzz_weights import Weights, exact_leaves, is_low_rank, whole_of
from oracle.autograd import gradients
from oracle.experts import by_rows, routed
from oracle.float8 import Recipe, routed_in_fp8

SINKS = ("w_up", "w_gate", "w_down", "b_up", "b_gate", "b_down")
Inputs = dict[str, Any]


@dataclass(frozen=True)
class ExpertsCase:
    """What the cases of both functions share."""

    seed: int
    weights: Weights
    backward: Backward
    x_layout: str
    dout: str  # "packed", "window", "flipped" or "expanded", one number for all
    poison: bool  # NaN wherever nothing may be read
    twice: bool
    without: str | None  # called again without gradients: "no_grad", "inference", "out"

    def values(self, dtype: torch.dtype) -> Inputs:
        """Inputs in float64: of the weights, of each pass."""
        values = Values(self.seed, dtype)
        return {
            "weights": self.weights.values(values),
            "before": self.weights.before(values, self.backward),
            "passes": [self.pass_values(values) for _ in range(self.backward.passes)],
        }

    def pass_values(self, values: Values) -> dict[str, Tensor]:
        raise NotImplementedError

    def call(self, leaves: dict[str, Tensor], given: dict[str, Tensor], sink: Any) -> Tensor:
        """Guild's result; the function must give the same bits without gradients."""
        out = self.run_layer(leaves, given, sink)
        again = without_gradients(self.without, out, partial(self.run_layer, leaves, given, sink))
        require(not same_bits({"out": out}, {"out": again}), f"{self.without}: other bits")
        return out

    def run_layer(
        self, leaves: dict[str, Tensor], given: dict[str, Tensor], sink: Any, **out: Any
    ) -> Tensor:
        """Guild's function, called once."""
        raise NotImplementedError

    def exact(self, leaves: Inputs, given: Inputs, recipe: Recipe | None) -> Tensor:
        """The oracle's result; for a layer in FP8, that of its recipe."""
        raise NotImplementedError

    def zeros(self, given: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Where a pass's results are zero, and which experts (E) have rows."""
        raise NotImplementedError

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of a pass's tensors that may want gradients."""
        raise NotImplementedError

    def make_dout(self, values: Values, rows: int) -> Tensor:
        hidden = self.weights.hidden
        if self.dout == "expanded":
            return values.normal(1, 1).expand(rows, hidden)
        return values.normal(rows, hidden)

    def place_dout(self, dout: Tensor, dtype: torch.dtype, device: str) -> Tensor:
        if self.dout == "expanded" and dout.numel():
            return dout[:1, :1].to(dtype).to(device).expand(dout.shape)
        return place(dout, self.dout.replace("expanded", "packed"), dtype, device)

    def run(self, values: Inputs, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Guild's results and gradients, by name."""
        backward, sink = self.backward, self.backward.sink()
        weights = self.weights.leaves(values["weights"], values["before"], backward, dtype, device)
        results, inputs = {}, {}

        def step(i: int) -> Outputs:
            one = values["passes"][i]
            given = {n: self.place_input(n, t, dtype, device) for n, t in one.items()}
            for name in self.inputs:
                given[name].requires_grad_(name in backward.wants)
                inputs[f"{name}{i}"] = given[name]
            out = self.call(weights, given, sink)
            results[f"out{i}"] = out.detach()
            return [(out, given["dout"])]

        backward.run(step, sink)
        for name, leaf in inputs.items():
            results |= backward.found(name, leaf, False)
        for name, leaf in weights.items():
            whole = whole_of(leaf) if isinstance(leaf, list) else leaf
            results |= backward.found(name, whole, not is_low_rank(name))
        return results

    def place_input(self, name: str, t: Tensor, dtype: torch.dtype, device: str) -> Tensor:
        """A pass's tensor as it is passed to Guild."""
        if name == "dout":
            return self.place_dout(t, dtype, device)
        if not t.is_floating_point():
            return t.to(device)
        return place(t, self.x_layout, dtype, device)

    def truth(self, values: Inputs, got: dict[str, Tensor], recipe: Recipe | None = None) -> Truth:
        """The oracle's results, in float64 unless there is a recipe."""
        wants = self.backward.wants
        weights = exact_leaves(values["weights"], wants)
        leaves = {n: t for n, t in weights.items() if n in wants}
        truth, outputs = Truth({}), []
        filled = torch.zeros(self.weights.experts, dtype=torch.bool)
        for i, tensors in enumerate(values["passes"]):
            given = tensors | exact_leaves({n: tensors[n] for n in self.inputs}, wants)
            leaves |= {f"{n}{i}": given[n] for n in self.inputs if n in wants}
            out = self.exact(weights, given, recipe)
            truth.values[f"out{i}"] = out.detach()
            outputs.append((out, self.seen(given)))
            zeros, has_rows = self.zeros(given)
            truth.zeros |= {f"{name}{i}": mask for name, mask in zeros.items()}
            filled |= has_rows
        for name, gradient in gradients(total(outputs), leaves).items():
            before = name in SINKS and self.backward.starts_with(name, True)
            truth.values[name] = gradient + values["before"][name] if before else gradient
            if name in SINKS and not before:
                truth.zeros[name] = ~filled.view(-1, *(1,) * (gradient.dim() - 1))
            elif is_low_rank(name):
                truth.zeros[name] = self.weights.lora.unused(name, filled)
        return truth

    def seen(self, given: dict[str, Tensor]) -> Tensor:
        """dout without the poison in rows that belong to no expert."""
        return given["dout"]


@dataclass(frozen=True)
class RoutedCase(ExpertsCase):
    """guild.routed_experts on (T, K) slots or on lists."""

    tokens: int
    top_k: int
    routing: str
    id_dtype: str
    score_dtype: str | None  # None: what the layer computes in
    slots: int | None  # with lists: how many, ...
    lead: int  # ... how many before the first list, ...
    spare: int  # ... and after the last
    residual: bool
    mapped: bool  # ids are indices into a map of all ranks' experts
    fp8: guild.FP8 | None = None

    @staticmethod
    def drawn(draw: Draw) -> RoutedCase:
        weights, tokens = Weights.drawn(draw), draw.tokens()
        fp8 = draw.fp8(0.25)
        if fp8 is not None:
            weights = weights.for_fp8(draw.aligned)
        top_k = draw.top_k(weights.experts)
        slots, lead, spare = None, 0, 0
        if draw.chance(0.45):
            used = draw.pick(tokens // 2, tokens // 7, tokens, 2 * tokens, tokens * top_k)
            lead, spare = (draw.pick(0, 0, draw.between(1, 9)) for _ in range(2))
            slots = lead + (used if tokens else 0) + spare
        residual = draw.chance(0.3)
        names = ["x", "scores", *(["residual"] if residual else []), *weights.shapes()]
        backward = draw.backward(names, SINKS)
        return RoutedCase(
            seed=draw.seed(),
            weights=weights.for_sink(backward.later),
            backward=backward,
            x_layout=draw.rows(),
            dout=draw.pick("packed", "packed", "window", "flipped", "expanded"),
            poison=draw.chance(0.25),
            twice=draw.chance(0.15),
            tokens=tokens,
            top_k=top_k,
            routing=draw.pick("distinct", "distinct", "distinct", "any", "one", "outside", "none"),
            id_dtype=draw.pick("int32", "int64"),
            score_dtype=draw.pick(None, None, None, "float32", "bfloat16"),
            slots=slots,
            lead=lead,
            spare=spare,
            residual=residual,
            mapped=draw.chance(0.2),
            fp8=fp8,
            without=draw.pick(None, None, "no_grad", "inference", "out"),
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("x", "scores", "residual") if self.residual else ("x", "scores")

    def pass_values(self, values: Values) -> dict[str, Tensor]:
        shape = (self.tokens, self.top_k) if self.slots is None else (self.slots,)
        given = {
            "x": values.normal(self.tokens, self.weights.hidden),
            "ids": self.draw_ids(values, shape),
            "dout": self.make_dout(values, self.tokens),
        }
        stored = getattr(torch, self.score_dtype or str(score_dtype(values.dtype))[6:])
        given["scores"] = (1.4 * values.uniform(*shape) - 0.4).to(stored).double()
        if self.residual:
            given["residual"] = values.normal(self.tokens, self.weights.hidden)
        if self.slots is not None:
            used = self.slots - self.lead - self.spare
            owner = values.integers(0, max(self.tokens, 1) - 1, used)
            ends = torch.bincount(owner, minlength=self.tokens)[: self.tokens].cumsum(0)
            offsets = torch.cat((ends.new_zeros(1), ends)) + self.lead
            given["token_offsets"] = offsets.to(torch.int32)
        if self.poison:
            token, valid = self.owners(given)
            given["scores"] = given["scores"].masked_fill(~valid.view(shape), torch.nan)
            idle = torch.bincount(token[valid], minlength=self.tokens) == 0
            given["x"] = given["x"].masked_fill(idle[:, None], torch.nan)
        return given

    def draw_ids(self, values: Values, shape: tuple[int, ...]) -> Tensor:
        experts = self.weights.experts
        if self.routing == "distinct" and len(shape) == 2:
            ids = values.uniform(shape[0], experts).argsort(1)[:, : shape[1]]
        elif self.routing == "one":
            ids = values.integers(0, experts - 1, 1).expand(shape)
        else:
            ids = values.integers(0, experts - 1, *shape)
        if self.routing in ("outside", "none"):
            wild = [-1, experts, -7, experts + 3, 2**31 - 1, -(2**31)]
            if self.id_dtype == "int64":
                wild += [2**32, 2**32 + experts - 1, -(2**63), 2**63 - 1]
            others = torch.tensor(wild)[values.integers(0, len(wild) - 1, *shape)]
            share = 1.0 if self.routing == "none" else 0.4
            ids = torch.where(values.uniform(*shape) < share, others, ids)
        return ids.to(getattr(torch, self.id_dtype))

    def owners(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Each slot's token (0 if it has none), and whether the slot is a row of some expert."""
        ids = given["ids"].flatten()
        valid = (ids >= 0) & (ids < self.weights.experts)
        if self.slots is None:
            return torch.arange(self.tokens).repeat_interleave(self.top_k), valid
        offsets = given["token_offsets"].long()
        slot = torch.arange(self.slots)
        owned = (slot >= offsets[0]) & (slot < offsets[-1])
        token = torch.zeros(self.slots, dtype=torch.int64)
        token[owned] = torch.arange(self.tokens).repeat_interleave(offsets.diff())
        return token, valid & owned

    def place_input(self, name: str, t: Tensor, dtype: torch.dtype, device: str) -> Tensor:
        layout = "flipped" if t.dim() == 2 and self.x_layout == "window" else "packed"
        if name == "ids":
            return place(t, layout, t.dtype, device)
        if name == "scores":
            stored = self.score_dtype and getattr(torch, self.score_dtype)
            return place(t, layout, stored or score_dtype(dtype), device)
        return super().place_input(name, t, dtype, device)

    def run_layer(
        self, leaves: dict[str, Tensor], given: dict[str, Tensor], sink: Any, **out: Any
    ) -> Tensor:
        ids, expert_map = given["ids"], None
        if self.mapped:
            ids, expert_map = self.mapped_ids(ids)
        return guild.routed_experts(
            given["x"],
            ids,
            given["scores"],
            **self.weights.arguments(leaves),
            token_offsets=given.get("token_offsets"),
            residual=given.get("residual"),
            recompute=self.backward.recompute,
            weight_gradients=sink,
            expert_map=expert_map,
            fp8=self.fp8,
            **out,
        )

    def mapped_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same experts under other ids, and the map from these back to them."""
        experts = self.weights.experts
        many = 2 * experts + 1
        order = torch.randperm(many, generator=torch.Generator().manual_seed(self.seed)).to(ids)
        expert_map = torch.full((many,), -1, dtype=torch.int32, device=ids.device)
        expert_map[order[:experts].long()] = torch.arange(experts).to(expert_map)
        places = order[ids.clamp(0, experts - 1).long()]
        stranger = (ids >= experts) & (ids < many)
        found = torch.where(stranger, order[experts], ids)
        return torch.where((ids >= 0) & (ids < experts), places, found), expert_map

    def exact(self, leaves: Inputs, given: Inputs, recipe: Recipe | None) -> Tensor:
        token, valid = self.owners(given)
        slots = torch.nonzero(valid).flatten()
        ids = given["ids"].flatten()[slots].long()
        scores = given["scores"].flatten().index_select(0, slots)
        rows = self.weights.oracle(leaves), given["x"], token[slots], ids, scores
        out = routed(*rows) if recipe is None else routed_in_fp8(*rows, recipe)
        return out + given["residual"] if self.residual else out

    def zeros(self, given: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        token, valid = self.owners(given)
        idle = (torch.bincount(token[valid], minlength=self.tokens) == 0)[:, None]
        zeros = {"scores": ~valid.view(given["ids"].shape), "x": idle}
        if not self.residual:
            zeros["out"] = idle
        ids = given["ids"].flatten()[valid].long()
        return zeros, torch.bincount(ids, minlength=self.weights.experts) > 0


@dataclass(frozen=True)
class SortedCase(ExpertsCase):
    """guild.experts_mlp of sorted rows."""

    rows: int  # of all experts together
    lead: int  # rows before offsets[0]
    spare: int  # rows from offsets[E] on

    inputs = ("x",)

    @staticmethod
    def drawn(draw: Draw) -> SortedCase:
        weights = Weights.drawn(draw)
        backward = draw.backward(["x", *weights.shapes()], SINKS)
        return SortedCase(
            seed=draw.seed(),
            weights=weights.for_sink(backward.later),
            backward=backward,
            x_layout=draw.rows(),
            dout=draw.pick("packed", "packed", "window", "flipped", "expanded"),
            poison=draw.chance(0.5),
            twice=draw.chance(0.15),
            rows=draw.tokens(),
            lead=draw.pick(0, 0, draw.between(1, 20)),
            spare=draw.pick(0, 0, draw.between(1, 20)),
            without=draw.pick(None, None, "no_grad", "out"),
        )

    @cached_property
    def nobody(self) -> Tensor:
        """bool (R, 1)"""
        row = torch.arange(self.lead + self.rows + self.spare)[:, None]
        return (row < self.lead) | (row >= self.lead + self.rows)

    def pass_values(self, values: Values) -> dict[str, Tensor]:
        x = values.normal(len(self.nobody), self.weights.hidden)
        dout = self.make_dout(values, len(self.nobody))
        if self.poison:
            x = x.masked_fill(self.nobody, torch.nan)
            if self.dout != "expanded":
                dout = dout.masked_fill(self.nobody, torch.nan)
        ids = values.integers(0, self.weights.experts - 1, self.rows)
        if values.uniform(1) < 0.5:
            ids = ids // 2 * 2  # every other expert is empty
        ends = torch.bincount(ids, minlength=self.weights.experts).cumsum(0)
        offsets = torch.cat((ends.new_zeros(1), ends)) + self.lead
        return {"x": x, "dout": dout, "offsets": offsets.to(torch.int32)}

    def run_layer(
        self, leaves: dict[str, Tensor], given: dict[str, Tensor], sink: Any, **out: Any
    ) -> Tensor:
        return guild.experts_mlp(
            given["x"],
            given["offsets"],
            **self.weights.arguments(leaves),
            recompute=self.backward.recompute,
            weight_gradients=sink,
            **out,
        )

    def exact(self, leaves: Inputs, given: Inputs, recipe: Recipe | None) -> Tensor:
        return by_rows(self.weights.oracle(leaves), given["x"], given["offsets"].tolist())

    def seen(self, given: dict[str, Tensor]) -> Tensor:
        return given["dout"].masked_fill(self.nobody, 0)

    def zeros(self, given: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        return {"out": self.nobody, "x": self.nobody}, given["offsets"].diff() > 0
