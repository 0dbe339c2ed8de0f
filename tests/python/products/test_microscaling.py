"""MXFP8 and NVFP4 beside plain torch, bit for bit."""

import pytest
import torch

import guild
from guild.float8 import regroup
from oracle.quantised import e2m1_codes, mxfp8, nvfp4, swizzled

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
ELEMENTS = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(9, 256), (130, 72), (33, 202)]


def _with_corners(x):
    """Replace some blocks: zeros, subnormals, large and tiny values, ties, a NaN, an infinity."""
    x[0, :32] = 0
    x[1, :32] *= 2.0**-20
    x[2, :32] *= 2.0**10
    x[3] = torch.arange(x.shape[1]).remainder(32) / 4.0 - 3
    if x.dtype != torch.float16:
        x[4, :32] *= 2.0**-126
        x[5, :32] *= 2.0**120
    x[6, 3], x[7, -1] = float("nan"), float("-inf")
    x[7, :4] = torch.tensor([1.0, 448.0, -449.0, 511.0])
    return x


def _expect_scales(got, want, order):
    found = got.view(torch.uint8).cpu()
    assert torch.equal(found, want if order == "rows" else swizzled(want))


@pytest.mark.parametrize("order", ["rows", "swizzled"])
@pytest.mark.parametrize("scale", ["floor", "ceil"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp8(shape, element, dtype, scale, order, device):
    torch.manual_seed(0)
    x = _with_corners(torch.randn(shape).to(element))
    got = guild.quantize(x.to(device), dtype, format="mxfp8", scale=scale, scale_order=order)
    codes, scales = mxfp8(x, dtype, scale)
    assert got.codes.dtype == dtype and got.scales.dtype == torch.float8_e8m0fnu
    found = got.codes.float().cpu()
    torch.testing.assert_close(found, codes, rtol=0, atol=0, equal_nan=True)
    assert (
        got.codes.view(torch.uint8).cpu()[found == 0] == torch.signbit(x)[found == 0] * 128
    ).all()
    _expect_scales(got.scales, scales, order)


@pytest.mark.parametrize("order", ["rows", "swizzled"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4(shape, element, given, order, device):
    torch.manual_seed(1)
    x = _with_corners(torch.randn(shape).to(element))
    above = torch.tensor([0.013]) if given else None
    got = guild.quantize(
        x.to(device),
        format="nvfp4",
        scale_order=order,
        global_scale=None if above is None else above.to(device),
    )
    codes, scales, above = nvfp4(x, above)
    assert got.codes.dtype == torch.float4_e2m1fn_x2 and got.scales.dtype == torch.float8_e4m3fn
    assert torch.equal(got.global_scale.cpu(), above)
    _expect_scales(got.scales, scales, order)
    assert torch.equal(got.codes.view(torch.uint8).cpu(), codes)


def test_every_tie_of_e2m1_goes_to_the_even_code(device):
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    near = torch.cat([ties, ties.nextafter(torch.zeros(())), ties.nextafter(ties + 1)])[:, None]
    x = torch.cat([torch.full((24, 1), 6.0), near, -near, torch.zeros(24, 13)], 1)
    one = torch.full((1,), 1.0, device=device)
    got = guild.quantize(x.to(device), format="nvfp4", global_scale=one)
    bytes_ = got.codes.view(torch.uint8).cpu()
    assert torch.equal(bytes_[:, 0] >> 4, e2m1_codes(near[:, 0]))
    assert torch.equal(bytes_[:, 1] & 15, e2m1_codes(-near[:, 0]))


def test_zeros_and_no_rows(device):
    for rows in (0, 3):
        x = torch.zeros(rows, 64, device=device)
        got = guild.quantize(x, format="nvfp4")
        assert got.global_scale.item() == torch.tensor(2.0**-100).div(2688).item()
        assert not got.codes.view(torch.uint8).any() and not got.scales.view(torch.uint8).any()
        got = guild.quantize(x, format="mxfp8")
        assert not got.codes.view(torch.uint8).any() and not got.scales.view(torch.uint8).any()


@pytest.mark.parametrize("power", [-126, -129, -140])
def test_nvfp4_of_the_least_numbers(power, device):
    """A scale whose inverse is no float leaves zeros, not the largest code."""
    x = torch.tensor([6.0, 3.0, 1.0, -1.0] + [0.0] * 12).mul(2.0**power)[None]
    scale = torch.tensor([2.0**power], device=device)
    got = guild.quantize(x.to(device), format="nvfp4", global_scale=scale)
    codes = got.codes.view(torch.uint8).cpu()[0].tolist()
    assert codes == ([0x57, 0xA2] + [0] * 6 if power == -126 else [0] * 8)


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 1.0, float("inf"), float("nan")])
def test_nvfp4_of_zeros_whatever_the_global_scale(scale, device):
    x = torch.zeros(5, 64)
    x[1, 16:32], x[3, 0], x[4, 40] = 3.0, -0.0, float("nan")
    above = torch.tensor([scale], device=device)
    got = guild.quantize(x.to(device), format="nvfp4", global_scale=above)
    zero = (x.view(5, 4, 16) == 0).all(-1)
    scales, codes = (t.view(torch.uint8).cpu() for t in (got.scales, got.codes))
    assert zero.sum() == 18 and not scales[zero].any() and scales[4, 2] == 0x7F
    assert not codes.view(5, 4, 8)[zero].any()


def _wide(codes, scales, columns):
    factor = torch.exp2(scales.view(torch.uint8).cpu().double() - 127)
    return codes.double().cpu() * factor.repeat_interleave(32, 1)[:, :columns]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(9, 256), (33, 200), (5, 131)])
