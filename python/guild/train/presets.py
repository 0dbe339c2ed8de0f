"""Models that `guild train --preset` knows by name: sizes for several GPUs, under --fsdp.

The vocabulary gives embedding and output the size that they have in these models, although the text
consists of bytes.
"""

from __future__ import annotations

from typing import Any

_LONG = {"context": 4096, "batch": 8, "lr": 3e-4, "warmup": 100, "balance": 1e-3}

PRESETS: dict[str, dict[str, Any]] = {
    # 6.8 billion weights, 1.1 billion for a token: SonicMoE's model (arXiv:2512.14080).
    "fine7b": {
        "hidden": 1536,
        "layers": 40,
        "heads": 24,
        "experts": 128,
        "intermediate": 256,
        "top_k": 8,
        "shared": 1024,
        "vocabulary": 100352,
        **_LONG,
    },
    # A smaller version of the same.
    "fine1b": {
        "hidden": 1024,
        "layers": 16,
        "heads": 16,
        "experts": 64,
        "intermediate": 256,
        "top_k": 8,
        "shared": 512,
        "vocabulary": 50304,
        **_LONG,
    },
    # OLMoE-1B-7B (arXiv:2409.02060).
    "olmoe": {
        "hidden": 2048,
        "layers": 16,
        "heads": 16,
        "experts": 64,
        "intermediate": 1024,
        "top_k": 8,
        "vocabulary": 50304,
        "router": "softmax",
        **_LONG,
    },
}
