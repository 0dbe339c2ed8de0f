"""Names in a benchmark's record: candidates, passes, matrix products, and the titles of tables."""

from __future__ import annotations

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gpt_oss")  # gated, the default first
DECODE_CANDIDATES = ("guild", "torch")  # in addition to those of files
PARTS = ("experts", "layer")  # with ids and scores given, and with the router
PASSES = ("forward", "backward")
FP8_PASSES = (*PASSES, "both")
GPU_CANDIDATES = ("guild", "bound", "floor", "compiled", "eager")
CPU_CANDIDATES = ("guild", "bound", "plain")
BOUNDS = ("bound", "floor")  # not layers: products and copies that do not depend on the routing
LIMITED = "guild_sms"  # Guild's layer on fewer multiprocessors, with --num-sms
SONICMOE = "sonicmoe"  # SonicMoE's layer, with --sonicmoe
BASELINES = ("compiled", "eager", "plain", SONICMOE)  # layers that are not Guild's
# The matrix products of a layer, in the order of `Bound.products`: two forward, four backward.
PRODUCTS = ("up", "down", "down gradient", "dW2", "up gradient", "dW1")
TITLES = {
    "guild": "Guild",
    LIMITED: "Guild, fewer SMs",
    "bound": "bound",
    "floor": "products + copies",
    "compiled": "torch compiled",
    "eager": "torch eager",
    "plain": "plain PyTorch",
    SONICMOE: "SonicMoE",
}
