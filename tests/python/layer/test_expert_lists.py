"""Weights as lists of one tensor per expert: what is read in place, and where gradients go."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import guild
from guild import WeightGradients, experts_mlp, grouped_mm, routed_experts
from guild._torch.expert_lists import view_of
from listed_layers import (
    CALLS,
    EVEN,
    EXPERTS,
    HIDDEN,
    SHAPES,
    UNEVEN,
    apart,
    backwards,
    copies_are_errors,  # noqa: F401 - a fixture of every test here
    dtype_of,
    expect_gradients,
    expected,
    inputs,
    scattered,
    sorted_call,
    through_data,
    views,
    whole_layer,
)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("made", EVEN + UNEVEN)
def test_lists_are_read_in_place(device: str, call: Callable, made: Callable) -> None:
    """The same bits, and a gradient of its own for each tensor, without a copy of a weight."""
    layer = whole_layer(device)
    out, dx, gradients = expected(call, layer, device)
    lists = {n: made(t) for n, t in layer.items()}
    x, ours = call(lists, device)
    assert torch.equal(ours, out)
    ours.square().sum().backward()
    assert torch.equal(x.grad, dx)
    expect_gradients(lists, gradients)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("made", [apart, views])
def test_views_of_negatives(device: str, call: Callable, made: Callable) -> None:
    """Negated views among a list, whose memory, which kernels read, holds the opposite numbers."""
    layer = whole_layer(device)
    out, dx, gradients = expected(call, layer, device)
    lists = {n: list(made(t)) for n, t in layer.items()}
    for parts in lists.values():
        parts[1::2] = [torch._neg_view(-p.detach()).requires_grad_() for p in parts[1::2]]
    x, ours = call(lists, device)
    assert torch.equal(ours, out)
    ours.square().sum().backward()
    assert torch.equal(x.grad, dx)
    expect_gradients(lists, gradients)


def test_ids_outside_stay_outside() -> None:
    """Counted from the last expert, too; those of the least and the greatest numbers as well."""
    layer = {n: backwards(t) for n, t in whole_layer("cpu").items()}
    x = torch.randn(6, HIDDEN, dtype=torch.float64)
    for dtype in (torch.int32, torch.int64):
        numbers = torch.iinfo(dtype)
        ids = torch.tensor([[-1], [EXPERTS], [numbers.min], [numbers.max], [-2], [0]], dtype=dtype)
        out = routed_experts(x, ids, torch.ones(6, 1), **layer)
        assert not out[:5].any() and out[5].any()


def test_lay_evenly_keeps_values_and_identity() -> None:
    parts = apart(torch.randn(3, 4, 5))
    values = [p.detach().clone() for p in parts]
    before = list(parts)
    guild.lay_evenly(parts)
    assert all(p is b and torch.equal(p, v) for p, b, v in zip(parts, before, values, strict=True))
    assert view_of(parts) is not None
    with pytest.raises(ValueError, match=r"tensors\[1\]: expected shape \(4, 5\)"):
        guild.lay_evenly([parts[0], torch.randn(4, 6)])
    for wrong, kind in ((None, "NoneType"), (torch.randn(3, 4, 5), "Tensor")):
        with pytest.raises(TypeError, match=f"tensors: expected a sequence .*, got {kind}"):
            guild.lay_evenly(wrong)
    with pytest.raises(ValueError, match="tensors: expected one or more"):
        guild.lay_evenly([])


def test_views_stay_inside_the_storage() -> None:
    """Evenly spaced addresses do not make a tensor unless one storage holds them all."""
    whole = torch.randn(6, 2, 3)
    parts = list(whole)
    assert view_of(parts).data_ptr() == whole.data_ptr()
    assert view_of(parts).shape == (6, 2, 3)
    assert view_of([whole[0], whole[2], whole[4]]).stride() == (12, 3, 1)
    assert view_of([whole[0], whole[1], whole[3]]) is None
    assert view_of([whole[2], whole[1], whole[0]]) is None
    assert view_of([whole[0], whole[1].mT.contiguous().mT]) is None
    assert view_of([whole[1], whole[1]]) is None
    assert view_of([whole[0], whole[1].view(torch.int32)]) is None
    assert view_of([whole[0], whole[1, :1]]) is None
    memory = bytearray(2 * 24)  # two storages that touch
    touching = [torch.frombuffer(memory, dtype=torch.float32, count=6, offset=o) for o in (0, 24)]
    assert view_of([t.view(2, 3) for t in touching]) is None


@pytest.mark.parametrize("made", [views, scattered])
def test_no_weight_is_copied(device: str, made: Callable) -> None:
    """Neither forward nor backward holds a tensor as large as a weight, except the gradients."""
    seen: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                    seen.append(t.untyped_storage().nbytes())
            return out

    layer = whole_layer(device)
    lists = {n: made(t) for n, t in layer.items() if n.startswith("w")}
    known = {parts[0].untyped_storage().data_ptr() for parts in lists.values()}
    x = torch.randn(1, HIDDEN, device=device, dtype=dtype_of(device), requires_grad=True)
    offsets = torch.tensor([0, 1, 1, 1, 1], device=device, dtype=torch.int32)
    with Watch():
        out = experts_mlp(x, offsets, **lists)
    smallest = min(t.numel() for n, t in layer.items() if n in lists) * x.element_size()
    assert seen and max(seen) < smallest
    seen.clear()
    with Watch():
        out.sum().backward()
    weights = sorted(b for b in set(seen) if b >= smallest)
    assert weights == sorted(t.numel() * t.element_size() for n, t in layer.items() if n in lists)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("sink", [None, WeightGradients(main_grad=True)])
def test_the_allocator_sees_no_weight(
    gpu: str, sink: WeightGradients | None, even: bool, call: Callable
) -> None:
    """Weights of 24 MiB and few rows: forward takes next to nothing, backward the gradients."""
    place = {"device": gpu, "dtype": torch.bfloat16}
    whole = torch.randn(8, 2 * 512, 1024, **place), torch.randn(8, 1024, 512, **place)
    lists = [views(w) if even else apart(w) for w in whole]
    for parts, w in zip(lists, whole, strict=True):
        buffer = torch.zeros_like(w, dtype=torch.float32)
        for part, main in zip(parts, buffer if even else apart(buffer), strict=True):
            part.main_grad = main.detach()
    del buffer
    x = torch.randn(8, 1024, **place, requires_grad=True)
    offsets = torch.arange(9, device=gpu, dtype=torch.int32)

    def most_of(step: Callable) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before

    def run() -> Tensor:
        more = {"weight_gradients": sink}
        if call is sorted_call:
            return experts_mlp(x, offsets, *lists, **more)
        ids = torch.arange(8, device=gpu)[:, None]
        return routed_experts(x, ids, torch.ones(8, 1, device=gpu), *lists, **more)

    weights, little, outs = sum(w.nbytes for w in whole), 2 << 20, []
    assert most_of(lambda: outs.append(run())) < little
    gradients = 0 if sink else weights
    assert most_of(lambda: outs[0].sum().backward()) < gradients + little


@pytest.mark.parametrize("call", CALLS)
def test_a_pair_of_lists(device: str, call: Callable) -> None:
    layer = whole_layer(device)
    gate, up = layer.pop("w_up").chunk(2, 1)
    b_gate, b_up = layer.pop("b_up").chunk(2, 1)
    pair = {**layer, "w_up": (gate.contiguous(), up.contiguous()), "b_up": (b_gate, b_up)}
    _, out = call(pair, device)
    lists = {
        **{n: views(t) for n, t in layer.items()},
        "w_up": (views(gate), views(up)),
        "b_up": [views(b_gate), views(b_up)],
    }
    _, ours = call(lists, device)
    assert torch.equal(ours, out)
    ours.sum().backward()
    assert all(p.grad is not None for half in lists["w_up"] for p in half)
    assert all(p.grad is not None for half in lists["b_up"] for p in half)


def test_some_experts_are_frozen(device: str) -> None:
    layer = whole_layer(device)
    _, _, gradients = expected(sorted_call, layer, device)
    for sink in (None, WeightGradients()):
        lists = {n: views(t) for n, t in layer.items()}
        for parts in lists.values():
            parts[0].requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", guild.CopiedWeightsWarning)  # of the gradients
            sorted_call(lists, device, weight_gradients=sink)[1].square().sum().backward()
        for name, parts in lists.items():
            assert parts[0].grad is None
            for part, gradient in zip(parts[1:], gradients[name][1:], strict=True):
                assert torch.equal(part.grad, gradient), name


def test_one_tensor_for_all_experts(device: str) -> None:
    """Its gradients add up."""
    layer = whole_layer(device)
    shared = torch.nn.Parameter(layer["w_down"][0].clone())
    tied = layer["w_down"][:1].expand(EXPERTS, -1, -1).clone().requires_grad_()
    sorted_call({**layer, "w_down": tied}, device)[1].sum().backward()
    lists = {**layer, "w_down": [shared] * EXPERTS}
    sorted_call(lists, device)[1].sum().backward()
    wanted = tied.grad.sum(0)
    bound = (1e-9 if device == "cpu" else 2e-2) * float(wanted.abs().max())  # parts are rounded
    torch.testing.assert_close(shared.grad, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("made", [views, *UNEVEN])
def test_grouped_mm_of_lists(device: str, made: Callable) -> None:
    layer = whole_layer(device)
    x, _, _ = inputs(device)
    ends = torch.tensor([9, 9, 14, 22], device=device, dtype=torch.int32)
    whole = layer["w_up"].clone().requires_grad_()
    out = grouped_mm(x, whole.mT, offs=ends, bias=layer["b_up"])
    out.sum().backward()
    parts = made(layer["w_up"])
    ours = grouped_mm(x, [p.mT for p in parts], offs=ends, bias=layer["b_up"])
    ours.sum().backward()
    assert torch.equal(ours, out)
    assert torch.equal(torch.stack([p.grad for p in parts]), whole.grad)
    y = torch.randn(HIDDEN, 24, device=device, dtype=dtype_of(device))
    results = []
    for left in (parts, whole):
        y.requires_grad_().grad = None
        results.append(grouped_mm(left, y, offs=ends))
        results[-1].square().sum().backward()
        results.append(y.grad)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    right = made(layer["w_up"].mT.contiguous())
    both, all_left = grouped_mm(parts, right), grouped_mm(whole, torch.stack(right))
    assert torch.equal(both, all_left)
    assert torch.equal(
        grouped_mm(
            x.detach(), [p.mT for p in made(layer["w_up"])], offs=ends, out_dtype=torch.float32
        ).double(),
        grouped_mm(x.detach(), whole.mT, offs=ends, out_dtype=torch.float32).double(),
    )


def test_overwritten_before_backward(device: str) -> None:
    lists = {n: through_data(t) for n, t in whole_layer(device).items()}
    for sink in (None, WeightGradients()):
        _, out = sorted_call(lists, device, weight_gradients=sink)
        with torch.no_grad():
            lists["w_down"][2].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_compiled_and_transformed() -> None:
    """Where tensors have no addresses the list is stacked: the same result and gradients."""
    layer = whole_layer("cpu")
    out, _, gradients = expected(sorted_call, layer, "cpu")
    lists = {n: views(t) for n, t in layer.items()}
    x, _, _ = inputs("cpu")
    offsets = torch.tensor([0, 9, 9, 14, 22], dtype=torch.int32)

    def call(w_up: list[Tensor]) -> Tensor:
        return experts_mlp(x, offsets, **{**lists, "w_up": w_up})

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    ours = compiled(lists["w_up"])
    assert torch.equal(ours, out)
    ours.square().sum().backward()
    assert torch.equal(torch.stack([p.grad for p in lists["w_up"]]), gradients["w_up"])
    func, given = torch.func, [p.detach() for p in lists["w_up"]]

    def loss(w: list[Tensor]) -> Tensor:
        return call(w).square().sum()

    def of_one(w: Tensor) -> Tensor:
        return func.vmap(lambda row: loss(list(row)))(w[None]).sum()

    # Inner levels do not know that outer ones differentiate.
    whole, one = torch.stack(given), torch.ones((), dtype=torch.float64)
    for made in (
        torch.stack(func.grad(loss)(given)),
        func.grad(of_one)(whole),
        torch.stack(func.grad(func.functionalize(loss))(given)),
        torch.stack(func.grad(lambda w: func.grad(lambda s: s * loss(w))(one))(given)),
    ):
        assert torch.equal(made, gradients["w_up"])
    of_one(leaf := whole.clone().requires_grad_()).backward()
    assert torch.equal(leaf.grad, gradients["w_up"])


def test_second_derivative() -> None:
    """grouped_mm's go through the list."""
    torch.manual_seed(0)
    ends = torch.tensor([2, 5], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for made in (views, apart):
        parts = made(torch.randn(2, 3, 4, dtype=torch.float64))
        assert torch.autograd.gradgradcheck(
            lambda x, *w: grouped_mm(x, list(w), offs=ends), (x, *parts)
        )


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda w: [*w[:3], w[3][:, :4]], ValueError, r"w_down\[3\]: expected shape \(16, 8\)"),
        (lambda w: [*w[:3], w[3].float()], TypeError, r"w_down\[3\]: expected dtype float64 like"),
        (lambda w: w[:3], ValueError, r"w_up: expected shape \(3, 16, 16\), got \(4, 16, 16\)"),
        (lambda w: [], TypeError, "w_down: expected a torch.Tensor, got list"),
        (lambda w: ["x", *w[1:]], TypeError, "w_down: expected a torch.Tensor, got list"),
        (lambda w: [*w[:3], "x"], TypeError, r"w_down\[3\]: expected a torch.Tensor, got str"),
        (lambda w: [*w[:3], w[3][None]], ValueError, r"w_down\[3\]: expected shape \(16, 8\), got"),
        (lambda w: [w[0].to_sparse()] * 4, TypeError, r"w_down\[0\]: expected a dense tensor, got"),
        (lambda w: [*w[:3], w[3].to_sparse_csr()], TypeError, r"w_down\[3\]: expected a dense"),
        (
            lambda w: [torch.nested.nested_tensor(list(w[0]))] * 4,
            TypeError,
            r"w_down\[0\]: expected a dense tensor, got a nested one",
        ),
    ],
)
def test_wrong_lists(wrong: Callable, error: type, message: str) -> None:
    lists = {n: views(t) for n, t in whole_layer("cpu").items()}
    with pytest.raises(error, match=message):
        sorted_call({**lists, "w_down": wrong(lists["w_down"])}, "cpu")


