"""The MoE blocks of Transformers that `replace_moe_blocks` knows, and how each of them routes.

Every router here follows its model's own: the dtype of the product, of the scores and of the
output. The steps between, a softmax, a top-k and what follows them in PyTorch, are one op.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guild import Router, route, router_logits

# Of a router and its tokens (T, hidden): logits (T, experts), scores (T, K), ids (T, K) int32.
Chosen = tuple[Tensor, Tensor, Tensor]


class BlockFamily(NamedTuple):
    """One class of block, and the classes of its parts."""

    model: str  # the folder in transformers.models
    block: str
    router: str
    experts: str
    router_name: str  # the block's attribute
    choose: Callable[[nn.Module, Tensor], Chosen]
    # For a router with float32 logits: how it chooses, so that one op can compute them as well.
    in_one: Callable[[nn.Module], Router] | None = None
    returns_scores: bool = False  # in addition to the states
    flattens: bool = True  # tokens to (T, hidden), before router and shared experts get them

    def classes(self) -> dict[str, type[nn.Module]]:
        """The classes of block, router and experts."""
        module = importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        return {part: getattr(module, getattr(self, part)) for part in PARTS}


PARTS = ("block", "router", "experts")


def softmax_in_float32(router: nn.Module, x: Tensor) -> Chosen:
    """Mixtral's: the scores stay float32."""
    logits = F.linear(x, router.weight)
    ids, scores = route(logits.float(), router.top_k)
    return logits, scores, ids


def softmax_as_logits(router: nn.Module, x: Tensor) -> Chosen:
    """That of Qwen and OLMoE: the scores are rounded to the logits' dtype."""
    logits = F.linear(x, router.weight)
    renormalize = bool(getattr(router, "norm_topk_prob", True))
    ids, scores = route(logits.float(), router.top_k, renormalize=renormalize)
    return logits, scores.to(logits.dtype), ids


def softmax_of_chosen(router: nn.Module, x: Tensor) -> Chosen:
    """gpt-oss's: with a bias, and a softmax of the chosen logits."""
    logits = F.linear(x, router.weight, router.bias)
    ids, scores = route(logits, router.top_k)
    return logits, scores.to(logits.dtype), ids


def grouped_sigmoid(router: nn.Module, x: Tensor) -> Chosen:
    """DeepSeek-V3's: logits in float32, and a bias for the choice."""
    if x.dtype in (torch.bfloat16, torch.float16) and router.weight.dtype == x.dtype:
        logits = router_logits(x, router.weight)
    else:
        logits = F.linear(x.float(), router.weight.float())
    options = grouped_sigmoid_options(router)
    ids, scores = route(
        logits,
        router.top_k,
        score=options.score,
        renormalize=options.renormalize,
        scale=options.scale,
        selection_bias=router.e_score_correction_bias,
        groups=options.groups,
        top_groups=options.top_groups,
        sum_floor=options.sum_floor,
    )
    return logits, scores, ids


def grouped_sigmoid_options(router: nn.Module) -> Router:
    """How DeepSeek-V3's router chooses."""
    make = _grouped_sigmoid.__wrapped__ if torch.compiler.is_compiling() else _grouped_sigmoid
    renormalize, scale = bool(router.norm_topk_prob), float(router.routed_scaling_factor)
    return make(renormalize, scale, router.num_group, router.topk_group)


def lacks_experts(router: nn.Module) -> bool:
    """Whether the groups that a token chooses have fewer experts than it takes."""
    groups = getattr(router, "num_group", 1)
    return groups > 1 and router.top_k > router.num_experts // groups * router.topk_group


@functools.lru_cache  # creating a Router checks its options, too slow to repeat for each token
def _grouped_sigmoid(renormalize: bool, scale: float, groups: int, top_groups: int) -> Router:
    return Router(
        "sigmoid",
        renormalize,
        scale,
        selection_bias=True,
        groups=groups,
        top_groups=top_groups,
        sum_floor=1e-20 if renormalize else 0.0,  # the model adds this number
    )


