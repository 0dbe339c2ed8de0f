"""Cross-entropy over a large vocabulary, a chunk of tokens at a time: no logits are kept.

    logits = x W^T,  loss = mean over tokens of logsumexp(logits) - logits[target]

Forward computes a chunk's gradients as well, while its logits exist, so that the product is done
once. Logits and sums are float32 whatever the dtype of x and W.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 28  # logits of a chunk: 1 GiB


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 0) -> Tensor:
    """Mean cross-entropy of x (tokens, hidden) W (vocabulary, hidden)^T, a float32 scalar.

    Parameters
    ----------
    x, weight : torch.Tensor
        In one dtype; both get gradients in it.
    targets : torch.Tensor
        int64 (tokens,), rows of the weight.
    chunk : int
        Tokens at a time; 0: as many as give 2^28 logits.
    """
    chunk = chunk or _even_chunk(x.shape[0], max(1, _CHUNK_ELEMENTS // weight.shape[0]))
    return _ChunkedCrossEntropy.apply(x, weight, targets, chunk)


def _even_chunk(tokens: int, most: int) -> int:
    """A chunk of at most `most` tokens; chunks are equal if at most twice as many do it."""
    least = max(1, -(-tokens // most))
    count = next((n for n in range(least, 2 * least) if tokens % n == 0), least)
    return max(1, -(-tokens // count))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        tokens = x.shape[0]
        total = torch.zeros((), device=x.device)
        dx = torch.empty_like(x) if wanted else None
        dweight = torch.zeros(weight.shape, device=x.device) if wanted else None
        one_pass = _pass(x.is_cuda)
        for first in range(0, tokens, chunk):
            rows = x[first : first + chunk]
            logits = _product(rows, weight.t())
            loss, dlogits = one_pass(logits, targets[first : first + chunk], tokens, x.dtype)
            del logits  # most of the memory that a chunk takes
            total += loss
            if wanted:
                torch.mm(dlogits, weight, out=dx[first : first + chunk])
                _add_product(dweight, dlogits.t(), rows)
            del dlogits
        ctx.save_for_backward(dx, dweight)
        ctx.dtype = weight.dtype
        return total / tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor):
        dx, dweight = ctx.saved_tensors
        dx, dweight = (dx.float() * dloss).to(dx.dtype), (dweight * dloss).to(ctx.dtype)
        return dx, dweight, None, None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b of 16-bit operands, in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Total += a b, in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def loss_and_gradient(
    logits: Tensor, targets: Tensor, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Sum of the losses; softmax minus one at the target, divided by `tokens`, in `dtype`."""
    most = logits.amax(1, keepdim=True)
    powers = (logits - most).exp()
    sums = powers.sum(1, keepdim=True)
    loss = ((sums.log() + most).sum() - logits.gather(1, targets[:, None]).sum()).float()
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return loss, ((powers / sums - is_target.float()) / tokens).to(dtype)


@functools.cache
def _pass(compiled: bool) -> Any:
    """The pass; compiled on a GPU: two passes over the logits instead of a dozen."""
    return torch.compile(loss_and_gradient) if compiled else loss_and_gradient
