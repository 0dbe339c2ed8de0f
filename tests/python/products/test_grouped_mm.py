"""guild.grouped_mm against dense products and torch._grouped_mm, in all four cases."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import guild
from oracle.products import grouped_mm


@dataclass(frozen=True)
class Problem:
    """Shapes of one call; `ends` are the groups' ends along the dimension that they split."""

    name: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    ends: tuple[int, ...] | None


PROBLEMS = (
    Problem("rows", (40, 24), (4, 24, 32), (16, 16, 17, 40)),
    Problem("inner", (24, 40), (40, 32), (16, 16, 24, 40)),
    Problem("columns", (4, 24, 16), (16, 40), (16, 16, 24, 40)),
    Problem("none", (4, 24, 16), (4, 16, 40), None),
    Problem("rows_tail", (64, 48), (3, 48, 16), (3, 30, 33)),
    Problem("inner_tail", (16, 64), (64, 24), (8, 8, 40)),
    Problem("columns_tail", (3, 16, 24), (24, 64), (8, 9, 40)),
    Problem("rows_odd_inner", (40, 100), (2, 100, 36), (13, 40)),
    Problem("one_group", (130, 64), (1, 64, 136), (130,)),
    Problem("no_rows", (0, 16), (2, 16, 8), (0, 0)),
    Problem("many_groups", (300, 16), (300, 16, 8), tuple(range(1, 301))),
)
LAYOUTS = ("row_major", "column_major", "a_column_major", "b_column_major")


def dense(a: Tensor, b: Tensor, ends: tuple[int, ...] | None, bias: Tensor | None) -> Tensor:
    """The same product in float64."""
    return grouped_mm(a.double(), b.double(), ends, None if bias is None else bias.double())


def operands(problem: Problem, layout: str, device: str, dtype: torch.dtype, seed: int = 0):
    """a, b and bias, which require gradients, and offs."""
    draw = torch.Generator().manual_seed(seed)

    def make(shape: tuple[int, ...], flip: bool) -> Tensor:
        t = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).to(device)
        t = t.mT.contiguous().mT if flip else t
        return t.requires_grad_()

    a = make(problem.a, layout in ("column_major", "a_column_major"))
    b = make(problem.b, layout in ("column_major", "b_column_major"))
    groups = len(problem.ends) if problem.ends else problem.a[0]
    columns = len(problem.a) == 3 and len(problem.b) == 2
    bias = make((groups, problem.a[-2] if columns else problem.b[-1]), False)
    offs = problem.ends and torch.tensor(problem.ends, dtype=torch.int32, device=device)
    return a, b, bias, offs


def close(value: Tensor, expected: Tensor) -> None:
    """Raise unless both agree up to the dtype's rounding."""
    bound = {torch.float64: 1e-13, torch.float32: 1e-5}.get(value.dtype, 6e-3)
    error = (value.double() - expected.double()).norm()
    assert error <= bound * expected.double().norm() + 1e-30, f"error {error:.3g}"
    assert value.isfinite().all()


