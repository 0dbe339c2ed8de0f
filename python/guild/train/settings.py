"""What a training run consists of: every number that decides its outcome, in one frozen record.

The defaults learn on two CPU cores in well under three minutes; see docs/measured/layers.md.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

# Settings that are words. Repeated here so that reading a command line does not import routing.py,
# which needs the compiled library; a test compares the two.
CHOICES = {
    "router": (
        "softmax",
        "softmax_renormalized",
        "topk_softmax",
        "sigmoid",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v4",
        "ernie4_5",
        "llama4",
    ),
    "round": ("none", "nearest", "up", "down", "stochastic", "balanced"),
}
MOST_SEED = 2**62
_MOST_COUNT = 2**31 - 1

BYTES = 256  # values of a byte
_PLAIN_ROUTERS = ("softmax_renormalized", "topk_softmax")


@dataclass(frozen=True)
class Settings:
    """Sizes, schedule and seed of a run; saved in its checkpoint and in summary.json.

    Attributes
    ----------
    steps : int
        Optimiser steps; the learning rate's schedule ends with the last one.
    batch, context : int
        Windows per step and bytes per window.
    accumulate : int
        Parts that a step's windows are divided into, of one forward and backward each.
    hidden, layers, heads : int
        Width and depth of the transformer.
    experts, intermediate, top_k : int
        Number of experts, width of one, experts that a token is sent to.
    shared : int
        Width of the experts that every token goes through; 0: none.
    vocabulary : int
        Rows of the embedding; those past 256 are never a target.
    lr, final_lr : float
        Peak learning rate and the share of it left at the end of the cosine.
    warmup : int
        Steps of linear warm-up.
    weight_decay, clip : float
        AdamW's decay of the matrices; norm at which the gradient is clipped.
    balance : float
        Weight of the load-balancing loss.
    router : str
        A name that guild.Router.named knows.
    round : str
        "none", or how guild.Router rounds tokens to tiles in training.
    tile : int
        Rows of a tile.
    capacity : float
        Most rows of an expert in training, over an even share; 0: no limit.
    bias_rate : float
        Step of the selection bias of routers that have one.
    seed : int
        Decides the initial weights, the order of the data and the sample at the end.
    """

    steps: int = 700
    batch: int = 16
    context: int = 128
    accumulate: int = 1
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    experts: int = 8
    intermediate: int = 128
    top_k: int = 2
    shared: int = 0
    vocabulary: int = 256
    lr: float = 3e-3
    final_lr: float = 0.05
    warmup: int = 40
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 0.02
    router: str = "softmax_renormalized"
    round: str = "none"
    tile: int = 128
    capacity: float = 0.0
    bias_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        self._expect_types()
        for name in (
            "steps batch context accumulate hidden layers heads experts intermediate top_k tile"
        ).split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in (
            "warmup",
            "weight_decay",
            "balance",
            "capacity",
            "bias_rate",
            "seed",
            "shared",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}: expected a finite number of 0 or more, got {getattr(self, name)}"
                )
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch: expected a multiple of {self.accumulate} (accumulate), got {self.batch}"
            )
        if self.seed > MOST_SEED:
            raise ValueError(f"seed: expected 0 to {MOST_SEED}, got {self.seed}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and field.name != "seed" and value > _MOST_COUNT:
                raise ValueError(f"{field.name}: expected at most {_MOST_COUNT}, got {value}")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}: expected a positive number, got {value}")
        if not 0 <= self.final_lr <= 1:
            raise ValueError(f"final_lr: expected a share between 0 and 1, got {self.final_lr}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if self.vocabulary < BYTES:
            raise ValueError(f"vocabulary: expected at least {BYTES}, got {self.vocabulary}")
        if self.round != "none" and self.capacity:
            raise ValueError(f"capacity: expected 0 with rounding, got {self.capacity}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: expected at most experts = {self.experts}, got {self.top_k}")
        for name in ("hidden", "intermediate", "shared"):
            if getattr(self, name) % 8:
                raise ValueError(
                    f"{name}: expected a multiple of 8 (16-byte rows in bf16), "
                    f"got {getattr(self, name)}"
                )

    def _expect_types(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            known = (int, float) if kind is float else kind
            if not isinstance(value, known) or isinstance(value, bool):
                raise TypeError(f"{field.name}: expected {kind.__name__}, got {value!r}")

    @property
    def plain_routing(self) -> bool:
        """Whether routing is top-k and softmax over the chosen, and drops or adds no row."""
        return self.router in _PLAIN_ROUTERS and self.round == "none" and not self.capacity

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one step learns from."""
        return self.batch * self.context

    def lr_at(self, step: int) -> float:
        """Learning rate of `step` (0 is the first): linear rise, then a cosine."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        along = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * along))
        return self.lr * (self.final_lr + (1 - self.final_lr) * cosine)

    def as_dict(self) -> dict[str, Any]:
        """Field names to values, for JSON and checkpoints."""
        return dataclasses.asdict(self)


def changed_fields(old: Settings, new: Settings) -> list[str]:
    """Names of the fields in which two settings differ."""
    return [name for name, value in old.as_dict().items() if value != getattr(new, name)]
