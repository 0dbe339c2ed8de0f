"""Quantisation by blocks and products of quantised operands, beside plain torch."""

import numpy as np
import pytest
import torch

import guild
from oracle.quantised import blockwise

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


def _with_corners(x):
    """Replace some blocks: zeros, subnormals, huge and tiny values, one NaN, one infinity."""
    flat = x.view(-1, x.shape[-1])
    flat[0, :128] = 0
    flat[1, :128] *= 1e-7
    flat[2, :128] *= 1e4
    if x.dtype != torch.float16:
        flat[3, :128] *= 1e-36
        flat[4, :128] *= 2.0**-110
    flat[5, 3] = float("nan")
    flat[6, -1] = float("inf")
    flat[7, 0] = 448.0
    return x


def _same(got, want, name):
    # The sign of a NaN's code has no meaning.
    assert torch.equal(got.isnan(), want.isnan()), name
    assert torch.equal(got.nan_to_num(), want.nan_to_num()), name


@pytest.mark.parametrize("scale", ["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(9, 256), (33, 200), (8, 131)])
def test_rows_are_quantised_bit_for_bit(shape, element, dtype, scale, device):
    torch.manual_seed(0)
    x = _with_corners(torch.randn(shape).to(element))
    got = guild.quantize(x.to(device), dtype, scale=scale)
    codes, scales = blockwise(x, dtype, scale, 1)
    _same(got.codes.float().cpu(), codes, "codes")
    _same(got.scales.cpu(), scales, "scales")


@pytest.mark.parametrize("scale", ["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(2, 256, 128), (3, 130, 200), (1, 8, 140)])
def test_weights_are_quantised_bit_for_bit(shape, transposed, dtype, scale, device):
    torch.manual_seed(1)
    w = _with_corners(torch.randn(shape)).to(torch.bfloat16)
    view = w.mT.contiguous().mT if transposed else w
    got = guild.quantize_weights(view.to(device), dtype, scale=scale, transposed=transposed)
    codes, scales = blockwise(w, dtype, scale, 128)
    _same(got.codes.float().cpu(), codes, "codes")
    _same(got.scales.cpu(), scales, "scales")
    if transposed:
        _same(got.transposed.float().cpu().mT, codes, "transposed")
    else:
        assert got.transposed is None


def _layouts(gate, up, device):
    """A gated weight in every layout, with the options that describe it to quantize_weights."""
    packed = torch.cat([gate, up], 1)
    alternating = torch.stack([gate, up], 2).flatten(1, 2)
    apart = [torch.zeros(2, *m.shape, dtype=m.dtype, device=device)[1].copy_(m) for m in packed]
    yield packed.to(device), {"gated": True}
    yield packed.mT.contiguous().to(device).mT, {"gated": True}
    yield alternating.to(device), {"gated": True, "interleaved": True}
    yield alternating.mT.contiguous().to(device).mT, {"gated": True, "interleaved": True}
    yield (gate.to(device), up.to(device)), {}
    yield (gate.mT.contiguous().to(device).mT, up.to(device)), {}
    yield list(packed.to(device)), {"gated": True}
    yield apart[::-1][::-1], {"gated": True}
    yield (list(gate.to(device)), list(up.to(device))), {}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 136, 264), (2, 128, 72), (2, 45, 130)])
def test_gated_weights_of_any_layout_become_one(shape, element, dtype, device):
    torch.manual_seed(5)
    gate, up = torch.randn(shape).to(element), torch.randn(shape).to(element) * 2
    gate[0, 3, 5], up[-1, 0, 0] = float("nan"), float("-inf")
    halves = [blockwise(w, dtype, "power_of_two", 128) for w in (gate, up)]
    codes, scales = (torch.cat(parts, 1) for parts in zip(*halves, strict=True))
    for i, (weight, told) in enumerate(_layouts(gate, up, device)):
        got = guild.quantize_weights(weight, dtype, scale="power_of_two", transposed=True, **told)
        _same(got.codes.float().cpu(), codes, f"codes of layout {i}")
        _same(got.transposed.float().cpu().mT, codes, f"transposed of layout {i}")
        _same(got.scales.cpu(), scales, f"scales of layout {i}")


@pytest.mark.parametrize("listed", [False, True])
def test_gate_and_up_that_begin_at_one_address(listed, device):
    """The same weight twice, or lists whose matrices lie in the same memory in another order."""
    torch.manual_seed(6)
    one, other = torch.randn(2, 64, 72, device=device).bfloat16()
    gate, up = ([one, other], [other, one]) if listed else (one[None], one[None])
    got = guild.quantize_weights((gate, up))
    apart = [torch.stack([*w]).clone() for w in (gate, up)]
    want = guild.quantize_weights(tuple(apart))
    _same(got.codes.float().cpu(), want.codes.float().cpu(), "codes")
    _same(got.scales.cpu(), want.scales.cpu(), "scales")


def _dequantised(codes, scales, rows):
    tall = scales.double().repeat_interleave(rows, -2).repeat_interleave(128, -1)
    return codes.double() * tall[..., : codes.shape[-2], : codes.shape[-1]]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("a_dtype", FORMATS)
@pytest.mark.parametrize(
    ("counts", "rest", "columns", "inner"),
    [
        ((5, 0, 130, 64), 0, 256, 128),
        ((1, 300, 0, 17), 9, 200, 272),
        ((0, 0, 40), 3, 264, 1040),
        ((129,), 0, 33, 400),
        ((0, 0), 5, 64, 16),
    ],
)
def test_product_of_quantised_operands(counts, rest, columns, inner, a_dtype, out_dtype, device):
    torch.manual_seed(2)
    rows = sum(counts) + rest
    a = guild.quantize(torch.randn(rows, inner, device=device), a_dtype)
    w = torch.randn(len(counts), columns, inner, device=device) / inner**0.5
    b = guild.quantize_weights(w)
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    got = guild.scaled_grouped_mm(a.codes, b.codes.mT, a.scales, b.scales.mT, ends, out_dtype)
    again = guild.scaled_grouped_mm(
        a.codes, b.codes.mT, a.scales.mT.contiguous().mT, b.scales.mT, ends, out_dtype
    )
    assert torch.equal(got, again)
    left, right = _dequantised(a.codes, a.scales, 1), _dequantised(b.codes, b.scales, 128)
    want = torch.zeros(rows, columns, dtype=torch.float64, device=device)
    size = torch.zeros_like(want)  # of the terms that are summed
    begin = 0
    for e, count in enumerate(counts):
        part = slice(begin, begin + count)
        want[part] = left[part] @ right[e].T
        size[part] = left[part].abs() @ right[e].T.abs()
        begin += count
    # Tensor cores keep 13 bits of the largest of 32 products that they add at once.
    bound = size * (2.0**-11 if got.is_cuda else 2.0**-20)
    bound = bound + want.abs() * torch.finfo(out_dtype).eps + torch.finfo(out_dtype).tiny
    assert ((got.double() - want).abs() <= bound).all()
    assert (got[begin:] == 0).all()


def test_a_block_that_is_not_finite_spoils_its_rows_alone(device):
    torch.manual_seed(3)
    x = torch.randn(6, 256, device=device)
    x[2, 5] = float("inf")
    a, b = guild.quantize(x), guild.quantize_weights(torch.randn(1, 64, 256, device=device))
    ends = torch.tensor([6], dtype=torch.int32, device=device)
    got = guild.scaled_grouped_mm(a.codes, b.codes.mT, a.scales, b.scales.mT, ends)
    assert got[2].isnan().all()
    assert torch.isfinite(got[[0, 1, 3, 4, 5]]).all()


def _operands():
    a, b = guild.quantize(torch.randn(4, 32)), guild.quantize_weights(torch.randn(2, 8, 32))
    ends = torch.tensor([2, 4], dtype=torch.int32)
    return {
        "mat_a": a.codes,
        "mat_b": b.codes.mT,
        "scale_a": a.scales,
        "scale_b": b.scales.mT,
        "offs": ends,
    }


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("mat_a", torch.randn(4, 32), "mat_a: expected dtype float8"),
        ("mat_a", torch.ones(1, 32).to(torch.float8_e4m3fn).expand(4, 32), "mat_a: expected rows"),
        ("mat_b", torch.zeros(2, 33, 8).to(torch.float8_e4m3fn), "mat_b: expected 32 rows"),
        ("mat_b", torch.zeros(2, 32, 8).to(torch.float8_e4m3fn), "expected K contiguous"),
        ("scale_a", torch.ones(4, 2), r"scale_a: expected shape \(4, 1\)"),
        ("scale_b", torch.ones(2, 1, 1).half(), "scale_b: expected dtype float32"),
        ("offs", torch.tensor([2, 4]), "offs: expected contiguous int32, got int64"),
        (
            "offs",
            torch.tensor([[2, 0], [4, 0]], dtype=torch.int32)[:, 0],
            r"offs: expected contiguous int32, got strides \(2,\)",
        ),
        ("out_dtype", torch.float64, "out_dtype: expected bfloat16"),
        ("out_dtype", np.zeros(3), r"out_dtype: expected a torch\.dtype, got ndarray"),
    ],
)
def test_wrong_calls_are_named(name, value, error):
    with pytest.raises((TypeError, ValueError), match=error):
        guild.scaled_grouped_mm(**(_operands() | {name: value}))


