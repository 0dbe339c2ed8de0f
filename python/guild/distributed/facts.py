"""What all ranks must agree on in a call: few numbers, as the peer engine's barriers hold 14."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from guild._torch.checks import FLOATS
from guild._torch.low_rank import LowRank
from guild._torch.operators import LayerFlags
from guild.distributed.ranks import word_of


def facts_of(
    size: int,
    exact: bool,
    x: Tensor,
    weighing: Tensor,
    local: list[Any],
    layer: int,
    low: LowRank | None = None,
) -> dict[str, int]:
    """What every rank must agree on; weighing: the tensor that gets the scores' gradient.

    size: ranks of the group.
    """
    w_up, w_gate, w_down, b_up, b_down, *flags = local
    flags = LayerFlags(*flags)
    kind = flags.kind + 16 * flags.gated + 32 * flags.clamp_after
    wants = any(t is not None and t.requires_grad for t in (w_up, w_gate, w_down, b_up, b_down))
    terms = low is not None and low.wants_gradient
    wants = (x.requires_grad, weighing.requires_grad, wants, terms)
    gradients = sum(1 << i for i, want in enumerate(wants) if want)
    return {
        "layer": layer,
        "hidden": x.shape[1],
        "intermediate": w_down.shape[1 if flags.transposed else 2],
        "experts": size * w_down.shape[0],
        "dtype": FLOATS.index(x.dtype),
        "(activation, up_offset)": word_of(kind, flags.up_offset),
        "(alpha, limit)": word_of(flags.alpha, flags.limit),
        "bias and LoRA": (b_up is not None) + 2 * (b_down is not None) + 4 * (low is not None),
        "exact": int(exact),
        "gradients": gradients * torch.is_grad_enabled(),
    }
