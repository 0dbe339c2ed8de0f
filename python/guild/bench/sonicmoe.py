"""SonicMoE's own layer on Hopper kernels, timed beside Guild's if the package `sonicmoe` is there.

https://github.com/Dao-AILab/sonic-moe; its first call compiles, for up to a minute per shape. Its
weights are [E, 2I, H] with interleaved rows of gate and up.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from guild.bench.problem import Problem


def importable() -> bool:
    """Whether the package `sonicmoe` is installed."""
    return importlib.util.find_spec("sonicmoe") is not None


def in_turn(weight: torch.Tensor) -> torch.Tensor:
    """A copy of (E, 2I, H) with gate's rows before up's in which the two are interleaved."""
    experts, rows, hidden = weight.shape
    halves = weight.view(experts, 2, rows // 2, hidden)
    return halves.transpose(1, 2).reshape(weight.shape)


def in_halves(weight: torch.Tensor) -> torch.Tensor:
    """The inverse of `in_turn`."""
    experts, rows, hidden = weight.shape
    return weight.view(experts, rows // 2, 2, hidden).transpose(1, 2).reshape(weight.shape)


def layer_of(problem: Problem) -> Callable[[torch.Tensor], torch.Tensor]:
    """Router, top-k and softmax over the chosen, experts, combine; w_up is interleaved."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    swiglu = ActivationType("swiglu")
    w_up, w_down = (w.permute(1, 2, 0) for w in (problem.w_up, problem.w_down))  # experts last
    top_k, stream = problem.shape.top_k, torch.cuda.current_stream().cuda_stream

    def layer(x: torch.Tensor) -> torch.Tensor:
        weights = (problem.router, w_up, None, w_down, None)
        return moe_TC_softmax_topk_layer(x, *weights, top_k, stream, swiglu, False)[0]

    return layer
