"""What all ranks must agree on in a call: few numbers, as the peer engine's barriers hold 14."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from guild._torch.checks import FLOATS, dtype_name
from guild._torch.gradient_targets import wanting
from guild._torch.low_rank import LowRank
from guild._torch.operators import LayerFlags
from guild.activations import KINDS, NO_LIMIT

_GATED, _CLAMP_AFTER = 16, 32  # beside the kind of an activation
_CALLS = 1 << 32  # of one ExpertParallel


def facts_of(
    size: int,
    exact: bool,
    x: Tensor,
    weighing: tuple[Tensor | None, ...],
    local: list[Any],
    layer: int,
    low: LowRank | None = None,
    lists: bool = False,
) -> dict[str, int]:
    """What every rank must agree on; weighing: the tensors that the scores' gradient reaches.

    size: ranks of the group; lists: the call has token_offsets.
    """
    w_up, w_gate, w_down, b_up, b_down, *flags = local
    flags = LayerFlags(*flags)
    kind = flags.kind + _GATED * flags.gated + _CLAMP_AFTER * flags.clamp_after
    wants = (
        x.requires_grad,
        wanting(weighing),
        wanting((w_up, w_gate, w_down, b_up, b_down)),
        low is not None and low.wants_gradient(),
    )
    gradients = sum(1 << i for i, want in enumerate(wants) if want)
    options = b_up is not None, b_down is not None, low is not None, lists
    return {
        "layer": layer,
        "hidden": x.shape[1],
        "intermediate": w_down.shape[1 if flags.transposed else 2],
        "experts": size * w_down.shape[0],
        "dtype": FLOATS.index(x.dtype),
        "(activation, up_offset)": _word_of(kind, flags.up_offset),
        "(alpha, limit)": _word_of(flags.alpha, flags.limit),
        "options": sum(1 << i for i, one in enumerate(options) if one),
        "exact": int(exact),
        "gradients": gradients * torch.is_grad_enabled(),
    }


def calls_of(number: int) -> int:
    """The number before the first call's, where `number` ExpertParallels were made before."""
    return number * _CALLS


def room_facts(max_tokens: int | None, capacity: float | None) -> dict[str, int]:
    """What every rank must have been given alike before memory is shared."""
    return {"max_tokens": max_tokens or 0, "capacity": _word_of(capacity or 0.0, 0.0)}


def _word_of(first: float, second: float) -> int:
    """Two numbers as one, in single precision."""
    return int.from_bytes(struct.pack("<ff", first, second), "little", signed=True)


def _numbers_of(word: int) -> tuple[float, float]:
    """What `_word_of` packed."""
    return struct.unpack("<ff", word.to_bytes(8, "little", signed=True))


def _activation(word: int) -> str:
    kind, up_offset = _numbers_of(word)
    kind = int(kind)
    name = ("gated " if kind & _GATED else "") + KINDS[kind % _GATED]
    return f"({name}{' with clamp_after' if kind & _CLAMP_AFTER else ''}, {up_offset:g})"


def _alpha_and_limit(word: int) -> str:
    alpha, limit = _numbers_of(word)
    return f"({alpha:g}, {math.inf if limit == NO_LIMIT else limit:g})"


def _names_of(*names: str) -> Callable[[int], str]:
    """Shows a number whose bit i stands for the name i."""

    def text(bits: int) -> str:
        return f"({', '.join(n for i, n in enumerate(names) if bits >> i & 1)})" if bits else "none"

    return text


def _call(call: int) -> str:
    number, of_one = divmod(call, _CALLS)
    return f"{of_one} of the group's ExpertParallel {number + 1}" if number else str(of_one)


# How a fact that is not a plain number is shown.
_SHOWN: dict[str, Callable[[int], str]] = {
    "call": _call,
    "dtype": lambda number: dtype_name(FLOATS[number]),
    "(activation, up_offset)": _activation,
    "(alpha, limit)": _alpha_and_limit,
    "options": _names_of("b_up", "b_down", "LoRA", "token_offsets"),
    "exact": lambda number: str(bool(number)),
    "capacity": lambda word: f"{_numbers_of(word)[0]:g}" if word else "None",
    "gradients": _names_of("x", "scores", "weights", "LoRA"),
}


def shown(name: str, value: int) -> str:
    """The value of a fact, in words."""
    return _SHOWN.get(name, str)(value)
