"""FlopCounterMode counts Guild's products as it counts torch's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import guild
import guild.distributed.peer_layer
import guild.float8.chunks
import guild.moe
from float8_calls import FLOAT8_CALLS, Operands
from guild._torch import float8_moe, low_rank  # noqa: F401  (they define ops)
from guild._torch.flops import FORMULAS
from test_opcheck import CALLS, Inputs

TOKENS, HIDDEN, WIDTH, COUNT, K = 24, 32, 40, 6, 2
ROUTER, EXPERTS = 2 * TOKENS * HIDDEN * COUNT, 2 * TOKENS * K * 3 * HIDDEN * WIDTH  # of a forward
DOWN, UP = EXPERTS // 3, EXPERTS // 3 * 2
WITHOUT_PRODUCTS = {
    "balance_sums",
    "balance_sums_backward",
    "bias_gradient",
    "bias_gradient_out",
    "cuda_built",
    "cuda_reason",
    "expert_table",
    "expert_view",
    "float8_weights",
    "float8_weights_out",
    "num_sms",
    "peer_collect",
    "peer_meet",
    "peer_memory_sizes",
    "peer_publish",
    "peer_pull",
    "peer_push",
    "peer_push_scores",
    "peer_tables",
    "quantize_chunks_out",
    "quantize_micro_out",
    "quantize_rows_out",
    "quantize_weights_out",
    "regroup_micro_out",
    "round_tokens",
    "route",
    "route_backward",
    "score_gradient",
    "set_num_sms",
    "sort_by_expert",
    "tie",
}


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def of_backward(out: Tensor) -> int:
    return flops(lambda: out.backward(torch.ones_like(out)))


def layer(**options: Any) -> guild.MoE:
    torch.manual_seed(0)
    return guild.MoE(HIDDEN, WIDTH, COUNT, K, **options)


def tokens(requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=requires_grad)


def test_every_op_is_known() -> None:
    """A new op has a formula, or is added to those that multiply no matrices."""
    names = {
        n.split("::")[1].split(".")[0]
        for n in torch._C._dispatch_get_all_op_names()
        if n.startswith("guild::")
    }
    own = {n for n in names if n.startswith("turned_heads")}  # the trainer's rotary embedding
    assert names - own == FORMULAS.keys() | WITHOUT_PRODUCTS
    assert not FORMULAS.keys() & WITHOUT_PRODUCTS
    assert all(getattr(torch.ops.guild, name) in flop_registry for name in FORMULAS)


# Of test_opcheck's calls: 12 tokens of 2 experts each, H = 16, I = 8, 4 experts.
OP_ROUTER, OP_DOWN, OP_UP = 2 * 12 * 16 * 4, 2 * 24 * 16 * 8, 2 * 24 * 16 * 16
OP_ALL = OP_UP + OP_DOWN
LOW_UP, LOW_DOWN = 2 * 24 * 8 * (16 + 16), 2 * 24 * 8 * (8 + 16)  # of rank 8
# Of the FP8 calls: 12 rows, H = 32, I = 16, 2 experts.
FLOAT8_DOWN, FLOAT8_UP = 2 * 12 * 32 * 16, 2 * 12 * 32 * 32
OF_OPS = {
    "moe_forward": OP_ALL,
    "moe_forward transposed": OP_ALL,
    "moe_forward of lists": OP_ALL,
    "moe_forward_out": OP_ALL,
    "moe_layer": OP_ROUTER + OP_ALL,
    "moe_layer_out": OP_ROUTER + OP_ALL,
    "experts_forward": OP_ALL,
    "experts_forward_out": OP_ALL,
    "infer_experts": OP_ALL,
    "infer_layer": OP_ROUTER + OP_ALL,
    "infer_layer with shared experts": OP_ROUTER + OP_ALL + 2 * 12 * (16 * 16 + 16 * 8),
    "infer_shared": 2 * 12 * (16 * 16 + 16 * 8),
    "router_logits": OP_ROUTER,
    "route_tokens": OP_ROUTER,
    "moe_backward": 2 * OP_ALL,
    "moe_backward of a pair by row": OP_DOWN + 2 * OP_UP,
    "moe_backward of nothing but a bias": OP_DOWN,
    "experts_backward": 2 * OP_ALL,
    "data_gradients": OP_ALL,
    "data_gradients by row": OP_ALL,
    "data_gradients of sorted rows": OP_ALL,
    "data_gradients for the weights alone": OP_DOWN,
    "lora_forward": OP_ALL + LOW_UP + LOW_DOWN,
    "up_projection of a pair": 2 * OP_DOWN,
    "up_projection without a gate": OP_DOWN,
    "down_projection": OP_DOWN,
    "down_projection transposed": OP_DOWN,
    "down_gradient": OP_DOWN,
    "up_gradient": OP_UP,
    "weight_gradients_out": OP_ALL,
    "up_weight_gradient_out": OP_UP,
    "down_weight_gradient_out": OP_DOWN,
    "combine": 0,
    "combine with a router": 2 * 24 * 16,
    "float8_experts": 2 * (FLOAT8_UP + FLOAT8_DOWN),
    "float8_moe": 2 * 12 * 32 * 2 + 2 * (FLOAT8_UP + FLOAT8_DOWN),
    "float8_backward": 4 * (FLOAT8_UP + FLOAT8_DOWN),
    "scaled_up_out": FLOAT8_UP,
    "scaled_down_gradient_out": FLOAT8_DOWN,
    "chunk_product_out": FLOAT8_DOWN,
}


@pytest.mark.parametrize("name", list(OF_OPS))
def test_an_op(name: str) -> None:
    arguments = (
        FLOAT8_CALLS[name](Operands("cpu")) if name in FLOAT8_CALLS else CALLS[name](Inputs("cpu"))
    )
    op = getattr(torch.ops.guild, name.partition(" ")[0])
    with torch.no_grad():
        assert flops(lambda: op(*arguments)) == OF_OPS[name]


def test_ops_over_ranks() -> None:
    """They count a rank's share: its own slots."""
    weights = {"w_up": torch.empty(2, 16, 16), "w_gate": None, "w_down": torch.empty(2, 16, 8)}
    slots = torch.empty(24, 2)  # of all ranks
    mine = torch.empty(12, 2)
    assert FORMULAS["peer_forward"](SimpleNamespace(ids=mine, **weights)) == OP_ALL
    for kept, again in ((24, 0), (0, OP_UP)):
        given = {"dout": torch.empty(12, 16), "by_slot": slots, "h": torch.empty(kept, 16)}
        found = FORMULAS["peer_backward"](SimpleNamespace(wanted=64 | 4 | 8, **given, **weights))
        assert found == 2 * OP_ALL + again


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({}, ROUTER + EXPERTS, 2 * EXPERTS + 2 * ROUTER),
        ({"bias": True}, ROUTER + EXPERTS, 2 * EXPERTS + 2 * ROUTER),
        ({"recompute": True}, ROUTER + EXPERTS, 2 * EXPERTS + UP + 2 * ROUTER),
        (
            {"shared_experts": 1},
            ROUTER + EXPERTS + EXPERTS // K,
            2 * (EXPERTS + EXPERTS // K) + 2 * ROUTER,
        ),
        (
            {"activation": "relu2_ungated"},
            ROUTER + 2 * DOWN,
            4 * DOWN + 2 * ROUTER,
        ),
        ({"fp8": guild.FP8()}, ROUTER + EXPERTS, 2 * EXPERTS + 2 * ROUTER),
        (
            {"fp8": guild.FP8(), "recompute": True},
            ROUTER + EXPERTS,
            2 * EXPERTS + UP + 2 * ROUTER,
        ),
    ],
    ids=lambda v: ",".join(v) or "plain" if isinstance(v, dict) else "",
)
def test_a_layer(options: dict[str, Any], forward: int, backward: int) -> None:
    dtype = torch.bfloat16 if "fp8" in options else torch.float32
    moe = layer(**options, dtype=dtype)
    x = tokens(dtype=dtype)
    with FlopCounterMode(display=False) as counter:
        out = moe(x)
    assert counter.get_total_flops() == forward
    assert sum(counter.get_flop_counts()["MoE"].values()) == forward
    assert of_backward(out) == backward


