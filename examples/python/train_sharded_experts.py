"""Trains an MoE layer as torchtitan builds it: separate weights, sharded, behind a dispatcher.

    python examples/python/train_sharded_experts.py [--steps 40]
    torchrun --nproc-per-node 2 examples/python/train_sharded_experts.py

Each rank has its part of every batch, and a part of each parameter: FSDP gathers the weights for
each forward and backward pass. Gate, up and down projection are three parameters, which Guild reads
in place. The dispatcher sorts tokens by expert and counts those of each expert; with expert
parallelism, it would send them to other ranks. torchtitan itself needs no code:
`--override.imports guild.integrations.torchtitan.fused_grouped_experts`.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import guild

DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 32, 8, 2, 256


class GroupedExperts(nn.Module):
    """SwiGLU experts on rows sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / DIM**0.5)  # gate
        self.w3 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / DIM**0.5)  # up
        self.w2 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / HIDDEN**0.5)

    def forward(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:
        """(R, DIM); rows_per_expert: (EXPERTS,)."""
        offsets = F.pad(rows_per_expert.cumsum(0, dtype=torch.int32), (1, 0))
        return guild.experts_mlp(rows, offsets, (self.w1, self.w3), self.w2)


class MoE(nn.Module):
    """Router, dispatch, experts, combine."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = GroupedExperts()

    def forward(self, x: Tensor) -> Tensor:
        """(T, DIM) tokens."""
        ids, scores = guild.route(self.gate(x).float(), top_k=TOP_K)
        slot = ids.flatten().argsort(stable=True)
        token = slot // TOP_K
        out = self.experts(x[token], torch.bincount(ids.flatten(), minlength=EXPERTS))
        weighted = out.float() * scores.flatten()[slot, None]
        return torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))


def train(steps: int) -> list[float]:
    """Train for some steps; returns the loss of each on this rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    teacher, student = MoE().requires_grad_(False), MoE()
    teacher.gate.load_state_dict(student.gate.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device == "cuda" else None
    for model in (teacher.to(device), student.to(device)):
        more = {} if policy is None else {"mp_policy": policy}
        fully_shard(model.experts, **more)
        fully_shard(model, **more)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    torch.manual_seed(1 + distributed.get_rank())
    losses = []
    for step in range(steps):
        x = torch.randn(TOKENS, DIM, device=device)
        loss = F.mse_loss(student(x).float(), teacher(x).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if distributed.get_rank() == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:4d}  loss {losses[-1]:.4f}")
    return losses


def run(steps: int) -> list[float]:
    """`train` with the ranks of torchrun, or alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            distributed.init_process_group(backend)
        else:
            store = distributed.FileStore(f"{folder}/ranks", 1)
            distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            losses = train(steps)
            if distributed.get_rank() == 0:
                print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
            return losses
        finally:
            distributed.destroy_process_group()


def main() -> None:
    """Parse the number of steps and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    run(parser.parse_args().steps)


if __name__ == "__main__":
    main()
