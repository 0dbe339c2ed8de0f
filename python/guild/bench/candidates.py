"""What `guild bench` times: Guild's layer, the same layer in plain PyTorch, and the cuBLAS bound.

Each candidate has a forward pass and a backward pass to call over and over. The backward pass
differentiates one recorded forward with respect to x, the router and the experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

import guild
from guild.bench import sonicmoe
from guild.bench.form import PlainForm
from guild.bench.names import BOUNDS, LIMITED, PRODUCTS, SONICMOE
from guild.bench.problem import Problem, Weights


class Layer:
    """A whole MoE layer: router, experts, combine.

    Parameters
    ----------
    name : str
        "guild", "guild_sms", "compiled", "eager" or "plain"; a subclass has its own.
    problems : list of Problem
        Input sets that the calls cycle through.
    """

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.name, self._problems = name, problems
        if name == "compiled":
            # The backward pass is timed repeatedly on one recorded forward, so it may not reuse the
            # memory of what the forward saved.
            torch._functorch.config.donated_buffer = False
        self._modules = [self.module(problem) for problem in problems]
        self._turn = itertools.cycle(range(len(problems)))
        self._recorded: Iterator[tuple[torch.Tensor, Problem]] | None = None

    def module(self, problem: Problem) -> Callable[[torch.Tensor], torch.Tensor]:
        """The layer with a problem's sizes and weights."""
        return layer_module(self.name, problem)

    def forward(self) -> torch.Tensor:
        """One forward pass, keeping what the backward pass needs."""
        turn = next(self._turn)
        return self._modules[turn](self._problems[turn].x)

    def backward(self) -> tuple[torch.Tensor, ...]:
        """Gradients of the problem's leaves; the forward was done at the first call."""
        if self._recorded is None:
            self._recorded = itertools.cycle(
                [(m(p.x), p) for m, p in zip(self._modules, self._problems, strict=True)]
            )
        out, problem = next(self._recorded)
        return torch.autograd.grad(out, problem.leaves(), problem.out_gradient, retain_graph=True)

    def both(self) -> tuple[torch.Tensor, ...]:
        """A forward pass and its backward pass."""
        turn = next(self._turn)
        problem = self._problems[turn]
        out = self._modules[turn](problem.x)
        return torch.autograd.grad(out, problem.leaves(), problem.out_gradient)

    def results(self) -> tuple[torch.Tensor, ...]:
        """Output and gradients for the first input set, for the check."""
        problem = self._problems[0]
        out = self._modules[0](problem.x)
        grads = torch.autograd.grad(out, problem.leaves(), problem.out_gradient)
        return (out.detach(), *grads)


class LimitedLayer(Layer):
    """Guild's layer on `num_sms` multiprocessors."""

    def __init__(self, problems: list[Problem], num_sms: int) -> None:
        super().__init__(LIMITED, problems)
        self._num_sms = num_sms

    def forward(self) -> torch.Tensor:
        """As `Layer.forward`."""
        with _sms(self._num_sms):
            return super().forward()

    def backward(self) -> tuple[torch.Tensor, ...]:
        """As `Layer.backward`."""
        with _sms(self._num_sms):
            return super().backward()

    def results(self) -> tuple[torch.Tensor, ...]:
        """As `Layer.results`."""
        with _sms(self._num_sms):
            return super().results()


class SonicMoELayer(Layer):
    """SonicMoE's layer, with a copy of w_up in its order."""

    def __init__(self, problems: list[Problem]) -> None:
        turned = [nn.Parameter(sonicmoe.in_turn(p.w_up.detach())) for p in problems]
        theirs = [replace(p, w_up=w) for p, w in zip(problems, turned, strict=True)]
        super().__init__(SONICMOE, theirs)

    def module(self, problem: Problem) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `Layer.module`."""
        return sonicmoe.layer_of(problem)

    def results(self) -> tuple[torch.Tensor, ...]:
        """As `Layer.results`, the gradient of w_up in the problem's order."""
        out, dx, dw_router, dw_up, dw_down = super().results()
        return out, dx, dw_router, sonicmoe.in_halves(dw_up), dw_down


@contextmanager
def _sms(count: int) -> Iterator[None]:
    before = guild.num_sms()
    guild.set_num_sms(count)
    try:
        yield
    finally:
        guild.set_num_sms(before)


