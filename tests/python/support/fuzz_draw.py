"""The parts of random cases: sizes, activations, memory layouts, options of backward.

A case is a frozen dataclass of plain values, drawn by `Draw`; its `repr` recreates it. Tensors
follow from the case's own seed, through `Values`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from guild import FP8, Activation, WeightGradients

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
PRESETS = ("silu", "quick_gelu", "gpt_oss", "relu2_ungated")


class Draw:
    """A seeded source of choices; `aligned` for a GPU, whose rows are aligned to 16 bytes."""

    def __init__(self, seed: int, aligned: bool = False) -> None:
        self._random = random.Random(seed)
        self.aligned = aligned

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def between(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def number(self, least: float, most: float) -> float:
        return round(self._random.uniform(least, most), 3)

    def seed(self) -> int:
        return self._random.getrandbits(31)

    def some(self, names: Iterable[str]) -> tuple[str, ...]:
        """All names, none, or a random part of them."""
        probability = self.pick(1.0, 1.0, 0.7, 0.7, 0.3, 0.0)
        return tuple(name for name in names if self.chance(probability))

    def width(self, unit: int = 8) -> int:
        """H or I: mostly small, sometimes larger than a tile of the kernels; unit: on a GPU."""
        if self.aligned:
            return unit * (self.between(17, 40) if self.chance(0.15) else self.between(1, 9))
        return self.between(60, 140) if self.chance(0.05) else self.between(1, 20)

    def tokens(self) -> int:
        return self.pick(0, 1, self.between(2, 40), self.between(2, 40), self.between(2, 40)) + (
            self.between(100, 300) if self.chance(0.1) else 0
        )

    def experts(self) -> int:
        return self.pick(1, 2, *(self.between(3, 9) for _ in range(5)), self.between(10, 40))

    def top_k(self, experts: int) -> int:
        """1 to 5, sometimes all."""
        most = min(experts, 10) if self.chance(0.15) else min(experts, 5)
        return most if self.chance(0.2) else self.between(1, most)

    def activation(self) -> Activation:
        if self.chance(0.2):
            return Activation.named(self.pick(*PRESETS))
        return Activation(
            self.pick(*KINDS),
            gated=self.chance(0.75),
            alpha=self.number(0.3, 2.5) if self.chance(0.5) else 1.0,
            limit=self.number(0.3, 3) if self.chance(0.4) else math.inf,
            up_offset=self.number(-1, 1.5) if self.chance(0.4) else 0.0,
            clamp_after=self.chance(0.3),
        )

    def matrices(self) -> str:
        """A layout of weights that `place` supports."""
        return self.pick("packed", "packed", "window", "flipped", "every_second") if (
            self.aligned or self.chance(0.9)
        ) else "scattered"  # fmt: skip

    def other_half(self, first: str) -> str:
        """A layout beside `first` in a pair: on a GPU with the same contiguous dimension."""
        if not self.aligned:
            return self.matrices()
        return first if first == "flipped" else self.pick("packed", "window", "every_second")

    def fp8(self, probability: float) -> FP8 | None:
        """How a layer runs in FP8; mostly not."""
        if not self.chance(probability):
            return None
        return FP8(
            wgrad=self.pick("bf16", "fp8"),
            gradients=self.pick("e4m3", "e4m3", "e5m2"),
            scales=self.pick("exact", "power_of_two"),
            save=self.pick("bf16", "bf16", "fp8"),
        )

    def rows(self) -> str:
        """A layout of rows whose columns are contiguous."""
        return self.pick("packed", "packed", "window")

    def backward(self, names: Iterable[str], sinks: Iterable[str]) -> Backward:
        """`names`: what may want a gradient; `sinks`: those that WeightGradients takes."""
        sinks = tuple(sinks)
        wants = self.some(names)
        later = self.pick(None, None, None, "grad", "main_grad")
        return Backward(
            wants=wants,
            existing=tuple(n for n in wants if n in sinks and self.chance(0.3)),
            later=later,
            delayed=later is not None and self.chance(0.5),
            passes=2 if self.chance(0.3) else 1,
            forward_first=self.chance(0.5),
            recompute=self.chance(0.35),
        )


class Values:
    """Tensors in float64 whose values are exact in `dtype` as well, so that both compute alike."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self.draw, dtype=torch.float64) * scale
        return values.to(dtype or self.dtype).double()

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.draw, dtype=torch.float64)

    def integers(self, least: int, most: int, *shape: int) -> Tensor:
        """int64 from least to most, inclusive."""
        return torch.randint(least, most + 1, shape, generator=self.draw)


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights of experts are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def place(values: Tensor, layout: str, dtype: torch.dtype, device: str) -> Tensor:
    """The values in another memory layout, with NaN around them if it leaves room."""
    values = values.to(dtype).to(device)
    if layout == "packed":
        return values.clone(memory_format=torch.contiguous_format)
    if layout == "flipped":
        return values.mT.clone(memory_format=torch.contiguous_format).mT
    shape = list(values.shape)
    if layout == "window":  # a part of longer rows, of more rows
        cut = [slice(None)] * (len(shape) - 2) + [slice(8, 8 + size) for size in shape[-2:]]
        shape[-2:] = [size + 16 for size in shape[-2:]]
    elif layout == "every_second":
        cut, shape[0] = [slice(1, None, 2)], 2 * shape[0]
    else:  # "scattered": no dimension is contiguous
        cut, shape = [..., 0], [*shape, 2]
    view = values.new_full(shape, math.nan)[tuple(cut)]
    view.copy_(values)
    return view


