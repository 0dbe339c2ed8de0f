"""Tensors whose storage has been freed, as FSDP does with parameters: an error that names them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import guild

EXPERTS, HIDDEN, WIDTH, TOKENS = 4, 16, 8, 10


def operands(device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = {
        "x": (TOKENS, HIDDEN),
        "w_up": (EXPERTS, 2 * WIDTH, HIDDEN),
        "w_down": (EXPERTS, HIDDEN, WIDTH),
        "b_up": (EXPERTS, 2 * WIDTH),
        "b_down": (EXPERTS, HIDDEN),
        "residual": (TOKENS, HIDDEN),
    }
    return {n: torch.randn(s, device=device, dtype=dtype) for n, s in shapes.items()}


def said(given: dict[str, Tensor | list[Tensor]]) -> str:
    """The error's message; pytest must see no tensor of these, as printing one may crash."""
    ids = torch.randint(0, EXPERTS, (TOKENS, 2), device=given["x"].device)
    scores = torch.rand(ids.shape, device=ids.device)
    try:
        guild.routed_experts(given.pop("x"), ids, scores, **given)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["x", "w_up", "w_down", "b_up", "b_down", "residual"])
def test_operands(name: str, gradients: bool, device: str) -> None:
    """Also those that do not begin where the storage did."""
    for offset in (0, 16):
        given = operands(device)
        freed = torch.empty(given[name].numel() + offset, device=device, dtype=given[name].dtype)
        given[name] = freed[offset:].view(given[name].shape).requires_grad_(gradients)
        freed.untyped_storage().resize_(0)
        error = said(given)
        assert re.search(rf"^{name}.*: expected values in memory, got an empty", error)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["w_up", "w_down", "b_down"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 1, 3, 2)])
@pytest.mark.parametrize("made", ["apart", "even", "one of them"])
def test_lists(made: str, order: tuple[int, ...], name: str, gradients: bool, device: str) -> None:
    given = operands(device)
    whole = given[name].clone()
    views = list(whole) if made == "even" else [part.clone() for part in whole]
    for part in views[2:3] if made == "one of them" else views:
        part.untyped_storage().resize_(0)
    listed = {n: list(given[n].clone()) for n in ("w_up", "w_down", "b_up", "b_down")}
    listed[name] = [views[i].requires_grad_(gradients) for i in order]
    assert re.search(
        rf"^{name}\[\d\]: expected values in memory, got an empty", said(given | listed)
    )
