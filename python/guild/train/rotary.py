"""Rotary positions of attention's queries and keys, and their gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BASE = 10_000.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (j, j + half) of the last dimension by the angle of their position.

    x (batch, context, heads, head size); cos, sin as `rotary_tables` makes them. Compiled, this is
    one expression over x, without parts to put together.
    """
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cos.to(x.dtype) + swapped * sin.to(x.dtype)


def rotary_angles(positions: Tensor, head_size: int) -> Tensor:
    """Angles float32 (positions, head_size / 2): each times a geometric series of rates."""
    rates = torch.arange(head_size // 2, device=positions.device) * (-2.0 / head_size)
    return positions[:, None] * _BASE**rates


def rotary_tables(positions: Tensor, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors by position of a head, and of the head with its halves swapped.

    Returns
    -------
    tuple of torch.Tensor
        (positions, 1, head_size) in dtype: cosines, and sines, those of the first half negative.
    """
    angles = rotary_angles(positions, head_size)
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    return cos[:, None].to(dtype), sin[:, None].to(dtype)


def turned_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys rotated by their positions, and values, (batch, context, heads, head size).

    qkv (batch, context, 3, heads, head size). Nothing that is returned is a view of it, which would
    keep all of it for backward.
    """
    if torch.compiler.is_compiling():
        return _TurnedHeads.apply(qkv, cos, sin)
    return _turned(qkv, cos, sin)


def _turned(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(2)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


class _TurnedHeads(torch.autograd.Function):
    """Writes the gradients of q, k and v each to its place in that of qkv.

    Compiled from `_turned`, they are one kernel that decides for every element which of the three
    it belongs to, and takes 220 us instead of 154 at the size of `fine7b`.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(qkv, cos, sin)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:
        return turned_heads_gradient(dq, dk, dv, *ctx.saved_tensors), None, None


@torch.library.custom_op("guild_train::turned_heads_gradient", mutates_args=())
def turned_heads_gradient(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv (batch, context, 3, heads, head size) from those of its three parts."""
    dqkv = _gradient_like(dq)
    turn, copy = (_compiled(f) if dq.is_cuda else f for f in (_turn_back, _copy))
    turn(dq, cos, sin, dqkv[:, :, 0])
    turn(dk, cos, sin, dqkv[:, :, 1])
    copy(dv, dqkv[:, :, 2])
    return dqkv


@turned_heads_gradient.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _gradient_like(dq)


def _gradient_like(dq: Tensor) -> Tensor:
    batch, context, *head = dq.shape
    return dq.new_empty(batch, context, 3, *head)


def _turn_back(d: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    out.copy_(rotate(d, cos, -sin))


def _copy(d: Tensor, out: Tensor) -> None:
    out.copy_(d)


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(function, dynamic=False)
