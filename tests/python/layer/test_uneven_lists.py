"""Lists of one tensor per expert whose tensors are unevenly spaced in memory."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import guild
import listed_layers
from guild import WeightGradients, experts_mlp, grouped_mm, routed_experts
from guild._torch.expert_lists import placed
from listed_layers import (
    CALLS,
    EXPERTS,
    HIDDEN,
    INNER,
    UNEVEN,
    apart,
    copies_are_errors,  # noqa: F401 - a fixture of every test here
    dtype_of,
    expect_gradients,
    expected,
    inputs,
    routed_call,
    scattered,
    sorted_call,
    views,
    whole_layer,
)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("made", UNEVEN)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_gradients_of_uneven_lists(
    device: str, call: Callable, made: Callable, dtype: torch.dtype | None
) -> None:
    """`.grad` and `main_grad` are written and added to where they are, as those of whole tensors.

    dtype: of main_grad; None: of the parameters.
    """
    layer = whole_layer(device)
    dtype = dtype or dtype_of(device)
    sink = WeightGradients(main_grad=True)
    whole = {n: torch.nn.Parameter(t.clone()) for n, t in layer.items()}
    lists = {n: made(t) for n, t in layer.items()}
    for name, t in whole.items():
        t.main_grad = torch.ones_like(t, dtype=dtype)
        for part, main in zip(lists[name], made(t.main_grad), strict=True):
            part.main_grad = main.detach()
    pointers = {n: [p.main_grad.data_ptr() for p in parts] for n, parts in lists.items()}
    for _ in range(2):  # over the ones, then over the sum
        for weights in (whole, lists):
            call(weights, device, weight_gradients=sink)[1].square().sum().backward()
    for name, parts in lists.items():
        assert [p.main_grad.data_ptr() for p in parts] == pointers[name]
        assert all(p.grad is None for p in parts)
        got, wanted = torch.stack([p.main_grad for p in parts]), whole[name].main_grad
        if name.startswith("w"):
            assert torch.equal(got, wanted), name
        else:  # gathered, and added afterwards
            torch.testing.assert_close(
                got, wanted, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-5
            )
    for weights in (whole, lists):  # `.grad`: made, then added to
        for _ in range(2):
            sink = WeightGradients()
            call(weights, device, weight_gradients=sink)[1].square().sum().backward()
    for name, parts in lists.items():
        assert torch.equal(torch.stack([p.grad for p in parts]), whole[name].grad), name


@pytest.mark.parametrize("call", CALLS)
def test_grads_that_lie_unevenly(device: str, call: Callable) -> None:
    """Those that are there are added to in place; one that is missing is made."""
    layer = whole_layer(device)
    _, _, gradients = expected(call, layer, device)
    lists = {n: apart(t) for n, t in layer.items()}
    for parts in lists.values():
        for part in parts[1:]:
            part.grad = torch.zeros_like(part)
    pointers = {n: [p.grad.data_ptr() for p in parts[1:]] for n, parts in lists.items()}
    call(lists, device, weight_gradients=WeightGradients())[1].square().sum().backward()
    for name, parts in lists.items():
        assert [p.grad.data_ptr() for p in parts[1:]] == pointers[name]
        assert torch.equal(torch.stack([p.grad for p in parts]), gradients[name]), name


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("made", UNEVEN)
def test_an_uneven_pair(device: str, call: Callable, made: Callable) -> None:
    """Gate, up and down each at distances of their own, and one of them one tensor."""
    layer = whole_layer(device)
    gate, up = (half.contiguous() for half in layer.pop("w_up").chunk(2, 1))
    x, out = call({**layer, "w_up": (gate, up)}, device)
    out.sum().backward()
    for ours in (
        {**layer, "w_up": (made(gate), made(up))},
        {**layer, "w_up": (gate, made(up)), "w_down": made(layer["w_down"])},
        {**layer, "w_up": (views(gate), made(up))},
    ):
        y, result = call(ours, device)
        assert torch.equal(result, out)
        result.sum().backward()
        assert torch.equal(y.grad, x.grad)


@pytest.mark.parametrize("made", [views, *UNEVEN])
def test_transposed_lists(device: str, made: Callable) -> None:
    """Lists of transposed matrices, and of views whose columns are contiguous."""
    layer = whole_layer(device)
    out = sorted_call(layer, device)[1]
    flipped = {n: t.mT.contiguous() if t.dim() == 3 else t for n, t in layer.items()}
    lists = {n: made(t) for n, t in flipped.items()}
    assert torch.equal(sorted_call(lists, device, transposed=True)[1], out)
    seen = {n: [p.mT if p.dim() == 2 else p for p in parts] for n, parts in lists.items()}
    ours = sorted_call(seen, device)[1]
    assert torch.equal(ours, out)
    ours.sum().backward()
    whole = {n: t.clone().requires_grad_() for n, t in flipped.items()}
    sorted_call(whole, device, transposed=True)[1].sum().backward()
    for name, parts in lists.items():
        assert torch.equal(torch.stack([p.grad for p in parts]), whole[name].grad), name


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_uneven_lists_with_options(device: str, delayed: bool, recompute: bool) -> None:
    layer = whole_layer(device)
    _, dx, gradients = expected(routed_call, layer, device)
    lists = {n: scattered(t) for n, t in layer.items()}
    sink = WeightGradients(delayed=delayed)
    for more in ({"weight_gradients": sink}, {}):
        for part in (p for parts in lists.values() for p in parts):
            part.grad = None
        x, out = routed_call(lists, device, recompute=recompute, **more)
        out.square().sum().backward()
        sink.compute()
        assert torch.equal(x.grad, dx)
        expect_gradients(lists, gradients)


def test_uneven_lists_with_lora(device: str) -> None:
    """The frozen weights of LoRA, and ones that get their gradients beside it."""
    layer = whole_layer(device)
    place = {"device": device, "dtype": dtype_of(device)}
    up = guild.LoRA(
        torch.randn(EXPERTS * 8, HIDDEN, **place), torch.randn(2 * INNER, EXPERTS * 8, **place)
    )
    down = guild.LoRA(
        torch.randn(EXPERTS * 8, INNER, **place), torch.randn(HIDDEN, EXPERTS * 8, **place)
    )
    terms = {"lora_up": up, "lora_down": down}
    for sink in (None, WeightGradients()):
        terms["weight_gradients"] = sink
        whole = {n: t.clone().requires_grad_() for n, t in layer.items()}
        lists = {n: scattered(t) for n, t in layer.items()}
        for call in CALLS:
            (x, out), (y, ours) = call(whole, device, **terms), call(lists, device, **terms)
            assert torch.equal(out, ours)
            out.sum().backward()
            ours.sum().backward()
            assert torch.equal(x.grad, y.grad)
        for name, parts in lists.items():
            assert torch.equal(torch.stack([p.grad for p in parts]), whole[name].grad), name
        frozen = {n: [p.detach() for p in parts] for n, parts in lists.items()}
        assert torch.equal(call(frozen, device, **{**terms, "weight_gradients": None})[1], out)


def test_saved_tensors_may_move(device: str) -> None:
    """Hooks that copy what backward keeps, as torch.autograd.graph.save_on_cpu does."""
    layer = whole_layer(device)
    out, dx, gradients = expected(routed_call, layer, device)
    lists = {n: scattered(t) for n, t in layer.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        x, ours = routed_call(lists, device)
    ours.square().sum().backward()
    assert torch.equal(x.grad, dx)
    expect_gradients(lists, gradients)


def test_out_beside_uneven_lists() -> None:
    """Memory between a list's tensors is free to be written; that of a tensor is not."""
    layer = {n: apart(t) for n, t in whole_layer("cpu").items()}
    buffer = torch.zeros(3, 4096, dtype=torch.float64)
    size = HIDDEN * INNER
    layer["w_down"] = [buffer[e % 3, e // 3 * size :][:size].view(HIDDEN, INNER) for e in range(4)]
    x, ids, scores = inputs("cpu")
    between = buffer[1, 1024:][: 24 * HIDDEN].view(24, HIDDEN)
    with torch.no_grad():
        wanted = routed_experts(x, ids, scores, **layer)
        routed_experts(x, ids, scores, **layer, out=between)
        assert torch.equal(between, wanted)
        over = buffer[2, 8:][: 24 * HIDDEN].view(24, HIDDEN)
        with pytest.raises(
            ValueError, match=r"out: expected memory not shared with other arguments, .* with w_do"
        ):
            routed_experts(x, ids, scores, **layer, out=over)
        ends = torch.tensor([9, 9, 14, 22], dtype=torch.int32)
        rows = torch.randn(24, INNER, dtype=torch.float64)
        seen = [t.mT for t in layer["w_down"]]
        wanted = grouped_mm(rows, torch.stack(seen), ends)
        assert torch.equal(grouped_mm(rows, seen, ends, out=between), wanted)
        with pytest.raises(
            ValueError,
            match=r"out: expected memory not shared with other arguments, .* with mat_b\[",
        ):
            grouped_mm(rows, seen, ends, out=over)


@pytest.mark.parametrize("call", CALLS)
def test_lists_that_are_cast_are_copied_with_a_warning(
    device: str, call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed_layers, "dtype_of", lambda device: torch.float32)
    layer = {n: t.float() for n, t in whole_layer(device).items()}
    lists = {n: apart(t) for n, t in layer.items()}
    with torch.autocast(device, torch.bfloat16):
        out, dx, gradients = expected(call, layer, device)
        with pytest.raises(guild.CopiedWeightsWarning, match="w_up: the experts' tensors cannot"):
            call(lists, device)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default", guild.CopiedWeightsWarning)
            for _ in range(2):
                x, ours = call(lists, device)
    assert len(said) == 2  # one for each weight, though called twice
    assert {w.filename for w in said} == {listed_layers.__file__}
    assert torch.equal(ours, out)
    ours.square().sum().backward()
    assert torch.equal(x.grad, dx)
    expect_gradients(lists, gradients)
    for parts in lists.values():
        guild.lay_evenly(parts)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(call(lists, device)[1], out)  # without a copy before the cast


def test_lists_that_a_gpu_cannot_read_are_copied_with_a_warning(gpu: str) -> None:
    """Off the 16-byte boundaries, and without a contiguous dimension."""
    layer = whole_layer(gpu)
    out = sorted_call(layer, gpu)[1]

    def shifted(t: Tensor) -> list[Tensor]:
        memory = [part.new_empty(part.numel() + 1)[1:] for part in t]
        return [m.view(p.shape).copy_(p) for m, p in zip(memory, t, strict=True)]

    def strided(t: Tensor) -> list[Tensor]:
        return [part.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2] for part in t]

    for made in (shifted, strided):
        lists = {**layer, "w_down": made(layer["w_down"])}
        with pytest.raises(guild.CopiedWeightsWarning, match="w_down: the experts' tensors cannot"):
            sorted_call(lists, gpu)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", guild.CopiedWeightsWarning)
            assert torch.equal(sorted_call(lists, gpu)[1], out)


@pytest.mark.parametrize("call", CALLS)
def test_uneven_lists_of_different_lengths(device: str, call: Callable) -> None:
    lists = {n: apart(t) for n, t in whole_layer(device).items()}
    fewer = {**lists, "w_down": lists["w_down"][:3]}
    with pytest.raises(ValueError, match=r"w_up: expected shape \(3, 16, 16\), got \(4, 16, 16\)"):
        call(fewer, device)
    whole = {**lists, "w_down": torch.stack(lists["w_down"])[:3]}
    with pytest.raises(ValueError, match=r"w_up: expected shape \(3, 16, 16\), got \(4, 16, 16\)"):
        call(whole, device)


def test_where_the_tensors_of_a_list_are() -> None:
    whole = torch.randn(6, 2, 3)
    found = placed([whole[4], whole[1], whole[2]])
    assert found.tensor.data_ptr() == whole[1].data_ptr()
    assert found.tensor.shape == (3, 2, 3) and found.tensor.stride() == (6, 3, 1)
    assert list(found.at) == [3, 0, 1]
    assert list(placed([whole[1], whole[1]]).at) == [0, 0]  # read only
    assert placed([whole[1], whole[1]], written=True) is None
    assert placed([whole[1, :, :2], whole[1, :, 1:]]) is not None
    assert placed([whole[1, :, :2], whole[1, :, 1:]], written=True) is None
    assert placed([whole[0], whole[1].mT.contiguous().mT]) is None
    assert placed([whole[0], whole[1].view(torch.int32)]) is None
    assert placed([whole[0], whole[1, :1]]) is None


@pytest.mark.parametrize("call", CALLS)
def test_uneven_lists_in_a_cuda_graph(gpu: str, call: Callable) -> None:
    """A replay reads what the tensors hold then, and adds to the same main_grads."""
    layer = whole_layer(gpu)
    lists = {n: scattered(t) for n, t in layer.items() if n.startswith("w")}
    for parts in lists.values():
        for part in parts:
            part.main_grad = torch.zeros_like(part, dtype=torch.float32)
    sink = WeightGradients(main_grad=True)
    x, ids, scores = inputs(gpu)
    offsets = torch.tensor([0, 9, 9, 14, 22], device=gpu, dtype=torch.int32)

    def step() -> Tensor:
        if call is sorted_call:
            out = experts_mlp(x, offsets, **lists, weight_gradients=sink)
        else:
            out = routed_experts(x, ids, scores, **lists, weight_gradients=sink)
        out.sum().backward()
        return out

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    with torch.no_grad():
        for parts in lists.values():
            for part in parts:
                part.mul_(0.5)
                part.main_grad.zero_()
    torch.empty(1 << 20, device=gpu).fill_(torch.nan)
    graph.replay()
    found = {n: [p.main_grad.clone() for p in parts] for n, parts in lists.items()}
    for parts in lists.values():
        for part in parts:
            part.main_grad.zero_()
    assert torch.equal(out, step())
    for name, parts in lists.items():
        assert all(torch.equal(p.main_grad, g) for p, g in zip(parts, found[name], strict=True))


def test_codes_are_copied_without_what_lies_between() -> None:
    """Copies hold the weights of an uneven list, not the memory that a view of it spans."""
    torch.manual_seed(0)
    lists = [[torch.randn(*s).bfloat16() for _ in range(3)] for s in ((256, 64), (64, 128))]
    between = [torch.empty(50_000 * (i + 1)) for i in range(2)]  # of uneven sizes
    lists[0][1], lists[0][2] = (t.clone() for t in lists[0][1:])
    codes = guild.FP8Weights(guild.FP8(), *lists)
    copied = copy.deepcopy(codes)
    assert len(pickle.dumps(vars(copied)["_given"])) < 300_000
    x, ids, scores = torch.randn(5, 64).bfloat16(), torch.zeros(5, 1).long(), torch.ones(5, 1)
    want = routed_experts(x, ids, scores, *lists, fp8=codes)
    copied.refresh()
    given = copied._given
    assert torch.equal(routed_experts(x, ids, scores, *given, fp8=copied), want)
    assert copied._masters is not None and between


def test_numbers_that_memory_does_not_hold() -> None:
    weights = [torch._efficientzerotensor((16, 8), dtype=torch.float64) for _ in range(EXPERTS)]
    ends = torch.tensor([3] * EXPERTS, dtype=torch.int32)
    assert not grouped_mm(torch.randn(3, 16, dtype=torch.float64), weights, offs=ends).any()
