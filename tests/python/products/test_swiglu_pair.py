"""The fused pair: its API's example unchanged, its formulas, and Guild's additions to it."""

from __future__ import annotations

import gc
import io
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from guild import Activation, grouped_mm_downproj, grouped_mm_swiglu
from guild.activations import PRESETS

TOKENS_PER_EXPERT = [128, 64, 0, 256, 192, 32, 128, 64]


def example(hidden: int, intermediate: int, device: str, dtype: torch.dtype = torch.bfloat16):
    """The tensors of the example, every one requiring a gradient, and offs."""
    torch.manual_seed(0)
    experts, rows = len(TOKENS_PER_EXPERT), sum(TOKENS_PER_EXPERT)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(device, dtype).requires_grad_()

    tensors = {
        "x": normal(rows, hidden),
        "W_up": normal(experts, hidden, 2 * intermediate, scale=hidden**-0.5),
        "b_up": normal(experts, 2 * intermediate),
        "W_down": normal(experts, intermediate, hidden, scale=intermediate**-0.5),
        "b_down": normal(experts, hidden),
    }
    ends = torch.tensor(TOKENS_PER_EXPERT).cumsum(0).to(device, torch.int32)
    return tensors, ends


def formulas(tensors: dict[str, Tensor], ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """swiglu_out, aux and out by the API's formulas, in float64, differentiable."""
    x, w_up, b_up, w_down, b_down = (
        tensors[n].double() for n in ("x", "W_up", "b_up", "W_down", "b_down")
    )
    starts = [0, *ends.tolist()[:-1]]
    spans = [slice(s, e) for s, e in zip(starts, ends.tolist(), strict=True)]
    aux = torch.cat([x[s] @ w_up[e] + b_up[e] for e, s in enumerate(spans)])
    gate, up = aux[:, 0::2].clamp(max=7.0), aux[:, 1::2].clamp(-7.0, 7.0)
    a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return a, aux, torch.cat([a[s] @ w_down[e] + b_down[e] for e, s in enumerate(spans)])


def close(name: str, value: Tensor, expected: Tensor, bound: float = 0.01) -> None:
    """Raise unless both agree to a few bfloat16 roundings, in norm."""
    assert value.shape == expected.shape, name
    error = (value.double() - expected.double()).norm() / expected.double().norm()
    assert error < bound, f"{name}: relative error {error:.3g}"


@pytest.mark.parametrize("sizes", [(2048, 1024), (64, 96)], ids=["full", "small"])
def test_the_example_unchanged(sizes: tuple[int, int], device: str) -> None:
    """The call as users write it, against the formulas."""
    torch.set_num_threads(2)
    tensors, offs = example(*sizes, device)
    x, W_up, b_up, W_down, b_down = tensors.values()

    swiglu_out, aux = grouped_mm_swiglu(
        x, W_up, offs=offs, bias=b_up, swiglu_alpha=1.702, swiglu_limit=7.0
    )
    out = grouped_mm_downproj(
        swiglu_out,
        W_down,
        offs=offs,
        bias=b_down,
        aux_biased_acc=aux,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
    )
    out.sum().backward()

    a, pre, expected = formulas(tensors, offs)
    close("swiglu_out", swiglu_out, a)
    close("aux", aux, pre)
    close("out", out, expected)
    truth = torch.autograd.grad(expected.sum(), list(tensors.values()))
    for (name, tensor), gradient in zip(tensors.items(), truth, strict=True):
        close(f"gradient of {name}", tensor.grad, gradient)
    for name in ("W_up", "b_up", "W_down", "b_down"):
        assert not tensors[name].grad[2].any(), f"{name}: expert 2 has no rows"


def test_transposed_views_of_parameters(device: str) -> None:
    """The same bits from (E, 2I, H) and (E, H, I) parameters, and gradients in their layout."""
    tensors, offs = example(64, 96, device)
    x, w_up, _, w_down, _ = (t.detach() for t in tensors.values())
    results = []
    for flip in (False, True):
        up, down = (w.mT.contiguous() if flip else w.clone() for w in (w_up, w_down))
        up.requires_grad_()
        down.requires_grad_()
        views = (up.mT, down.mT) if flip else (up, down)
        a, aux = grouped_mm_swiglu(x, views[0], offs)
        out = grouped_mm_downproj(a, views[1], offs, aux_biased_acc=aux)
        out.sum().backward()
        assert up.grad.is_contiguous() and down.grad.is_contiguous()
        grads = (up.grad.mT, down.grad.mT) if flip else (up.grad, down.grad)
        results.append((out, *grads))
    for packed, flipped in zip(*results, strict=True):
        close("flipped", flipped, packed, 4e-3)


@pytest.mark.parametrize("fused", [True, False], ids=["aux", "plain"])
def test_swiglu_out_used_on_its_own(fused: bool, device: str) -> None:
    """The gradient of a second use of swiglu_out is added, whichever path its first use takes."""
    tensors, offs = example(64, 96, device)
    x, w_up, b_up, w_down, b_down = tensors.values()
    swiglu_out, aux = grouped_mm_swiglu(x, w_up, offs, b_up)
    out = grouped_mm_downproj(swiglu_out, w_down, offs, b_down, aux if fused else None)
    (out.float().sum() + swiglu_out.float().square().sum()).backward()
    a, _, expected = formulas(tensors, offs)
    truth = torch.autograd.grad(expected.sum() + a.square().sum(), list(tensors.values()))
    for (name, tensor), gradient in zip(tensors.items(), truth, strict=True):
        close(f"gradient of {name}", tensor.grad, gradient, 0.02)


def test_aux_gets_no_gradient_from_rows_of_nobody(device: str) -> None:
    """Zeros there, whatever the memory held, so that anomaly mode and norms see none of it."""
    tensors, offs = example(64, 96, device)
    offs = offs - 64
    x, w_up, _, w_down, _ = tensors.values()
    for width in (64, 2 * 96):  # what freed memory holds
        torch.full((x.shape[0], width), float("nan"), device=device, dtype=x.dtype)
    with torch.autograd.detect_anomaly(check_nan=True):
        a, aux = grouped_mm_swiglu(x, w_up, offs)
        aux.retain_grad()
        grouped_mm_downproj(a, w_down, offs, aux_biased_acc=aux).sum().backward()
    assert not aux.grad[int(offs[-1]) :].any() and aux.grad[: int(offs[-1])].any()


def test_rows_of_nobody(device: str) -> None:
    """Rows past offs[-1] may hold anything; results and gradients there are zero."""
    tensors, offs = example(64, 96, device)
    offs = offs - 64  # expert 0 ends at 64, the last 64 rows have no expert
    x, w_up, b_up, w_down, b_down = tensors.values()
    used = int(offs[-1])
    results = []
    for filler in (1.0, float("nan")):
        rows = x.detach().clone()
        rows[used:] = filler
        rows.requires_grad_()
        a, aux = grouped_mm_swiglu(rows, w_up, offs, b_up)
        out = grouped_mm_downproj(a, w_down, offs, b_down, aux)
        dout = torch.ones_like(out)
        dout[used:] = filler
        grads = torch.autograd.grad(out, (rows, w_up, b_up, w_down, b_down), dout)
        assert not a[used:].any() and not out[used:].any() and not grads[0][used:].any()
        results.append((out, *grads))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_other_activations_and_orders(device: str) -> None:
    """Plain SwiGLU by name, concatenated weights, and an activation without a gate."""
    tensors, offs = example(64, 96, device)
    x, w_up = tensors["x"].detach(), tensors["W_up"].detach()
    together = torch.cat((w_up[:, :, 0::2], w_up[:, :, 1::2]), 2)
    a, aux = grouped_mm_swiglu(x, w_up, offs, activation="swiglu")
    b, aux_together = grouped_mm_swiglu(
        x, together, offs, activation="swiglu", order="concatenated"
    )
    assert torch.equal(a, b)
    assert torch.equal(aux, torch.stack(aux_together.chunk(2, 1), 2).flatten(1))
    gate, up = aux_together.double().chunk(2, 1)
    close("swiglu", a, torch.nn.functional.silu(gate) * up)
    c, _ = grouped_mm_swiglu(x, w_up, offs, activation="relu2_ungated")
    assert c.shape == (864, 192)
    close("offset", grouped_mm_swiglu(x, w_up, offs, None, 1.0, float("inf"), up_offset=0.0)[0], a)


def test_frozen_parts(device: str) -> None:
    """Only what requires a gradient gets one."""
    tensors, offs = example(64, 96, device)
    x, w_up, _, w_down, _ = tensors.values()
    a, aux = grouped_mm_swiglu(x.detach(), w_up.detach(), offs)
    grouped_mm_downproj(a, w_down, offs, aux_biased_acc=aux).sum().backward()
    assert w_down.grad is not None and w_up.grad is None
    w_down.grad = None
    a, aux = grouped_mm_swiglu(x.detach(), w_up, offs)
    grouped_mm_downproj(a, w_down.detach(), offs, aux_biased_acc=aux).sum().backward()
    assert w_up.grad is not None and w_down.grad is None


def test_autocast(device: str) -> None:
    """float32 parameters: bfloat16 products, float32 gradients."""
    tensors, offs = example(64, 96, device, torch.float32)
    x, w_up, b_up, w_down, b_down = tensors.values()
    with torch.autocast(device, dtype=torch.bfloat16):
        a, aux = grouped_mm_swiglu(x, w_up, offs, b_up)
        out = grouped_mm_downproj(a, w_down, offs, b_down, aux)
    assert a.dtype == aux.dtype == out.dtype == torch.bfloat16
    dout = torch.randn_like(out)
    out.backward(dout)
    exact = {n: t.detach().bfloat16().double().requires_grad_() for n, t in tensors.items()}
    expected = formulas(exact, offs)[2]
    close("out", out, expected)
    expected.backward(dout.double())
    for name, tensor in tensors.items():
        assert tensor.grad.dtype == torch.float32, name
        close(name, tensor.grad, exact[name].grad)


def mismatched(device: str) -> dict[str, tuple]:
    """Calls whose second half does not match what the first half was called with."""
    tensors, offs = example(64, 96, device)
    x, w_up, b_up, w_down, _ = tensors.values()
    a, aux = grouped_mm_swiglu(x, w_up, offs, b_up)
    other, other_aux = grouped_mm_swiglu(x, w_up, offs, b_up)
    changed, changed_aux = grouped_mm_swiglu(x.detach(), w_up.detach(), offs)
    changed.mul_(2)
    kept, changed_aux_alone = grouped_mm_swiglu(x.detach(), w_up.detach(), offs)
    changed_aux_alone.mul_(2)
    call = (w_down, offs, None)
    return {
        "alpha": ((a, *call, aux, 1.0), {}),
        "limit": ((a, *call, aux, 1.702, 6.0), {}),
        "up_offset": ((a, *call, aux), {"up_offset": 0.0}),
        "activation": ((a, *call, aux), {"activation": Activation("gelu")}),
        "order": ((a, *call, aux), {"order": "concatenated"}),
        "other aux": ((a, *call, other_aux), {}),
        "derived swiglu_out": ((other * 2, *call, other_aux), {}),
        "changed in place": ((changed, *call, changed_aux), {}),
        "aux changed in place": ((kept, *call, changed_aux_alone), {}),
    }


@pytest.mark.parametrize(
    "what",
    [
        "alpha",
        "limit",
        "up_offset",
        "activation",
        "order",
        "other aux",
        "derived swiglu_out",
        "changed in place",
        "aux changed in place",
    ],
)
def test_mismatch_is_detected(what: str, device: str) -> None:
    """Each would give a wrong gradient; each is an error that names aux_biased_acc."""
    args, options = mismatched(device)[what]
    with pytest.raises(ValueError, match=r"aux_biased_acc: expected the "):
        grouped_mm_downproj(*args, **options)


def test_inference_mode(device: str) -> None:
    """Inference tensors have no version counter; the bits are the same as outside."""
    tensors, offs = example(64, 96, device)
    x, w_up, b_up, w_down, b_down = (t.detach() for t in tensors.values())

    def pair() -> Tensor:
        a, aux = grouped_mm_swiglu(x, w_up, offs, b_up)
        return grouped_mm_downproj(a, w_down, offs, b_down, aux)

    expected = pair()
    with torch.inference_mode():
        assert torch.equal(pair(), expected)


def test_autocast_around_the_second_alone() -> None:
    """aux is cast as swiglu_out is; its gradient comes back in float32."""
    tensors, offs = example(64, 96, "cpu", torch.float32)
    x, w_up, b_up, w_down, b_down = tensors.values()
    a, aux = grouped_mm_swiglu(x, w_up, offs, b_up)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_mm_downproj(a, w_down, offs, b_down, aux)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    truth = torch.autograd.grad(formulas(tensors, offs)[2].sum(), [*tensors.values()])
    for (name, tensor), expected in zip(tensors.items(), truth, strict=True):
        close(name, tensor.grad, expected)


def test_swiglu_out_is_saved_as_any_tensor() -> None:
    """torch.load reads the file, which holds nothing besides the values."""
    tensors, offs = example(64, 96, "cpu")
    a, _ = grouped_mm_swiglu(tensors["x"].detach(), tensors["W_up"].detach(), offs)
    file = io.BytesIO()
    torch.save(a, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, a) and not vars(loaded)


def test_notes_end_with_their_tensors() -> None:
    """What is remembered of a call, for comparison, is dropped together with its swiglu_out."""
    tensors, offs = example(64, 96, "cpu")
    a, aux = grouped_mm_swiglu(tensors["x"], tensors["W_up"], offs)
    kept = weakref.ref(aux)
    assert kept() is aux
    del a, aux
    gc.collect()
    assert kept() is None


def test_wrong_swiglu_out_beside_aux() -> None:
    """The error names what is wrong."""
    tensors, offs = example(64, 96, "cpu")
    x, w_up, _, w_down, _ = (t.detach() for t in tensors.values())
    a, aux = grouped_mm_swiglu(x, w_up, offs)
    with pytest.raises(ValueError, match=r"^w_down: expected shape "):
        grouped_mm_downproj(a[:, :8], w_down, offs, aux_biased_acc=aux)
    with pytest.raises(TypeError, match=r"^swiglu_out: expected "):
        grouped_mm_downproj(a.int(), w_down, offs, aux_biased_acc=aux)


def test_another_aux_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a graph tensors have no identity to compare, but shape and dtype are checked."""
    tensors, offs = example(64, 96, "cpu")
    x, w_up, _, w_down, _ = (t.detach() for t in tensors.values())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    a, aux = grouped_mm_swiglu(x, w_up, offs)
    grouped_mm_downproj(a, w_down, offs, aux_biased_acc=aux)
    with pytest.raises(ValueError, match=r"^aux_biased_acc: expected shape \(864, 192\), got \(8,"):
        grouped_mm_downproj(a, w_down, offs, aux_biased_acc=aux[:8])
    with pytest.raises(TypeError, match=r"^aux_biased_acc: expected dtype bfloat16 like swiglu"):
        grouped_mm_downproj(a, w_down, offs, aux_biased_acc=aux.float())


def test_no_swiglu_out() -> None:
    """swiglu_out is required even with aux, since the note on aux is looked up by it."""
    tensors, offs = example(64, 96, "cpu")
    _, aux = grouped_mm_swiglu(tensors["x"], tensors["W_up"], offs)
    with pytest.raises(TypeError, match=r"^swiglu_out: expected a torch.Tensor, got NoneType"):
        grouped_mm_downproj(None, tensors["W_down"], offs, aux_biased_acc=aux)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_activations_of_infinite_gates(name: str, dtype: torch.dtype) -> None:
    """Values, slopes and second derivatives have their limits, also where squares overflow."""
    activation = replace(PRESETS[name], gated=False, up_offset=0.0, limit=torch.inf)
    gate = torch.tensor([-torch.inf, -1e30, -1e20, 1e20, 1e30, torch.inf], dtype=dtype)
    gate = gate[:, None].requires_grad_()
    square = activation.kind == "relu2"
    positive = gate.detach().clamp(min=0)
    value = activation(gate)
    slope = activation.gradient(gate, torch.ones_like(gate))
    assert torch.equal(value, positive**2 if square else positive)
    assert torch.equal(slope, 2 * positive if square else positive.sign())
    (curve,) = torch.autograd.grad(slope.sum(), gate)
    assert torch.equal(curve, 2 * positive.sign() if square else torch.zeros_like(gate))


def test_gradients_of_a_sum_that_overflows() -> None:
    """In float16, by the kernels, by torch's operations, and of the first product alone."""
    x, ends = torch.tensor([[256.0]]).half(), torch.tensor([1], dtype=torch.int32)
    w_up = torch.tensor([[[-300.0, 1.0]]]).half().requires_grad_()
    w_down = torch.ones(1, 1, 1).half().requires_grad_()
    a, aux = grouped_mm_swiglu(x, w_up, ends)
    out = grouped_mm_downproj(a, w_down, ends, aux_biased_acc=aux)
    for create_graph in (False, True):
        found = torch.autograd.grad(
            out.sum(), [w_up, w_down], retain_graph=True, create_graph=create_graph
        )
        assert not any(gradient.any() for gradient in found)
    assert not torch.autograd.grad(a.sum(), w_up)[0].any()