@pytest.mark.parametrize("name", ["mat_a", "mat_b"])
def test_codes_of_negatives(name):
    given = _operands()
    given[name] = torch._neg_view(given[name])
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor whose memory holds its ele"):
        guild.scaled_grouped_mm(**given)


def test_wrong_quantisations_are_named():
    x = torch.randn(4, 32)
    for call, error in (
        (lambda: guild.quantize(x.double()), "x: expected dtype bfloat16"),
        (lambda: guild.quantize(x.T), "x: expected rows with contiguous columns"),
        (lambda: guild.quantize(x[:1].expand(4, 32)), r"x: expected rows .* strides \(0, 1\)"),
        (lambda: guild.quantize(x, torch.int8), "dtype: expected float8_e4m3fn"),
        (lambda: guild.quantize(x, np.zeros(3)), r"dtype: expected a torch\.dtype, got array"),
        (lambda: guild.quantize(x, scale="e8m0"), "scale: expected"),
        (lambda: guild.quantize(x, scale=np.zeros(3)), "scale: expected 'exact' or .* got array"),
        (lambda: guild.quantize(x[None]), "x: expected 2 dimensions"),
        (lambda: guild.quantize_weights(x), "weight: expected 3 dimensions"),
        (lambda: guild.quantize_weights((x[None], x[None, :2])), r"weight\[1\] \(up\): expected"),
        (lambda: guild.quantize_weights(x[None, :3], gated=True), "weight: expected an even"),
        (lambda: guild.quantize_weights(x[None], interleaved=True), "interleaved: expected False"),
        (lambda: guild.quantize_weights(x[None], gated=1), "gated: expected True or False"),
        (lambda: guild.quantize_weights(x[:, :0][None]), "weight: expected sizes of at least 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            call()