def sigmoid_of_chosen(router: nn.Module, x: Tensor) -> Chosen:
    """Llama 4's, whose scores multiply what goes into the experts."""
    logits = nn.Linear.forward(router, x)
    ids, scores = route(logits.float(), router.top_k, score="sigmoid", renormalize=False)
    return logits, scores.to(logits.dtype), ids


# The folder of each model, and the prefix of its class names.
_MIXTRALS = (("mixtral", "Mixtral"), ("minimax", "MiniMax"))
_QWENS = (
    ("qwen2_moe", "Qwen2Moe"),
    ("qwen3_moe", "Qwen3Moe"),
    ("qwen3_next", "Qwen3Next"),
    ("qwen3_5_moe", "Qwen3_5Moe"),
    ("qwen3_vl_moe", "Qwen3VLMoeText"),
    ("qwen3_omni_moe", "Qwen3OmniMoeThinkerText"),
    ("qwen3_omni_moe", "Qwen3OmniMoeTalkerText"),
    ("qwen4_exp", "Qwen4ExpText"),
    ("olmoe", "Olmoe"),
    ("flex_olmo", "FlexOlmo"),
    ("mellum", "Mellum"),
)
_DEEPSEEKS = (
    ("deepseek_v3", "DeepseekV3"),
    ("deepseek_v32", "DeepseekV32"),
    ("dots1", "Dots1"),
    ("exaone_moe", "ExaoneMoe"),
    ("glm4_moe", "Glm4Moe"),
    ("glm4_moe_lite", "Glm4MoeLite"),
    ("glm4v_moe", "Glm4vMoeText"),
    ("glm5_next", "Glm5NextText"),
    ("glm_moe_dsa", "GlmMoeDsa"),
    ("hy_v4", "HYV4"),
    ("kimi_linear", "KimiLinear"),
    ("solar_open", "SolarOpen"),
)


def _like_qwen(model: str, name: str, choose: Callable[[nn.Module, Tensor], Chosen]) -> BlockFamily:
    parts = f"{name}SparseMoeBlock", f"{name}TopKRouter", f"{name}Experts"
    return BlockFamily(model, *parts, "gate", choose)


def _like_deepseek(model: str, name: str) -> BlockFamily:
    block = f"{name}SparseMoEBlock" if model == "exaone_moe" else f"{name}MoE"
    parts = block, f"{name}TopkRouter", f"{name}Experts"
    return BlockFamily(
        model, *parts, "gate", grouped_sigmoid, grouped_sigmoid_options, flattens=False
    )


FAMILIES = (
    *(_like_qwen(*names, softmax_in_float32) for names in _MIXTRALS),
    *(_like_qwen(*names, softmax_as_logits) for names in _QWENS),
    *(_like_deepseek(*names) for names in _DEEPSEEKS),
    BlockFamily(
        "gpt_oss",
        "GptOssMLP",
        "GptOssTopKRouter",
        "GptOssExperts",
        "router",
        softmax_of_chosen,
        returns_scores=True,
    ),
    BlockFamily(
        "llama4",
        "Llama4TextMoe",
        "Llama4Router",
        "Llama4TextExperts",
        "router",
        sigmoid_of_chosen,
    ),
)


def first_of(own: type[nn.Module], module: nn.Module) -> nn.Module | None:
    """A part of that class, perhaps behind adapters; None if there is none."""
    return next((m for m in module.modules() if isinstance(m, own)), None)


def family_of(block: nn.Module) -> BlockFamily | None:
    """The family of a block that is exactly of its class and unmodified; else None."""
    for family in FAMILIES:
        name = f"transformers.models.{family.model}.modeling_{family.model}"
        if (type(block).__module__, type(block).__name__) == (name, family.block):
            return family
    return None
