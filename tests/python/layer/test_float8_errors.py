"""Options that a layer in FP8 does not support: each error names its option."""

from __future__ import annotations

import pytest
import torch

import guild
from guild import FP8, FP8Weights
from layers import ACTIVATIONS, Case, make_layer

CASE = Case("small", 12, 32, 16, 3, 2, "random", frozenset())


def test_settings_are_named() -> None:
    for name, value in (("wgrad", "fp16"), ("gradients", "e3m4"), ("scales", 2), ("save", None)):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
            FP8(**{name: value})
    with pytest.raises(TypeError, match=r"^cached: expected"):
        FP8(cached=1)


def test_wrong_calls_are_named(device: str) -> None:
    layer = make_layer(CASE, ACTIVATIONS["swiglu"], torch.bfloat16, device)
    given = layer.arguments("concatenated")
    weights = FP8Weights(FP8(), given["w_up"], given["w_down"])
    other = FP8Weights(FP8(), given["w_up"][:2], given["w_down"][:2])
    lora = guild.LoRA(torch.zeros(3, 4, 32), torch.zeros(3, 32, 4))
    cases = [
        ({"fp8": True}, TypeError, "fp8: expected guild.FP8 or guild.FP8Weights, got bool True"),
        ({"fp8": FP8(cached=True)}, ValueError, "fp8: expected FP8 without cached"),
        ({"fp8": other}, ValueError, r"fp8: expected FP8Weights of w_down \(3, 32, 16\)"),
        ({"fp8": weights, "w_up": given["w_up"].double()}, TypeError, "w_up: expected dtype"),
        ({"lora_up": lora}, NotImplementedError, "lora_up: expected None with fp8"),
        (
            {"w_up": given["w_up"].half()},
            TypeError,
            "w_up: expected dtype bfloat16 or float32 with fp8, got float16",
        ),
        (
            {"w_up": (layer.gate, layer.up.float()), "order": "concatenated", "b_up": None},
            TypeError,
            r"w_up\[1\] \(up\): expected dtype bfloat16 like w_up\[0\] \(gate\), got float32",
        ),
    ]
    for changed, error, message in cases:
        call = {"x": layer.x, "fp8": FP8()} | given | changed
        with pytest.raises(error, match=message):
            guild.routed_experts(topk_ids=layer.ids, topk_weights=layer.scores, **call)
    if device == "cpu":  # a GPU takes no float32 anyway
        masters = given["w_up"].float(), given["w_down"].float()
        with pytest.raises(TypeError, match="x: expected bfloat16 or float16 with fp8"):
            guild.routed_experts(layer.x.float(), layer.ids, layer.scores, *masters, fp8=FP8())
    else:
        narrow = [t[..., :24].contiguous() for t in (layer.x, given["w_up"])]
        rest = layer.ids, layer.scores, narrow[1], given["w_down"][:, :24].contiguous()
        with pytest.raises(ValueError, match="hidden: expected a multiple of 16 with fp8 on CUDA"):
            guild.routed_experts(narrow[0], *rest, fp8=FP8())


def test_wrong_modules_are_named() -> None:
    with pytest.raises(TypeError, match=r"fp8: expected guild.FP8, got str 'e4m3'"):
        guild.MoE(16, 16, 2, 1, fp8="e4m3")
    weights = torch.zeros(2, 32, 16), torch.zeros(2, 16, 16)
    with pytest.raises(TypeError, match=r"fp8: expected guild.FP8, got NoneType"):
        FP8Weights(None, *weights)
    with pytest.raises(ValueError, match="w_up: expected shape"):
        FP8Weights(FP8(), *weights, activation="relu2_ungated")
    pair = weights[1], weights[1].half()
    with pytest.raises(TypeError, match=r"^w_up\[1\] \(up\): .* float32 like w_up\[0\] \(gate\)"):
        FP8Weights(FP8(), pair, weights[1].half())
    layer = guild.MoE(16, 16, 2, 1, fp8=FP8())
    with pytest.raises(TypeError, match="x: expected bfloat16 or float16 with fp8, got float32"):
        layer(torch.zeros(4, 16))


def test_whose_device_it_is() -> None:
    """`FP8Weights` has no x that the weights could be unlike."""
    w_up, w_down = torch.ones(2, 256, 128), torch.ones(2, 128, 128, device="meta")
    with pytest.raises(ValueError, match=r"^w_up: expected a tensor on meta like w_down, got"):
        FP8Weights(FP8(), w_up, w_down)


def test_tokens_in_fp8() -> None:
    """With a mask as well, whose fill torch has not for this dtype."""
    layer = guild.MoE(16, 16, 4, 2)
    x, mask = torch.ones(3, 16).to(torch.float8_e4m3fn), torch.tensor([True, False, True])
    for given in ((x,), (x, mask)):
        with pytest.raises(TypeError, match=r"^x: expected dtype float32 like w_up, got float8"):
            layer(*given)