def without_gradients(how: str | None, like: Tensor, call: Callable[..., Tensor]) -> Tensor:
    """The result of a call without gradients; `like` itself if `how` is None."""
    if how is None:
        return like
    if how == "inference":
        with torch.inference_mode():
            return call()
    with torch.no_grad():
        if how == "no_grad":
            return call()
        layout = "window" if like.dim() == 2 else "packed"
        out = place(torch.full_like(like, math.nan), layout, like.dtype, str(like.device))
        given = call(out=out)
        return out if given is out else out.new_empty(0)


@dataclass(frozen=True)
class Backward:
    """Which tensors want gradients, where these go, and in how many passes they add up."""

    wants: tuple[str, ...]
    existing: tuple[str, ...]  # those of them that have a gradient beforehand
    later: str | None  # None: autograd; else WeightGradients, "grad" or "main_grad"
    delayed: bool
    passes: int
    forward_first: bool  # all forward passes, then all backward passes
    recompute: bool

    def sink(self) -> WeightGradients | None:
        if self.later is None:
            return None
        return WeightGradients(main_grad=self.later == "main_grad", delayed=self.delayed)

    def prepare(self, name: str, leaf: Tensor, before: Tensor, layout: str, sunk: bool) -> None:
        """Set whether a leaf wants a gradient, and give it the one that it has beforehand."""
        leaf.requires_grad_(name in self.wants)
        if sunk and self.later == "main_grad":
            leaf.main_grad = place(before, layout, torch.float32, str(leaf.device))
        elif name in self.existing:
            leaf.grad = place(before, layout, leaf.dtype, str(leaf.device))

    def starts_with(self, name: str, sunk: bool) -> bool:
        """Whether a leaf that wants a gradient has one beforehand."""
        return name in self.existing or (sunk and self.later == "main_grad")

    def found(self, name: str, leaf: Tensor, sunk: bool) -> dict[str, Tensor]:
        """The leaf's gradient by its name; under another name if it wanted none."""
        results = {} if leaf.grad is None else {name: leaf.grad}
        if sunk and self.later == "main_grad":
            results = {f"{name}.grad": g for g in results.values()}
            if leaf.requires_grad:
                results[name] = leaf.main_grad
        return results

    def run(self, step: Callable[[int], Outputs], sink: WeightGradients | None) -> None:
        """step(i): runs pass i, and returns its outputs and their gradients."""
        waiting = []
        for i in range(self.passes):
            outputs = step(i)
            if self.forward_first:
                waiting.append(outputs)
            else:
                backward(outputs)
        for outputs in waiting:
            backward(outputs)
        if sink is not None:
            sink.compute()


Outputs = list[tuple[Tensor, Tensor]]


def backward(outputs: Outputs) -> None:
    """Run backward through every output that has a gradient."""
    pairs = [pair for pair in outputs if pair[0].requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))


def total(outputs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum whose gradients `backward` computes."""
    return sum((out * gradient).sum() for out, gradient in outputs)
