"""An embedding whose gradient repeats to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Embedding(nn.Embedding):
    """torch.nn.Embedding, with a gradient of the weight that has the same bits in every run.

    On a GPU, PyTorch 2.11 adds up the gradients of few rows with many tokens each by atomics
    unless deterministic algorithms are on (PyTorch's pull request 170589).
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 (...) -> (..., columns)."""
        return _Rows.apply(self.weight, tokens)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        with _deterministic():
            found = torch.ops.aten.embedding_dense_backward(gradient, tokens, ctx.rows, -1, False)
        return found, None


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic algorithms, without their filling of new memory."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
