"""Low-rank terms of random expert layers: ranks, form, dtype, as Guild takes them and as deltas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuzz_draw import Draw, Values
from guild import LoRA
from oracle.lora import delta


@dataclass(frozen=True)
class LowRankTerms:
    """Terms of the weights that routed_experts and experts_mlp take; a rank of 0 is no term."""

    up: int
    gate: int  # where gate and up are two weights
    down: int
    stacked: bool  # as PEFT stores them
    scale: float
    dtype: str | None  # None: the layer's

    @staticmethod
    def drawn(draw: Draw, apart: bool) -> LowRankTerms | None:
        if not draw.chance(0.35):
            return None

        def rank() -> int:
            return draw.pick(0, 1, 8, draw.between(2, 20))

        return LowRankTerms(
            up=rank(),
            gate=rank() if apart else 0,
            down=rank(),
            stacked=draw.chance(0.6),
            scale=draw.pick(1.0, 2.0, draw.number(-1, 2)),
            dtype=draw.pick(None, None, "float32", "bfloat16"),
        )

    def ranks(self) -> dict[str, int]:
        """Ranks by the weight's name."""
        ranks = {"w_up": self.up, "w_gate": self.gate, "w_down": self.down}
        return {name: rank for name, rank in ranks.items() if rank}

    def shapes(
        self, weights: dict[str, tuple[int, ...]], transposed: bool
    ) -> dict[str, tuple[int, ...]]:
        """Shapes of w_up.a, w_up.b and so on, for weights of these shapes."""
        shapes = {}
        for name, rank in self.ranks().items():
            experts, outputs, inputs = weights[name]
            if transposed:
                outputs, inputs = inputs, outputs
            if self.stacked:
                a, b = (experts * rank, inputs), (outputs, rank * experts)
            else:
                a, b = (experts, rank, inputs), (experts, outputs, rank)
            shapes |= {f"{name}.a": a, f"{name}.b": b}
        return shapes

    def values(self, values: Values, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The terms in float64, of a size that keeps what they add near 1."""
        stored = self.dtype and getattr(torch, self.dtype)
        if values.dtype in (torch.bfloat16, torch.float16) and stored != torch.bfloat16:
            stored = values.dtype  # so that no cast rounds them
        rank = {f"{name}.b": r for name, r in self.ranks().items()}
        return {
            name: values.normal(*s, scale=rank.get(name, s[-1]) ** -0.5, dtype=stored)
            for name, s in shapes.items()
        }

    def leaf(self, value: Tensor, dtype: torch.dtype, device: str) -> Tensor:
        return value.to(getattr(torch, self.dtype) if self.dtype else dtype).to(device)

    def arguments(self, leaves: dict[str, Tensor], apart: bool) -> dict[str, Any]:
        """lora_up and lora_down."""

        def one(name: str) -> LoRA | None:
            if f"{name}.a" not in leaves:
                return None
            return LoRA(leaves[f"{name}.a"], leaves[f"{name}.b"], self.scale)

        up = (one("w_gate"), one("w_up")) if apart else one("w_up")
        return {"lora_up": up, "lora_down": one("w_down")}

    def with_deltas(self, leaves: dict[str, Tensor], transposed: bool) -> dict[str, Tensor]:
        """The weights with the terms added to them."""
        summed = dict(leaves)
        for name in self.ranks():
            a, b = leaves[f"{name}.a"], leaves[f"{name}.b"]
            change = delta(a, b, self.scale, leaves[name].shape[0])
            summed[name] = leaves[name] + (change.mT if transposed else change)
        return summed

    def unused(self, name: str, filled: Tensor) -> Tensor:
        """Where the gradient of w_up.a and so on is zero: bool, for experts (E) without rows."""
        rank, empty = self.ranks()[name.partition(".")[0]], ~filled
        if not self.stacked:
            return empty.view(-1, 1, 1)
        if name.endswith(".a"):
            return empty.repeat_interleave(rank)[:, None]
        return empty.repeat(rank)[None]
