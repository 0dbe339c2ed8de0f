"""torch.stack and torch.cat whatever autocast says: it refuses 16-bit tensors of another dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from guild._torch.checks import autocast_dtype


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.stack in the tensors' own dtype."""
    with _as_they_are(tensors[0]):
        return torch.stack(tuple(tensors), dim)


def cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat in the tensors' own dtype."""
    with _as_they_are(tensors[0]):
        return torch.cat(tuple(tensors), dim)


def _as_they_are(x: Tensor) -> contextlib.AbstractContextManager:
    if autocast_dtype(x) is None:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)