def dtypes_of(device: str) -> tuple[torch.dtype, ...]:
    """The dtypes that the backend supports."""
    sixteen = (torch.bfloat16, torch.float16)
    return sixteen if device == "cuda" else (torch.float64, torch.float32, *sixteen)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_values_and_gradients(problem: Problem, layout: str, device: str) -> None:
    """The result and the gradients of a, b and bias, with and without bias."""
    for dtype in dtypes_of(device):
        for with_bias in (False, True):
            a, b, bias, offs = operands(problem, layout, device, dtype)
            inputs = (a, b, bias) if with_bias else (a, b)
            out = guild.grouped_mm(a, b, offs, bias if with_bias else None)
            expected = dense(a, b, problem.ends, bias if with_bias else None)
            assert out.dtype == dtype and out.shape == expected.shape
            close(out, expected)
            dout = torch.randn_like(out)
            got = torch.autograd.grad(out, inputs, dout)
            wanted = torch.autograd.grad(expected, inputs, dout.double())
            for value, truth, given in zip(got, wanted, inputs, strict=True):
                assert value.dtype == given.dtype and value.shape == given.shape
                close(value, truth)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_float32_result(problem: Problem, device: str) -> None:
    """With out_dtype the result is not rounded to 16 bits on the way."""
    a, b, bias, offs = operands(problem, "row_major", device, torch.bfloat16)
    out = guild.grouped_mm(a, b, offs, bias, torch.float32)
    assert out.dtype == torch.float32
    close(out, dense(a, b, problem.ends, bias))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_into_a_given_tensor(problem: Problem, out_dtype: torch.dtype, device: str) -> None:
    """out= writes every element; with accumulate it adds, and skips what belongs to no group."""
    a, b, _, offs = operands(problem, "row_major", device, torch.bfloat16)
    expected = dense(a, b, problem.ends, None).detach()
    with torch.no_grad():
        out = torch.full(expected.shape, float("nan"), dtype=out_dtype, device=device)
        assert guild.grouped_mm(a, b, offs, out=out) is out
        close(out, expected)
        before = torch.randn(expected.shape, device=device).to(out_dtype)
        out = before.clone()
        guild.grouped_mm(a, b, offs, out=out, accumulate=True)
        close(out, expected + before.double())
        nobody = expected == 0
        assert torch.equal(out[nobody], before[nobody])


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_strided_views(problem: Problem, device: str) -> None:
    """Operands that are windows of larger tensors, whose rows begin at multiples of 16 bytes."""
    a, b, bias, offs = operands(problem, "row_major", device, torch.bfloat16)
    expected = guild.grouped_mm(a, b, offs, bias)

    def window(t: Tensor) -> Tensor:
        columns = t.shape[-1]
        larger = torch.full((*t.shape[:-1], -(-columns // 8) * 8 + 16), float("nan"), device=device)
        larger = larger.to(t.dtype)
        larger[..., 8 : 8 + columns] = t.detach()
        return larger[..., 8 : 8 + columns]

    out = guild.grouped_mm(window(a), window(b), offs, bias)
    if problem.name == "rows_odd_inner":  # on a GPU rows of 100 elements are for another kernel
        close(out, dense(a, b, problem.ends, bias))
    else:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("rows", [40, 700])
@pytest.mark.parametrize(("start", "columns"), [(0, 264), (1, 267), (2, 266), (4, 268), (8, 272)])
def test_bias_anywhere(rows: int, start: int, columns: int, device: str) -> None:
    """A bias whose rows begin at any multiple of 2, 4, 8 or 16 bytes."""
    problem = Problem("rows", (rows, 72), (2, 72, 264), (rows // 3, rows))
    for dtype in dtypes_of(device):
        a, b, bias, offs = operands(problem, "b_column_major", device, dtype)
        larger = torch.full((3 * columns,), float("nan"), dtype=dtype, device=device)
        moved = larger.as_strided((2, 264), (columns, 1), start).copy_(bias.detach())
        out = guild.grouped_mm(a, b, offs, moved)
        close(out, dense(a, b, problem.ends, bias))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
@pytest.mark.parametrize("operand", [0, 1], ids=["a", "b"])
def test_expanded_operands(problem: Problem, operand: int, device: str) -> None:
    """Operands that repeat one row, column or matrix: a stride is 0."""
    a, b, _, offs = operands(problem, "row_major", device, torch.bfloat16)
    for dim in range((a, b)[operand].dim()):
        given = [a.detach(), b.detach()]
        if not given[operand].numel():
            continue
        given[operand] = given[operand].narrow(dim, 0, 1).expand_as(given[operand])
        close(guild.grouped_mm(*given, offs), dense(*given, problem.ends, None))


def test_autocast(device: str) -> None:
    """float32 operands are cast; gradients come back in float32."""
    a, b, bias, offs = operands(PROBLEMS[0], "row_major", device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = guild.grouped_mm(a, b, offs, bias)
    assert out.dtype == torch.bfloat16
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (a, b, bias), dout)
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in (a, b, bias)]
    expected = dense(*rounded[:2], PROBLEMS[0].ends, rounded[2])
    close(out, expected)
    for value, truth in zip(
        got, torch.autograd.grad(expected, rounded, dout.double()), strict=True
    ):
        assert value.dtype == torch.float32
        close(value.bfloat16(), truth)


@pytest.mark.parametrize("problem", PROBLEMS[:4], ids=lambda p: p.name)
def test_the_calls_of_torch(problem: Problem, device: str) -> None:
    """torch._grouped_mm takes the same arguments and gives the same values (no empty groups)."""
    problem = replace(problem, ends=problem.ends and (8, 16, 24, 40))
    layout = "row_major" if problem.name in ("inner", "columns") else "b_column_major"
    a, b, _, offs = operands(problem, layout, device, torch.bfloat16)
    expected = torch._grouped_mm(a, b, offs=offs)
    close(guild.grouped_mm(a, b, offs=offs), expected)


def test_same_bits_twice(device: str) -> None:
    """There are no atomics, not even in the gradient of a bias."""
    results = []
    for _ in range(2):
        a, b, bias, offs = operands(PROBLEMS[8], "row_major", device, torch.bfloat16)
        out = guild.grouped_mm(a, b, offs, bias)
        results.append((out, *torch.autograd.grad(out, (a, b, bias), torch.ones_like(out))))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("case", ["rows", "columns", "no rows", "inner", "none"])
def test_empty_sums_get_no_bias(case: str) -> None:
    """With a size of 0 the result is zeros or empty, and the bias gets no gradient."""
    offs = torch.tensor([2, 5], dtype=torch.int32)
    shapes = {
        "rows": ((5, 0), (2, 0, 3), offs, (2, 3)),
        "columns": ((2, 4, 0), (0, 5), offs, (2, 4)),
        "no rows": ((2, 0, 3), (3, 5), offs, (2, 0)),
        "inner": ((4, 0), (0, 3), torch.zeros(2, dtype=torch.int32), (2, 3)),
        "none": ((2, 4, 0), (2, 0, 3), None, (2, 3)),
    }
    a, b, ends, bias_shape = shapes[case]
    bias = torch.ones(bias_shape, requires_grad=True)
    out = guild.grouped_mm(torch.zeros(a), torch.zeros(b), ends, bias)
    assert not out.any()
    out.sum().backward()
    assert bias.grad.shape == bias.shape and not bias.grad.any()


@pytest.mark.parametrize("strange", [torch.inf, torch.nan])
def test_no_gradient_reaches_the_bias_of_an_empty_sum(strange: float, device: str) -> None:
    """Whatever comes in for its result, which is zeros without the bias."""
    offs = torch.tensor([2, 2, 6], dtype=torch.int32, device=device)
    a, b = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((8, 6), (6, 16)))
    bias = torch.randn(3, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = guild.grouped_mm(a, b, offs, bias)
    into = torch.ones_like(out)
    into[1] = strange
    out.backward(into)
    assert torch.equal(bias.grad[:, 0].cpu(), torch.tensor([8, 0, 8], dtype=torch.bfloat16))
