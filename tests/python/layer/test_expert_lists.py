"""Weights as lists of one tensor per expert: what is read in place, and where gradients go."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import guild
from guild import WeightGradients, experts_mlp, grouped_mm, routed_experts
from guild._torch.expert_lists import placed, view_of

EXPERTS, HIDDEN, INNER = 4, 16, 8
SHAPES = {
    "w_up": (EXPERTS, 2 * INNER, HIDDEN),
    "w_down": (EXPERTS, HIDDEN, INNER),
    "b_up": (EXPERTS, 2 * INNER),
    "b_down": (EXPERTS, HIDDEN),
}
Layer = dict[str, Tensor]
Lists = dict[str, list[Tensor]]


@pytest.fixture(autouse=True)
def copies_are_errors() -> None:
    """A copy that a test did not ask for fails it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", guild.CopiedWeightsWarning)
        yield


def dtype_of(device: str) -> torch.dtype:
    return torch.float64 if device == "cpu" else torch.bfloat16


def whole_layer(device: str) -> Layer:
    torch.manual_seed(0)
    return {n: torch.randn(s, device=device, dtype=dtype_of(device)) for n, s in SHAPES.items()}


def views(t: Tensor) -> list[Tensor]:
    """Parameters in one storage, one after the other."""
    return [torch.nn.Parameter(part) for part in t.clone()]


def with_gaps(t: Tensor) -> list[Tensor]:
    """In one storage, with something else of the same size between each two."""
    return [torch.nn.Parameter(part) for part in t.repeat_interleave(2, 0)[::2]]


def through_data(t: Tensor) -> list[Tensor]:
    """Parameters made apart, whose memory a buffer of all has become."""
    made = [torch.nn.Parameter(torch.empty_like(part)) for part in t]
    buffer = torch.cat([t.new_full((8,), torch.nan), t.flatten()])
    for i, parameter in enumerate(made):
        begin = 8 + i * parameter.numel()
        parameter.data = buffer[begin : begin + parameter.numel()].view(parameter.shape)
    return made


def apart(t: Tensor) -> list[Tensor]:
    return [torch.nn.Parameter(part.clone()) for part in t]


def backwards(t: Tensor) -> list[Tensor]:
    return views(t.flip(0))[::-1]


def scattered(t: Tensor) -> list[Tensor]:
    """In one storage, in a random order, at distances whose common divisor is 16 bytes."""
    width = 16 // t.element_size()
    number = t[0].numel()
    gaps = [(0, 3, 1, 7, 2, 5)[e % 6] * width for e in range(len(t))]
    buffer = t.new_full((sum(gaps) + t.numel(),), torch.nan)
    made, end = {}, 0
    for e in torch.randperm(len(t)).tolist():
        begin = end + gaps[e]
        end = begin + number
        buffer[begin:end] = t[e].flatten()
        made[e] = torch.nn.Parameter(buffer[begin:end].view(t.shape[1:]))
    return [made[e] for e in range(len(t))]


EVEN = [views, with_gaps, through_data]
UNEVEN = [apart, backwards, scattered]


def inputs(device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(24, HIDDEN, device=device, dtype=dtype_of(device), requires_grad=True)
    ids = torch.arange(48, device=device).view(24, 2) * 7 % 5  # one expert too many: skipped
    return x, ids, torch.rand(24, 2, device=device)


def sorted_call(layer: dict, device: str, **more: object) -> tuple[Tensor, Tensor]:
    x, _, _ = inputs(device)
    offsets = torch.tensor([0, 9, 9, 14, 22], device=device, dtype=torch.int32)
    return x, experts_mlp(x, offsets, **layer, **more)


def routed_call(layer: dict, device: str, **more: object) -> tuple[Tensor, Tensor]:
    x, ids, scores = inputs(device)
    return x, routed_experts(x, ids, scores, **layer, **more)


CALLS = [sorted_call, routed_call]


def expected(call: Callable, layer: Layer, device: str) -> tuple[Tensor, Tensor, Layer]:
    """Result, x's gradient and the layer's from tensors of all experts."""
    layer = {n: t.clone().requires_grad_() for n, t in layer.items()}
    x, out = call(layer, device)
    out.square().sum().backward()
    return out.detach(), x.grad, {n: t.grad for n, t in layer.items()}


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
    for name, parts in lists.items():
        assert torch.equal(torch.stack([p.grad for p in parts]), gradients[name]), name


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
        for name, parts in lists.items():
            assert torch.equal(torch.stack([p.grad for p in parts]), gradients[name]), name


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
    for name, parts in lists.items():
        assert torch.equal(torch.stack([p.grad for p in parts]), gradients[name]), name


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
            ValueError, match=r"out: expected memory of its own, got some that w_do"
        ):
            routed_experts(x, ids, scores, **layer, out=over)
        ends = torch.tensor([9, 9, 14, 22], dtype=torch.int32)
        rows = torch.randn(24, INNER, dtype=torch.float64)
        seen = [t.mT for t in layer["w_down"]]
        wanted = grouped_mm(rows, torch.stack(seen), ends)
        assert torch.equal(grouped_mm(rows, seen, ends, out=between), wanted)
        with pytest.raises(
            ValueError, match=r"out: expected memory of its own, got some that mat_b\["
        ):
            grouped_mm(rows, seen, ends, out=over)


