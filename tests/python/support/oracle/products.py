"""Grouped matrix products, one group after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def grouped_mm(a: Tensor, b: Tensor, ends: Sequence[int] | None, bias: Tensor | None) -> Tensor:
    """Group by group; the bias is added to a group's result, and an empty group has none."""
    if ends is None:
        out = [a[e] @ b[e] for e in range(a.shape[0])]
        return torch.stack(out if bias is None else [o + bias[e] for e, o in enumerate(out)])
    spans = list(pairwise([0, *ends]))
    if a.dim() == 3:
        parts = [a[e] @ b[:, i:j] for e, (i, j) in enumerate(spans)]
        if bias is not None:
            parts = [part + bias[e][:, None] for e, part in enumerate(parts)]
        return torch.cat([*parts, a.new_zeros(a.shape[1], b.shape[1] - ends[-1])], 1)
    if b.dim() == 2:
        parts = [a[:, i:j] @ b[i:j] for i, j in spans]
        if bias is not None:
            filled = [j > i for i, j in spans]
            parts = [part + bias[e] * filled[e] for e, part in enumerate(parts)]
        return torch.stack(parts)
    parts = [a[i:j] @ b[e] for e, (i, j) in enumerate(spans)]
    if bias is not None:
        parts = [part + bias[e] for e, part in enumerate(parts)]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])