class Bound:
    """The same products for perfectly balanced experts through cuBLAS, and nothing else.

    Forward: up and down projection. Backward: down gradient, dW2, up gradient, dW1. Every expert
    has T K / E rows, rounded up, so that no row of the layer is left out. Weights are read through
    differently shaped views of the layer's: the values do not matter here, and a second copy would
    not always fit.
    """

    name = "bound"

    def __init__(self, problems: list[Problem]) -> None:
        t, h, i, e, k = problems[0].shape
        rows = -(-t * k // e)
        like = problems[0].x

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, dtype=like.dtype, device=like.device)

        self._x, self._out_gradient = normal(e, rows, h), normal(e, rows, h)
        self._a, self._h_gradient = normal(e, rows, i), normal(e, rows, 2 * i)
        self._weights = itertools.cycle(
            [(p.w_up.detach().view(e, h, 2 * i), p.w_down.detach().view(e, i, h)) for p in problems]
        )

    def forward(self) -> None:
        """Up and down projection."""
        for product in self.products(*next(self._weights))[:2]:
            product()

    def backward(self) -> None:
        """Down gradient, dW2, up gradient, dW1."""
        for product in self.products(*next(self._weights))[2:]:
            product()

    def products(self, w_up: torch.Tensor, w_down: torch.Tensor) -> list[Callable]:
        """The six products over (E, H, 2I) and (E, I, H) weights, in the order of `PRODUCTS`."""
        pairs = (
            (self._x, w_up),
            (self._a, w_down),
            (self._out_gradient, w_down.mT),
            (self._a.mT, self._out_gradient),
            (self._h_gradient, w_up.mT),
            (self._x.mT, self._h_gradient),
        )
        return [partial(torch.bmm, *pair) for pair in pairs]

    def calls(self, out: dict[str, torch.Tensor]) -> dict[str, Callable]:
        """Each product alone, by name; calls cycle through the weights and write into `out`."""

        def turn(place: int, out: torch.Tensor | None) -> Callable:
            return lambda: self.products(*next(self._weights))[place](out=out)

        return {name: turn(place, out.get(name)) for place, name in enumerate(PRODUCTS)}


class Floor(Bound):
    """The bound's products, followed by copies of what a fused layer moves in addition.

    Forward: the combine's rows of Y and its output, the router's X and logits, and A, which is
    written in addition to H. Backward: the combine's rows of dX and its output, the router's X and
    the gradient of its logits, and H and its gradient, which the down gradient reads and writes
    where the bare product only writes A's width. Copies in memory: half of the bytes read, half
    written.

    Attributes
    ----------
    copied : dict
        Bytes by pass, reads and writes together.
    """

    name = "floor"
    _MOST = 1 << 28  # elements of one copy

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        t, h, i, e, k = problems[0].shape
        like, rows = problems[0].x, t * k
        size = like.dtype.itemsize
        both = (rows + 2 * t) * h * size
        self.copied = {
            "forward": both + t * e * 4 + rows * i * size,
            "backward": both + t * e * size + 4 * rows * i * size,
        }
        elements = min(self._MOST, max(self.copied.values()) // (2 * size))
        self._from = torch.randn(elements, dtype=like.dtype, device=like.device)
        self._to = torch.empty_like(self._from)

    def forward(self) -> None:
        """The bound's forward products and the copies."""
        super().forward()
        self._copy(self.copied["forward"])

    def backward(self) -> None:
        """The bound's backward products and the copies."""
        super().backward()
        self._copy(self.copied["backward"])

    def _copy(self, count: int) -> None:
        left = count // (2 * self._from.element_size())
        while left > 0:
            part = min(left, self._from.numel())
            torch.neg(self._from[:part], out=self._to[:part])
            left -= part


def make_candidate(name: str, problems: list[Problem], num_sms: int | None) -> Layer | Bound:
    """The candidate called `name` over these inputs."""
    if name in BOUNDS:
        return Bound(problems) if name == "bound" else Floor(problems)
    if name == SONICMOE:
        return SonicMoELayer(problems)
    return LimitedLayer(problems, num_sms) if name == LIMITED else Layer(name, problems)


def _constructor(name: str) -> Callable[..., nn.Module]:
    if name in ("guild", LIMITED):
        return guild.MoE
    return partial(PlainForm, compiled=name == "compiled")


def layer_module(name: str, problem: Problem) -> nn.Module:
    """The layer called `name` with a problem's sizes and weights."""
    return module_of(_constructor(name), problem)


def module_of(make: Callable[..., nn.Module], weights: Weights) -> nn.Module:
    """What a constructor of layers makes from the sizes and weights of a problem or a layer."""
    _, hidden, intermediate, experts, top_k = weights.shape
    with torch.device("meta"):
        module = make(hidden, intermediate, experts, top_k, **weights.form.options())
    module.load_state_dict(weights.state(), assign=True)
    return module
