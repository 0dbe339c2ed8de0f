"""What a training step costs, and how much of the GPU it uses."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from guild.train.settings import Settings

# Dense bf16 with fp32 sums, FLOP per second, by a part of the GPU's name (NVIDIA's data sheets).
_PEAK = {
    **{"H100 PCIe": 756e12, "H800 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12},
    **{"H100": 989e12, "H800": 989e12, "H200": 989e12},  # the last one: GH200 as well
}


def flops_per_token(s: Settings) -> float:
    """Operations of forward and backward: 6 for each weight that a token meets, and attention.

    Causal attention multiplies half of context x context twice, three times with backward.
    """
    expert = 3 * s.hidden * (s.top_k * s.intermediate + s.shared)
    block = 4 * s.hidden**2 + expert + s.hidden * s.experts
    attention = 6 * s.layers * s.context * s.hidden
    return 6 * (s.layers * block + s.vocabulary * s.hidden) + attention


def peak_flops(device: torch.device) -> float | None:
    """A device's peak in bf16, in FLOP per second; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK.items() if part in name), None)


def speed_of(s: Settings, seconds: float, ranks: int, device: torch.device) -> dict[str, float]:
    """One step's tokens per second and GPU and, where known, MFU and memory; empty on the CPU.

    Returns
    -------
    dict
        `tokens_per_second_per_gpu`; `mfu`, a share of 1; `memory_gib`, the most of this rank's so
        far.
    """
    if device.type != "cuda":
        return {}
    rate = s.tokens_per_step / seconds / ranks
    found = {"tokens_per_second_per_gpu": rate}
    peak = peak_flops(device)
    if peak is not None:
        found["mfu"] = rate * flops_per_token(s) / peak
    found["memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def speed_summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the steps that have them, and the most memory; empty for a run on one device."""
    found: dict[str, float] = {}
    for name, over in (
        ("tokens_per_second_per_gpu", statistics.median),
        ("mfu", statistics.median),
        ("memory_gib", max),
    ):
        values = [row[name] for row in rows if name in row]
        if values:
            found[name] = over(values)
    return found


def speed_facts(row: dict[str, Any]) -> str:
    """`36,400 tokens/s/GPU  MFU 30.1 %  66.0 GiB`, as far as a row or summary has them."""
    facts = []
    if "tokens_per_second_per_gpu" in row:
        facts.append(f"{row['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU")
    if "mfu" in row:
        facts.append(f"MFU {100 * row['mfu']:.1f} %")
    if "memory_gib" in row:
        facts.append(f"{row['memory_gib']:.1f} GiB")
    return "  ".join(facts)
