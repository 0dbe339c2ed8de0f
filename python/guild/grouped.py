"""Level 1: the grouped product, and the fused pair of the two projections on sorted rows."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from guild._torch.checks import (
    dtype_name,
    expect_device,
    expect_dims,
    expect_dtype,
    expect_experts,
    expect_flag,
    expect_free,
    expect_like,
    expect_offsets,
    expect_operand,
    expect_rows,
    expect_shape,
    expect_tensor,
)
from guild._torch.expert_lists import Listed, joined, table_of, touching
from guild._torch.gradients import starts
from guild._torch.operators import autocast, ops
from guild.activations import Activation, as_activation, expect_parameter, is_interleaved

_GPT_OSS = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}

_grouped_mm = ops.grouped_mm.default
_grouped_mm_out = ops.grouped_mm_out.default
_pair_up = ops.pair_up.default
_pair_down = ops.pair_down.default


# ---- the grouped product ------------------------------------------------------------------------


def grouped_mm(
    mat_a: Listed,
    mat_b: Listed,
    offs: Tensor | None = None,
    bias: Listed | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """torch._grouped_mm with a bias, float32 results, accumulation and defined zeros.

    ============ =============== =============== ===============
    groups split mat_a           mat_b           result
    ============ =============== =============== ===============
    rows         (M, K)          (E, K, N)       (M, N)
    inner        (M, K)          (K, N)          (E, M, N)
    columns      (E, M, K)       (K, N)          (M, N)
    nothing      (E, M, K)       (E, K, N)       (E, M, N)
    ============ =============== =============== ===============

    Parameters
    ----------
    mat_a, mat_b : torch.Tensor or list of torch.Tensor
        As above, bfloat16 or float16; on the CPU float32 and float64 too; each row- or
        column-major. One with 3 dimensions may be a list of E matrices, read in place as in
        `routed_experts`.
    offs : torch.Tensor, optional
        int32 (E,), ascending: where each group ends along the dimension that groups split; None if
        they split nothing. 1 to 4,096 groups. Values are not checked but clamped: one below its
        predecessor counts as the predecessor, one above the dimension's size as that size. On a
        GPU gradients of weights and biases are unspecified where one is below its predecessor.
    bias : torch.Tensor or list of torch.Tensor, optional
        (E, N); (E, M) where groups split columns. Or a list of E vectors.
    out_dtype : torch.dtype, optional
        mat_a's dtype, the default, or float32.
    out : torch.Tensor, optional
        Tensor to write the result to: of its shape, in mat_a's dtype or float32. Must not share
        memory with an operand, nor overlap itself. Has no gradient: an error where an operand, the
        bias or out wants one, unless under no_grad().
    accumulate : bool
        Add to `out` instead of overwriting it.

    Returns
    -------
    torch.Tensor
        Zero where there is nothing to multiply: in empty groups, in groups whose sum is empty, to
        which no bias is added, and in rows or columns at or past offs[-1]. With `accumulate` these
        keep their values. Under autocast the operands are cast to its dtype first.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    NotImplementedError
        Under forward-mode AD, and with out under torch.func.vmap.
    """
    given = {"mat_a": mat_a, "mat_b": mat_b}
    a, b = (joined(name, value) for name, value in given.items())
    mat_a, mat_b, bias = a.tensor, b.tensor, joined("bias", bias, 1).tensor
    expect_dims("mat_a", mat_a, 2, 3)
    expect_dims("mat_b", mat_b, 2, 3)
    if bias is not None:
        expect_tensor("bias", bias)
    mat_a, mat_b, bias = autocast(mat_a, mat_b, bias)
    expect_operand("mat_a", mat_a)
    expect_like("mat_b", mat_b, mat_a, "mat_a")
    shape = _grouped_shape(mat_a, mat_b, offs)
    if bias is not None:
        groups = mat_a.shape[0] if mat_a.dim() == 3 else mat_b.shape[0]
        if mat_a.dim() == 2 and mat_b.dim() == 2:
            groups = offs.shape[0]
        by_row = mat_a.dim() == 3 and mat_b.dim() == 2
        expect_shape("bias", bias, (groups, shape[-2] if by_row else shape[-1]))
        expect_like("bias", bias, mat_a, "mat_a")
        expect_rows("bias", bias)
    expect_dtype("out_dtype", out_dtype)
    expect_flag("accumulate", accumulate)
    dtypes = (None, mat_a.dtype, torch.float32)
    if out_dtype not in dtypes:
        raise TypeError(
            f"out_dtype: expected {_or_float32(mat_a.dtype)}, got {dtype_name(out_dtype)}"
        )
    if out is None:
        if accumulate:
            raise ValueError("accumulate: expected False without out, got True")
        as_float = out_dtype == torch.float32 and mat_a.dtype != torch.float32
        return _grouped_mm(mat_a, mat_b, offs, bias, as_float, table_of(a), table_of(b))
    expect_shape("out", out, shape)
    expect_device("out", out, mat_a, "mat_a")
    if out.dtype not in dtypes or out_dtype not in (None, out.dtype):
        wanted = _or_float32(mat_a.dtype) if out_dtype is None else dtype_name(out_dtype)
        raise TypeError(f"out: expected dtype {wanted}, got {dtype_name(out.dtype)}")
    read = {"mat_a": mat_a, "mat_b": mat_b, "offs": offs, "bias": bias}
    for name, found in (("mat_a", a), ("mat_b", b)):
        if found.at is not None:  # a view that spans other memory too
            del read[name]
            read |= touching(out, name, given[name])
    expect_free(out, read)
    _grouped_mm_out(mat_a, mat_b, offs, bias, out, accumulate, table_of(a), table_of(b))
    return out


def _or_float32(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float32 else f"{dtype_name(dtype)} or float32"


def _grouped_shape(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None) -> tuple[int, ...]:
    """The result's shape; checks K, E and offs on the way."""
    rows, inner, columns = mat_a.shape[-2], mat_a.shape[-1], mat_b.shape[-1]
    if mat_b.shape[-2] != inner:
        raise ValueError(
            f"mat_b: expected {inner} rows to match the columns of mat_a {tuple(mat_a.shape)}, "
            f"got shape {tuple(mat_b.shape)}"
        )
    stacks = [t.shape[0] for t in (mat_a, mat_b) if t.dim() == 3]
    if len(stacks) == 2:
        if offs is not None:
            raise ValueError(
                f"offs: expected None where both operands have 3 dimensions, got shape "
                f"{tuple(offs.shape)}"
            )
        if stacks[0] != stacks[1]:
            raise ValueError(f"mat_b: expected {stacks[0]} matrices as in mat_a, got {stacks[1]}")
        expect_experts("mat_a", mat_a, stacks[0], False, "groups")
        return stacks[0], rows, columns
    if offs is None:
        raise ValueError("offs: expected the end of each group, int32 (groups,), got None")
    expect_offsets("offs", offs, mat_a)
    expect_experts("offs", offs, offs.shape[0], False, "groups")
    if stacks:
        expect_shape("offs", offs, (stacks[0],), "one end per group")
        return rows, columns
    return offs.shape[0], rows, columns


