"""Times the training step of a Transformers MoE model with each implementation of its experts.

    python bench/transformers_step.py --out bench/results/DATE-GPU-transformers.json
    python bench/transformers_step.py --toy      # seconds, on any machine; no figures to quote

The model is Qwen3-30B-A3B with 4 layers, or GLM-4.5-Air with 3 of which 2 are MoE (--preset), with
random weights in bf16. A step is forward and backward of 4 sequences of 4,096 tokens, without the
head over the vocabulary. Besides the step, a block
(router and experts) and the experts alone are timed. What cannot run here, such as SonicMoE's
kernels without the network that they are fetched from, is reported with the reason.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

import guild
import guild.integrations.transformers as guild_transformers
from guild.bench.timing import calls_per_round, compared, drawn_orders, milliseconds
from guild.provenance import pick_device, provenance

# Of each preset: the class of its config, and sizes. The second has DeepSeek-V3's kind of router,
# of which Transformers computes the logits in float32.
PRESETS = {
    "qwen30b": (
        "Qwen3MoeConfig",
        dict(
            vocab_size=151936,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            norm_topk_prob=True,
        ),
    ),
    "glm45air": (
        "Glm4MoeConfig",
        dict(
            vocab_size=151552,
            hidden_size=4096,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            num_hidden_layers=3,
            num_attention_heads=96,
            num_key_value_heads=8,
            head_dim=128,
            norm_topk_prob=True,
        ),
    ),
}
# Of the tiny model of either preset.
TOY = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_experts=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
# What runs the experts; "blocks" are Guild's, with the routers as well.
CANDIDATES = ("six_lines", "guild", "blocks", "grouped_mm", "sonicmoe")
REFERENCE = "six_lines"
MOST_DIFFERENCE = 0.02  # of results in bf16 with the same routing


def six_lines(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What somebody writes by hand who knows the model."""
    w_up, w_down = experts.gate_up_proj, experts.down_proj
    return guild.routed_experts(hidden_states, top_k_index, top_k_weights, w_up, w_down)


@contextmanager
def running(name: str, model: transformers.PreTrainedModel) -> Iterator[None]:
    """The model with one candidate under it."""
    model.set_experts_implementation("guild" if name == "blocks" else name)
    replaced = guild_transformers.replace_moe_blocks(model) if name == "blocks" else []
    assert bool(replaced) == (name == "blocks")
    try:
        yield
    finally:
        guild_transformers.restore_moe_blocks(model)


class Work:
    """The model, and what is called of it: functions without arguments that leave gradients."""

    def __init__(self, preset: str, toy: bool, device: torch.device):
        torch.manual_seed(0)
        config_class, sizes = PRESETS[preset]
        if toy:
            sizes = sizes | {name: size for name, size in TOY.items() if name in sizes}
        self.batch, self.length = (2, 32) if toy else (4, 4096)
        batch, length, self.sizes = self.batch, self.length, sizes
        config = getattr(transformers, config_class)(**sizes, use_cache=False)
        with device:
            self.model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16).train()
            self.tokens = torch.randint(sizes["vocab_size"], (batch, length))
            states = torch.randn(batch, length, sizes["hidden_size"], dtype=torch.bfloat16)
        self.states, self.gradient = states.requires_grad_(), torch.randn_like(states)
        self.block = next(m for m in self.model.modules() if hasattr(m, "experts"))
        with torch.no_grad():
            routed = self.block.gate(self.states.view(-1, sizes["hidden_size"]))
        self.scores, self.ids = routed[1].requires_grad_(), routed[2]

    def calls(self) -> dict[str, Callable[[], Tensor]]:
        """By name; each returns its result."""
        return {
            "step": self.step,
            "block": self.run_block,
            "experts": self.run_experts,
            "experts forward": self.forward_of_experts,
        }

    def forget_gradients(self) -> None:
        """As an optimizer's zero_grad does."""
        self.model.zero_grad(set_to_none=True)
        self.states.grad = self.scores.grad = None

    def step(self) -> Tensor:
        """Forward and backward of the model."""
        self.forget_gradients()
        out = self.model(self.tokens).last_hidden_state
        out.backward(self.gradient)
        return out.detach()

    def run_block(self) -> Tensor:
        """Forward and backward of a block: router and experts."""
        self.forget_gradients()
        out = self.block(self.states)
        out.backward(self.gradient)
        return out.detach()

    def run_experts(self) -> Tensor:
        """Forward and backward of a block's experts."""
        self.forget_gradients()
        out = self._experts()
        out.backward(self.gradient.view_as(out))
        return out.detach()

    def forward_of_experts(self) -> Tensor:
        """Forward of a block's experts in training."""
        return self._experts().detach()

    def _experts(self) -> Tensor:
        return self.block.experts(self.states.flatten(0, 1), self.ids, self.scores)


