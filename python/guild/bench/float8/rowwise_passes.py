"""Quantises rows and columns for torch's FP8 products: torchao's kernels, or compiled torch.

Scales are powers of two, as torchao rounds them in training: a row's values are multiplied by the
largest that keeps them within E4M3's 448, and the product's scale is the inverse.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 16  # a group of rows is a multiple of these in torch's products
_MOST = 448.0
_LEAST = 1e-12  # amax of a row of zeros
_Coded = tuple[Tensor, Tensor]


class Passes(NamedTuple):
    """Functions from bfloat16 to codes, the summed dimension last, and float32 scales.

    Attributes
    ----------
    rows : callable
        (rows, K) to codes (rows, K) and scales (rows,).
    weights : callable
        (experts, outputs, inputs) to the same with scales (experts, outputs).
    turned : callable
        (experts, outputs, inputs) to (experts, inputs, outputs) with scales (experts, inputs).
    columns : callable
        (rows, M), (rows, N) and int32 ends (experts,), multiples of 16, to the pairs of (M, rows)
        with scales (experts * M,) and (N, rows) with (experts * N,).
    """

    rows: Callable[[Tensor], _Coded]
    weights: Callable[[Tensor], _Coded]
    turned: Callable[[Tensor], _Coded]
    columns: Callable[[Tensor, Tensor, Tensor], tuple[_Coded, _Coded]]


def fast(function: Callable[..., Tensor], x: Tensor) -> Callable[..., Tensor]:
    """The function, compiled on a GPU, where its passes are fused; unchanged on the CPU."""
    return _compiled(function) if x.is_cuda else function


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)  # once for all shapes


def torch_passes() -> Passes:
    """The passes in plain torch."""
    return Passes(_rows, _rows, _turned, _columns)


def torchao_passes() -> Passes | None:
    """The passes of torchao's MoE training; None if it is not installed or has other ones."""
    if importlib.util.find_spec("torchao") is None:
        return None
    try:
        from torchao.prototype.moe_training.kernels import (
            triton_fp8_colwise_3d_scale_and_cast,
            triton_fp8_per_group_colwise_scales_dual,
            triton_fp8_rowwise_2d_scale_and_cast,
            triton_fp8_rowwise_3d_transpose_rhs,
        )
    except ImportError:
        return None
    options = {"output_dtype": torch.float8_e4m3fn, "round_scales_to_power_of_2": True}

    def rows(x: Tensor) -> _Coded:
        codes, scales = triton_fp8_rowwise_2d_scale_and_cast(x, **options)
        return codes, scales.flatten().reciprocal()

    def weights(w: Tensor) -> _Coded:
        codes, scales = triton_fp8_colwise_3d_scale_and_cast(w.mT, **options)
        return codes.mT, scales.flatten(1).reciprocal()

    def turned(w: Tensor) -> _Coded:
        codes, scales = triton_fp8_rowwise_3d_transpose_rhs(w.mT, **options)
        return codes.mT, scales.flatten(1).reciprocal()

    def columns(a: Tensor, b: Tensor, ends: Tensor) -> tuple[_Coded, _Coded]:
        found = triton_fp8_per_group_colwise_scales_dual(a, b, ends, *options.values())
        of_a, scales_a, of_b, scales_b = found
        return (of_a.t(), scales_a.reciprocal()), (of_b.t(), scales_b.reciprocal())

    return Passes(rows, weights, turned, columns)


def _rows(x: Tensor) -> _Coded:
    factors = fast(_row_factors, x)(x)
    return fast(_coded_rows, x)(x, factors), factors.reciprocal()


def _turned(w: Tensor) -> _Coded:
    factors = fast(_column_factors, w)(w)
    return fast(_coded_turned, w)(w, factors), factors.reciprocal()


def _columns(a: Tensor, b: Tensor, ends: Tensor) -> tuple[_Coded, _Coded]:
    starts = torch.arange(0, a.shape[0], ROWS, device=a.device, dtype=ends.dtype)
    # Rows after the last end belong to no expert: no product reads their arbitrary codes.
    expert = torch.searchsorted(ends, starts, right=True).clamp_(max=ends.shape[0] - 1)
    return _columns_of(a, ends, expert), _columns_of(b, ends, expert)


def _columns_of(x: Tensor, ends: Tensor, expert: Tensor) -> _Coded:
    most = fast(_most_of_blocks, x)(x)
    counts = ends.diff(prepend=ends.new_zeros(1)) // ROWS
    of_experts = torch.segment_reduce(most, "max", lengths=counts, unsafe=True, initial=0.0)
    factors = fast(_factors, x)(of_experts)
    return fast(_coded_columns, x)(x, factors, expert), factors.flatten().reciprocal()


def _factors(amax: Tensor) -> Tensor:
    return torch.exp2(torch.floor(torch.log2(_MOST / amax.float().clamp(min=_LEAST))))


def _row_factors(x: Tensor) -> Tensor:
    return _factors(x.abs().amax(-1))


def _column_factors(w: Tensor) -> Tensor:
    return _factors(w.abs().amax(1))


def _coded(x: Tensor, factors: Tensor) -> Tensor:
    return (x.float() * factors).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn)


def _coded_rows(x: Tensor, factors: Tensor) -> Tensor:
    return _coded(x, factors[..., None])


def _coded_turned(w: Tensor, factors: Tensor) -> Tensor:
    return _coded(w, factors[:, None]).mT.contiguous()


def _most_of_blocks(x: Tensor) -> Tensor:
    return x.abs().view(-1, ROWS, x.shape[1]).amax(1).float()


def _coded_columns(x: Tensor, factors: Tensor, expert: Tensor) -> Tensor:
    blocks = _coded(x.view(-1, ROWS, x.shape[1]), factors[expert][:, None])
    return blocks.view(x.shape).t().contiguous()
