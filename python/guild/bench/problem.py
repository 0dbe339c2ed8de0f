"""Inputs of a benchmark: random normals, with the routing that was asked for written into x.

The layer as timed includes its router product, so the routing must come out of x and the router's
weights. The router's rows are orthonormal; replacing x's part in their span by a wanted set of
logits L, x <- x - (x R^T) R + L R, gives exactly L as logits and leaves x close to normal.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn

from guild.bench.form import LayerForm
from guild.bench.presets import Shape

ROUTINGS = ("balanced", "random", "zipf")
DECODE_ROUTINGS = ("random", "zipf", "hot", "same")
# Chosen and other logits are at least this far apart, so that rounding in bf16 (steps of 0.03 at 8)
# changes no choice and every layer routes alike.
_GAP = 0.25
_ROTATED_SETS = 16


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One layer's parameters.

    Attributes
    ----------
    shape : Shape
        Sizes; of several layers with the same weights, each may have its own number of tokens.
    form : LayerForm
        The layer's other options.
    router : torch.nn.Parameter
        (experts, hidden).
    w_up, w_down : torch.nn.Parameter
        (experts, 2 * intermediate, hidden) and (experts, hidden, intermediate), as the form stores
        them.
    b_up, b_down : torch.nn.Parameter or None
        (experts, 2 * intermediate), (experts, hidden).
    """

    shape: Shape
    form: LayerForm = LayerForm()
    router: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter
    b_up: nn.Parameter | None = None
    b_down: nn.Parameter | None = None

    def experts(self) -> dict[str, nn.Parameter]:
        """The experts' weights and biases by the names of `guild.MoE`."""
        found = {name: getattr(self, name) for name in ("w_up", "w_down", "b_up", "b_down")}
        return {name: weight for name, weight in found.items() if weight is not None}

    def state(self) -> dict[str, nn.Parameter]:
        """All weights by the names of `guild.MoE`."""
        return {"router.weight": self.router, **self.experts()}


@dataclass(frozen=True, kw_only=True)
class Problem(Weights):
    """One set of inputs; the leaves require gradients.

    Attributes
    ----------
    x, out_gradient : torch.Tensor
        (tokens, hidden).
    """

    x: torch.Tensor
    out_gradient: torch.Tensor

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """x, router and the experts' weights: what the backward pass differentiates."""
        return self.x, self.router, *self.experts().values()


