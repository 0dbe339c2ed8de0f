"""Random calls of the quantisers, whose results are known to the last bit."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import guild
from fuzz_compare import Truth
from fuzz_draw import Draw, Values, place
from fuzz_products import draw_ends
from fuzz_weights import members_of
from guild.float8 import Quantized, quantize_chunks
from oracle import quantised

Inputs = dict[str, Tensor]

_ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class QuantisedCase:
    """guild.quantize, guild.quantize_weights or guild.float8.quantize_chunks."""

    seed: int
    kind: str  # "rows", "weights", "chunks", "mxfp8", "nvfp4"
    element: str
    dtype: str
    scale: str
    order: str  # of microscaling formats' scales
    groups: int
    rows: int
    columns: int
    layout: str
    lists: str | None  # weights as a list: see fuzz_weights.parts_of
    halves: int  # of weights' rows, or of chunks' columns
    interleaved: bool
    transposed: bool
    tokens: int | None  # rows of what chunks are gathered from
    of_codes: bool  # chunks of what guild.quantize makes
    spread: int  # rows differ by up to this power of two
    twice: bool

    @staticmethod
    def drawn(draw: Draw) -> QuantisedCase:
        kind = draw.pick("rows", "weights", "weights", "chunks", "chunks", "mxfp8", "nvfp4")
        halves, rows = draw.pick(1, 2), draw.tokens()
        weights, chunks = kind == "weights", kind == "chunks"
        size = draw.between(100, 300) if draw.chance(0.4) else draw.width()
        of_codes = chunks and draw.chance(0.4)
        even = 2 if halves == 2 or kind == "nvfp4" else 1
        scales = ("floor", "ceil") if kind == "mxfp8" else ("exact", "power_of_two")
        return QuantisedCase(
            seed=draw.seed(),
            kind=kind,
            element=draw.pick(*_ELEMENTS),
            dtype=draw.pick(*_FORMATS),
            scale="power_of_two" if of_codes else draw.pick(*scales),
            order=draw.pick("rows", "swizzled") if kind in ("mxfp8", "nvfp4") else "rows",
            groups=min(draw.experts(), 6) if weights else draw.experts(),
            rows=even * draw.pick(1, draw.between(2, 90)) if weights else rows,
            columns=size if weights else size + size % even,
            layout=draw.matrices() if weights else draw.rows(),
            lists=draw.pick(None, None, "even", "backwards", "apart") if weights else None,
            halves=halves if weights or chunks else 1,
            interleaved=weights and halves == 2 and draw.chance(0.5),
            transposed=weights and draw.chance(0.7),
            tokens=draw.between(1, 60) if chunks and draw.chance(0.5) else None,
            of_codes=of_codes,
            spread=draw.pick(0, 3, 20),
            twice=draw.chance(0.15),
        )

    def values(self, dtype: torch.dtype) -> Inputs:
        values = Values(self.seed, _ELEMENTS[self.element])
        many = (self.groups, self.rows) if self.kind == "weights" else (self.tokens or self.rows,)
        if self.kind == "chunks" and self.tokens is not None:
            many = (self.tokens,)
        x = values.normal(*many, self.columns)
        power = values.integers(-self.spread, min(self.spread, 8), *many, 1)
        x = (x * torch.exp2(power.double())).to(values.dtype)
        given = {"x": x.masked_fill(values.uniform(*x.shape) < 0.1, 0)}
        if self.kind == "chunks":
            ends = draw_ends(values, self.groups, self.rows)
            given["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
            if self.tokens is not None:
                token = values.integers(-1, self.tokens, self.rows)
                given["row_token"] = token.to(torch.int32)
        return given

    def run(self, given: Inputs, device: str, dtype: torch.dtype) -> Inputs:
        x = place(given["x"], self.layout, _ELEMENTS[self.element], device)
        got = self._quantised(x, {n: t.to(device) for n, t in given.items() if n != "x"})
        codes, scales = got[:2]
        if self.kind == "chunks":  # slots without a chunk hold arbitrary values
            used = [slot for slot, _, _ in quantised.slots(self._counts(given))]
            codes, scales = codes[used], scales[used]
        results = {"codes": codes.view(torch.uint8), "scales": _bits(scales)}
        if self.kind == "weights" and self.transposed:
            results["transposed"] = got.transposed.view(torch.uint8)
        if self.kind == "nvfp4":
            results["global"] = _bits(got.global_scale)
        return results

    def _quantised(self, x: Tensor, more: Inputs) -> Any:
        dtype = _FORMATS[self.dtype]
        if self.kind == "weights":
            weight = x if self.lists is None else members_of(x, self.lists)
            with warnings.catch_warnings():  # of sizes whose lists a GPU cannot read in place
                warnings.simplefilter("ignore", guild.CopiedWeightsWarning)
                return guild.quantize_weights(
                    weight,
                    dtype,
                    scale=self.scale,
                    transposed=self.transposed,
                    gated=self.halves == 2,
                    interleaved=self.interleaved,
                )
        if self.kind == "chunks":
            if self.of_codes:
                x = _by_halves(x, dtype, self.halves)
            places = more["offsets"], more.get("row_token")
            return quantize_chunks(x, *places, dtype, scale=self.scale, halves=self.halves)
        if self.kind == "nvfp4":
            return guild.quantize(x, format="nvfp4", scale_order=self.order)
        options = {"format": "mxfp8", "scale_order": self.order} if self.kind == "mxfp8" else {}
        return guild.quantize(x, dtype, scale=self.scale, **options)

    def _counts(self, given: Inputs) -> list[int]:
        return given["offsets"].diff().tolist()

    def truth(self, given: Inputs, got: Inputs) -> Truth:
        x, dtype = given["x"], _FORMATS[self.dtype]
        if self.kind == "nvfp4":
            codes, scales, above = quantised.nvfp4(x, None)
            values = {"codes": codes, "scales": self._ordered(scales), "global": _bits(above)}
        elif self.kind == "mxfp8":
            codes, scales = quantised.mxfp8(x, dtype, self.scale)
            values = {"codes": _bytes(codes, dtype), "scales": self._ordered(scales)}
        elif self.kind == "chunks":
            values = self._chunks(given, dtype)
        elif self.kind == "weights":
            step = slice(0, None, 2), slice(1, None, 2)
            half = self.rows // 2
            parts = step if self.interleaved else (slice(half), slice(half, None))
            halves = [x[:, p] for p in parts] if self.halves == 2 else [x]
            made = [quantised.blockwise(w, dtype, self.scale, 128) for w in halves]
            codes, scales = (torch.cat(t, 1) for t in zip(*made, strict=True))
            values = {"codes": _bytes(codes, dtype), "scales": _bits(scales)}
            if self.transposed:
                values["transposed"] = values["codes"].mT
        else:
            codes, scales = quantised.blockwise(x, dtype, self.scale, 1)
            values = {"codes": _bytes(codes, dtype), "scales": _bits(scales)}
        return Truth({name: t.double() for name, t in values.items()})

    def _ordered(self, scales: Tensor) -> Tensor:
        return scales if self.order == "rows" else quantised.swizzled(scales)

    def _chunks(self, given: Inputs, dtype: torch.dtype) -> Inputs:
        """Chunks; for codes, the chunks of their values."""
        x, width = given["x"].float(), self.columns
        parts = quantised.column_blocks(width, self.halves)
        if self.of_codes:
            made = [quantised.blockwise(x[:, p], dtype, self.scale, 1) for p in parts]
            x = torch.cat([codes * scales for codes, scales in made], 1)
            # A block's scale is the largest of its rows', even if the largest was rounded down.
            row_scales = torch.cat([scales for _, scales in made], 1)
        if "row_token" in given:
            token = given["row_token"].long()
            inside = ((token >= 0) & (token < x.shape[0]))[:, None]
            rows = token.clamp(0, x.shape[0] - 1)
            x = torch.where(inside, x[rows], 0)
            if self.of_codes:
                row_scales = torch.where(inside, row_scales[rows], 0)
        counts = self._counts(given)
        used = [slot for slot, _, _ in quantised.slots(counts)]
        codes = torch.zeros(len(used), width, 128)
        scales = torch.zeros(len(used), len(parts))
        least = quantised.block_scale(torch.zeros(()), dtype, "power_of_two")[0]
        first_row = {slot: (first, count) for slot, first, count in quantised.slots(counts)}
        for slot, block, part, found, scale in quantised.chunks(
            x, counts, dtype, self.scale, self.halves
        ):
            if self.of_codes:
                first, count = first_row[slot]
                scale = row_scales[first : first + count, block].amax().maximum(least)
                found = torch.zeros_like(found)
                found[:, :count] = (x[first : first + count, part] / scale).T.to(dtype).float()
            codes[used.index(slot), part] = found
            scales[used.index(slot), block] = scale
        return {"codes": _bytes(codes, dtype), "scales": _bits(scales)}


def _by_halves(x: Tensor, dtype: torch.dtype, halves: int) -> Quantized:
    """Rows whose halves share no block of scales."""
    made = [guild.quantize(part, dtype, scale="power_of_two") for part in x.chunk(halves, 1)]
    codes = torch.cat([m.codes.view(torch.uint8) for m in made], 1).view(dtype)
    return Quantized(codes, torch.cat([m.scales for m in made], 1))


def _bytes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype).view(torch.uint8)


def _bits(scales: Tensor) -> Tensor:
    """Scales as integers, which compare without any tolerance."""
    return scales.contiguous().view(torch.int32 if scales.element_size() == 4 else torch.uint8)
