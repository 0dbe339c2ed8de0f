"""Trains one Mixture-of-Experts layer to imitate another: the shortest loop that uses guild.MoE.

    python examples/python/train_moe.py [--steps 300]

Runs on a GPU in bfloat16 (autocast, float32 parameters) if there is one, else on the CPU in
float32. The student has its own router and must find a use for every expert; the selection bias
balances their load without an auxiliary loss.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import guild

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 64, 64, 8, 2, 512


def train(steps: int) -> list[float]:
    """Train for some steps; returns the loss of each."""
    torch.manual_seed(0)
    router = guild.Router(score="sigmoid", selection_bias=True)
    student = guild.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, router=router)
    teacher = guild.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K).requires_grad_(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    student.to(device)
    teacher.to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x = torch.randn(TOKENS, HIDDEN, device=device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            target = teacher(x)
            loss = F.mse_loss(student(x).float(), target.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        student.balance(rate=2e-3)
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            counts = student.expert_counts.tolist()
            print(f"step {step:4d}  loss {losses[-1]:.4f}  rows of each expert {counts}")
    return losses


def main() -> None:
    """Parse the number of steps and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    losses = train(parser.parse_args().steps)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