# ---- the fused pair -----------------------------------------------------------------------------


class _Origin(NamedTuple):
    """What grouped_mm_swiglu records about its swiglu_out for grouped_mm_downproj to check.

    Not under torch.compile, whose graphs cannot look up a tensor.
    """

    aux: Tensor
    activation: Activation
    order: str
    versions: tuple[int, int] | None


# Kept apart from the tensors: an attribute of theirs would be saved and copied with them.
_origins: MutableMapping[Tensor, _Origin] = WeakTensorKeyDictionary()


def grouped_mm_swiglu(
    x: Tensor,
    w_up: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    swiglu_alpha: float | None = None,
    swiglu_limit: float | None = None,
    *,
    up_offset: float | None = None,
    activation: Activation | str | None = None,
    order: str = "interleaved",
) -> tuple[Tensor, Tensor]:
    """Up projection and activation of sorted rows, the first op of a pair.

    Its defaults are gpt-oss's. The default layer of `guild.MoE` and `guild.experts_mlp` is
    activation="swiglu" with order="concatenated".

        aux = x W_up + bias;   g = min(gate, limit);   u = clamp(up, -limit, limit)
        swiglu_out = g * sigmoid(alpha g) * (u + up_offset)

    Parameters
    ----------
    x : torch.Tensor
        (rows R, hidden H), sorted by expert; dtypes as in `grouped_mm`.
    w_up : torch.Tensor
        (E, H, 2I): row-major, or the transposed view of an (E, 2I, H) parameter; (E, H, I) for an
        activation without a gate. E is 1 to 4,096.
    offs : torch.Tensor
        int32 (E,): where each expert's rows end. Rows at or past offs[-1] belong to no expert.
    bias : torch.Tensor, optional
        (E, 2I), (E, I) without a gate.
    swiglu_alpha, swiglu_limit, up_offset : float, optional
        Default: those of gpt-oss, 1.702, 7.0 and 1.0.
    activation : Activation or str, optional
        Another activation instead ("swiglu" is the plain one); excludes the three above.
    order : {"interleaved", "concatenated"}
        Whether W_up's columns are gate_0, up_0, gate_1, ... or all gates first.

    Returns
    -------
    swiglu_out : torch.Tensor
        (R, I); rows that belong to no expert are zero. Can be used like any other tensor, with a
        correct gradient.
    aux : torch.Tensor
        (R, 2I), in the same order as W_up's columns: what `grouped_mm_downproj` takes as
        `aux_biased_acc` to fuse the activation's gradient into its own. Rows that belong to no
        expert are undefined.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    NotImplementedError
        Under forward-mode AD.
    """
    act = _pair_activation(swiglu_alpha, swiglu_limit, up_offset, activation)
    interleaved = is_interleaved(order)
    x, w_up, bias = _pair_operands("x", x, "w_up", w_up, offs, bias)
    if act.gated and w_up.shape[2] % 2:
        raise ValueError(
            f"w_up: expected an even number of columns (gate and up), got shape {tuple(w_up.shape)}"
        )
    out, aux = _pair_up(x, w_up, starts(offs), bias, *act.scalars, interleaved)
    if not torch.compiler.is_compiling():
        _origins[out] = _Origin(aux, act, order, _versions(out, aux))
    return out, aux


