"""Generates text with a Mixture-of-Experts model of Hugging Face Transformers on Guild's kernels.

    python examples/python/generate_transformers.py
    python examples/python/generate_transformers.py --model Qwen/Qwen3-30B-A3B "Once upon a time"

Without --model, a tiny random model generates meaningless bytes, on any machine. Prompts of
different lengths go through the model together. Whole MoE blocks are replaced, routers included.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig

import guild.integrations.transformers

TINY = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
PROMPTS = ["Once upon a time", "To be, or"]


class Bytes:
    """Replaces the tiny model's tokenizer: a token is a byte; short prompts start with zeros."""

    pad_token_id = 0

    def __call__(self, texts: list[str]) -> dict[str, torch.Tensor]:
        rows = [list(text.encode()) for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    def batch_decode(self, ids: torch.Tensor, **_: object) -> list[str]:
        """Bytes that are not text come out as question marks."""
        return [bytes(row).lstrip(b"\0").decode(errors="replace") for row in ids.tolist()]


def load(name: str | None, device: str) -> tuple[PreTrainedModel, Bytes | AutoTokenizer]:
    """The model with its MoE blocks on Guild, and its tokenizer."""
    guild.integrations.transformers.register()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options = {"dtype": dtype, "experts_implementation": "guild"}
    if name is None:
        model, tokenizer = AutoModelForCausalLM.from_config(TINY, **options), Bytes()
    else:
        model = AutoModelForCausalLM.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    replaced = guild.integrations.transformers.replace_moe_blocks(model)
    print(f"{len(replaced)} MoE blocks on Guild")
    return model.to(device).eval(), tokenizer


def generate(
    model: PreTrainedModel, tokenizer: Bytes | AutoTokenizer, prompts: list[str], tokens: int
) -> list[str]:
    """Each prompt with the model's continuation."""
    if isinstance(tokenizer, Bytes):
        inputs = tokenizer(prompts)
    else:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    ids = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def main() -> None:
    """Parse, load, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", help="name or folder of a checkpoint")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load(args.model, "cuda" if torch.cuda.is_available() else "cpu")
    for text in generate(model, tokenizer, args.prompts, args.tokens):
        print(repr(text))


if __name__ == "__main__":
    main()