def test_regrouping(shape, dtype, device):
    torch.manual_seed(2)
    x = torch.randn(shape)
    x[:, : shape[1] // 2] *= torch.exp2(torch.randint(-14, 3, (shape[0], 1)).float())
    x[0] = 0
    made = guild.quantize(x.to(device), dtype, format="mxfp8")
    codes, scales = regroup(made.codes, made.scales)
    want = _wide(made.codes, made.scales, shape[1])
    # A block's scale is the largest of four scales.
    fours = torch.nn.functional.pad(
        made.scales.view(torch.uint8).cpu(),
        (0, -(-shape[1] // 32) % 4 and 4 - -(-shape[1] // 32) % 4),
    )
    largest = fours.view(shape[0], -1, 4).amax(-1)
    assert torch.equal(scales.cpu().double(), torch.exp2(largest.double() - 127))
    tall = scales.cpu().double().repeat_interleave(128, 1)[:, : shape[1]]
    assert torch.equal(codes.double().cpu(), (want / tall).float().to(dtype).double())
    # The division is exact where its result is normal.
    normal = (want / tall).abs() >= torch.finfo(dtype).tiny
    assert normal.any() and torch.equal((codes.double().cpu() * tall)[normal], want[normal])


@pytest.mark.parametrize("columns", [256, 200, 131])
def test_infinite_codes_stay_infinite(columns, device):
    """Of E5M2, which a quantiser never gives but any other producer may."""
    torch.manual_seed(3)
    x = torch.randn(6, columns)
    x[:, :32] *= 2.0**-10  # whose codes are rounded again
    made = guild.quantize(x.to(device), torch.float8_e5m2, format="mxfp8")
    infinite = torch.rand(6, columns) < 0.1
    sign = torch.where(torch.rand(6, columns) < 0.5, -1.0, 1.0)
    given = torch.where(infinite, sign * float("inf"), made.codes.float().cpu())
    finite, scales = regroup(made.codes, made.scales)
    codes, again = regroup(given.to(torch.float8_e5m2).to(device), made.scales)
    want = torch.where(infinite, given, finite.float().cpu())
    assert infinite[:, :32].any() and torch.equal(codes.float().cpu(), want)
    assert torch.equal(again, scales)


def test_a_scale_that_is_nan_spoils_its_block(device):
    x = torch.randn(4, 256)
    x[1, 40] = float("nan")
    made = guild.quantize(x.to(device), format="mxfp8")
    codes, scales = regroup(made.codes, made.scales)
    assert codes[1, :128].float().isnan().all() and scales[1, 0].isnan()
    codes[1, :128], scales[1, 0] = 0, 0
    assert not codes.float().isnan().any() and not scales.isnan().any()


def test_global_scale_that_is_a_view_of_negatives(device):
    """As the imaginary part of a conjugate is."""
    x = torch.randn(4, 64, device=device)
    conjugate = torch.tensor([0.0 - 2.0j], dtype=torch.complex64, device=device).conj()
    codes, scales, _, back = guild.quantize(x, format="nvfp4", global_scale=conjugate.imag)
    two = torch.full((1,), 2.0, device=device)
    wanted = guild.quantize(x, format="nvfp4", global_scale=two)
    assert torch.equal(codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert torch.equal(scales.float(), wanted.scales.float()) and torch.equal(back, two)


def test_wrong_calls_are_named():
    x = torch.randn(4, 64)
    made = guild.quantize(x, format="mxfp8")
    swizzled = guild.quantize(x, format="mxfp8", scale_order="swizzled")
    for call, error in (
        (lambda: guild.quantize(x, format="mxfp4"), "format: expected"),
        (lambda: guild.quantize(x, format="mxfp8", scale="exact"), "scale: expected 'floor' or"),
        (lambda: guild.quantize(x, format="nvfp4", scale="floor"), "scale: expected none"),
        (lambda: guild.quantize(x, scale="floor"), "scale: expected 'exact' or"),
        (lambda: guild.quantize(x, scale_order="swizzled"), "scale_order: expected 'rows'"),
        (lambda: guild.quantize(x, format="mxfp8", scale_order="k"), "scale_order: expected"),
        (lambda: guild.quantize(x[:, :63], format="nvfp4"), "x: expected an even number"),
        (lambda: guild.quantize(x, global_scale=torch.ones(1)), "global_scale: expected none"),
        (lambda: guild.quantize(x, global_scale="x"), "global_scale: .*Tensor, got str"),
        (
            lambda: guild.quantize(x, format="nvfp4", global_scale=torch.ones(2)),
            r"global_scale: expected shape \(1,\)",
        ),
        (lambda: regroup(x, made.scales), "codes: expected float8_e4m3fn"),
        (lambda: regroup(made.codes, swizzled.scales), r"scales: expected shape \(4, 2\)"),
        (lambda: regroup(made.codes, torch.ones(4, 2)), "scales: expected dtype float8_e8m0fnu"),
        (
            lambda: regroup(made.codes.T, made.scales),
            "codes: expected rows with contiguous columns",
        ),
        (
            lambda: regroup(torch._neg_view(made.codes), made.scales),
            "codes: expected a tensor whos",
        ),
        (
            lambda: regroup(made.codes, torch._neg_view(made.scales)),
            "scales: expected a tensor who",
        ),
        (
            lambda: regroup(made.codes[:1].expand(4, 64), made.scales),
            r"codes: expected rows .* strides \(0, 1\)",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            call()


def test_a_given_scale_is_only_read(device: str) -> None:
    """A backward that keeps it finds it unchanged."""
    scale = torch.full((1,), 0.5, device=device)
    guild.quantize(torch.randn(4, 32, device=device), format="nvfp4", global_scale=scale)
    assert scale._version == 0
