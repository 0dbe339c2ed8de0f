"""The down gradient's chunks have the bits that the chunk quantiser gives; H may be codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import guild
from guild._torch.float8_gradients import chunks_of
from guild._torch.float8_steps import (
    Codes,
    Kept,
    in_16_bits,
    new_chunks,
    quantized_rows,
    row_scales,
)
from guild._torch.operators import LayerFlags, ops
from guild._torch.row_routing import RowRouting
from layers import ACTIVATIONS

HIDDEN, POWER_OF_TWO = 160, 1
# Rows per expert: whole chunks, the rows of one consumer and one more, the rest of whole tiles.
COUNTS = (0, 1, 64, 65, 128, 129, 17, 256, 257, 320, 321, 450)


class Gradient:
    """Operands of one down gradient, of which some rows belong to no expert."""

    def __init__(
        self, size: int, activation: str, device: str, dtype: torch.dtype, gradients: int
    ) -> None:
        torch.manual_seed(size)
        act = ACTIVATIONS[activation]
        self.flags, self.gradients = LayerFlags(*act.scalars, False, False), gradients
        self.size, self.halves = size, 2 if act.gated else 1
        self.rows, tokens = sum(COUNTS) + 3, 90
        ends = torch.tensor((0, *COUNTS)).cumsum(0).int()
        token = torch.randint(-1, tokens, (self.rows,), dtype=torch.int32)
        score = torch.rand(self.rows)
        none = torch.empty(0, dtype=torch.int32)
        self.places = RowRouting(*(t.to(device) for t in (ends, token, none, score)))
        dout = torch.randn(tokens, HIDDEN) * torch.logspace(-4, 4, tokens, 2)[:, None]
        self.dout = quantized_rows(dout.to(device, dtype), gradients, POWER_OF_TWO)
        h = (
            torch.randn(self.rows, self.halves * size)
            * torch.logspace(-6, 2, self.rows, 2)[:, None]
        )
        self.h = h.to(device, dtype)
        weight = torch.randn(len(COUNTS), HIDDEN, size, device=device) * HIDDEN**-0.5
        self.weight = guild.quantize_weights(weight, transposed=True)

    def codes_of_h(self) -> Kept:
        """H as codes in halves."""
        parts = [quantized_rows(t, 0, POWER_OF_TWO) for t in self.h.chunk(self.halves, 1)]
        return Kept(*(torch.cat([p[i] for p in parts], 1) for i in range(2)))

    def run(self, kept: Kept, chunks: bool, rounded: bool) -> dict[str, Tensor]:
        """Results by name, zeros where nothing is written; rounded: with the 16-bit results."""
        like, shape = self.h, (self.rows, self.halves * self.size)
        codes = Codes(
            torch.zeros(shape, dtype=torch.uint8, device=like.device),
            row_scales(self.dout.scales, self.rows, self.size, self.halves).zero_(),
        )
        dh = torch.zeros_like(like) if rounded else None
        a = like.new_zeros(self.rows, self.size) if rounded else None
        parts = torch.zeros(self.rows, -(-self.size // 256), device=like.device)
        made = [Codes(None, None)] * 2
        if chunks:
            sizes = like, self.rows, len(COUNTS), self.size
            made = [new_chunks(*sizes, n) for n in (self.halves, 1)]
            for tensor in (*made[0], *made[1]):
                tensor.zero_()
        transposed = self.weight.transposed.view(torch.uint8)
        ops.scaled_down_gradient_out(
            *(*self.dout, self.gradients, self.places.offsets, self.places.row_token),
            *(self.places.row_score, transposed.mT, self.weight.scales, *kept.arguments()),
            *(*self.flags[:-1], self.gradients, POWER_OF_TWO, *codes, dh, a, parts),
            *(*made[0], *made[1]),
        )
        names = "dh_codes", "dh_scales", "dh", "a", "parts", "dh_chunks", "dh_chunk_scales"
        results = (*codes, dh, a, parts, *made[0], *made[1])
        return dict(zip((*names, "a_chunks", "a_chunk_scales"), results, strict=True))


def expect_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """The same bits, NaN included."""
    for name, tensor in got.items():
        if tensor is not None and want[name] is not None:
            same = torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (tensor, want[name])))
            assert same, f"{name}: {(tensor != want[name]).sum()} others"


def expect_chunks(step: Gradient, made: dict[str, Tensor], separate: dict[str, Tensor]) -> None:
    """The chunks must be those that the quantiser makes of the other results."""
    codes = Codes(separate["dh_codes"], separate["dh_scales"])
    dh = chunks_of(codes, step.places, False, step.halves, step.gradients, POWER_OF_TWO)
    a = chunks_of(separate["a"], step.places, False, 1, 0, POWER_OF_TWO)
    used = slots(step)
    for name, want in (("dh_chunks", dh), ("a_chunks", a)):
        got = Codes(made[name], made[f"{name[:-1]}_scales"])
        scales = [t.scales[used].view(torch.int32) for t in (got, want)]
        assert torch.equal(*scales), name
        assert torch.equal(got.codes[used], want.codes[used]), name


def slots(step: Gradient) -> Tensor:
    """Which slots hold a chunk."""
    all_slots = torch.zeros(step.rows // 128 + len(COUNTS), dtype=torch.bool)
    begin = 0
    for expert, count in enumerate(COUNTS):
        first = begin // 128 + expert
        all_slots[first : first + -(-count // 128)] = True
        begin += count
    return all_slots.to(step.h.device)


@pytest.mark.parametrize("gradients", [0, 1], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss", "relu_squared"])
@pytest.mark.parametrize("size", [64, 272, 336])
def test_chunks_of_the_step(size: int, activation: str, gradients: int, device: str) -> None:
    """The fused call gives what two calls give, whether or not it also gives the other results."""
    step = Gradient(size, activation, device, torch.bfloat16, gradients)
    separate = step.run(Kept(step.h), False, True)
    for rounded in (False, True):
        made = step.run(Kept(step.h), True, rounded)
        expect_chunks(step, made, separate)
        expect_same({n: t for n, t in made.items() if "chunk" not in n}, separate)


def test_values_that_are_not_finite(device: str) -> None:
    """A chunk with a row of NaN, or one whose A' is infinite in float16."""
    step = Gradient(144, "swiglu", device, torch.float16, 0)
    step.h[300, 5] = float("nan")
    step.h[700, 130:] = 60000
    separate = step.run(Kept(step.h), False, True)
    assert separate["dh_scales"].isnan().any()
    expect_chunks(step, step.run(Kept(step.h), True, False), separate)


