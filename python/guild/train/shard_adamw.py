"""AdamW for DTensors, each rank on its own parts: one pass over a module's weights at a time.

    g = gradient / scale,  m += (1 - b1) (g - m),  v += (1 - b2) (g^2 - v)
    w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

The same pass writes the 16-bit copy of w that gathers read. torch's fused AdamW goes through
DTensor for every weight, which takes the host longer than a GPU needs for the step, and writes back
gradients that it has scaled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class ShardAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same state, for parameters that are DTensors over all ranks.

    Parameters
    ----------
    groups : iterable of dict
        Of parameters, as torch's optimisers take them. Those of a group get their gradients in the
        same steps.
    modules : sequence of sequence of torch.nn.Parameter
        The parameters of each module, which are updated together.
    copies : mapping of torch.nn.Parameter to torch.Tensor
        Where a parameter's part on this rank is written in another dtype as well: flat, as large as
        the part or larger.
    **options
        As AdamW takes them: lr, betas, eps.

    Attributes
    ----------
    grad_scale : torch.Tensor or None
        Gradients are divided by it when they are read.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        modules: Sequence[Sequence[nn.Parameter]],
        copies: Mapping[nn.Parameter, Tensor],
        **options: Any,
    ) -> None:
        super().__init__(groups, fused=True, **options)  # as the state of one process says
        self.grad_scale: Tensor | None = None
        self._module_of = {p: i for i, module in enumerate(modules) for p in module}
        self._copies = copies

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise NotImplementedError("closure: expected None")
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            if not given:
                continue
            self._begin(given)
            steps = [self.state[p]["step"] for p in given]
            torch._foreach_add_(steps, 1)
            numbers, scale = _numbers(group, steps[0]), self.grad_scale
            if scale is None:
                scale = torch.ones_like(steps[0])
            for parameters in self._by_module(given):
                lists = tuple(zip(*map(self._tensors, parameters), strict=True))
                _update(steps[0].is_cuda)(lists, numbers, scale, group["betas"], group["eps"])

    def _by_module(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The parameters of each module that have a part on this rank."""
        found: dict[int, list[nn.Parameter]] = {}
        for p in parameters:
            if _part(p).numel():
                found.setdefault(self._module_of[p], []).append(p)
        return list(found.values())

    def begin(self) -> None:
        """Allocate all moments now, and not in pieces of memory that the first step has left."""
        for group in self.param_groups:
            self._begin(group["params"])

    def _begin(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }

    def _tensors(self, parameter: nn.Parameter) -> tuple[Tensor, ...]:
        """This rank's parts: weight, gradient, both moments, and the copy if there is one."""
        state, weight = self.state[parameter], _part(parameter)
        moments = _part(state["exp_avg"]), _part(state["exp_avg_sq"])
        copy = self._copies.get(parameter)
        copies = () if copy is None else (copy[: weight.numel()].view(weight.shape),)
        return weight, _part(parameter.grad), *moments, *copies


def local_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of the gradients' parts on this rank, a float32 scalar."""
    parts = [_part(p.grad) for p in parameters if p.grad is not None]
    filled = [part for part in parts if part.numel()]
    if not filled:
        return torch.zeros((), device=parts[0].device if parts else None)
    return norm_of(torch._foreach_norm(filled))


def norm_of(norms: Sequence[Tensor]) -> Tensor:
    """Norm of several tensors from theirs; in any order the same up to float64's rounding."""
    return torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64).float()


def _part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _numbers(group: dict[str, Any], steps: Tensor) -> Tensor:
    """Float32 (3,): the factor that decay leaves, the step size, and 1 / sqrt of v's correction.

    Computed where the steps are counted, so that a CUDA graph of a step can be replayed.
    """
    t, (first, second) = steps.double(), group["betas"]
    lr = torch.zeros_like(t) + group["lr"]  # a number, or a scalar on the same device
    values = 1 - lr * group["weight_decay"], lr / (1 - first**t), (1 - second**t).rsqrt()
    return torch.stack(values).float()


def _update_lists(
    lists: tuple[tuple[Tensor, ...], ...],
    numbers: Tensor,
    scale: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """See the equations above; lists: weights, gradients, m, v, and copies if there are any."""
    kept, size, correction = numbers.unbind()
    for weight, gradient, first, second, *copy in zip(*lists, strict=True):
        g = gradient / scale
        m = first + (1 - betas[0]) * (g - first)
        v = second + (1 - betas[1]) * (g * g - second)
        updated = kept * weight - size * m / (v.sqrt() * correction + eps)
        first.copy_(m)
        second.copy_(v)
        weight.copy_(updated)
        if copy:
            copy[0].copy_(updated)


@functools.cache
def _update(compiled: bool) -> Callable[..., None]:
    """On a GPU one kernel for each weight; every block has the same sizes and is compiled once."""
    return torch.compile(_update_lists, dynamic=False) if compiled else _update_lists
