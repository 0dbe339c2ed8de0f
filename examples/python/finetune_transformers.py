"""Fine-tunes a Mixture-of-Experts model of Hugging Face Transformers on Guild's kernels.

    python examples/python/finetune_transformers.py
    python examples/python/finetune_transformers.py --model Qwen/Qwen3-30B-A3B --lora 16

Without --model it is a tiny random model, on any machine. It learns to spell this file, or the file
given by --text. With --lora only adapters of that rank are trained, on the weights of the experts
and of attention, by PEFT (`pip install peft`). Except for `register()` and
`experts_implementation="guild"` it is the loop that one writes without Guild.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
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


def load(name: str | None, text: str, device: str) -> tuple[PreTrainedModel, Tensor]:
    """The model, and the text as its tokens (bytes for the tiny one)."""
    guild.integrations.transformers.register()
    if name is None:
        model = AutoModelForCausalLM.from_config(TINY, experts_implementation="guild")
        return model.to(device), torch.tensor(list(text.encode()))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, experts_implementation="guild")
    tokens = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0]
    return model.to(device), tokens


def with_adapters(model: PreTrainedModel, rank: int) -> torch.nn.Module:
    """The model under PEFT: its own weights frozen, adapters added."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    return get_peft_model(model, config)


def train(
    model: torch.nn.Module, tokens: Tensor, steps: int, batch: int, length: int, rate: float
) -> list[float]:
    """Train on random windows of the text; returns the loss of each step."""
    device = next(model.parameters()).device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    model.train()
    losses = []
    for step in range(steps):
        starts = torch.randint(len(tokens) - length, (batch, 1))
        ids = tokens[starts + torch.arange(length)].to(device)
        # Under autocast the experts compute in bfloat16; on the CPU in the model's own dtype.
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    """Parse, load, train, save if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder of a checkpoint")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="file to learn")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters only")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a window")
    parser.add_argument("--rate", type=float, help="learning rate")
    parser.add_argument("--out", type=Path, help="folder to save to")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps: expected at least 1")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokens = load(args.model, args.text.read_text(), device)
    if len(tokens) <= args.length:
        parser.error(f"--text: expected more than {args.length} tokens (--length)")
    if args.lora:
        model = with_adapters(model, args.lora)
    usual = 3e-3 if args.model is None else 1e-4 if args.lora else 1e-5
    rate = usual if args.rate is None else args.rate
    losses = train(model, tokens, args.steps, args.batch, args.length, rate)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if args.out is not None:
        model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
