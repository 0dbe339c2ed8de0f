"""Tells torch of the FP8 ops that write into their arguments: no results and no gradient."""

from __future__ import annotations

import torch

from guild._torch.autograd import register_without_gradient

QUANTISERS = (
    "quantize_chunks_out",
    "quantize_micro_out",
    "quantize_rows_out",
    "quantize_weights_out",
    "regroup_micro_out",
)
PRODUCTS = (
    "chunk_product_out",
    "scaled_grouped_mm_out",
    "scaled_up_out",
    "scaled_down_gradient_out",
)

for _name in (*QUANTISERS, *PRODUCTS):
    torch.library.register_fake(f"guild::{_name}")(lambda *args: None)

register_without_gradient(*QUANTISERS, *PRODUCTS)
