"""A kernel that only reads, for read rates that copies and reductions may not reach.

Imported where Triton is installed, as it is with torch for CUDA.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _sum_part(source, sums, steps, BLOCK: tl.constexpr):
    """sums[p] = the sum of program p's `steps` consecutive blocks."""
    start = source + tl.program_id(0).to(tl.int64) * steps * BLOCK
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        total += tl.load(start + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def sum_parts(source: torch.Tensor, sums: torch.Tensor) -> None:
    """Sums of equal parts of a float32 vector, as many parts as there are sums.

    The vector's length is a multiple of 4096 times the number of sums.
    """
    parts = sums.numel()
    steps = source.numel() // (parts * _BLOCK)
    _sum_part[(parts,)](source, sums, steps, BLOCK=_BLOCK, num_warps=8)
