"""What the machine can do: its rates of reading memory and of multiplying matrices.

No single kernel is known to reach the highest read rate of every GPU, so several read the same
memory, each in its own way, and the fastest counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from guild.bench.steps import Yardsticks
from guild.bench.timing import Call, interleaved

_ROUNDS = 5
_SECONDS = 0.05


class Rates(NamedTuple):
    """Bytes and operations per microsecond.

    Attributes
    ----------
    read, matrix : float
        Of reading memory, and of one large matrix product.
    """

    read: float
    matrix: float


def measured_rates(dtype: torch.dtype, device: torch.device) -> tuple[Rates, dict[str, Any]]:
    """The rates and, for the record, which kernel reached them: TB/s of each, TFLOPS."""
    yardsticks = Yardsticks(dtype, device)
    count = (1 << 29) if device.type == "cuda" else (1 << 22)  # float32 values: 2 GiB
    source = torch.randn(count, device=device)
    calls = _readers(source)
    moved = dict.fromkeys(calls, 4 * count)
    for name, call in yardsticks.calls.items():
        calls[name], moved[name] = call, yardsticks.work[name].bytes
    taken = interleaved(calls, _ROUNDS, _SECONDS if source.is_cuda else _SECONDS / 10, device)
    best = {name: 1e3 * min(each) for name, each in taken.items()}  # us
    read = {name: moved[name] / us for name, us in best.items() if moved[name]}
    rates = Rates(max(read.values()), yardsticks.work["matrix"].flops / best["matrix"])
    fastest = max(read, key=read.__getitem__)
    return rates, {
        "read_tbps": rates.read / 1e6,
        "read_by": fastest,
        "reads_tbps": {name: rate / 1e6 for name, rate in read.items()},
        "matrix_size": yardsticks.size,
        "matrix_tflops": rates.matrix / 1e6,
    }


def _readers(source: torch.Tensor) -> dict[str, Call]:
    """Calls that read a vector and write next to nothing."""
    matrix = source.view(-1, 4096)
    vector = torch.ones(4096, device=source.device)
    calls: dict[str, Call] = {"sum": source.sum, "product": lambda: torch.mv(matrix, vector)}
    if source.is_cuda:
        calls |= _triton_readers(source)
    return calls


def _triton_readers(source: torch.Tensor) -> dict[str, Call]:
    """The same by Triton's kernel; none where Triton is missing or finds no compiler."""
    try:
        from guild.bench.decode.triton_read import sum_parts

        calls: dict[str, Call] = {}
        for parts in (1 << 11, 1 << 13):
            sums = torch.empty(parts, device=source.device)
            sum_parts(source, sums)
            calls[f"triton, {parts}"] = lambda sums=sums: sum_parts(source, sums)
        return calls
    except Exception:  # noqa: BLE001 - whatever its compilers raise
        return {}
