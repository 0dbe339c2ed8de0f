"""Offsets out of order or past the end give what the offsets that they are clamped to give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import guild
from tolerance import relative_error

ROWS, EXPERTS, HIDDEN, WIDTH = 16, 3, 16, 8
# Ends as given, and what "one below its predecessor counts as the predecessor, one above the
# dimension's size as that size" makes of them.
ENDS = {
    "past the end": ((6, 20, 24), (6, 16, 16)),
    "descending": ((9, 3, 5), (9, 9, 9)),
    "negative": ((-3, -1, 12), (0, 0, 12)),
    "down and up": ((9, 3, 14), (9, 9, 14)),
}


def _grouped(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor) -> Tensor:
    return guild.grouped_mm(a, b, offs, bias)


def _pair(x: Tensor, w_up: Tensor, offs: Tensor, w_down: Tensor, b_up: Tensor) -> Tensor:
    h, _ = guild.grouped_mm_swiglu(x, w_up, offs, b_up)
    return guild.grouped_mm_downproj(h, w_down, offs)


def _fused_pair(x: Tensor, w_up: Tensor, offs: Tensor, w_down: Tensor, b_up: Tensor) -> Tensor:
    h, aux = guild.grouped_mm_swiglu(x, w_up, offs, b_up)
    return guild.grouped_mm_downproj(h, w_down, offs, aux_biased_acc=aux)


def _mlp(x: Tensor, w_up: Tensor, offs: Tensor, w_down: Tensor, *low: Tensor) -> Tensor:
    offsets = torch.nn.functional.pad(offs, (1, 0))
    lora = guild.LoRA(*low) if low else None
    return guild.experts_mlp(x, offsets, w_up, w_down, lora_up=lora)


def _recomputed(x: Tensor, w_up: Tensor, offs: Tensor, w_down: Tensor) -> Tensor:
    offsets = torch.nn.functional.pad(offs, (1, 0))
    return guild.experts_mlp(x, offsets, w_up, w_down, recompute=True)


E, R, H, W = EXPERTS, ROWS, HIDDEN, WIDTH
CALLS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "rows": (_grouped, ((R, H), (E, H, W), (E, W))),
    "inner": (_grouped, ((H, R), (R, W), (E, W))),
    "columns": (_grouped, ((E, W, H), (H, R), (E, W))),
    "pair": (_pair, ((R, H), (E, H, 2 * W), (E, W, H), (E, 2 * W))),
    "fused pair": (_fused_pair, ((R, H), (E, H, 2 * W), (E, W, H), (E, 2 * W))),
    "experts_mlp": (_mlp, ((R, H), (E, 2 * W, H), (E, H, W))),
    "LoRA": (_mlp, ((R, H), (E, 2 * W, H), (E, H, W), (E, 8, H), (E, 2 * W, 8))),
    "recompute": (_recomputed, ((R, H), (E, 2 * W, H), (E, H, W))),
}
TWICE = ("rows", "inner", "columns", "pair", "fused pair")  # that have second derivatives


def _operands(shapes: tuple[tuple[int, ...], ...], device: str) -> list[Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for s in shapes
    ]


def _with(ends: tuple[int, ...], call: Callable, given: list[Tensor], twice: bool) -> list[Tensor]:
    """The result, its gradients and, if `twice`, those of the sum of their squares."""
    first, second, *rest = given
    offs = torch.tensor(ends, dtype=torch.int32, device=first.device)
    out = call(first, second, offs, *rest)
    # Rows or columns of no expert need not have values in grouped products.
    out = torch.where(_used(out, first, second, ends), out, 0)
    weights = torch.linspace(-1, 2, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    gradients = torch.autograd.grad((out * weights).sum(), given, create_graph=twice)
    results = [out, *gradients]
    if twice:
        energy = sum((g * g).sum() for g in gradients)
        results += torch.autograd.grad(energy, given, allow_unused=True, materialize_grads=True)
    return [r.detach() for r in results]


def _used(out: Tensor, first: Tensor, second: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Where `out` has the results of experts."""
    last = min(max(*ends, 0), ROWS)
    if out.dim() == 3:
        return torch.ones_like(out, dtype=torch.bool)
    by_column = first.dim() == 3 and second.dim() == 2
    index = torch.arange(out.shape[1 if by_column else 0], device=out.device)
    used = index < last
    return used[None, :] if by_column else used[:, None]


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", CALLS)
def test_as_the_clamped(name: str, ends: str, device: str) -> None:
    call, shapes = CALLS[name]
    given, clamped = ENDS[ends]
    operands = _operands(shapes, device)
    # Gradients of weights and biases on a GPU expect ascending offsets.
    compared = 2 if device == "cuda" and sorted(given) != list(given) else None
    for twice in (False, True) if name in TWICE and compared is None else (False,):
        got = _with(given, call, operands, twice)[:compared]
        wanted = _with(clamped, call, operands, twice)[:compared]
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert torch.equal(a, b), (name, ends, twice, i)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", TWICE)
def test_a_graph_of_backward_changes_no_gradient(name: str, ends: str, device: str) -> None:
    call, shapes = CALLS[name]
    operands = _operands(shapes, device)
    plain = _with(ENDS[ends][0], call, operands, False)
    again = _with(ENDS[ends][0], call, operands, True)
    for a, b in zip(plain, again, strict=False):
        assert relative_error(b, a.double()) < (2e-2 if device == "cuda" else 1e-12)
