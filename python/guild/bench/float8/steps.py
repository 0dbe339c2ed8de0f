"""The steps of a layer in FP8, each as a call that can be timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import guild
from guild._torch.float8_gradients import chunk_products, chunked
from guild._torch.float8_layer import quantized_rows
from guild._torch.float8_steps import Codes, Wanted, data_gradients, forward, up_step
from guild._torch.operators import LayerFlags, ops
from guild.activations import Activation
from guild.bench.problem import Problem


@torch.no_grad()
def step_calls(problem: Problem, weights: guild.FP8Weights) -> dict[str, Callable[[], object]]:
    """Steps by name, in the order in which a layer runs them, with all weight gradients."""
    recipe, experts = weights.fp8.recipe(), weights.codes
    flags = LayerFlags(*Activation.named("silu").scalars, False, False)
    x, dout = problem.x.detach(), problem.out_gradient
    logits = guild.router_logits(x, problem.router.detach())
    ids, scores = guild.route(logits, problem.shape.top_k)
    down = Codes(experts.down, experts.down_scales)
    tokens = x, ids, scores, None, None
    nothing = None, None
    _, kept, codes, routing = forward(tokens, experts.halves(), down, nothing, flags, recipe, True)
    wanted = Wanted(True, True, True, True, False, False)
    about = dout, kept, routing, experts, None, flags, recipe
    made = data_gradients(*about, wanted)
    rows = torch.empty(routing.row_token.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    a, _ = up_step(codes, routing, experts.halves(), None, flags, recipe, x.dtype, False)
    operands = chunked(made, codes, dout, routing, 2, recipe, True)
    up, low = torch.empty_like(problem.w_up), torch.empty_like(problem.w_down)
    return {
        "quantise X": partial(quantized_rows, x, 0, recipe.scales),
        "up": partial(
            up_step, codes, routing, experts.halves(), None, flags, recipe, x.dtype, True
        ),
        "down": partial(ops.scaled_grouped_mm_out, *a, 0, *down, 0, routing.ends, rows),
        "combine": partial(ops.combine, rows, routing.slot_row, scores, None, None),
        "down gradient": partial(data_gradients, *about, wanted._replace(x=False, scores=False)),
        "data gradients": partial(data_gradients, *about, wanted),
        "chunks": partial(chunked, made, codes, dout, routing, 2, recipe, True),
        "dW1, dW2": partial(chunk_products, operands, up, None, low, flags, False),
    }
