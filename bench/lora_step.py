"""Times LoRA training of a Transformers MoE model, and its memory, with and without the sum.

    python bench/lora_step.py --out bench/results/DATE-GPU-lora.json
    python bench/lora_step.py --toy      # seconds, on any machine; no figures to quote

The model is Qwen3-30B-A3B with 4 layers and random weights in bf16, all of them frozen, with PEFT's
adapters on gate_up_proj and down_proj of every expert. A step is forward and backward of 4
sequences of 4,096 tokens, without the head over the vocabulary. Beside the step one layer's experts
are timed. The candidates:

    terms        Guild, low-rank terms beside the weights
    sums         Guild on PEFT's sums W + B A
    grouped_mm   Transformers' default on PEFT's sums
    frozen       Guild without the adapters: what nothing can beat; no gradient but the input's
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from transformers_step import PRESETS

import guild.integrations.transformers as guild_transformers
from guild.bench.timing import calls_per_round, compared, drawn_orders, milliseconds
from guild.provenance import pick_device, provenance

_, FULL = PRESETS["qwen30b"]
TOY = FULL | dict(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=16,
)
CANDIDATES = ("terms", "sums", "grouped_mm", "frozen")
REFERENCE = "sums"
MOST_DIFFERENCE = 0.02  # of results in bf16


class Work:
    """The adapted model, and what is called of it."""

    def __init__(self, sizes: dict[str, Any], batch: int, length: int, rank: int, device: Any):
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**sizes, use_cache=False)
        with device:
            model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)
            self.tokens = torch.randint(sizes["vocab_size"], (batch, length))
            states = torch.randn(batch, length, sizes["hidden_size"], dtype=torch.bfloat16)
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        lora = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=names
        )
        self.model = peft.get_peft_model(model, lora).train()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.02)
        self.states, self.gradient = states.requires_grad_(), torch.randn_like(states)
        block = model.layers[0].mlp
        with torch.no_grad():
            _, self.scores, self.ids = block.gate(states.view(-1, sizes["hidden_size"]))
        self.experts = block.experts

    def forget_gradients(self) -> None:
        """As an optimizer's zero_grad does."""
        self.model.zero_grad(set_to_none=True)
        self.states.grad = None

    def step(self) -> Tensor:
        """Forward and backward of the model."""
        self.forget_gradients()
        embedded = self.model.get_input_embeddings()(self.tokens).requires_grad_()
        out = self.model(inputs_embeds=embedded).last_hidden_state
        out.backward(self.gradient)
        return out.detach()

    def run_experts(self) -> Tensor:
        """Forward and backward of the first layer's experts."""
        self.forget_gradients()
        out = self.experts(self.states.flatten(0, 1), self.ids, self.scores)
        out.backward(self.gradient.view_as(out))
        return out.detach()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """The model as one candidate has it."""
        adopted = ParamWrapper._activate_lora
        if name == "sums":
            ParamWrapper._activate_lora = adopted.guild_original
        base = self.model.get_base_model()
        base.set_experts_implementation("grouped_mm" if name == "grouped_mm" else "guild")
        wrappers = [m for m in self.model.modules() if isinstance(m, ParamWrapper)]
        for wrapper in wrappers:
            wrapper._disable_adapters = name == "frozen"
        try:
            yield
        finally:
            ParamWrapper._activate_lora = adopted
            for wrapper in wrappers:
                wrapper._disable_adapters = False


def keep_sums(adopt: Callable[..., None]) -> Callable[..., None]:
    """Guild's adoption of PEFT's wrappers, but not while they are given back on purpose."""

    def once(*arguments: Any) -> None:
        if not once.done:
            adopt(*arguments)
            once.done = True

    once.done = False
    return once


def expect_same(work: Work) -> None:
    """Exit if a candidate computes something else."""
    with work.running("grouped_mm"):
        expected = work.run_experts().double()
    for name in ("terms", "sums"):
        with work.running(name):
            found = work.run_experts().double()
        difference = ((found - expected).norm() / expected.norm()).item()
        if difference > MOST_DIFFERENCE:
            raise SystemExit(f"{name}: its result is {difference:.1%} away from grouped_mm's")


def times(
    work: Work, call: Callable[[], Tensor], rounds: int, seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds by candidate, one figure a round, in interleaved rounds."""
    counts = {}
    for name in CANDIDATES:
        with work.running(name):
            counts[name] = calls_per_round(call, seconds, device)
    figures: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for order in drawn_orders(CANDIDATES, rounds):
        for name in order:
            with work.running(name):
                figures[name].append(milliseconds(call, counts[name], device))
    return figures


def peaks(work: Work, call: Callable[[], Tensor]) -> dict[str, dict[str, int]]:
    """Bytes that torch's allocator has in use: before a call, and at most during it."""
    found = {}
    for name in CANDIDATES:
        work.forget_gradients()
        gc.collect()
        torch.cuda.empty_cache()
        with work.running(name):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            found[name] = {"before": before, "peak": torch.cuda.max_memory_allocated()}
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record: provenance, and by candidate times, ratios and peaks."""
    device = pick_device(args.device)
    guild_transformers.register()
    from guild.integrations.transformers import experts

    experts.adopt = keep_sums(experts.adopt)
    experts.adopt_peft()
    sizes, batch, length = (TOY, 2, 32) if args.toy else (FULL, 4, 4096)
    work = Work(sizes, batch, length, args.rank, device)
    expect_same(work)
    calls = {"step": work.step, "experts": work.run_experts}
    measured = {
        what: times(work, call, args.rounds, args.seconds, device) for what, call in calls.items()
    }
    on_gpu = device.type == "cuda"
    return {
        **provenance(device),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "model": sizes | {"batch": batch, "length": length, "dtype": "bfloat16"},
        "rank": args.rank,
        "rounds": args.rounds,
        "seconds_per_round": args.seconds,
        **compared(measured, REFERENCE),
        "bytes": {what: peaks(work, call) for what, call in calls.items()} if on_gpu else {},
    }


def show(record: dict[str, Any]) -> None:
    """Print a row a candidate."""
    print(f"{record['device']}, torch {record['torch']}, rank {record['rank']}")
    print(f"ms (times those of {REFERENCE}), and GiB at most, of which more than before the call:")
    for name in CANDIDATES:
        cells = []
        for what, figures in record["milliseconds"].items():
            ratio = record[f"over_{REFERENCE}"][what][name]["median"]
            cells.append(f"{what} {figures[name]['median']:9.3f} ({ratio:.3f})")
            if record["bytes"]:
                peak, before = (record["bytes"][what][name][k] / 2**30 for k in ("peak", "before"))
                cells.append(f"{peak:6.2f} GiB (+{peak - before:.2f})")
        print(f"{name:12}" + "  ".join(cells))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index>")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a round, at least")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    record = measure(args)
    show(record)
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
