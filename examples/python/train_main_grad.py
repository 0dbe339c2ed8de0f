"""Trains experts as Megatron-Core does: one parameter per expert, gradients summed in float32.

    python examples/python/train_main_grad.py [--steps 40]

The parameters lie one after the other in a buffer that the trainer owns, and so do their
`main_grad`s. Guild reads and writes both in place. Each step has several micro-batches, whose
weight gradients are computed after all of them, where a pipeline would have bubbles. The optimizer
keeps float32 copies of the parameters. Runs on a GPU in bfloat16 if there is one, else on the CPU.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import guild

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, MICRO_BATCHES = 64, 32, 8, 2, 128, 4
SHAPES = {"up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}


class Experts(nn.Module):
    """`up{e}` and `down{e}` of each expert e."""

    def __init__(self, **place: object) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            for e in range(EXPERTS):
                weight = torch.randn(shape, **place) / shape[1] ** 0.5
                self.register_parameter(f"{name}{e}", nn.Parameter(weight))
            guild.lay_evenly(self.listed(name))
        self.sums = guild.WeightGradients(main_grad=True, delayed=True)

    def listed(self, name: str) -> list[nn.Parameter]:
        """One parameter per expert."""
        return [self.get_parameter(f"{name}{e}") for e in range(EXPERTS)]

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """Each token through its experts."""
        weights = self.listed("up"), self.listed("down")
        return guild.routed_experts(x, ids, scores, *weights, weight_gradients=self.sums)


class Buffers:
    """All parameters in one tensor, their gradients in another and float32 copies in a third."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = torch.cat([p.detach().flatten() for p in parameters])
        self.masters = self.parameters.float()
        self.gradients = torch.zeros_like(self.masters)
        begin = 0
        for p in parameters:
            part = slice(begin, begin + p.numel())
            p.data = self.parameters[part].view(p.shape)
            p.main_grad = self.gradients[part].view(p.shape)
            begin += p.numel()
        self.masters.grad = self.gradients
        self.optimizer = torch.optim.AdamW([self.masters], lr=3e-3)

    def step(self) -> None:
        """Update the copies, round them to the parameters, and clear the sums."""
        self.optimizer.step()
        self.parameters.copy_(self.masters)
        self.gradients.zero_()


def train(steps: int) -> list[float]:
    """Train for some steps; returns the loss of each."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    place = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    teacher, student = Experts(**place).requires_grad_(False), Experts(**place)
    buffers = Buffers(list(student.parameters()))
    gate = torch.randn(HIDDEN, EXPERTS, **place)
    losses = []
    for step in range(steps):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            x = torch.randn(TOKENS, HIDDEN, **place)
            ids, scores = guild.route((x @ gate).float(), top_k=TOP_K)
            error = student(x, ids, scores).float() - teacher(x, ids, scores).float()
            loss = error.square().mean() / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        student.sums.compute()
        buffers.step()
        losses.append(total)
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {total:.4f}")
    return losses


def main() -> None:
    """Parse the number of steps and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    losses = train(parser.parse_args().steps)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