def usable(work: Work) -> tuple[list[str], dict[str, str]]:
    """Candidates whose experts compute what grouped_mm's do, and why the others do not."""
    names, failures = [], {}
    with running("grouped_mm", work.model):
        expected = work.run_experts().double()
    for name in CANDIDATES:
        try:
            with running(name, work.model):
                found = work.run_experts().double()
                work.step()
        except Exception as error:  # of a package that is not there, or cannot run on this machine
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        difference = ((found - expected).norm() / expected.norm()).item()
        if difference < MOST_DIFFERENCE:
            names.append(name)
        else:
            failures[name] = f"its result is {difference:.1%} away from that of grouped_mm"
    return names, failures


def times(
    work: Work, names: list[str], rounds: int, seconds: float, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each call by candidate, one figure a round, in interleaved rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    for what, call in work.calls().items():
        counts = {}
        for name in names:
            with running(name, work.model):
                counts[name] = calls_per_round(call, seconds, device)
        figures: dict[str, list[float]] = {name: [] for name in names}
        for order in drawn_orders(names, rounds):
            for name in order:
                with running(name, work.model):
                    figures[name].append(milliseconds(call, counts[name], device))
        found[what] = figures
    return found


def peaks(work: Work, names: list[str]) -> dict[str, int]:
    """Bytes that torch's allocator has in use at most in a step: weights, gradients, the rest."""
    found = {}
    for name in names:
        work.forget_gradients()
        gc.collect()
        torch.cuda.empty_cache()
        with running(name, work.model):
            torch.cuda.reset_peak_memory_stats()
            work.step()
            found[name] = torch.cuda.max_memory_allocated()
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record: provenance, and by candidate times, ratios and peaks."""
    device = pick_device(args.device)
    guild_transformers.register()
    ExpertsInterface.register("six_lines", six_lines)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events and memory statistics are those of the current one
    work = Work(args.preset, args.toy, device)
    names, failures = usable(work)
    if REFERENCE in failures:
        raise SystemExit(f"{REFERENCE}: {failures[REFERENCE]}")
    measured = times(work, names, args.rounds, args.seconds, device)
    return {
        **provenance(device),
        "transformers": transformers.__version__,
        "preset": args.preset,
        "model": work.sizes
        | {"batch": work.batch, "length": work.length, "dtype": "bfloat16", "toy": args.toy},
        "rounds": args.rounds,
        "seconds_per_round": args.seconds,
        **compared(measured, REFERENCE),
        "step_peak_bytes": peaks(work, names) if device.type == "cuda" else {},
        "failures": failures,
    }


def show(record: dict[str, Any]) -> None:
    """Print a row a candidate."""
    whats = list(record["milliseconds"])
    print(f"{record['device']}, torch {record['torch']}, transformers {record['transformers']}")
    print(f"{record['preset']}{', a toy' * record['model']['toy']}")
    print(f"ms, and times those of {REFERENCE}:")
    print(f"{'':12}" + "".join(f"{what:>20}" for what in whats) + f"{'peak GiB':>12}")
    for name in record["milliseconds"]["step"]:
        cells = [
            f"{record['milliseconds'][what][name]['median']:12.3f}"
            f" ({record[f'over_{REFERENCE}'][what][name]['median']:.3f})"
            for what in whats
        ]
        peak = record["step_peak_bytes"].get(name)
        memory = "-" if peak is None else f"{peak / 2**30:.2f}"
        print(f"{name:12}" + "".join(f"{cell:>20}" for cell in cells) + f"{memory:>12}")
    for name, why in record["failures"].items():
        print(f"{name}: not measured: {why}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index>")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="qwen30b")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
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
