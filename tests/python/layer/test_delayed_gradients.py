"""Delayed gradients that fail part of the way, are discarded, or whose operands are overwritten."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import guild
from guild import FP8, WeightGradients, routed_experts

EXPERTS, HIDDEN, SIZE, TOKENS = 4, 128, 64, 12
SHAPES = {
    "w_up": (EXPERTS, 2 * SIZE, HIDDEN),
    "w_down": (EXPERTS, HIDDEN, SIZE),
    "b_up": (EXPERTS, 2 * SIZE),
    "b_down": (EXPERTS, HIDDEN),
}
CODES = FP8(wgrad="fp8")
Layer = dict[str, Tensor | list[Tensor] | tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def copies_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", guild.CopiedWeightsWarning)
        yield


def layer_on(device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    kind = {"device": device, "dtype": torch.bfloat16}
    return {n: (torch.randn(s, **kind) / 8).requires_grad_() for n, s in SHAPES.items()}


def out_of(layer: Layer, device: str, sink: WeightGradients | None, **how: object) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.arange(2 * TOKENS, device=device).view(TOKENS, 2) % EXPERTS
    scores = torch.rand(TOKENS, 2, device=device)
    return routed_experts(x, ids, scores, **layer, weight_gradients=sink, **how)


@pytest.mark.parametrize("biased", [False, True])
def test_output_gradient_overwritten_beside_codes(device: str, biased: bool) -> None:
    """The gradient of b_down reads it again; those of the weights read codes of their own."""
    found = []
    for overwritten in (False, True):
        layer, sink = layer_on(device), WeightGradients(delayed=True)
        layer["b_down"].requires_grad_(biased)
        out = out_of(layer, device, sink, fp8=CODES)
        dout = torch.ones_like(out)
        out.backward(dout)
        if overwritten:
            dout.zero_()
        if overwritten and biased:
            with pytest.raises(RuntimeError, match=r"^the output's gradient: expected to find it"):
                sink.compute()
            return
        sink.compute()
        found.append([layer[n].grad for n in ("w_up", "w_down", "b_up")])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_that_overlap(name: str, listed: bool, delayed: bool) -> None:
    """Forward refuses to add to them, as `compute` and backward do if they come later."""
    layer = layer_on("cpu")
    if listed:
        parts = {n: t.detach().clone().unbind() for n, t in layer.items()}
        layer = {n: [t.requires_grad_() for t in ts] for n, ts in parts.items()}
    wrong = layer[name][2] if listed else layer[name]
    sink = WeightGradients(delayed=delayed)
    out = out_of(layer, "cpu", sink)
    wrong.grad = torch.zeros(1, dtype=wrong.dtype).expand(wrong.shape)
    with pytest.raises(ValueError, match=rf"^{name}.*\.grad: expected elements that do not"):
        out.sum().backward()
        sink.compute()
    own = rf"{name}\[2\]" if listed else name
    with pytest.raises(ValueError, match=rf"^{own}\.grad: expected elements that do not overlap"):
        out_of(layer, "cpu", sink)


@pytest.mark.parametrize("fp8", [None, CODES])
def test_discarded(device: str, fp8: FP8 | None) -> None:
    """What a skipped step has left is neither computed nor kept, nor in the way of the next."""
    layer, plain = layer_on(device), layer_on(device)
    out_of(plain, device, None, fp8=fp8).sum().backward()
    sink = WeightGradients(delayed=True)
    out = out_of(layer, device, sink, fp8=fp8)
    dout = torch.ones_like(out)
    out.backward(dout)
    del out
    dout.zero_()
    with pytest.raises(RuntimeError, match="expected to find it as backward left it"):
        sink.compute()
    kept = weakref.ref(dout)
    del dout
    assert sink.pending == 1 and kept() is not None
    sink.discard()
    assert sink.pending == 0 and kept() is None
    assert all(t.grad is None for t in layer.values())
    sink.discard()
    out_of(layer, device, sink, fp8=fp8).sum().backward()
    sink.compute()
    for name, t in layer.items():
        torch.testing.assert_close(t.grad, plain[name].grad, rtol=2e-2, atol=2e-2)


class NoMemory(TorchDispatchMode):
    """Fails at one of the ops that write gradients or allocate memory for them."""

    WRITING = ("gradients_out", "gradient_out", "product_out", "add_", "copy_")
    ALLOCATING = ("::empty", "::zeros", "empty_like", "zeros_like", "_to_copy")

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.endswith(self.WRITING + self.ALLOCATING):
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError(f"no memory for {func}")
        return func(*args, **(kwargs or {}))


def members(layer: Layer) -> list[Tensor]:
    return [t for w in layer.values() for t in ([w] if isinstance(w, Tensor) else w)]


def given_targets(layer: dict[str, Tensor], case: str) -> Layer:
    """The layer with tensors to add to, which are not written alike."""
    found: Layer = dict(layer)
    if "pair" in case:
        halves = layer["w_up"].detach().chunk(2, 1)
        found["w_up"] = tuple(t.clone().requires_grad_() for t in halves)
    if case == "lists":
        for name, whole in layer.items():
            found[name] = [t.requires_grad_() for t in whole.detach().clone()]
            found[name][1].requires_grad_(False)
    for i, t in enumerate(members(found)):
        wide = (i % 2 == 0) != (case == "narrow")
        t.main_grad = torch.ones_like(t, dtype=torch.float32 if wide else t.dtype)
        t.overwrite_main_grad = case == "overwritten"
        t.grad = torch.ones_like(t) if case == "pair" else None
    return found


@pytest.mark.parametrize("case", ["narrow", "wide", "pair", "new pair", "lists", "overwritten"])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize(
    "how",
    [{}, {"fp8": CODES}, {"fp8": CODES, "order": "interleaved"}],
    ids=["16 bits", "codes", "interleaved codes"],
)
def test_failing_at_any_op(device: str, case: str, main_grad: bool, how: dict) -> None:
    """`compute` goes on where it was, and adds nothing twice."""
    if "pair" in case and "order" in how:
        pytest.skip("a pair has no order")
    where = "main_grad" if main_grad else "grad"

    def gradients(at: int) -> tuple[list[Tensor | None], bool]:
        layer = given_targets(layer_on(device), case)
        sink = WeightGradients(main_grad=main_grad, delayed=True)
        out_of(layer, device, sink, **how).sum().backward()
        failed = False
        try:
            with NoMemory(at):
                sink.compute()
        except torch.OutOfMemoryError:
            failed = True
            assert sink.pending == 1
            sink.compute()
        assert sink.pending == 0
        return [getattr(t, where) for t in members(layer)], failed

    wanted, _ = gradients(-1)
    failures = 0
    while True:
        got, failed = gradients(failures)
        for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert (one is None) == (other is None), (failures, i)
            assert one is None or torch.equal(one, other), (failures, i)
        if not failed:
            break
        failures += 1
    assert failures >= 3


def test_gradients_of_inference_mode(device: str) -> None:
    """An output's gradient whose writes torch does not count."""
    layer = layer_on(device)
    sink = WeightGradients()
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    ids = torch.randint(EXPERTS, (TOKENS, 2), device=device)
    out = routed_experts(
        x, ids, torch.ones(ids.shape, device=device), **layer, weight_gradients=sink
    )
    with torch.inference_mode():
        dout = torch.ones_like(out)
    out.backward(dout)
    assert all(t.grad is not None for t in layer.values())
