"""MXFP8 and NVFP4 beside plain torch, bit for bit."""

import pytest
import torch

import guild
from guild.float8 import regroup

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
ELEMENTS = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(9, 256), (130, 72), (33, 200), (8, 34), (260, 640)]
# The values of E2M1's codes 0 to 7.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _with_corners(x):
    """Blocks of zeros, subnormals, large and tiny values, ties, a NaN and an infinity."""
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


def _blocks(x, size):
    """x (rows, columns) in float32 as (rows, blocks, size), zeros behind the last column."""
    rows, columns = x.shape
    padded = torch.zeros(rows, -(-columns // size) * size)
    padded[:, :columns] = x.float()
    return padded.view(rows, -1, size)


def _mxfp8(x, dtype, scale):
    """Values of codes, and the bytes of E8M0 scales."""
    blocks = _blocks(x, 32)
    largest = blocks.abs().amax(-1)
    finite = torch.isfinite(blocks).all(-1)
    limit = torch.finfo(dtype).max
    mantissa, exponent = torch.frexp(largest.where(finite, torch.ones(())))
    emax = 8 if dtype == torch.float8_e4m3fn else 15  # of the format's largest value
    power = exponent - 1 - emax
    if scale == "ceil":
        power += (mantissa.double() * 2 * 2.0**emax > limit).int()
    power = power.where(largest > 0, torch.tensor(-200)).clamp(min=-127)
    values = blocks.double() / torch.ldexp(torch.ones_like(largest.double()), power)[..., None]
    codes = values.clamp(-limit, limit).float().to(dtype).float()
    codes = codes.where(finite[..., None], torch.tensor(float("nan")))
    bytes_ = (power + 127).where(finite, torch.tensor(255)).to(torch.uint8)
    return codes.flatten(1)[:, : x.shape[1]], bytes_


def _swizzled(scales):
    """(rows, blocks) in the order that cuBLAS takes, as torchao's to_blocked makes it."""
    rows, width = (-(-n // m) * m for n, m in zip(scales.shape, (128, 4), strict=True))
    padded = torch.zeros(rows, width, dtype=torch.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    tiles = padded.view(rows // 128, 128, width // 4, 4).permute(0, 2, 1, 3)
    return tiles.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(rows, width)


def _expect_scales(got, want, order):
    found = got.view(torch.uint8).cpu()
    assert torch.equal(found, want if order == "rows" else _swizzled(want))


@pytest.mark.parametrize("order", ["rows", "swizzled"])
@pytest.mark.parametrize("scale", ["floor", "ceil"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp8(shape, element, dtype, scale, order, device):
    torch.manual_seed(0)
    x = _with_corners(torch.randn(shape).to(element))
    got = guild.quantize(x.to(device), dtype, format="mxfp8", scale=scale, scale_order=order)
    codes, scales = _mxfp8(x, dtype, scale)
    assert got.codes.dtype == dtype and got.scales.dtype == torch.float8_e8m0fnu
    found = got.codes.float().cpu()
    torch.testing.assert_close(found, codes, rtol=0, atol=0, equal_nan=True)
    assert (
        got.codes.view(torch.uint8).cpu()[found == 0] == torch.signbit(x)[found == 0] * 128
    ).all()
    _expect_scales(got.scales, scales, order)


def _e2m1_codes(x):
    """The nearest codes, ties to the even one, largest beyond 6, with the sign."""
    size = x.abs().clamp(max=6)[..., None]
    far = (size - E2M1).abs()
    nearest = far == far.amin(-1, keepdim=True)
    odd = torch.arange(8) % 2
    code = torch.where(nearest, odd, 2).argmin(-1)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def _nvfp4(x, given):
    blocks = _blocks(x, 16)
    finite = torch.isfinite(blocks).all(-1)
    largest = blocks.abs().amax(-1).where(finite, torch.zeros(()))
    least = torch.tensor(2.0**-100)
    above = given if given is not None else largest.amax().maximum(least) / torch.tensor(2688.0)
    block = (largest / torch.tensor(6.0) / above).clamp(max=448).to(torch.float8_e4m3fn)
    scale = block.float() * above
    factor = torch.where(scale > 0, torch.ones_like(scale) / scale, 0)
    values = blocks.where(finite[..., None], torch.zeros(())) * factor[..., None]
    codes = _e2m1_codes(values).where((finite & (scale > 0))[..., None], torch.tensor(0))
    codes = codes.to(torch.uint8).flatten(1)[:, : x.shape[1]]
    bytes_ = block.view(torch.uint8).where(finite, torch.tensor(0x7F, dtype=torch.uint8))
    return codes[:, ::2] | codes[:, 1::2] << 4, bytes_, above.view(1)


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
    codes, scales, above = _nvfp4(x, above)
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
    assert torch.equal(bytes_[:, 0] >> 4, _e2m1_codes(near[:, 0]))
    assert torch.equal(bytes_[:, 1] & 15, _e2m1_codes(-near[:, 0]))


def test_zeros_and_no_rows(device):
    for rows in (0, 3):
        x = torch.zeros(rows, 64, device=device)
        got = guild.quantize(x, format="nvfp4")
        assert got.global_scale.item() == torch.tensor(2.0**-100).div(2688).item()
        assert not got.codes.view(torch.uint8).any() and not got.scales.view(torch.uint8).any()
        got = guild.quantize(x, format="mxfp8")
        assert not got.codes.view(torch.uint8).any() and not got.scales.view(torch.uint8).any()


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
    # A block's scale is the largest of four.
    fours = torch.nn.functional.pad(
        made.scales.view(torch.uint8).cpu(),
        (0, -(-shape[1] // 32) % 4 and 4 - -(-shape[1] // 32) % 4),
    )
    largest = fours.view(shape[0], -1, 4).amax(-1)
    assert torch.equal(scales.cpu().double(), torch.exp2(largest.double() - 127))
    tall = scales.cpu().double().repeat_interleave(128, 1)[:, : shape[1]]
    assert torch.equal(codes.double().cpu(), (want / tall).float().to(dtype).double())
    # Exact where the result is normal.
    normal = (want / tall).abs() >= torch.finfo(dtype).tiny
    assert normal.any() and torch.equal((codes.double().cpu() * tall)[normal], want[normal])


def test_a_scale_that_is_nan_spoils_its_block(device):
    x = torch.randn(4, 256)
    x[1, 40] = float("nan")
    made = guild.quantize(x.to(device), format="mxfp8")
    codes, scales = regroup(made.codes, made.scales)
    assert codes[1, :128].float().isnan().all() and scales[1, 0].isnan()
    codes[1, :128], scales[1, 0] = 0, 0
    assert not codes.float().isnan().any() and not scales.isnan().any()


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
        (
            lambda: guild.quantize(x, format="nvfp4", global_scale=torch.ones(2)),
            r"global_scale: expected shape \(1,\)",
        ),
        (lambda: regroup(x, made.scales), "codes: expected float8_e4m3fn"),
        (lambda: regroup(made.codes, swizzled.scales), r"scales: expected shape \(4, 2\)"),
        (lambda: regroup(made.codes, torch.ones(4, 2)), "scales: expected dtype float8_e8m0fnu"),
        (lambda: regroup(made.codes.T, made.scales), "codes: expected contiguous columns"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            call()
