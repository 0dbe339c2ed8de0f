"""Rows quantised as chunks, and the weight gradients that are products of chunks."""

import pytest
import torch

from guild._torch.expert_lists import placed
from guild.float8 import Chunks, Quantized, chunk_product, quantize, quantize_chunks
from oracle.quantised import chunks, slots

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
COUNTS = [(300, 0, 5, 128), (0, 0), (1,), (129, 127, 256, 0, 60)]


def _offsets(counts, device="cpu"):
    return torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)


def _expect(got, x, counts, dtype, halves):
    """The chunks must be those of x, bit for bit."""
    codes, scales = got.codes.float().cpu(), got.scales.cpu()
    for slot, block, part, want, scale in chunks(x, counts, dtype, "power_of_two", halves):
        torch.testing.assert_close(codes[slot, part], want, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(scales[slot, block], scale, rtol=0, atol=0, equal_nan=True)


def _with_corners(x):
    """Replace some rows and blocks: zeros, tiny and large values, one NaN, one infinity."""
    rows, columns = x.shape
    x[rows // 2 :, : columns // 2] *= 2.0**-12
    x[::7] *= 2.0**-20
    x[::5] = 0
    x[:, columns - 1] *= 2.0**9
    if rows > 200 and columns > 130:
        x[3, 5], x[201, 129] = float("nan"), float("inf")
    return x


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("element", "columns", "halves"),
    [
        (torch.bfloat16, 256, 1),
        (torch.bfloat16, 400, 2),
        (torch.float16, 136, 1),
        (torch.float32, 131, 1),
        (torch.bfloat16, 74, 2),
    ],
)
def test_rows_become_chunks(counts, dtype, element, columns, halves, device):
    torch.manual_seed(0)
    x = _with_corners(torch.randn(sum(counts), columns)).to(element)
    got = quantize_chunks(x.to(device), _offsets(counts, device), dtype=dtype, halves=halves)
    assert got.codes.shape == (sum(counts) // 128 + len(counts), columns, 128)
    _expect(got, x, counts, dtype, halves)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("columns", [256, 200, 77])
def test_codes_become_chunks(counts, dtype, columns, device):
    """Chunks made from codes are those of the codes' values, infinities among them."""
    torch.manual_seed(1)
    rows = sum(counts)
    x = _with_corners(torch.randn(rows, columns)).to(torch.bfloat16)
    by_row = quantize(x.to(device), dtype, scale="power_of_two")
    if dtype == torch.float8_e5m2:
        by_row.codes.view(torch.uint8)[1::9, 2::31] = 0x7C
        by_row.codes.view(torch.uint8)[1::9, 3::31] = 0xFC
    got = quantize_chunks(by_row, _offsets(counts, device))
    wide = by_row.scales.cpu().repeat_interleave(128, 1)[:, :columns]
    value = by_row.codes.float().cpu() * wide
    for slot, first, count in slots(counts):
        for block in range(-(-columns // 128)):
            part = slice(128 * block, min(128 * block + 128, columns))
            scale = by_row.scales[first : first + count, block].cpu()
            scale = scale.amax()  # NaN if one of them is
            torch.testing.assert_close(
                got.scales[slot, block].cpu(), scale, rtol=0, atol=0, equal_nan=True
            )
            want = torch.zeros(part.stop - part.start, 128)
            want[:, :count] = (value[first : first + count, part] / scale).T
            found = got.codes[slot, part].float().cpu()
            want = want.to(dtype).float()
            torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("of_codes", [False, True])
def test_rows_are_gathered(of_codes, device):
    torch.manual_seed(2)
    counts, tokens, columns = (150, 0, 70), 40, 200
    x = torch.randn(tokens, columns).to(torch.bfloat16)
    row_token = torch.randint(-1, tokens + 1, (sum(counts),), dtype=torch.int32)
    inside = (row_token >= 0) & (row_token < tokens)
    rows = torch.where(inside[:, None], x[row_token.clamp(0, tokens - 1).long()], 0)
    offsets = _offsets(counts, device)

    def source(t):
        return quantize(t.to(device), scale="power_of_two") if of_codes else t.to(device)

    got = quantize_chunks(source(x), offsets, row_token.to(device))
    want = quantize_chunks(source(rows), offsets)
    for slot, _, _ in slots(counts):
        assert torch.equal(got.codes[slot].view(torch.uint8), want.codes[slot].view(torch.uint8))
        assert torch.equal(got.scales[slot], want.scales[slot])


def _values(chunks, slot, count):
    """The rows of a slot, in float64."""
    codes = chunks.codes[slot, :, :count].double().cpu()
    scales = chunks.scales[slot].double().cpu()
    return (codes * scales.repeat_interleave(128)[: codes.shape[0], None]).T


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("a_dtype", FORMATS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("counts", "out", "inner"),
    [
        ((300, 0, 5, 128), 264, 136),
        ((0, 129), 40, 400),
        ((64,), 640, 256),
    ],
)
def test_product_of_chunks(counts, out, inner, accumulate, a_dtype, out_dtype, device):
    torch.manual_seed(3)
    rows, groups = sum(counts), len(counts)
    offsets = _offsets(counts, device)
    a = quantize_chunks(torch.randn(rows, out, device=device), offsets, dtype=a_dtype)
    b = quantize_chunks(torch.randn(rows, inner, device=device), offsets, scale="exact")
    for lay in ("rows", "columns", "alternate"):
        start = torch.randn(groups, out, inner).to(out_dtype)
        if lay == "rows":
            got = start.clone().to(device)
        elif lay == "columns":
            got = start.mT.contiguous().to(device).mT
        else:
            got = torch.stack([start, start], 2).to(device).flatten(1, 2)[:, ::2]
        chunk_product(a, b, offsets, rows, got, accumulate=accumulate)
        want = torch.zeros(groups, out, inner, dtype=torch.float64)
        size, begin = torch.zeros_like(want), 0
        for e, count in enumerate(counts):
            for j in range(-(-count // 128)):
                slot, here = begin // 128 + e + j, min(128, count - 128 * j)
                left, right = _values(a, slot, here), _values(b, slot, here)
                want[e] += left.T @ right
                size[e] += left.T.abs() @ right.abs()
            begin += count
        if accumulate:
            want += start.double()
        # Tensor cores keep 13 bits of what they add to a sum of at most 128 products.
        bound = size * (2.0**-12 if got.is_cuda else 2.0**-20)
        bound = bound + want.abs() * torch.finfo(out_dtype).eps + torch.finfo(out_dtype).tiny
        assert ((got.double().cpu() - want).abs() <= bound).all(), lay


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_product_into_matrices_anywhere_in_memory(out_dtype, device):
    torch.manual_seed(5)
    counts, rows = (130, 0, 20), 150
    offsets = _offsets(counts, device)
    a = quantize_chunks(torch.randn(rows, 64, device=device), offsets)
    b = quantize_chunks(torch.randn(rows, 48, device=device), offsets)
    memory = torch.ones(9, 64, 48, dtype=out_dtype, device=device)
    matrices = [memory[5], memory[1], memory[7]]
    want = torch.ones(3, 64, 48, dtype=out_dtype, device=device)
    for accumulate in (False, True):
        chunk_product(a, b, offsets, rows, placed(matrices, True), accumulate=accumulate)
        chunk_product(a, b, offsets, rows, want, accumulate=accumulate)
        assert torch.equal(torch.stack(matrices), want)
    assert (memory[[0, 2, 3, 4, 6, 8]] == 1).all()


def test_halves_of_columns_are_products_of_their_own(device):
    torch.manual_seed(4)
    counts, rows = (130, 20), 150
    offsets = _offsets(counts, device)
    x = torch.randn(rows, 400, device=device)
    both = quantize_chunks(x, offsets, halves=2)
    b = quantize_chunks(torch.randn(rows, 64, device=device), offsets)
    for first in (0, 200):
        alone = quantize_chunks(x[:, first : first + 200].contiguous(), offsets)
        results = [torch.empty(2, 200, 64, device=device) for _ in range(2)]
        for a, out in zip((both.columns(first, 200), alone), results, strict=True):
            chunk_product(a, b, offsets, rows, out)
        assert torch.equal(*results)


def test_wrong_rows_are_named():
    offsets, x = _offsets((100, 28)), torch.randn(128, 64)
    codes, good = quantize(x), quantize_chunks(x, offsets)
    for call, error in (
        (lambda: quantize_chunks(x.double(), offsets), "x: expected dtype bfloat16"),
        (lambda: quantize_chunks(x.T, offsets), "x: expected rows with contiguous columns"),
        (
            lambda: quantize_chunks(
                Quantized(codes.codes[:1].expand(128, 64), codes.scales), offsets
            ),
            r"x: expected rows .* strides \(0, 1\)",
        ),
        (lambda: quantize_chunks(x, offsets.long()), "offsets: expected contiguous int32"),
        (lambda: quantize_chunks(x, offsets[:1]), "offsets: expected 2 elements"),
        (lambda: quantize_chunks(x, offsets, halves=3), "halves: expected 1 to 2, got 3"),
        (lambda: quantize_chunks(x[:, :63].clone(), offsets, halves=2), "1, or 2 with an even"),
        (lambda: quantize_chunks(x, offsets, scale="e8m0"), "scale: expected"),
        (lambda: quantize_chunks(x, offsets, dtype=torch.int8), "dtype: expected float8"),
        (lambda: quantize_chunks(x, offsets, offsets[None]), "row_token: expected 1 dim"),
        (
            lambda: quantize_chunks(Quantized(codes.codes, codes.scales.half()), offsets),
            "x.scales: expected dtype float32",
        ),
        (
            lambda: quantize_chunks(Quantized(codes.codes, codes.scales.to("meta")), offsets),
            "x.scales: expected a tensor on cpu like x.codes, got one on meta",
        ),
        (
            lambda: quantize_chunks(Quantized(torch._neg_view(codes.codes), codes.scales), offsets),
            "x.codes: expected a tensor whose memory holds its elements",
        ),
        (lambda: quantize_chunks(x, offsets, halves=2.0), "halves: expected an int, got float 2.0"),
        (lambda: quantize_chunks(tuple(good), offsets), "x: expected a torch.Tensor or guild.Q"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            call()


def test_wrong_products_are_named():
    offsets, x = _offsets((100, 28)), torch.randn(128, 64)
    good, out = quantize_chunks(x, offsets), torch.empty(2, 64, 64)
    of_good = good, offsets, 128
    for call, error in (
        (lambda: chunk_product(good, good, offsets, 500, out), r"a.codes: expected shape \(5, "),
        (
            lambda: chunk_product(good, good, offsets, 128, out[:, :8]),
            r"out: expected shape \(2, 64, 64\)",
        ),
        (
            lambda: chunk_product(good, Chunks(good.codes, good.scales[:, :0]), offsets, 128, out),
            "b.scales: expected shape",
        ),
        (lambda: chunk_product(good, good, offsets, 128, out.double()), "out: expected dtype"),
        (
            lambda: chunk_product(good, good, offsets, 128, out.clone().requires_grad_()),
            "out: expected a tensor that wants no gradient, got one that",
        ),
        (lambda: chunk_product(good.codes, good, offsets, 128, out), "a: expected guild.float8.C"),
        (lambda: chunk_product(good, None, offsets, 128, out), "b: expected guild.float8.Chunks"),
        (lambda: chunk_product(good, good, offsets, 128.0, out), "rows: expected an int, got flo"),
        (lambda: chunk_product(good, good, offsets, -1, out), "rows: expected at least 0, got -1"),
        (
            lambda: chunk_product(good, good, offsets, 500, out),
            r"got \(3, 64, 128\); 500 rows in 2 groups have 5 slots",
        ),
        (lambda: chunk_product(good, good, offsets.long(), 128, out), "offsets: .* got int64"),
        (
            lambda: chunk_product(good, good, offsets.repeat(2)[::2], 128, out),
            r"offsets: expected contiguous int32, got strides \(2,\)",
        ),
        (lambda: chunk_product(good, good, offsets[:1], 128, out), "offsets: expected 2 elements"),
        (
            lambda: chunk_product(good, good.columns(0, 0), offsets, 128, out),
            r"b.codes: expected columns, got shape \(3, 0, 128\)",
        ),
        (
            lambda: chunk_product(
                Chunks(good.codes.mT.contiguous().mT, good.scales), *of_good, out
            ),
            "a.codes: expected the 128 codes of a column contiguous",
        ),
        (
            lambda: chunk_product(Chunks(torch._neg_view(good.codes), good.scales), *of_good, out),
            "a.codes: expected a tensor whose memory holds its elements",
        ),
        (
            lambda: chunk_product(good, *of_good, out[:1].expand(2, 64, 64)),
            "out: expected elements that do not overlap",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            call()
