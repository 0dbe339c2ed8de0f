"""The optimiser of `guild train --fsdp` beside torch's: the same steps, and the same state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from guild.train.shard_adamw import ShardAdamW, local_norm

HOW = {"lr": 0.01, "betas": (0.9, 0.95)}


def weights(seed: int = 0) -> list[nn.Parameter]:
    """The weights of two modules: matrices and a vector."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (5, 4), (4,), (3, 2, 2)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]


def groups(own: list[nn.Parameter]) -> list[dict]:
    """Parameter groups in which matrices alone decay."""
    matrices = {"params": [w for w in own if w.dim() > 1], "weight_decay": 0.1}
    return [matrices, {"params": [w for w in own if w.dim() == 1], "weight_decay": 0.0}]


def take_steps(
    own: list[nn.Parameter], optimizer: torch.optim.AdamW, first: int, last: int
) -> None:
    """Steps `first` to `last`, with gradients four times too large that are scaled down by four."""
    optimizer.grad_scale = torch.tensor(4.0)
    if not isinstance(optimizer, ShardAdamW):
        optimizer.found_inf = torch.tensor(0.0)
    for step in range(first, last):
        for w, gradient in zip(own, weights(seed=step + 1), strict=True):
            w.grad = 4 * gradient.detach()
        optimizer.step()


def test_steps_as_torch() -> None:
    own, truth = weights(), weights()
    room = {w: torch.zeros(w.numel() + 3, dtype=torch.bfloat16) for w in own}
    optimizer = ShardAdamW(groups(own), [own[:2], own[2:]], room, **HOW)
    reference = torch.optim.AdamW(groups(truth), fused=True, **HOW)
    take_steps(own, optimizer, 0, 3)
    take_steps(truth, reference, 0, 3)
    state = copy.deepcopy(optimizer.state_dict())  # either continues from the other's
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    reference.load_state_dict(state)
    take_steps(own, optimizer, 3, 6)
    take_steps(truth, reference, 3, 6)
    for one, other in zip(own, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert torch.equal(room[one][: one.numel()].view(one.shape), one.bfloat16())
        assert not room[one][one.numel() :].any()
        for name in ("exp_avg", "exp_avg_sq", "step"):
            mine, theirs = optimizer.state[one][name], reference.state[other][name]
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_weights_without_gradient_or_part() -> None:
    """Such weights stay as they are; a closure is refused."""
    own = [*weights(), nn.Parameter(torch.empty(0, 4))]
    optimizer = ShardAdamW(groups(own), [own], {}, **HOW)
    assert local_norm(own) == 0
    own[0].grad, own[3].grad = torch.full((5, 4), 2.0), torch.empty(0, 4)
    before = [w.detach().clone() for w in own]
    optimizer.step()
    moved = [not torch.equal(w, old) for w, old in zip(own, before, strict=True)]
    assert moved == [True, False, False, False]
    assert [optimizer.state[w]["step"].item() for w in (own[0], own[3])] == [1, 1]
    assert local_norm(own).item() == pytest.approx(80**0.5)
    moment = optimizer.state[own[0]]["exp_avg"]
    optimizer.begin()
    assert optimizer.state[own[0]]["exp_avg"] is moment and moment.any()
    assert all(optimizer.state[w]["step"] == 0 for w in own[1:3])
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: 0.0)