def wanted_logits(
    shape: Shape, routing: str, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Logits float32 (tokens, experts) whose top-k is distributed as `routing` says.

    "balanced" gives every expert tokens * top_k / experts rows (exactly, if that is whole);
    "random" chooses uniformly; "zipf" draws without replacement with probabilities proportional to
    1 / rank; "hot" sends every token to one expert and chooses its others uniformly; "same" chooses
    once for all tokens.
    """
    size = (shape.tokens, shape.experts)
    if routing == "balanced":
        logits = 0.25 * torch.randn(size, device=device, generator=generator)
        ids = _balanced_ids(shape, device, generator)
        return logits.scatter_add_(1, ids, torch.full(ids.shape, 3.0, device=device))
    if routing == "random":
        logits = torch.randn(size, device=device, generator=generator)
    elif routing == "zipf":
        # Gumbel noise on log-probabilities: its top-k is a draw without replacement.
        noise = torch.empty(size, device=device).exponential_(generator=generator).log_().neg_()
        rank = torch.randperm(shape.experts, device=device, generator=generator) + 1
        logits = noise - rank.float().log()
        logits -= logits.mean(1, keepdim=True)
    elif routing in ("hot", "same"):
        logits = 0.25 * torch.randn(size, device=device, generator=generator)
        liked = 1 if routing == "hot" else shape.top_k
        order = torch.randperm(shape.experts, device=device, generator=generator)
        logits[:, order[:liked]] += 3.0
    else:
        known = ", ".join(dict.fromkeys(ROUTINGS + DECODE_ROUTINGS))
        raise ValueError(f"routing: expected one of {known}, got {routing!r}")
    chosen = logits.topk(shape.top_k, -1).indices
    return logits.scatter_add_(1, chosen, torch.full(chosen.shape, _GAP, device=device))


def _balanced_ids(shape: Shape, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """int64 (tokens, top_k), distinct within a token, every expert equally often."""
    tokens, experts, top_k = shape.tokens, shape.experts, shape.top_k
    if experts % top_k:
        slots = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % experts
        return slots[torch.randperm(tokens, device=device, generator=generator)]
    # Blocks of experts / top_k tokens share out one random order of the experts.
    blocks = -(-tokens * top_k // experts)
    order = torch.rand(blocks, experts, device=device, generator=generator).argsort(1)
    return order.view(-1, top_k)[:tokens]


def expect_routable(shape: Shape) -> None:
    """Raise ValueError unless x has room for the logits that a routing wants."""
    if shape.hidden < shape.experts:
        raise ValueError(
            f"thiek: expected hidden of at least experts = {shape.experts}, got {shape.hidden}"
        )


def make_problems(
    shape: Shape,
    routing: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    weights_of: list[Problem] | None = None,
    form: LayerForm | None = None,
) -> list[Problem]:
    """Inputs for one shape: several sets if a single one would stay in the GPU's L2 cache.

    weights_of: problems of the same shape, whose form and experts' weights are taken. form: else
    the layer's other options, by default none.

    Raises
    ------
    ValueError
        If hidden is smaller than experts (the routing could not be written into x), or if a CPU run
        would not fit in memory.
    """
    expect_routable(shape)
    if device.type == "cpu":
        expect_room(shape, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    given = weights_of or [None] * _set_count(shape, dtype, device)
    form = weights_of[0].form if weights_of else form or LayerForm()
    return [_make_problem(shape, form, routing, dtype, device, generator, w) for w in given]


def _make_problem(
    shape: Shape,
    form: LayerForm,
    routing: str,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    weights: Problem | None,
) -> Problem:
    router = orthonormal_router(shape, dtype, device, generator)
    x = routed_tokens(shape, routing, router, generator)
    size = shape.tokens, shape.hidden
    out_gradient = torch.randn(size, dtype=dtype, device=device, generator=generator)
    if weights is not None:
        experts = weights.experts()
    else:
        experts = expert_weights(shape, form, dtype, device, generator)
    tokens = {"x": x.requires_grad_(), "out_gradient": out_gradient}
    return Problem(shape=shape, form=form, router=nn.Parameter(router), **experts, **tokens)


def orthonormal_router(
    shape: Shape, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Router weights (experts, hidden) whose rows are orthonormal before rounding."""
    size = shape.hidden, shape.experts
    columns = torch.randn(size, dtype=torch.float32, device=device, generator=generator)
    return torch.linalg.qr(columns).Q.mT.to(dtype).contiguous()


def routed_tokens(
    shape: Shape, routing: str, router: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """x (tokens, hidden), close to normal, that an orthonormal router routes as asked for."""
    size, device = (shape.tokens, shape.hidden), router.device
    x = torch.randn(size, dtype=torch.float32, device=device, generator=generator)
    span = router.float()
    x += (wanted_logits(shape, routing, device, generator) - x @ span.mT) @ span
    return x.to(router.dtype)


def expert_weights(
    shape: Shape,
    form: LayerForm,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> dict[str, nn.Parameter]:
    """Weights, normal of variance 1 / inputs, and biases of variance 1, by name."""

    def normal(*size: int) -> torch.Tensor:
        made = torch.randn(size, dtype=dtype, device=device, generator=generator)
        return made if len(size) == 2 else made.mul_(size[1 if form.transposed else 2] ** -0.5)

    _, hidden, intermediate, experts, _ = shape
    return form.weights(hidden, intermediate, experts, normal)


def _bytes_per_set(shape: Shape, dtype: torch.dtype) -> int:
    t, h, i, e, _ = shape
    return (3 * e * i * h + e * h + 2 * t * h) * dtype.itemsize


def _set_count(shape: Shape, dtype: torch.dtype, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_ROTATED_SETS, 1 + 2 * cache // _bytes_per_set(shape, dtype))


def expect_room(shape: Shape, dtype: torch.dtype) -> None:
    """Raise ValueError if the machine has not enough memory for problems of this shape."""
    # Weights, their gradients and the bound's results; rows of the plain layer counted six times.
    t, h, i, _, k = shape
    needed = 3 * _bytes_per_set(shape, dtype) + 6 * t * k * (h + 2 * i) * dtype.itemsize
    expect_memory(shape, needed)


def expect_memory(shape: Shape, needed: int) -> None:
    """Raise ValueError if the machine has less than the needed bytes."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ValueError(
            f"shape: {shape} (T, H, I, E, K) needs about {needed / 2**30:.0f} GiB, this machine "
            f"has {there / 2**30:.0f} GiB; take fewer tokens or experts"
        )
