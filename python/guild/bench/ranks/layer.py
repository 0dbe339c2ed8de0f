"""The calls of one layer that `guild.bench.parallel` times."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

import guild
from guild.bench.presets import Shape
from guild.bench.problem import make_problems


class SharedLayer:
    """A layer's calls to time: with its experts on all ranks of a group, or only a share of them.

    Parameters
    ----------
    shape : Shape
        Tokens of this rank, and the whole layer's sizes.
    group : guild.ExpertParallel or None
        The ranks.
    routing : str
        One of `problem.ROUTINGS`.
    seed : int
        Of this rank's inputs.
    like : SharedLayer, optional
        Another layer, whose weights are used.
    inference : bool
        Forwards without gradients.
    """

    def __init__(
        self,
        shape: Shape,
        group: guild.ExpertParallel | None,
        routing: str,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        like: SharedLayer | None = None,
        inference: bool = False,
    ) -> None:
        # Only the router of the problem is used; its experts are narrow to save memory.
        problem = make_problems(shape._replace(intermediate=8), routing, dtype, device, seed)[0]
        place = {"device": device, "dtype": dtype}
        _, hidden, intermediate, experts, top_k = shape
        sizes = hidden, intermediate, experts, top_k
        if like is None:
            self.layer = guild.MoE(*sizes, expert_group=group, **place)
            with torch.no_grad():
                self.layer.router.weight.copy_(problem.router)
        else:
            self.layer = guild.MoE(*sizes, expert_group=group, device="meta", dtype=dtype)
            for name, weight in like.layer.named_parameters():
                owner, _, last = name.rpartition(".")
                setattr(self.layer.get_submodule(owner), last, weight)
        self.call: Callable[[torch.Tensor], torch.Tensor] = self.layer
        self.x, self._dout = problem.x, problem.out_gradient
        self._leaves = self.x, self.layer.router.weight, self.layer.w_up, self.layer.w_down
        self._out: torch.Tensor | None = None
        self._keeps = not inference

    def forward(self) -> torch.Tensor:
        """One forward, which keeps what backward needs unless it is inference."""
        with torch.set_grad_enabled(self._keeps):
            return self.call(self.x)

    def results(self) -> list[torch.Tensor]:
        """The output and, unless it is inference, all gradients."""
        found = [self.forward().detach(), *(self.backward() if self._keeps else ())]
        self.forget()
        return found

    def sent_by(self, call: Callable[[torch.Tensor], torch.Tensor]) -> SharedLayer:
        """The same tokens and weights with `call` instead of the layer."""
        other = copy.copy(self)
        other.call, other._out = call, None
        return other

    def backward(self) -> tuple[torch.Tensor, ...]:
        """Gradients of x, router and experts, from a forward that the first call runs."""
        if self._out is None:
            self._out = self.forward()
        return torch.autograd.grad(self._out, self._leaves, self._dout, retain_graph=True)

    def forget(self) -> None:
        """Drop the forward that `backward` has kept."""
        self._out = None