def grouped_mm_downproj(
    swiglu_out: Tensor,
    w_down: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    aux_biased_acc: Tensor | None = None,
    swiglu_alpha: float | None = None,
    swiglu_limit: float | None = None,
    *,
    up_offset: float | None = None,
    activation: Activation | str | None = None,
    order: str = "interleaved",
) -> Tensor:
    """Down projection of sorted rows, the second op of a pair: swiglu_out W_down + bias.

    Parameters
    ----------
    swiglu_out : torch.Tensor
        (rows R, I).
    w_down : torch.Tensor
        (E, I, H): row-major, or the transposed view of an (E, H, I) parameter. E is 1 to 4,096.
    offs : torch.Tensor
        int32 (E,): where each expert's rows end.
    bias : torch.Tensor, optional
        (E, H).
    aux_biased_acc : torch.Tensor, optional
        The aux that `grouped_mm_swiglu` returned with swiglu_out. With it the activation's gradient
        is fused into this product's, and goes to aux; swiglu_out gets none from here. Without it
        the gradient goes to swiglu_out.
    swiglu_alpha, swiglu_limit, up_offset, activation, order
        As given to `grouped_mm_swiglu`; used only with `aux_biased_acc`, and checked against what
        it was made with, except inside torch.compile.

    Returns
    -------
    torch.Tensor
        (R, H); rows at or past offs[-1] are zero.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or aux_biased_acc, activation and order are not those of
        this swiglu_out; the message names it.
    """
    act = _pair_activation(swiglu_alpha, swiglu_limit, up_offset, activation)
    interleaved = is_interleaved(order)
    given = swiglu_out
    operands = _pair_operands("swiglu_out", swiglu_out, "w_down", w_down, offs, bias)
    swiglu_out, w_down, bias = operands
    if aux_biased_acc is not None:
        expect_tensor("aux_biased_acc", aux_biased_acc)
        if not torch.compiler.is_compiling():
            _expect_origin(given, aux_biased_acc, act, order)
        _, aux_biased_acc = autocast(swiglu_out, aux_biased_acc)
        rows, inner = swiglu_out.shape
        expect_shape("aux_biased_acc", aux_biased_acc, (rows, act.width(inner)))
        expect_like("aux_biased_acc", aux_biased_acc, swiglu_out, "swiglu_out")
    return _pair_down(
        swiglu_out, aux_biased_acc, w_down, starts(offs), bias, *act.scalars, interleaved
    )


