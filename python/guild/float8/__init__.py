"""FP8: quantisation by blocks, the grouped product of quantised operands, and expert layers in FP8.

Scales multiply, as torch's do: an element is its code times the scale of its block. Rows have a
scale for every 128 columns, weights for every 128 x 128 elements (DeepSeek-V3, arXiv:2412.19437,
section 3.3).
"""

from guild.float8.chunks import Chunks as Chunks
from guild.float8.chunks import chunk_product as chunk_product
from guild.float8.chunks import quantize_chunks as quantize_chunks
from guild.float8.experts import FP8Weights as FP8Weights
from guild.float8.grouped import scaled_grouped_mm as scaled_grouped_mm
from guild.float8.kept import refresh_fp8 as refresh_fp8
from guild.float8.microscaling import regroup as regroup
from guild.float8.quantization import Quantized as Quantized
from guild.float8.quantization import quantize as quantize
from guild.float8.quantization import quantize_weights as quantize_weights
from guild.float8.settings import FP8 as FP8
from guild.float8.settings import SlowFP8Warning as SlowFP8Warning

__all__ = [
    "FP8",
    "Chunks",
    "FP8Weights",
    "Quantized",
    "SlowFP8Warning",
    "chunk_product",
    "quantize",
    "quantize_chunks",
    "quantize_weights",
    "refresh_fp8",
    "regroup",
    "scaled_grouped_mm",
]