@pytest.mark.parametrize("shared", [0, 2])
def test_inference(shared: int) -> None:
    moe = layer(shared_experts=shared)
    expected = ROUTER + EXPERTS + EXPERTS // K * shared
    with torch.no_grad():
        assert flops(lambda: moe(tokens(False))) == expected
        assert flops(lambda: moe(tokens(False), out=torch.empty(TOKENS, HIDDEN))) == expected


def test_frozen_weights() -> None:
    """What is not wanted is not counted; the router's part of dX is a sum over chosen experts."""
    moe = layer().requires_grad_(False)
    assert of_backward(moe(tokens())) == EXPERTS + 2 * TOKENS * K * HIDDEN
    moe.w_down.requires_grad_(True)
    assert of_backward(moe(tokens(False))) == DOWN + DOWN


def experts() -> tuple[Tensor, Tensor]:
    return (
        torch.randn(COUNT, 2 * WIDTH, HIDDEN, requires_grad=True),
        torch.randn(COUNT, HIDDEN, WIDTH, requires_grad=True),
    )


def routing() -> tuple[Tensor, Tensor]:
    return torch.randint(COUNT, (TOKENS, K)), torch.rand(TOKENS, K)


@pytest.mark.parametrize("delayed", [False, True])
def test_routed_experts(delayed: bool) -> None:
    weights = experts()
    gradients = guild.WeightGradients(delayed=True) if delayed else None
    given = tokens(), *routing(), *weights
    with FlopCounterMode(display=False) as counter:
        guild.routed_experts(*given, weight_gradients=gradients).sum().backward()
        if gradients is not None:
            assert counter.get_total_flops() == 2 * EXPERTS
            gradients.compute()
    assert counter.get_total_flops() == 3 * EXPERTS


