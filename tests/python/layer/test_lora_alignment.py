"""Low-rank terms as a GPU's kernels read them: what src/cuda/alignment.h asks for.

Here ranks are padded and operands moved on the CPU as they are on a GPU, so that the operands of
the steps can be inspected, and results compared with those of the operands as they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import guild
from guild import LoRA, WeightGradients
from guild._torch import alignment, low_rank
from guild._torch.alignment import aligned, missing
from guild._torch.operators import ops
from layers import moved
from test_compile import assert_same, fresh_compiler  # noqa: F401 - a fixture of these tests too

TOKENS, HIDDEN, INNER = 12, 24, 16
PRODUCTS = (
    *("up_projection", "down_projection", "up_gradient", "down_gradient"),
    *("up_weight_gradient_out", "down_weight_gradient_out"),
)


def is_read(t: Tensor) -> bool:
    """Whether kernels read this matrix, or these (E, m, n)."""
    if t.data_ptr() % 16 or t.shape[-1] % 8:
        return False
    if t.dim() == 2:
        return t.stride(1) == 1 and (t.shape[0] <= 1 or t.stride(0) % 8 == 0)
    experts, *matrix = t.stride()
    return experts % 8 == 0 and min(matrix) == 1 and max(matrix) % 8 == 0 and t.shape[1] % 8 == 0


class Checked:
    """The steps, which raise where kernels could not read an operand."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        step = getattr(ops, name)

        def checked(*arguments: Any) -> Any:
            self.calls += 1
            for t in arguments:
                if isinstance(t, Tensor) and t.dtype == torch.bfloat16:
                    assert is_read(t), (name, t.shape, t.stride(), t.data_ptr() % 16)
            return step(*arguments)

        return checked if name in PRODUCTS else step


@contextmanager
def as_on_a_gpu() -> Iterator[Checked]:
    """Tensors of the CPU are filled up, moved and checked as a GPU's."""

    def always(_: Tensor) -> bool:
        return True

    steps = Checked()
    with (
        patch.object(alignment, "needs_alignment", always),
        patch.object(low_rank, "needs_alignment", always),
        patch.object(low_rank, "ops", steps),
    ):
        yield steps


def normal(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).bfloat16()


def strided(shape: tuple[int, ...], strides: tuple[int, ...], begin: int = 0) -> Tensor:
    values = torch.arange(600).bfloat16()
    return values.as_strided(shape, strides, begin)


@pytest.mark.parametrize(
    "given, kept",
    [
        (strided((3, 16, 8), (128, 8, 1)), True),
        (strided((3, 16, 8), (128, 8, 1), 8), True),
        (strided((3, 16, 8), (128, 8, 1), 1), False),
        (strided((1, 16, 8), (1, 8, 1)), False),
        (strided((1, 16, 8), (3, 8, 1), 5), False),
        (strided((3, 16, 8), (1, 24, 3)), False),
        (strided((3, 16, 8), (160, 10, 1)), False),
        (strided((3, 8, 16), (128, 1, 8)), False),
        (strided((5, 16), (16, 1)), True),
        (strided((5, 16), (16, 1), 3), False),
        (strided((5, 16), (17, 1)), False),
        (strided((5, 16), (24, 1)), False),
    ],
)
def test_aligned(given: Tensor, kept: bool) -> None:
    """Copied where rows, matrices or the first element lie wrong, and only there."""
    with as_on_a_gpu():
        found = aligned(given)
    assert torch.equal(found, given) and found.is_contiguous() and is_read(found)
    assert (found is given) == kept
    assert aligned(given) is given  # as the CPU's kernels read it


def test_missing() -> None:
    with as_on_a_gpu():
        assert [missing(rank, normal(1)) for rank in (1, 7, 8, 9, 16)] == [7, 1, 0, 7, 0]
    assert missing(1, normal(1)) == 0


def stacked(experts: int, rank: int, outputs: int, inputs: int) -> LoRA:
    """As PEFT stores it."""
    return LoRA(normal(experts * rank, inputs), normal(outputs, rank * experts), 0.5)


def split(experts: int, rank: int, outputs: int, inputs: int) -> LoRA:
    return LoRA(normal(experts, rank, inputs), normal(experts, outputs, rank), 1.0)