def test_one_expert_whose_stride_means_nothing(device: str) -> None:
    """What one matrix's distance from the next would be may be any number."""
    x, _, _ = inputs(device)
    up, down = (torch.randn(s[1:], device=device, dtype=x.dtype) for s in list(SHAPES.values())[:2])
    offsets = torch.tensor([0, 24], device=device, dtype=torch.int32)
    wanted = experts_mlp(x, offsets, up[None], down[None])
    odd = [t.as_strided((1, *t.shape), (13, *t.stride())) for t in (up, down)]
    assert torch.equal(experts_mlp(x, offsets, *odd), wanted)
    ends = offsets[1:]
    product = grouped_mm(x, up[None].mT, offs=ends)
    assert torch.equal(grouped_mm(x, odd[0].mT, offs=ends), product)
    assert torch.equal(grouped_mm(x[None], odd[0].mT), product[None])


def grouped_call(layer: dict, device: str, **more: object) -> tuple[Tensor, Tensor]:
    x, _, _ = inputs(device)
    ends = torch.tensor([9, 9, 14, 22], device=device, dtype=torch.int32)
    return x, grouped_mm(x, layer["w_up"], ends, layer["b_up"])


def float8_call(layer: dict, device: str, **more: object) -> tuple[Tensor, Tensor]:
    x, ids, scores = inputs(device)
    return x, routed_experts(x.bfloat16(), ids, scores, **layer, fp8=guild.FP8(), **more)