def test_sorted_experts() -> None:
    offsets = torch.arange(COUNT + 1, dtype=torch.int32) * (TOKENS // COUNT)
    out = guild.experts_mlp(tokens(), offsets, *experts())
    assert of_backward(out) == 2 * EXPERTS // K


def test_lists_of_experts() -> None:
    weights = [list(w.detach().unbind()) for w in experts()]
    weights = [[m.clone().requires_grad_() for m in w] for w in weights]
    with FlopCounterMode(display=False) as counter:
        guild.routed_experts(tokens(), *routing(), *weights).sum().backward()
    assert counter.get_total_flops() == 3 * EXPERTS


@pytest.mark.parametrize("frozen", [False, True])
def test_lora(frozen: bool) -> None:
    rank = 4
    weights = [w.requires_grad_(not frozen) for w in experts()]
    up = guild.LoRA(torch.randn(COUNT, rank, HIDDEN), torch.randn(COUNT, 2 * WIDTH, rank), 1.0)
    down = guild.LoRA(torch.randn(COUNT, rank, WIDTH), torch.randn(COUNT, HIDDEN, rank), 1.0)
    for t in (up.a, up.b, down.a, down.b):
        t.requires_grad_()
    low_up, low_down = (
        2 * TOKENS * K * rank * (HIDDEN + 2 * WIDTH),
        2 * TOKENS * K * rank * (WIDTH + HIDDEN),
    )
    forward = EXPERTS + low_up + low_down
    with FlopCounterMode(display=False) as counter:
        out = guild.routed_experts(tokens(), *routing(), *weights, lora_up=up, lora_down=down)
    assert counter.get_total_flops() == forward
    again = 2 * TOKENS * K * rank * WIDTH  # A' A2^TOKENS, for dB2
    assert of_backward(out) == forward + low_up + low_down + again + (0 if frozen else EXPERTS)


def test_grouped_products() -> None:
    ends = torch.arange(1, COUNT + 1, dtype=torch.int32) * 4
    rows, stack, other = (
        torch.randn(TOKENS, HIDDEN),
        torch.randn(COUNT, HIDDEN, WIDTH),
        torch.randn(TOKENS, WIDTH),
    )
    three = torch.randn(COUNT, 4, HIDDEN)
    for a, b, offs in (
        (rows, stack, ends),
        (rows.t(), other, ends),
        (three, torch.randn(HIDDEN, TOKENS), ends),
    ):
        expected = 2 * TOKENS * HIDDEN * (TOKENS * 4 // 24 if a is three else WIDTH)
        assert flops(lambda a=a, b=b, offs=offs: guild.grouped_mm(a, b, offs)) == expected
    assert flops(lambda: guild.grouped_mm(three, stack)) == 2 * TOKENS * HIDDEN * WIDTH


def test_float8_product() -> None:
    ends = torch.arange(1, COUNT + 1, dtype=torch.int32) * 4
    a, w = (
        guild.quantize(torch.randn(TOKENS, 128)),
        guild.quantize_weights(torch.randn(COUNT, 64, 128)),
    )
    given = a.codes, w.codes.mT, a.scales, w.scales.mT, ends
    assert flops(lambda: guild.scaled_grouped_mm(*given)) == 2 * TOKENS * 128 * 64