def anywhere(experts: int, rank: int, outputs: int, inputs: int) -> LoRA:
    """Parts of something larger."""
    lora = split(experts, rank, outputs, inputs)
    return LoRA(moved(lora.a, 1), moved(lora.b, 3), 1.0)


def gradients(
    form: Callable[..., LoRA], rank: int, experts: int, apart: bool, flipped: bool, sink: bool
) -> list[Tensor]:
    """The output and the gradients of x, scores and terms."""
    names = ("gate", "up") if apart else ("both",)
    w_up = [normal(experts, INNER * (3 - len(names)), HIDDEN) for _ in names]
    w_down = normal(experts, HIDDEN, INNER)
    if flipped:
        w_up, w_down = [w.mT.contiguous().mT for w in w_up], w_down.mT.contiguous().mT
    up = [form(experts, rank + i, w.shape[1], HIDDEN) for i, w in enumerate(w_up)]
    down = form(experts, rank, HIDDEN, INNER)
    ids = (torch.arange(TOKENS * 2).view(TOKENS, 2) * 5 % 7) % experts
    x, scores = normal(TOKENS, HIDDEN), normal(TOKENS, 2).float()
    leaves = [x, scores, *(t for lora in (*up, down) for t in (lora.a, lora.b))]
    for leaf in leaves:
        leaf.requires_grad_()
    later = WeightGradients() if sink else None
    weights = tuple(w_up) if apart else w_up[0], w_down
    terms = {"lora_up": tuple(up) if apart else up[0], "lora_down": down}
    out = guild.routed_experts(x, ids, scores, *weights, **terms, weight_gradients=later)
    out.backward(moved(torch.ones_like(out), 1))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("apart, flipped, sink", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("rank", [1, 8, 13])
@pytest.mark.parametrize("form", [stacked, split, anywhere])
def test_what_reaches_the_steps(
    form: Callable[..., LoRA], rank: int, experts: int, apart: bool, flipped: bool, sink: bool
) -> None:
    """All of it can be read; results are those of the operands as they were given."""
    given = gradients(form, rank, experts, apart, flipped, sink)
    with as_on_a_gpu() as steps:
        found = gradients(form, rank, experts, apart, flipped, sink)
    assert steps.calls > 10
    for one, other in zip(found, given, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", [stacked, anywhere])
def test_compiles(form: Callable[..., LoRA]) -> None:
    """fullgraph, forward and backward: nothing that is asked of an operand's place is traced."""
    w_up, w_down = normal(3, INNER * 2, HIDDEN), normal(3, HIDDEN, INNER)
    offsets = torch.tensor([0, 5, 5, TOKENS], dtype=torch.int32)
    up, down = form(3, 3, INNER * 2, HIDDEN), form(3, 8, HIDDEN, INNER)

    def call(x: Tensor, *low: Tensor) -> Tensor:
        terms = {"lora_up": LoRA(*low[:2], 2.0), "lora_down": LoRA(*low[2:])}
        return guild.experts_mlp(x, offsets, w_up, w_down, **terms)

    inputs = normal(TOKENS, HIDDEN), up.a, up.b, down.a, down.b
    with as_on_a_gpu() as steps:
        assert_same(call, tuple(t.requires_grad_() for t in inputs), "aot_eager")
    assert steps.calls


def test_gradients_have_the_strides_of_the_weights(device: str) -> None:
    """As without low-rank terms, and as compiled code is told."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kind = {"device": device, "dtype": dtype}
    w_up = torch.randn(48, 4, 16, **kind).transpose(0, 1).requires_grad_()
    w_down = torch.randn(4, 16, 24, **kind)
    ids = torch.randint(4, (6, 2), device=device)
    tokens = torch.randn(6, 16, **kind), ids, torch.rand(6, 2, device=device)
    lora = guild.LoRA(torch.randn(4, 8, 24, **kind), torch.randn(4, 16, 8, **kind))
    for term in (None, lora):
        out = guild.routed_experts(*tokens, w_up, w_down, lora_down=term)
        (gradient,) = torch.autograd.grad(out.sum(), w_up)
        assert gradient.stride() == w_up.stride()
