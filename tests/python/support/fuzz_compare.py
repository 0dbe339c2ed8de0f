"""How far results may be off, and what must be exactly zero or the same bits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# Relative errors over a whole tensor: of float64 arithmetic, and of storage in fewer bits.
_EXACT = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_ALIKE = 0.02  # two results of 16-bit storage that differ by rounding alone
_SUMS = 5e-6  # of fp32 sums in another order, as docs/numerics.md allows


@dataclass
class Truth:
    """Results of the oracle, in float64, by the names that Guild's have."""

    values: dict[str, Tensor]
    zeros: dict[str, Tensor] = field(default_factory=dict)  # bool: where zero is promised
    scales: dict[str, float] = field(default_factory=dict)  # norms before terms cancel each other


def error_of(value: Tensor, name: str, truth: Truth) -> float:
    """||value - truth|| / ||truth||; infinite if NaN or an infinity came instead of a number."""
    expected = truth.values[name]
    value = value.detach().cpu().double()
    both = value.isnan() & expected.isnan()
    difference = (value - expected).masked_fill(both, 0).norm()
    size = max(float(expected.nan_to_num(0).norm()), truth.scales.get(name, 0.0))
    if not difference.isfinite():
        return float("inf")
    return float(difference) / size if size > 0 else float(difference)


def structure(got: dict[str, Tensor], truth: Truth) -> list[str]:
    """Wrong names and shapes, and nonzero numbers where there should be zeros."""
    failures = [f"{name}: expected no gradient, got one" for name in got.keys() - truth.values]
    failures += [f"{name}: expected a tensor, got None" for name in truth.values.keys() - got]
    for name in got.keys() & truth.values.keys():
        value, expected = got[name].detach().cpu(), truth.values[name]
        if value.shape != expected.shape:
            failures.append(f"{name}: expected shape {expected.shape}, got {value.shape}")
        elif name in truth.zeros:
            wrong = int((value != 0)[truth.zeros[name].expand(value.shape)].sum())
            if wrong:
                failures.append(f"{name}: expected zeros, {wrong} elements are not")
    return sorted(failures)


def compare(got: dict[str, Tensor], truth: Truth) -> list[str]:
    """What is wrong with results of float64 arithmetic, one line each."""
    failures = structure(got, truth)
    if failures:
        return failures
    for name, value in got.items():
        allowed = _EXACT.get(value.dtype, 0.0)
        error = error_of(value, name, truth)
        if error > allowed:
            failures.append(f"{name}: relative error {error:.2e}, at most {allowed:.0e} expected")
    return failures


def compare_rounded(
    got: dict[str, Tensor],
    truth: Truth,
    rounded: dict[str, Tensor],
    truth_of_rounded: Truth,
    dtype: torch.dtype,
) -> list[str]:
    """The rule of docs/numerics.md: at most twice the error of the rounded reference.

    dtype: in which the intermediate results are stored. A single number rounded the other way may
    make up a small tensor's whole error, so that much is allowed in any case. Half of the result is
    the most, unless the reference is as wrong in the same way: in a layer of a few values, rounding
    may move one of them across a clamped activation's limit.
    """
    failures = structure(got, truth) + structure(rounded, truth_of_rounded)
    if failures:
        return failures
    for name, value in got.items():
        if not value.is_floating_point():
            allowed = 0.0
        else:
            one = torch.finfo(dtype).eps / max(value.numel(), 1) ** 0.5
            allowed = 2 * error_of(rounded[name], name, truth_of_rounded) + _SUMS + one
        error = error_of(value, name, truth)
        alike = Truth({name: rounded[name].detach().cpu().double()})
        most = 0.5 if error_of(value, name, alike) > _ALIKE else allowed
        if not error <= min(allowed, most):
            failures.append(f"{name}: relative error {error:.2e}, at most {allowed:.2e} expected")
    return failures


def compare_recipe(
    got: dict[str, Tensor], truth: Truth, recipe: Truth, narrow: dict[str, Tensor] | None = None
) -> list[str]:
    """What is wrong with results of a layer in FP8, against its recipe in float64.

    A single code rounded the other way may make up a small tensor's whole error, so an eighth of
    the result is allowed in any case.

    narrow: the same layer in 16 bits. Parts that are not quantised, such as shared experts, have
    its errors, which are large if rounding moves a few values across a clamped activation's limit.
    """
    failures = structure(got, truth)
    if failures:
        return failures
    for name, value in got.items():
        allowed = max(1.3 * error_of(recipe.values[name], name, truth), 0.125)
        if narrow is not None and value.is_floating_point():
            allowed = max(allowed, 2 * error_of(narrow[name], name, truth))
        error = error_of(value, name, truth)
        if not error <= allowed:
            failures.append(f"{name}: relative error {error:.2e}, at most {allowed:.2e} expected")
    return failures


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Results of two runs that differ."""
    failures = [f"{name}: only one of two runs has it" for name in one.keys() ^ other.keys()]
    for name in one.keys() & other.keys():
        first, second = (t[name].detach().cpu().contiguous().view(-1) for t in (one, other))
        if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            failures.append(f"{name}: two runs differ")
    return sorted(failures)
