"""Whole models from their configs, tiny and random, and one step of their training."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from torch import Tensor

from calls import error

VOCABULARY = 64
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_experts_per_tok=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
CONFIGS = {
    "MixtralConfig": dict(intermediate_size=24, num_local_experts=4),
    "GptOssConfig": dict(intermediate_size=24, num_local_experts=4, head_dim=16),
    "Qwen3MoeConfig": dict(moe_intermediate_size=24, num_experts=4, head_dim=16),
    "OlmoeConfig": dict(intermediate_size=24, num_experts=4),
    "GraniteMoeConfig": dict(intermediate_size=24, num_local_experts=4),
    "DeepseekV3Config": dict(
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
}
# Whose blocks can be replaced besides.
MORE_BLOCKS = {
    "Qwen2MoeConfig": dict(
        moe_intermediate_size=24, shared_expert_intermediate_size=16, num_experts=4
    ),
    "Qwen3NextConfig": dict(
        moe_intermediate_size=24,
        shared_expert_intermediate_size=16,
        num_experts=4,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    ),
    "Glm4MoeConfig": dict(
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        head_dim=16,
    ),
    "Llama4TextConfig": dict(
        intermediate_size=24,
        intermediate_size_mlp=24,
        num_local_experts=4,
        num_experts_per_tok=1,
        head_dim=16,
    ),
}
KNOWN = [name for name in CONFIGS | MORE_BLOCKS if name != "GraniteMoeConfig"]  # their blocks
SIGMOID = ("DeepseekV3Config", "Glm4MoeConfig")


def make_model(
    name: str, sizes: dict[str, object] | None = None, **options: object
) -> transformers.PreTrainedModel:
    """A tiny random model, with the same weights at each call."""
    torch.manual_seed(0)
    sizes = SIZES | (CONFIGS | MORE_BLOCKS)[name] | (sizes or {})
    config = getattr(transformers, name)(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.float()


def eager(name: str, **sizes: object) -> transformers.PreTrainedModel:
    """The model with its own loop over experts."""
    implementation = {} if name.startswith("Llama4") else {"experts_implementation": "eager"}
    return make_model(name, sizes, **implementation)


@cache
def tokens() -> Tensor:
    return torch.randint(2, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))


def step(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    out = model(tokens(), labels=tokens())
    out.loss.backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    return {"logits": out.logits.detach(), **{name: p.grad.clone() for name, p in trained}}


def expect_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert error(ours[name], theirs[name]) < 1e-5, name