def test_ids_outside_stay_outside() -> None:
    """Counted from the last expert, too; those of the least and the greatest numbers as well."""
    layer = {n: backwards(t) for n, t in whole_layer("cpu").items()}
    x = torch.randn(6, HIDDEN, dtype=torch.float64)
    for dtype in (torch.int32, torch.int64):
        numbers = torch.iinfo(dtype)
        ids = torch.tensor([[-1], [EXPERTS], [numbers.min], [numbers.max], [-2], [0]], dtype=dtype)
        out = routed_experts(x, ids, torch.ones(6, 1), **layer)
        assert not out[:5].any() and out[5].any()


@pytest.mark.parametrize("call", CALLS)
def test_lists_that_are_cast_are_copied_with_a_warning(
    device: str, call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "dtype_of", lambda device: torch.float32)
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
    assert {w.filename for w in said} == {__file__}
    assert torch.equal(ours, out)
    ours.square().sum().backward()
    assert torch.equal(x.grad, dx)
    for name, parts in lists.items():
        assert torch.equal(torch.stack([p.grad for p in parts]), gradients[name]), name
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


def test_lay_evenly_keeps_values_and_identity() -> None:
    parts = apart(torch.randn(3, 4, 5))
    values = [p.detach().clone() for p in parts]
    before = list(parts)
    guild.lay_evenly(parts)
    assert all(p is b and torch.equal(p, v) for p, b, v in zip(parts, before, values, strict=True))
    assert view_of(parts) is not None
    with pytest.raises(ValueError, match=r"tensors\[1\]: expected shape \(4, 5\)"):
        guild.lay_evenly([parts[0], torch.randn(4, 6)])
    with pytest.raises(ValueError, match="tensors: expected one or more"):
        guild.lay_evenly([])


def test_views_stay_inside_the_storage() -> None:
    """Addresses of one distance are no tensor unless one storage holds them all."""
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
    by_transform = torch.func.grad(lambda w: call(w).square().sum())(
        [p.detach() for p in lists["w_up"]]
    )
    assert torch.equal(torch.stack(by_transform), gradients["w_up"])


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
        (lambda w: [*w[:3], w[3].float()], TypeError, r"w_down\[3\]: expected dtype float64 as"),
        (lambda w: w[:3], ValueError, r"w_up: expected shape \(3, 16, 16\), got \(4, 16, 16\)"),
        (lambda w: [], TypeError, "w_down: expected a torch.Tensor, got list"),
        (lambda w: ["x", *w[1:]], TypeError, "w_down: expected a torch.Tensor, got list"),
        (lambda w: [*w[:3], "x"], TypeError, r"w_down\[3\]: expected a torch.Tensor, got str"),
        (lambda w: [*w[:3], w[3][None]], ValueError, r"w_down\[3\]: expected shape \(16, 8\), got"),
    ],
)
def test_wrong_lists(wrong: Callable, error: type, message: str) -> None:
    lists = {n: views(t) for n, t in whole_layer("cpu").items()}
    with pytest.raises(error, match=message):
        sorted_call({**lists, "w_down": wrong(lists["w_down"])}, "cpu")
