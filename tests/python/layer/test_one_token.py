"""The layer of one token, in which a GPU's up projection chooses the experts."""

from __future__ import annotations

import itertools

import pytest
import torch

import guild
from guild._torch.operators import LayerFlags, ops
from guild.routing import router_scalars

HIDDEN, WIDTH = 576, 16
FLAGS = LayerFlags(*guild.Activation().scalars, False, False)
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@pytest.mark.parametrize("logits", ["random", "alike", "same", "nan"])
@pytest.mark.parametrize("experts", [3, 60, 128, 160, 512])
def test_the_experts_are_the_routers(experts: int, logits: str, device: str) -> None:
    """By every kind of router, with ties, NaN, padding, several groups and biases."""
    torch.manual_seed(experts)
    place = {"device": device, "dtype": torch.bfloat16}
    x, weight = torch.randn(1, HIDDEN, **place), torch.randn(experts, HIDDEN, **place) / 24
    if logits == "alike":
        x, weight = x.sign() * (x.abs() > 2), weight.sign() * (weight.abs() > 0.1)
    elif logits == "same":
        weight[:] = weight[0]
    elif logits == "nan":
        weight[experts // 3] = float("nan")
    w_up = torch.randn(experts, 2 * WIDTH, HIDDEN, **place) / 24
    w_down = torch.randn(experts, HIDDEN, WIDTH, **place)
    bias = torch.randn(experts, device=device) / 20
    pluses = None, torch.randn(experts, **place) / 4
    padding = torch.zeros(1, dtype=torch.bool, device=device)
    for score, renormalize, groups, sums, biased, masked in itertools.product(
        SCORES, (False, True), (1, 4), ("max", "top2_sum"), (False, True), (False, True)
    ):
        if experts % groups:
            continue
        options = {"groups": groups, "top_groups": max(1, groups // 2), "group_score": sums}
        router = guild.Router(score, renormalize, 2.5, biased, **options)
        scalars = router_scalars(min(10, experts // 2), router)
        plus = pluses[masked ^ biased]
        asked = x, weight, plus, bias if biased else None, padding if masked else None, *scalars
        scores, ids, _ = ops.route_tokens(*asked)
        wanted, found = torch.empty_like(x), torch.empty_like(x)
        args = None, w_up, None, w_down, None, None, *FLAGS
        wanted_offsets = ops.moe_forward_out(x, ids, scores, None, *args, wanted, None)
        offsets = ops.moe_layer_out(*asked, None, w_up, w_down, None, None, *FLAGS, found)
        assert torch.equal(offsets, wanted_offsets), router
        assert torch.equal(found.nan_to_num(-7.0), wanted.nan_to_num(-7.0)), router


@pytest.mark.parametrize(
    ("activation", "interleaved", "width"),
    [
        ("swiglu", False, 512),
        ("swiglu", True, 520),
        ("gpt_oss", True, 600),
        ("relu2_ungated", False, 1112),
    ],
)
def test_ten_experts_whose_tiles_of_more_rows_fit_a_gpu_at_once(
    activation: str, interleaved: bool, width: int, device: str
) -> None:
    """Without ids given the up projection may have larger tiles, with the same bits."""
    torch.manual_seed(width)
    flags = LayerFlags(*guild.Activation.named(activation).scalars, interleaved, False)
    scalars = router_scalars(10, guild.Router())
    for dtype in (torch.bfloat16, torch.float16):
        place = {"device": device, "dtype": dtype}
        x, weight = torch.randn(1, 192, **place), torch.randn(12, 192, **place) / 14
        w_up = torch.randn(12, (1 + flags.gated) * width, 192, **place) / 14
        w_down = torch.randn(12, 192, width, **place) / 24
        scores, ids, _ = ops.route_tokens(x, weight, None, None, None, *scalars)
        wanted, found = torch.empty_like(x), torch.empty_like(x)
        args = None, w_up, None, w_down, None, None, *flags
        ops.moe_forward_out(x, ids, scores, None, *args, wanted, None)
        ops.moe_layer_out(
            x, weight, None, None, None, *scalars, None, w_up, w_down, None, None, *flags, found
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("hidden", [64, 1088, 8192])
@pytest.mark.parametrize("gated", [False, True])
def test_a_token_has_its_bits_in_any_company(hidden: int, gated: bool, gpu: str) -> None:
    """Sums over H of one chunk and of several, with shared experts and without."""
    torch.manual_seed(hidden)
    shared = {"shared_experts": 1, "shared_gate": True, "router_bias": True} if gated else {}
    place = {"device": gpu, "dtype": torch.float16}
    layer = guild.MoE(hidden, WIDTH, 64, 5, router="deepseek_v3", **shared, **place).eval()
    x = torch.randn(130, hidden, **place)
    if gated:
        torch.nn.init.normal_(layer.router.bias)
    with torch.no_grad():
        everyone = layer(x)
        for token in range(0, 130, 7):
            one = slice(token, token + 1)
            assert torch.equal(layer(x[one]), everyone[one]), token
