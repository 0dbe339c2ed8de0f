"""Random calls of guild.grouped_mm, and of the pair grouped_mm_swiglu and grouped_mm_downproj."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import guild
from fuzz_compare import Truth
from fuzz_draw import Draw, Values, backward, place, total
from fuzz_weights import members_of, whole_of
from guild import Activation
from oracle import autograd
from oracle.experts import activate, halves
from oracle.products import grouped_mm

Inputs = dict[str, Tensor]


def draw_ends(values: Values, groups: int, count: int) -> Tensor:
    """int32 (groups,): where each group ends; some are empty."""
    group = values.integers(0, groups - 1, count)
    if values.uniform(1) < 0.4:
        group = group // 2 * 2
    return torch.bincount(group, minlength=groups).cumsum(0).to(torch.int32)


def leaves_of(values: Inputs, wants: tuple[str, ...]) -> Inputs:
    """The oracle's operands."""
    return {n: t.clone().requires_grad_(n in wants) for n, t in values.items()}


@dataclass(frozen=True)
class ProductCase:
    """guild.grouped_mm in one of its four cases."""

    seed: int
    split: str  # "rows", "inner", "columns", "nothing"
    groups: int
    shared: int  # of the dimension that is split, the part that belongs to groups ...
    spare: int  # ... and the part that belongs to none
    sizes: tuple[int, int]  # of the others; three if nothing is split, the first of `shared`
    bias: bool
    layouts: tuple[str, str, str]  # of mat_a, mat_b, out
    out: str | None  # "same" or "float32": a tensor is given
    accumulate: bool
    float_result: bool
    poison: bool
    wants: tuple[str, ...]
    twice: bool
    lists: str | None  # matrices of groups as a list: see fuzz_weights.parts_of

    @staticmethod
    def drawn(draw: Draw) -> ProductCase:
        out = draw.pick(None, None, "same", "float32")
        bias, given = draw.chance(0.5), out is not None
        size = draw.width if draw.chance(0.7) else lambda: draw.between(1, 70)
        split = draw.pick("rows", "inner", "columns", "nothing")
        spare = draw.pick(0, draw.between(1, 20))
        shared = draw.tokens()
        if draw.aligned and draw.chance(0.5):
            spare += -(shared + spare) % 8
        return ProductCase(
            seed=draw.seed(),
            split=split,
            groups=draw.experts(),
            shared=min(shared, 60) if split == "nothing" else shared,
            spare=spare,
            sizes=(size(), size()),
            bias=bias,
            layouts=(draw.matrices(), draw.matrices(), draw.pick("packed", "window", "flipped")),
            out=out,
            accumulate=given and draw.chance(0.6),
            float_result=draw.chance(0.25),
            poison=draw.chance(0.5),
            wants=() if given else draw.some(["a", "b", "bias"] if bias else ["a", "b"]),
            twice=draw.chance(0.15),
            lists=draw.pick(None, None, None, "even", "backwards", "apart", "uneven"),
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of mat_a, mat_b and the result."""
        many, (p, q), e = self.shared + self.spare, self.sizes, self.groups
        return {
            "rows": ((many, p), (e, p, q), (many, q)),
            "inner": ((p, many), (many, q), (e, p, q)),
            "columns": ((e, p, q), (q, many), (p, many)),
            "nothing": ((e, many, p), (e, p, q), (e, many, q)),
        }[self.split]

    def nobody(self) -> tuple[Any, Any, Any]:
        """Indices of what belongs to no group, in mat_a, mat_b and the result; None: nothing."""
        rows, columns = slice(self.shared, None), (slice(None), slice(self.shared, None))
        return {
            "rows": (rows, None, rows),
            "inner": (columns, rows, None),
            "columns": (None, columns, columns),
            "nothing": (None, None, None),
        }[self.split]

    def values(self, dtype: torch.dtype) -> Inputs:
        values = Values(self.seed, dtype)
        a, b, out = self.shapes
        given = {"a": values.normal(*a), "b": values.normal(*b)}
        stored = torch.float32 if self.float_result and dtype == torch.float64 else dtype
        given["dout"] = values.normal(*out, dtype=stored)
        if self.split != "nothing":
            given["offs"] = draw_ends(values, self.groups, self.shared)
        if self.bias:
            given["bias"] = values.normal(self.groups, out[-2 if self.split == "columns" else -1])
        given["before"] = values.normal(*out)
        if self.poison:
            for name, where in zip(("a", "b", "dout"), self.nobody(), strict=True):
                if where is not None:
                    given[name][where] = torch.nan
        return given

    def run(self, given: Inputs, device: str, dtype: torch.dtype) -> Inputs:
        operands = {
            "a": place(given["a"], self.layouts[0], dtype, device),
            "b": place(given["b"], self.layouts[1], dtype, device),
        }
        if self.bias:
            operands["bias"] = place(given["bias"], "packed", dtype, device)
        for name, t in operands.items():
            t.requires_grad_(name in self.wants)
        offs = given["offs"].to(device) if "offs" in given else None
        options: dict[str, Any] = {}
        if self.out is not None:
            stored = torch.float32 if self.out == "float32" else dtype
            before = given["before"] if self.accumulate else given["before"] * torch.nan
            options = {"out": place(before, self.layouts[2], stored, device)}
            options["accumulate"] = self.accumulate
        elif self.float_result:
            options = {"out_dtype": torch.float32}
        listed = {
            n: members_of(t, self.lists)
            for n, t in operands.items()
            if self.lists is not None and t.dim() == 3
        }
        a, b, bias = ({**operands, **listed}.get(n) for n in ("a", "b", "bias"))
        with warnings.catch_warnings():  # of sizes whose lists a GPU cannot read in place
            warnings.simplefilter("ignore", guild.CopiedWeightsWarning)
            out = guild.grouped_mm(a, b, offs, bias, **options)
        backward([(out, place(given["dout"], self.layouts[2], out.dtype, device))])
        operands |= {n: whole_of(members) for n, members in listed.items()}
        results = {n: t.grad for n, t in operands.items() if t.grad is not None}
        return results | {"out": out.detach()}

    def truth(self, given: Inputs, got: Inputs) -> Truth:
        leaves = leaves_of({n: given[n] for n in ("a", "b", "bias") if n in given}, self.wants)
        ends = given["offs"].tolist() if "offs" in given else None
        out = grouped_mm(leaves["a"], leaves["b"], ends, leaves.get("bias"))
        dout = given["dout"].clone()
        truth = Truth({"out": out.detach()})
        for name, where in zip(("a", "b", "out"), self.nobody(), strict=True):
            if where is not None and (name in self.wants or name == "out"):
                zeros = torch.zeros(leaves[name].shape if name != "out" else out.shape).bool()
                zeros[where] = True
                truth.zeros[name] = zeros
                if name == "out":
                    dout[where] = 0
        if self.accumulate:
            truth.values["out"] = truth.values["out"] + given["before"]
            truth.zeros.clear()
        wanted = {n: leaves[n] for n in self.wants}
        truth.values |= autograd.gradients((out * dout).sum(), wanted)
        return truth


@dataclass(frozen=True)
class PairCase:
    """grouped_mm_swiglu, then grouped_mm_downproj."""

    seed: int
    experts: int
    hidden: int
    intermediate: int
    rows: int
    spare: int
    activation: Activation
    spelled: bool  # alpha, limit and up_offset as arguments
    order: str
    layouts: tuple[str, str, str]  # of x, w_up, w_down
    biases: tuple[str, ...]
    fused: bool  # aux goes into the down projection
    uses: tuple[str, ...]  # "a", "aux": those that the loss uses as well
    poison: bool
    wants: tuple[str, ...]
    twice: bool

    @staticmethod
    def drawn(draw: Draw) -> PairCase:
        activation, spelled = draw.activation(), draw.chance(0.3)
        if spelled:
            activation = replace(activation, kind="silu", gated=True, clamp_after=False)
        biases = tuple(name for name in ("b_up", "b_down") if draw.chance(0.5))
        return PairCase(
            seed=draw.seed(),
            experts=draw.experts(),
            hidden=draw.width(),
            intermediate=draw.width(),
            rows=draw.tokens(),
            spare=draw.pick(0, draw.between(1, 20)),
            activation=activation,
            spelled=spelled,
            order=draw.pick("interleaved", "concatenated"),
            layouts=(draw.rows(), draw.matrices(), draw.matrices()),
            biases=biases,
            fused=draw.chance(0.6),
            uses=tuple(name for name in ("a", "aux") if draw.chance(0.3)),
            poison=draw.chance(0.5),
            wants=draw.some(["x", "w_up", "w_down", *biases]),
            twice=draw.chance(0.15),
        )

    def values(self, dtype: torch.dtype) -> Inputs:
        values, many = Values(self.seed, dtype), self.rows + self.spare
        experts, hidden, inner = self.experts, self.hidden, self.intermediate
        width = self.activation.width(inner)
        given = {
            "x": values.normal(many, hidden),
            "w_up": values.normal(experts, hidden, width, scale=hidden**-0.5),
            "w_down": values.normal(experts, inner, hidden, scale=inner**-0.5),
            "b_up": values.normal(experts, width),
            "b_down": values.normal(experts, hidden),
            "dout": values.normal(many, hidden),
            "da": values.normal(many, inner),
            "daux": values.normal(self.rows, width),
            "offs": draw_ends(values, experts, self.rows),
        }
        if self.poison:
            for name in ("x", "dout", "da"):
                given[name][self.rows :] = torch.nan
        return given

    @property
    def names(self) -> tuple[str, ...]:
        return ("x", "w_up", "w_down", *self.biases)

    def run(self, given: Inputs, device: str, dtype: torch.dtype) -> Inputs:
        layouts = dict(zip(("x", "w_up", "w_down"), self.layouts, strict=True))
        tensors = {}
        for name in self.names:
            tensors[name] = place(given[name], layouts.get(name, "packed"), dtype, device)
            tensors[name].requires_grad_(name in self.wants)
        offs, act = given["offs"].to(device), self.activation
        options: dict[str, Any] = {"activation": act}
        if self.spelled:
            options = {"swiglu_alpha": act.alpha, "swiglu_limit": act.limit}
            options["up_offset"] = act.up_offset
        options["order"] = self.order
        x, w_up, w_down = (tensors[name] for name in ("x", "w_up", "w_down"))
        a, aux = guild.grouped_mm_swiglu(x, w_up, offs, tensors.get("b_up"), **options)
        out = guild.grouped_mm_downproj(
            a, w_down, offs, tensors.get("b_down"), aux if self.fused else None, **options
        )
        outputs = {"out": out, "a": a, "aux": aux[: self.rows]}
        gradients = {"out": "dout", "a": "da", "aux": "daux"}
        used = ("out", *self.uses)
        backward([(outputs[n], given[gradients[n]].to(dtype).to(device)) for n in used])
        results = {n: t.grad for n, t in tensors.items() if t.grad is not None}
        return results | {n: t.detach() for n, t in outputs.items()}

    def truth(self, given: Inputs, got: Inputs) -> Truth:
        leaves = leaves_of({n: given[n] for n in self.names}, self.wants)
        ends = given["offs"].tolist()
        aux = grouped_mm(leaves["x"], leaves["w_up"], ends, leaves.get("b_up"))
        aux = aux[: self.rows]
        gate, up = halves(aux, 1, self.order, self.activation.gated)
        a = activate(self.activation, *((up, None) if gate is None else (gate, up)))
        out = grouped_mm(a, leaves["w_down"], ends, leaves.get("b_down"))
        outputs = {"out": out, "a": a, "aux": aux}
        gradients = {"out": given["dout"][: self.rows], "a": given["da"][: self.rows]}
        gradients["aux"] = given["daux"]
        loss = total((outputs[n], gradients[n]) for n in ("out", *self.uses))
        truth = Truth(autograd.gradients(loss, {n: leaves[n] for n in self.wants}))
        nobody = torch.arange(self.rows + self.spare)[:, None] >= self.rows
        for name, t in outputs.items():
            rows = t.detach()
            if name != "aux":
                rows = torch.cat((rows, rows.new_zeros(self.spare, rows.shape[1])))
                truth.zeros[name] = nobody
            truth.values[name] = rows
        empty = torch.diff(given["offs"], prepend=torch.zeros(1, dtype=torch.int32)) == 0
        for name in self.wants:
            shape = (-1, *(1,) * (leaves[name].dim() - 1))
            truth.zeros[name] = nobody if name == "x" else empty.view(shape)
        return truth
