"""Forwards whose results stay in L2: discarded there, and written again by the next layer.

What fits into L2 is discarded once it has been added up. Where weights are large, the down
projection and the sum run by parts of the columns, so that a part has to fit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import guild

TOP_K = 5
LEAST_BYTES = 2 << 20  # of what is discarded
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # hidden, intermediate, experts, options
    "a line of columns": (64, 576, 12, {}),
    "several blocks": (2112, 64, 12, {"order": "interleaved", "bias": True}),
    "no whole lines": (2048, 328, 12, {}),
    "shared": (1024, 512, 12, {"shared_experts": 1, "shared_gate": True}),
    "transposed": (1024, 512, 12, {"transposed": True}),
    "two parts": (8192, 5120, 25, {"bias": True}),
    "two uneven parts": (7232, 5824, 26, {"order": "interleaved"}),
    "four parts": (8192, 5120, 50, {}),
    "large, shared": (8192, 5120, 25, {"shared_experts": 1}),
    "large, transposed": (8192, 5120, 25, {"transposed": True}),
}


def in_turns(layer: guild.MoE, x: Tensor) -> Tensor:
    """So few tokens at a time that nothing is discarded."""
    bytes_of_token = TOP_K * (layer.hidden + layer.intermediate) * x.element_size()
    return torch.cat([layer(few) for few in x.split(LEAST_BYTES // bytes_of_token - 1)])


@pytest.mark.parametrize("name", CASES)
def test_layers_after_each_other(name: str, gpu: str) -> None:
    hidden, intermediate, experts, options = CASES[name]
    torch.manual_seed(hidden)
    place = {"device": gpu, "dtype": torch.float16 if options else torch.bfloat16}
    sizes = hidden, intermediate, experts, TOP_K
    layers = [guild.MoE(*sizes, **options, **place) for _ in range(2)]
    x = torch.randn(2000, hidden, **place)
    most = 300 if hidden > 4096 else 2000
    with torch.no_grad():
        expected = [in_turns(layer, x[:most]) for layer in layers]
        for tokens in (130, 300, 700, most):
            both = [layer(x[: min(tokens, most)]) for layer in (*layers, *layers)]
            for out, wanted in zip(both, 2 * expected, strict=True):
                assert torch.equal(out, wanted[:tokens]), tokens


@pytest.mark.parametrize("listed", [False, True])
def test_parts_of_rows_that_are_further_apart(listed: bool, gpu: str) -> None:
    """With `out` and a residual among other columns, and with lists of weights."""
    torch.manual_seed(3)
    hidden, intermediate, experts = 8192, 5120, 25
    place = {"device": gpu, "dtype": torch.bfloat16}
    w_up = torch.randn(experts, 2 * intermediate, hidden, **place) * hidden**-0.5
    w_down = torch.randn(experts, hidden, intermediate, **place) * intermediate**-0.5
    weights = [list(w.unbind()) if listed else w for w in (w_up, w_down)]
    x, residual, out = torch.randn(3, 200, hidden + 64, **place)
    kept = out[:, hidden:].clone()
    x, residual = x[:, :hidden], residual[:, 64:]
    scores, ids = torch.rand(200, experts, device=gpu).topk(TOP_K)
    with torch.no_grad():
        routed = x, ids.int(), scores, *weights
        got = guild.routed_experts(*routed, residual=residual, out=out[:, :hidden])
        for first in range(0, 200, 10):
            few = slice(first, first + 10)
            some = x[few], ids[few].int(), scores[few], *weights
            assert torch.equal(got[few], guild.routed_experts(*some, residual=residual[few]))
    assert torch.equal(out[:, hidden:], kept)