@pytest.mark.parametrize("gradients", [0, 1], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [64, 272, 336])
def test_h_of_codes(size: int, gradients: int, device: str) -> None:
    """Codes whose scales are powers of two are bfloat16 values, so results are the same."""
    step = Gradient(size, "swiglu", device, torch.bfloat16, gradients)
    kept = step.codes_of_h()
    plain = in_16_bits(kept, step.flags, torch.bfloat16)
    for chunks in (False, True):
        expect_same(step.run(kept, chunks, True), step.run(plain, chunks, True))


@pytest.mark.parametrize("size", [64, 130, 256])
def test_small_h_of_codes_in_float16(size: int) -> None:
    """Scales below float16's range are not rounded to it."""
    torch.manual_seed(0)
    h = [torch.randn(9, size) * scale for scale in (1e-5, 3e-4)]
    codes = [guild.quantize(half) for half in h]
    joined = [torch.cat([t.codes.view(torch.uint8) for t in codes], 1)]
    joined.append(torch.cat([t.scales for t in codes], 1))
    flags = LayerFlags(*ACTIVATIONS["swiglu"].scalars, False, False)
    found = in_16_bits(Kept(*joined), flags, torch.float16).h
    values = [dequantized(*t) for t in codes]
    assert torch.equal(found, torch.cat(values, 1).half())


def dequantized(codes: Tensor, scales: Tensor, *_: object) -> Tensor:
    """Codes times the scales of their 128 columns, in float32."""
    return codes.float() * scales.repeat_interleave(128, 1)[:, : codes.shape[1]]


def test_chunks_want_powers_of_two(device: str) -> None:
    """Codes with exact scales cannot be shifted to a common scale."""
    step = Gradient(64, "swiglu", device, torch.bfloat16, 0)
    chunks = new_chunks(step.h, step.rows, len(COUNTS), 64, 2)
    codes = step.h.new_empty(step.rows, 128, dtype=torch.uint8)
    scales = row_scales(step.dout.scales, step.rows, 64, 2)
    with pytest.raises(RuntimeError, match="dh_chunks: expected null with scale 0"):
        ops.scaled_down_gradient_out(
            *(*step.dout, 0, step.places.offsets, step.places.row_token, None),
            *(step.weight.transposed.view(torch.uint8).mT, step.weight.scales, step.h, None, None),
            *(*step.flags[:-1], 0, 0, codes, scales, None, None, None, *chunks, None, None),
        )
