"""grouped_mm(out=): which memory it may have, and what autograd learns of the write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import guild
from guild._torch.checks import expect_apart, expect_own_elements

ROWS, WIDTH, GROUPS = 12, 8, 3
ENDS = torch.tensor([2, 7, 11], dtype=torch.int32)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def square(**changed: Tensor) -> Tensor:
    """A product whose operands and result have the same shape, so that any of them can be out."""
    given = {"mat_a": normal(ROWS, WIDTH), "mat_b": normal(GROUPS, WIDTH, WIDTH), "offs": ENDS}
    return guild.grouped_mm(**{**given, **changed})


def shared_with(name: str) -> dict[str, Tensor]:
    """Arguments whose out shares memory with one operand."""
    buffer = torch.zeros(4 * ROWS * WIDTH)
    out = buffer[: ROWS * WIDTH].view(ROWS, WIDTH)
    shapes = {"mat_a": (ROWS, WIDTH), "mat_b": (GROUPS, WIDTH, WIDTH), "bias": (GROUPS, WIDTH)}
    if name == "offs":
        return {"out": out, "offs": buffer.view(torch.int32)[5:8].copy_(ENDS)}
    size = torch.Size(shapes[name]).numel()
    return {"out": out, name: buffer[WIDTH : WIDTH + size].view(shapes[name])}


def test_out_is_a_view_of_negatives() -> None:
    """Kernels would write the opposite numbers, since they do not see the pending negation."""
    out = torch._neg_view(torch.zeros(ROWS, WIDTH))
    for more in ({}, {"accumulate": True}):
        with pytest.raises(ValueError, match=r"^out: expected a tensor whose memory holds its el"):
            square(out=out, **more)


@pytest.mark.parametrize("name", ["mat_a", "mat_b", "bias", "offs"])
def test_out_in_the_memory_of_an_operand(name: str) -> None:
    """Rows of the operand would be read after they have been overwritten."""
    with pytest.raises(ValueError, match=f"out: expected memory not shared with .* with {name}"):
        square(**shared_with(name))


def test_out_is_an_operand(device: str) -> None:
    rows = normal(ROWS, WIDTH).to(device, torch.bfloat16)
    weights = normal(GROUPS, WIDTH, WIDTH).to(rows)
    with pytest.raises(ValueError, match=r"out: expected memory not shared with .* with mat_a"):
        guild.grouped_mm(rows, weights, ENDS.to(device), out=rows)


class Weight(torch.nn.Parameter):
    """A parameter subclass, as training frameworks make them."""


@pytest.mark.parametrize("kind", [torch.nn.Parameter, Weight])
def test_out_is_an_operand_of_another_class(kind: type[torch.nn.Parameter]) -> None:
    rows = kind(normal(ROWS, WIDTH), requires_grad=False)
    with pytest.raises(ValueError, match=r"out: expected memory not shared with .* with mat_a"):
        square(mat_a=rows, out=rows)


def test_out_of_fake_tensors() -> None:
    """Fake tensors have no memory to share."""
    with FakeTensorMode():
        rows, weights = torch.empty(ROWS, WIDTH), torch.empty(GROUPS, WIDTH, WIDTH)
        ends = torch.empty(GROUPS, dtype=torch.int32)
        out = torch.empty(ROWS, WIDTH)
        assert guild.grouped_mm(rows, weights, ends, out=out) is out


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(1, WIDTH).expand(ROWS, WIDTH),
        torch.zeros(ROWS, 1).expand(ROWS, WIDTH),
        torch.zeros(200).as_strided((ROWS, WIDTH), (WIDTH - 1, 1)),
    ],
    ids=["rows", "columns", "slanted"],
)
def test_out_over_itself(out: Tensor) -> None:
    """An out in which several elements share one address is refused."""
    with pytest.raises(ValueError, match="out: expected elements that do not overlap"):
        square(out=out)


def test_columns_of_one_buffer() -> None:
    """Operand and result that lie side by side in one buffer do not overlap."""
    buffer = torch.zeros(ROWS, 3 * WIDTH)
    rows, out = buffer[:, :WIDTH].copy_(normal(ROWS, WIDTH)), buffer[:, WIDTH : 2 * WIDTH]
    expected = square(mat_a=rows.clone())
    assert torch.equal(square(mat_a=rows, out=out), expected)
    assert not buffer[:, 2 * WIDTH :].any()
    with pytest.raises(ValueError, match="memory not shared with"):
        square(mat_a=rows, out=buffer[:, WIDTH - 1 : 2 * WIDTH - 1])


def places(t: Tensor) -> list[int]:
    """The address of every element."""
    steps = torch.zeros(t.shape, dtype=torch.int64)
    for dim, stride in enumerate(t.stride()):
        shape = [-1 if d == dim else 1 for d in range(t.dim())]
        steps = steps + (torch.arange(t.shape[dim]) * stride).view(shape)
    return (steps + t.storage_offset()).flatten().tolist()


def accepts(check: Callable[..., None], *arguments: object) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return False
    return True


def test_every_small_pattern() -> None:
    """Of two views of one buffer, exactly those pairs that do not overlap are accepted."""
    buffer = torch.zeros(40)
    strides = [(0, 1), (1, 1), (2, 1), (3, 1), (6, 1), (1, 3), (1, 6), (6, 2), (12, 3)]
    views = [
        buffer.as_strided(shape, stride, offset)
        for shape in ((2, 3), (3, 1), (1, 2), (3, 2))
        for stride in strides
        for offset in (0, 1, 2, 3, 4, 5, 7, 9)
    ]
    for view in views:
        if len(set(places(view))) < view.numel():
            assert not accepts(expect_own_elements, "out", view)
    for a in views[::3]:
        for b in views[::2]:
            apart = not set(places(a)) & set(places(b))
            assert accepts(expect_apart, "out", a, "x", b) == apart
    columns = buffer[:36].view(6, 6)
    assert accepts(expect_apart, "out", columns[:, :3], "x", columns[:, 3:])
    assert accepts(expect_apart, "out", columns[:, 4:], "x", columns[1:, :4])
    assert accepts(expect_apart, "out", columns[:3], "x", columns[3:])
    assert accepts(expect_apart, "out", columns[:0], "x", columns)


@pytest.mark.parametrize("name", ["mat_a", "mat_b", "bias", "out"])
def test_out_where_a_gradient_is_wanted(name: str) -> None:
    """The gradient would be lost, so it is an error; under no_grad none is asked for."""
    shapes = {"mat_a": (ROWS, WIDTH), "mat_b": (GROUPS, WIDTH, WIDTH), "bias": (GROUPS, WIDTH)}
    given = {"out": torch.zeros(ROWS, WIDTH)}
    given[name] = torch.zeros(shapes.get(name, (ROWS, WIDTH)), requires_grad=True)
    with pytest.raises(ValueError, match=f"out: expected None since {name} requires"):
        square(**given)
    with torch.no_grad():
        square(**given)


def test_autograd_sees_the_write(device: str) -> None:
    """Writing to a tensor that was saved for backward is an error in that backward."""
    place = {"device": device, "dtype": torch.bfloat16}
    kept = torch.ones(ROWS, WIDTH, **place)
    result = kept.clone().requires_grad_() * kept
    version = kept._version
    rows, weights = normal(ROWS, WIDTH).to(**place), normal(GROUPS, WIDTH, WIDTH).to(**place)
    guild.grouped_mm(rows, weights, ENDS.to(device), out=kept)
    assert kept._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_compiled() -> None:
    """The compiled graph contains the write."""
    rows, weights = normal(ROWS, WIDTH), normal(GROUPS, WIDTH, WIDTH)

    def add(out: Tensor) -> Tensor:
        return guild.grouped_mm(rows, weights, ENDS, out=out, accumulate=True) * 2

    expected, out = square() + 1, torch.ones(ROWS, WIDTH)
    got = torch.compile(add, fullgraph=True, backend="aot_eager")(out)
    torch.testing.assert_close(out[:11], expected[:11])
    torch.testing.assert_close(got, out * 2)


def test_not_under_transforms() -> None:
    out, both = torch.zeros(ROWS, WIDTH), normal(2, ROWS, WIDTH)
    given = {"mat_b": normal(GROUPS, WIDTH, WIDTH), "offs": ENDS, "out": out}
    with pytest.raises(NotImplementedError, match=r"out: expected None under torch\.func"):
        torch.func.vmap(lambda rows: guild.grouped_mm(rows, **given))(both)
