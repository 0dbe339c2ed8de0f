"""QuACK, the strongest other grouped products for Hopper: its recorded figures and its kernels.

The figures, quack_h200.json, are of six products with gather and activation fused. They are scaled
to another run by the ratio of the two runs' cuBLAS bounds. If the package `quack` is installed
(quack-kernels, https://github.com/Dao-AILab/quack), the same six can be timed beside Guild's.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from guild.bench.chain import StepChain
from guild.bench.presets import Shape
from guild.bench.timing import milliseconds, replayed

# Rows and columns of a tile, and whether two consumer warp groups take turns (ping-pong).
_TILES = ((128, 256, False), (256, 192, False), (128, 192, True), (128, 128, True))
_TRIAL_CALLS = 5


def entry(shape: Shape) -> dict[str, Any] | None:
    """The recorded figures of a shape: `ms` by product, `bound_ms` by pass; None without any."""
    recorded = json.loads(Path(__file__).with_name("quack_h200.json").read_text())
    return recorded["shapes"].get(str(shape))


def importable() -> bool:
    """Whether the package `quack` is installed."""
    return importlib.util.find_spec("quack") is not None


def products(chain: StepChain) -> dict[str, Callable[..., object]]:
    """QuACK's six products on a chain's tensors, by step; each takes the config of its tile."""
    from quack.gemm_interface import gemm_act, gemm_dact, gemm_tuned

    plain = gemm_tuned.fn
    ends, tokens = chain.offsets, chain.row_token
    h, a, y = (torch.empty_like(t) for t in (chain.h, chain.a, chain.y))
    rows = {"cu_seqlens_m": ends}
    gathered = {**rows, "A_idx": tokens}
    summed = {"cu_seqlens_k": ends, "A_idx": tokens}
    silu = {"activation": "swiglu"}
    return {
        "up": lambda c: gemm_act(
            chain.x, chain.w_up.mT, preact_out=h, postact_out=a, **silu, **gathered, config=c
        ),
        "down": lambda c: plain(chain.a, chain.w_down.mT, y, **rows, config=c),
        "down gradient": lambda c: gemm_dact(
            chain.dout,
            chain.w_down,
            chain.h,
            dx_out=h,
            postact_out=a,
            colvec_scale=chain.row_score,
            colvec_reduce=True,
            dynamic_scheduler=False,
            **silu,
            **gathered,
            config=c,
        ),
        "dW2": lambda c: plain(chain.dout.T, chain.a_scaled, chain.dw_down, **summed, config=c),
        "up gradient": lambda c: plain(chain.dh, chain.w_up, y, **rows, config=c),
        "dW1": lambda c: plain(chain.x.T, chain.dh, chain.dw_up.mT, **summed, config=c),
    }


def best_calls(chain: StepChain) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """The six products, each with the fastest tile of a short trial, and why some have none."""
    from quack.gemm_config import GemmConfig

    found: dict[str, Callable[[], object]] = {}
    failures: dict[str, str] = {}
    for name, product in products(chain).items():
        least = float("inf")
        for rows, columns, turns in _TILES:
            config = GemmConfig(
                tile_m=rows,
                tile_n=columns,
                pingpong=turns,
                cluster_m=2,
                cluster_n=1,
                is_dynamic_persistent=False,
            )

            def call(product: Callable = product, config: Any = config) -> object:
                return product(config)

            try:
                call()  # compiles
                trial, calls = replayed(call, _TRIAL_CALLS) if chain.x.is_cuda else (call, 1)
                taken = milliseconds(trial, _TRIAL_CALLS, chain.x.device) / calls
            except Exception as error:  # noqa: BLE001 - whatever a foreign compiler raises
                failures[name] = (str(error).strip() or repr(error)).splitlines()[0]
                continue
            if taken < least:
                least, found[name] = taken, call
        if name in found:
            failures.pop(name, None)
    return found, failures
