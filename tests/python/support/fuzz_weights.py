"""Weights of random expert layers: sizes, order, layouts, as Guild takes them and as the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuzz_draw import Backward, Draw, Values, place
from fuzz_lora import LowRankTerms
from guild import Activation
from oracle.experts import Experts


@dataclass(frozen=True)
class Weights:
    """The weights that routed_experts and experts_mlp take."""

    experts: int
    hidden: int
    intermediate: int
    activation: Activation
    order: str
    transposed: bool
    apart: bool  # w_up is a pair (gate, up)
    b_up: str | None  # "one" or "pair"
    b_down: bool
    layouts: tuple[str, ...]  # of w_up, w_down, biases, w_gate
    lora: LowRankTerms | None
    lists: str | None  # one tensor per expert in memory: see parts_of

    @staticmethod
    def drawn(draw: Draw) -> Weights:
        activation = draw.activation()
        pair = activation.gated
        apart = pair and draw.chance(0.35)
        up = draw.matrices()
        return Weights(
            experts=draw.experts(),
            hidden=draw.width(),
            intermediate=draw.width(),
            activation=activation,
            order=draw.pick("concatenated", "interleaved"),
            transposed=draw.chance(0.4),
            apart=apart,
            b_up=draw.pick(None, "one", "pair" if pair else "one"),
            b_down=draw.chance(0.5),
            layouts=(up, draw.matrices(), draw.rows(), draw.other_half(up)),
            lora=LowRankTerms.drawn(draw, apart),
            lists=draw.pick(None, None, None, None, "even", "backwards", "apart", "uneven"),
        )

    def for_sink(self, later: str | None) -> Weights:
        """Weights that WeightGradients supports: b_up is one tensor, in the products' order."""
        if later is None:
            return self
        order = "concatenated" if self.apart else self.order
        b_up = self.b_up and "one"
        return Weights(**{**vars(self), "order": order, "b_up": b_up})

    def for_fp8(self, aligned: bool) -> Weights:
        """Weights of a layer in FP8; aligned: for a GPU."""
        unit = 16 if aligned else 1
        hidden, inner = (-(-n // unit) * unit for n in (self.hidden, self.intermediate))
        changed = {"hidden": hidden, "intermediate": inner, "lora": None}
        return Weights(**{**vars(self), **changed})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        experts, hidden, inner = self.experts, self.hidden, self.intermediate
        out = inner if self.apart else self.activation.width(inner)
        shapes = {
            "w_up": (experts, hidden, out) if self.transposed else (experts, out, hidden),
            "w_down": (experts, inner, hidden) if self.transposed else (experts, hidden, inner),
        }
        if self.apart:
            shapes["w_gate"] = shapes["w_up"]
        if self.b_up == "one":
            shapes["b_up"] = (experts, self.activation.width(inner))
        elif self.b_up == "pair":
            shapes["b_up"] = shapes["b_gate"] = (experts, inner)
        if self.b_down:
            shapes["b_down"] = (experts, hidden)
        if self.lora is not None:
            shapes |= self.lora.shapes(shapes, self.transposed)
        return shapes

    def values(self, values: Values) -> dict[str, Tensor]:
        """Weights in float64, of a size that keeps pre-activations near 1."""
        scales = {"w_up": self.hidden**-0.5, "w_down": self.intermediate**-0.5}
        scales["w_gate"] = scales["w_up"]
        shapes = self.shapes()
        low = {n: shapes.pop(n) for n in list(shapes) if is_low_rank(n)}
        made = {n: values.normal(*s, scale=scales.get(n, 1.0)) for n, s in shapes.items()}
        return made | (self.lora.values(values, low) if low else {})

    def before(self, values: Values, backward: Backward) -> dict[str, Tensor]:
        """Gradients that the weights have beforehand, in float64."""
        dtype = torch.float32 if backward.later == "main_grad" else values.dtype
        return {n: values.normal(*s, dtype=dtype) for n, s in self.shapes().items()}

    def leaves(
        self,
        values: dict[str, Tensor],
        before: dict[str, Tensor],
        backward: Backward,
        dtype: torch.dtype,
        device: str,
    ) -> dict[str, Tensor]:
        """Parameters for Guild."""
        up, down, bias, gate = self.layouts
        layouts = {"w_up": up, "w_gate": gate, "w_down": down}
        leaves = {}
        for name, value in values.items():
            if is_low_rank(name):
                leaves[name] = self.lora.leaf(value, dtype, device)
                backward.prepare(name, leaves[name], before[name], "packed", False)
                continue
            layout = layouts.get(name, bias)
            leaf = leaves[name] = place(value, layout, dtype, device)
            backward.prepare(name, leaf, before[name], layout, True)
            if self.lists:
                leaves[name] = members_of(leaf, self.lists)
        return leaves

    def arguments(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """Keyword arguments of routed_experts and experts_mlp."""

        def one_or_pair(up: str, gate: str) -> Any:
            return (leaves[gate], leaves[up]) if gate in leaves else leaves.get(up)

        low = {} if self.lora is None else self.lora.arguments(leaves, self.apart)
        return low | {
            "w_up": one_or_pair("w_up", "w_gate"),
            "w_down": leaves["w_down"],
            "b_up": one_or_pair("b_up", "b_gate"),
            "b_down": leaves.get("b_down"),
            "activation": self.activation,
            "order": self.order,
            "transposed": self.transposed,
        }

    def oracle(self, leaves: dict[str, Tensor]) -> Experts:
        if self.lora is not None:
            leaves = self.lora.with_deltas(leaves, self.transposed)
        return Experts.of(leaves, self.activation, self.order, self.transposed)


def is_low_rank(name: str) -> bool:
    """Whether it names a part of a low-rank term: w_up.a and so on."""
    return "." in name


def members_of(leaf: Tensor, lists: str) -> list[Tensor]:
    """A leaf as one leaf per expert, with the gradients that it has."""
    members = [part.requires_grad_(leaf.requires_grad) for part in parts_of(leaf.detach(), lists)]
    for name in ("grad", "main_grad"):
        gradient = getattr(leaf, name, None)
        if gradient is not None:
            for member, part in zip(members, parts_of(gradient, lists), strict=True):
                setattr(member, name, part)
    return members


def parts_of(whole: Tensor, lists: str) -> list[Tensor]:
    """The parts of a tensor as a list in some memory layout.

    "even": where they are; "backwards": in the opposite order; "apart": each in its own memory;
    "uneven": in one storage, some 16 bytes apart, the odd ones first.
    """
    if lists == "uneven":
        return _uneven_parts([part.clone() for part in whole])
    if lists == "apart":
        return [part.clone() for part in whole]
    if lists == "even":
        return [part.detach() for part in whole]
    return [part.detach() for part in whole.flip(0)][::-1]


def _uneven_parts(parts: list[Tensor]) -> list[Tensor]:
    width = 16 // parts[0].element_size()
    room = -(-parts[0].numel() // width) * width + 3 * width
    buffer = parts[0].new_full((len(parts) * room,), math.nan)
    order = [*range(1, len(parts), 2), *range(0, len(parts), 2)]
    made = {}
    for i, e in enumerate(order):
        begin = i * room + e % 3 * width
        own = buffer[begin:].as_strided(
            parts[e].shape, parts[e].stride(), buffer[begin:].storage_offset()
        )
        made[e] = own.copy_(parts[e])
    return [made[e] for e in range(len(parts))]


def whole_of(members: list[Tensor]) -> Tensor:
    """The leaf that members were made of, with the gradients that they have now."""
    leaf = torch.stack([m.detach() for m in members]).requires_grad_(members[0].requires_grad)
    for name in ("grad", "main_grad"):
        gradients = [getattr(m, name, None) for m in members]
        assert len({g is None for g in gradients}) == 1, f"{name} of some experts alone"
        if gradients[0] is not None:
            setattr(leaf, name, torch.stack(gradients))
    return leaf


def exact_leaves(values: dict[str, Tensor], wants: tuple[str, ...]) -> dict[str, Tensor]:
    """The values in float64 for the oracle."""
    return {name: v.clone().requires_grad_(name in wants) for name, v in values.items()}