def _pair_activation(
    alpha: float | None,
    limit: float | None,
    up_offset: float | None,
    activation: Activation | str | None,
) -> Activation:
    given = {"swiglu_alpha": alpha, "swiglu_limit": limit, "up_offset": up_offset}
    given = {name: value for name, value in given.items() if value is not None}
    if activation is None:
        for name, value in given.items():  # named as in these functions' signatures
            expect_parameter(name, value)
        own = {name.removeprefix("swiglu_"): value for name, value in given.items()}
        return Activation("silu", **{**_GPT_OSS, **own})
    if given:
        raise ValueError(
            f"activation: expected None together with {', '.join(given)}, got {activation!r}"
        )
    return as_activation(activation)


def _pair_operands(
    x_name: str, x: Tensor, w_name: str, w: Tensor, offs: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The product's operands, cast under autocast and checked."""
    expect_dims(x_name, x, 2, what="(rows, columns)")
    expect_dims(w_name, w, 3, what="(experts, inputs, outputs)")
    if bias is not None:
        expect_tensor("bias", bias)
    x, w, bias = autocast(x, w, bias)
    expect_operand(x_name, x)
    expect_rows(x_name, x)
    experts, inputs, outputs = w.shape
    expect_experts(w_name, w, experts, False, "experts")
    if not (inputs and outputs):
        raise ValueError(f"{w_name}: expected inputs and outputs, got shape {tuple(w.shape)}")
    if inputs != x.shape[1]:
        raise ValueError(
            f"{w_name}: expected shape ({experts}, {x.shape[1]}, outputs) for {x_name} "
            f"{tuple(x.shape)}, got {tuple(w.shape)}; pass {w_name}.mT if outputs come first"
        )
    expect_like(w_name, w, x, x_name)
    expect_offsets("offs", offs, x)
    expect_shape("offs", offs, (experts,), "one end per expert")
    if bias is not None:
        expect_shape("bias", bias, (experts, outputs))
        expect_like("bias", bias, x, x_name)
        expect_rows("bias", bias)
    return x, w, bias


def _versions(out: Tensor, aux: Tensor) -> tuple[int, int] | None:
    """Version counters of both; None for a pair made in inference mode, which counts none."""
    return None if out.is_inference() else (out._version, aux._version)


def _expect_origin(out: Tensor, aux: Tensor, activation: Activation, order: str) -> None:
    """Raise unless aux, activation and order are what grouped_mm_swiglu made `out` with."""
    origin = _origins.get(out)
    if origin is None or origin.aux is not aux or origin.versions != _versions(out, aux):
        raise ValueError(
            "aux_biased_acc: expected the aux that grouped_mm_swiglu returned with this swiglu_out "
            "(neither of them changed since), got another tensor; without aux_biased_acc the "
            "gradient goes through swiglu_out"
        )
    if origin.activation != activation or origin.order != order:
        raise ValueError(
            f"aux_biased_acc: expected the parameters that made it, {origin.activation}, "
            f"{origin.order}, got {activation}, {order}"
        )