@pytest.mark.parametrize("sink", [None, WeightGradients()])
@pytest.mark.parametrize("made", [views, apart])
@pytest.mark.parametrize("call", [*CALLS, float8_call, grouped_call])
def test_tangents(call: Callable, made: Callable, sink: object, device: str) -> None:
    """Forward mode raises as it does for tensors of all experts, with gradients or without."""
    layer = whole_layer(device)
    if call is float8_call:
        layer = {n: t.bfloat16() for n, t in layer.items()}
    if call is grouped_call:
        layer["w_up"] = layer["w_up"].mT.contiguous()
    for name in ("w_up", "b_up") if call is grouped_call else layer:
        for gradients in (True, False):
            with forward_ad.dual_level(), torch.set_grad_enabled(gradients):
                parts = [t.detach() for t in made(layer[name])]
                parts = [forward_ad.make_dual(t, torch.ones_like(t)) for t in parts]
                with pytest.raises(NotImplementedError, match="a list of tensors has no forward-"):
                    call(layer | {name: parts}, device, weight_gradients=sink)


def test_biases_with_strides(device: str) -> None:
    """Vectors that are evenly spaced, but whose elements are not side by side, are gathered."""
    layer = whole_layer(device)
    b_up, b_down = (
        torch.randn(width, EXPERTS).to(layer["w_up"])
        for width in (2 * layer["w_down"].shape[2], HIDDEN)
    )
    x, ids, scores = inputs(device)
    lists = [[b[:, e] for e in range(EXPERTS)] for b in (b_up, b_down)]
    weights = layer["w_up"], layer["w_down"]
    whole = b_up.mT.contiguous(), b_down.mT.contiguous()
    got, want = (routed_experts(x, ids, scores, *weights, *given) for given in (lists, whole))
    assert torch.equal(got, want)
