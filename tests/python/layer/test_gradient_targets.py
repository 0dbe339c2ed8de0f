"""Where WeightGradients put gradients: tensors that are there, in one buffer, shared, or wrong."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import guild
from guild import WeightGradients, experts_mlp, routed_experts, sink_experts
from guild._torch.operators import ops
from test_weight_gradients import sorted_case


@pytest.fixture(params=["float64", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if device == "cuda" and request.param == "float64":
        pytest.skip("the GPU has no float64")
    return getattr(torch, request.param)


@pytest.mark.parametrize("held", ["gate", "up"])
def test_a_gradient_that_is_there_is_added_to(device: str, dtype: torch.dtype, held: str) -> None:
    """Also where the other tensor of a (gate, up) pair has none yet."""
    case = sorted_case(device, dtype)
    w_up = (case["gate"], case["up"])
    more = {"weight_gradients": WeightGradients()}
    call = (case["x_sorted"], case["offsets"], w_up, case["w_down"])
    expected = sorted_case(device, dtype)
    out = experts_mlp(
        expected["x_sorted"],
        expected["offsets"],
        (expected["gate"], expected["up"]),
        expected["w_down"],
    )
    out.sum().backward()
    case[held].grad = torch.ones_like(case[held])
    experts_mlp(*call, **more).sum().backward()
    for name in ("gate", "up"):
        fresh = expected[name].grad
        wanted = fresh + 1 if name == held else fresh
        torch.testing.assert_close(case[name].grad, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_targets_in_one_buffer(device: str, dtype: torch.dtype, interleaved: bool) -> None:
    """Gate's and up's sums as the halves of one tensor, or row by row in turn."""
    sums, expected = torch.zeros(3, 16, 16, device=device), {}
    for shared in (True, False):
        case = sorted_case(device, dtype)
        halves = (sums[:, ::2], sums[:, 1::2]) if interleaved else sums.split(8, 1)
        for name, half in zip(("gate", "up"), halves, strict=True):
            case[name].main_grad = half if shared else torch.zeros_like(half)
        case["w_down"].main_grad = torch.zeros(3, 16, 8, device=device)
        sink = WeightGradients(main_grad=True)
        w_up = (case["gate"], case["up"])
        rows = case["x_sorted"], case["offsets"]
        experts_mlp(*rows, w_up, case["w_down"], weight_gradients=sink).sum().backward()
        for name in ("gate", "up", "w_down"):
            if shared:
                expected[name] = case[name].main_grad
            else:
                assert torch.equal(case[name].main_grad, expected[name])


def test_targets_that_come_to_overlap(device: str, dtype: torch.dtype) -> None:
    """Found apart once, then moved: into each other, and apart again elsewhere."""
    case = sorted_case(device, dtype)
    sink = WeightGradients(main_grad=True)
    apart = torch.zeros(2, 3, 8, 16, device=device)
    case["w_down"].main_grad = torch.zeros(3, 16, 8, device=device)

    def step() -> None:
        rows, w_up = (case["x_sorted"], case["offsets"]), (case["gate"], case["up"])
        experts_mlp(*rows, w_up, case["w_down"], weight_gradients=sink).sum().backward()

    for shared in (False, True, False):
        case["gate"].main_grad, case["up"].main_grad = apart[0], apart[0 if shared else 1]
        if shared:
            with pytest.raises(
                ValueError, match="main_grad: expected memory not shared with other"
            ):
                step()
        else:
            step()


def test_targets_that_overlap_in_another_dtype(device: str) -> None:
    """Found apart in 16 bits; at the same places they share memory in 32."""
    case = sorted_case(device, torch.bfloat16)
    rows, w_up = (case["x_sorted"], case["offsets"]), (case["gate"], case["up"])
    sink = WeightGradients(main_grad=True)
    memory = torch.zeros(1024, device=device)
    halves = memory.view(torch.bfloat16)[:768].view(2, 3, 8, 16)
    case["w_down"].main_grad = torch.zeros(3, 16, 8, device=device)
    case["gate"].main_grad, case["up"].main_grad = halves
    experts_mlp(*rows, w_up, case["w_down"], weight_gradients=sink).sum().backward()
    wide = memory[:384].view(3, 8, 16), memory[192:576].view(3, 8, 16)
    case["gate"].main_grad, case["up"].main_grad = wide
    assert [t.data_ptr() for t in wide] == [t.data_ptr() for t in halves]
    with pytest.raises(ValueError, match="main_grad: expected memory not shared with other"):
        experts_mlp(*rows, w_up, case["w_down"], weight_gradients=sink).sum().backward()


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_one_parameter_as_both_weights(
    device: str, dtype: torch.dtype, main_grad: bool, delayed: bool
) -> None:
    """Its two gradients are added up."""
    grads = []
    for sink in (None, WeightGradients(main_grad=main_grad, delayed=delayed)):
        torch.manual_seed(5)
        weight = torch.randn(3, 16, 16).to(device, dtype).requires_grad_()
        weight.main_grad = torch.zeros(3, 16, 16, device=device)
        x, ids = torch.randn(6, 16).to(device, dtype), torch.arange(6, device=device)[:, None] % 3
        chosen = ids, torch.ones(6, 1, device=device)
        more = {"activation": "relu_ungated", "weight_gradients": sink}
        routed_experts(x, *chosen, weight, weight, **more).sum().backward()
        if delayed and sink is not None:
            sink.compute()
        grads.append(weight.main_grad if main_grad and sink is not None else weight.grad)
    near = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(grads[1].double(), grads[0].double(), rtol=near, atol=10 * near)


def wrong(change: str) -> None:
    x = torch.randn(4, 8)
    ids, scores = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    w_up = torch.randn(2, 8, 8, requires_grad=True)
    w_down = torch.randn(2, 8, 4, requires_grad=True)
    sink: object = WeightGradients(main_grad=True)
    if change == "dtype":
        w_up.main_grad = torch.zeros(2, 8, 8, dtype=torch.float64)
    elif change == "shape":
        w_up.main_grad = torch.zeros(2, 8, 4)
    elif change == "overlap":
        w_up.main_grad = torch.zeros(1, 8, 8).expand(2, 8, 8)
    elif change == "two targets":
        buffer = torch.zeros(2 * 8 * 8 + 2 * 8 * 4 - 1)  # one element too few
        w_up.main_grad = buffer[: 2 * 8 * 8].view(2, 8, 8)
        w_down.main_grad = buffer[2 * 8 * 8 - 1 :].view(2, 8, 4)
    elif change == "the weight itself":
        w_up.main_grad = w_up.detach()
        w_down.main_grad = torch.zeros_like(w_down)
    elif change == "two gradients":
        sink, w_up.grad = WeightGradients(), torch.zeros_like(w_up)
        w_down.grad = w_up.grad[:, :, 4:]
    elif change == "overlapping gradient":
        sink, w_up.grad = WeightGradients(), torch.zeros(1).expand(2, 8, 8)
    elif change == "leaf":
        sink, w_up = WeightGradients(), w_up * 2
    elif change == "type":
        sink = "main_grad"
    routed_experts(x, ids, scores, w_up, w_down, weight_gradients=sink)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"w_up\.main_grad: expected a float32 tensor, got None"),
        ("dtype", r"w_up\.main_grad: expected float32 .* got float64"),
        ("shape", r"w_up\.main_grad: expected float32 of shape \(2, 8, 8\), .*\(2, 8, 4\)"),
        ("overlap", r"w_up\.main_grad: expected elements that do not overlap"),
        ("two targets", r"w_up\.main_grad: expected memory not shared with .*w_down\.main_grad"),
        ("the weight itself", r"w_up\.main_grad: expected memory not shared with .* with w_up"),
        ("two gradients", r"w_up\.grad: expected memory not shared with .*w_down\.grad"),
        ("overlapping gradient", r"w_up\.grad: expected elements that do not .*\(0, 0, 0\)"),
        ("leaf", r"w_up: expected a parameter"),
        ("type", r"weight_gradients: expected guild\.WeightGradients"),
    ],
)
def test_wrong_targets(change: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        wrong(change)


@pytest.mark.parametrize("how", ["grad", "delayed", "main_grad", "lists", "FP8"])
@pytest.mark.parametrize("swapped", [False, True])
def test_autocast_to_the_other_16_bits(device: str, how: str, swapped: bool) -> None:
    """Gradients in the weights' dtype, where the layer computes in another one of 16 bits."""
    own, narrow = (torch.float16, torch.bfloat16)[:: -1 if swapped else 1]
    options = {"bias": True, "device": device, "dtype": own}
    if how == "FP8":
        options["fp8"] = guild.FP8(wgrad="bf16")
    sink = WeightGradients(main_grad=how == "main_grad", delayed=how == "delayed")
    torch.manual_seed(0)
    layer = guild.MoE(64, 32, 4, 2, **options)
    x = torch.randn(20, 64, dtype=own, device=device)
    leaves = [p.detach() for n, p in layer.named_parameters() if n[:2] in ("w_", "b_")]
    found = []
    for weight_gradients in (None, sink):
        ws = [list(w.clone().unbind()) if how == "lists" else [w.clone()] for w in leaves]
        for w in sum(ws, []):
            w.requires_grad_()
            if how == "main_grad":
                w.main_grad = torch.zeros_like(w)
        up, down, b_up, b_down = (w if how == "lists" else w[0] for w in ws)
        ids, scores = guild.route(layer.router(x).float(), top_k=2)
        for _ in range(2):  # the second is added
            with torch.autocast(device, dtype=narrow):
                out = guild.routed_experts(
                    x,
                    ids,
                    scores.detach(),
                    up,
                    down,
                    b_up=b_up,
                    b_down=b_down,
                    fp8=layer.fp8,
                    weight_gradients=weight_gradients,
                )
            assert out.dtype == narrow
            out.float().sum().backward()
        sink.compute()
        place = "main_grad" if how == "main_grad" and weight_gradients else "grad"
        found.append([getattr(w, place) for w in sum(ws, [])])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype == own
        assert (one.float() - other.float()).norm() <= 0.02 * one.float().norm()


@pytest.mark.parametrize("listed", [False, True])
def test_nothing_is_left_by_a_step_that_fails(
    device: str, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.grad` is as it was, and the pass, which stays pending, can be computed again."""
    sums = WeightGradients(delayed=True)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = guild.MoE(64, 32, 4, 2, device=device, dtype=dtype)
    ws = [layer.w_up, layer.w_down]
    if listed:
        ws = [[t.detach().requires_grad_() for t in w.detach().clone().unbind()] for w in ws]
    x = torch.randn(20, 64, device=device, dtype=dtype)
    ids, scores = guild.route(layer.router(x).float(), top_k=2)
    tensors = sum(ws, []) if listed else ws
    truth = []
    for weight_gradients in (None, sums):
        for t in tensors:
            t.grad = None
        out = guild.routed_experts(x, ids, scores.detach(), *ws, weight_gradients=weight_gradients)
        out.float().sum().backward()
        if not truth:
            truth = [t.grad.clone() for t in tensors]
    with monkeypatch.context() as patch:
        patch.setattr("guild.sink_experts.ops", _OutOfMemory())
        with pytest.raises(torch.OutOfMemoryError):
            sums.compute()
    assert sums.pending == 1 and all(t.grad is None for t in tensors)
    sums.compute()
    assert all(torch.equal(t.grad, g) for t, g in zip(tensors, truth, strict=True))


@pytest.mark.parametrize("op", ["weight_gradients_out", "bias_gradient_out"])
def test_computed_once_after_errors(op: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that stays pending goes on where it ended: nothing is added twice."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sums = WeightGradients(main_grad=True, delayed=True)
    layer = guild.MoE(64, 32, 4, 2, bias=True, device=device, dtype=dtype)
    x = torch.randn(20, 64, device=device, dtype=dtype)
    experts = [p for name, p in layer.named_parameters() if not name.startswith("router")]
    found = []
    for failures in (0, 3):
        layer.weight_gradients = sums
        for p in experts:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        layer(x).float().sum().backward()
        for _ in range(failures):
            with monkeypatch.context() as patch:
                patch.setattr("guild.sink_experts.ops", _OutOfMemory(op))
                with pytest.raises(torch.OutOfMemoryError):
                    sums.compute()
            assert sums.pending == 1
        sums.compute()
        found.append([p.main_grad for p in experts])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_biases_by_column(device: str, main_grad: bool, listed: bool) -> None:
    """Gradients of biases may have any strides, as those of weights may."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = guild.MoE(64, 32, 4, 2, bias=True, device=device, dtype=dtype)
    x = torch.randn(20, 64, device=device, dtype=dtype)
    ids, scores = guild.route(layer.router(x).float().detach(), top_k=2)
    tensors = [layer.w_up, layer.w_down, layer.b_up, layer.b_down]
    found = []
    for by_column in (False, True):
        ws = [t.detach().clone().requires_grad_() for t in tensors]
        if listed:
            ws = [[t.detach().requires_grad_() for t in w.detach().unbind()] for w in ws]
        for w in ws:
            for t in w if listed else [w]:
                kind = torch.float32 if main_grad else dtype
                target = torch.ones(*t.shape, 3 if by_column else 1, device=device, dtype=kind)
                target = target.mT[..., 0, :] if target.dim() == 2 else target[..., 0]
                setattr(t, "main_grad" if main_grad else "grad", target)
        sink = WeightGradients(main_grad=main_grad)
        out = guild.routed_experts(x, ids, scores, *ws, weight_gradients=sink)
        out.float().sum().backward()
        flat = sum(ws, []) if listed else ws
        found.append([t.main_grad if main_grad else t.grad for t in flat])
    assert not found[1][-1].is_contiguous()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_negated_targets(main_grad: bool, listed: bool) -> None:
    """A view of negatives in `.grad` is added to as autograd would; in main_grad it is an error."""
    torch.manual_seed(0)
    given = torch.randn(4, 16, 16), torch.randn(4, 16, 8)
    found = []
    for sink in (None, WeightGradients(main_grad=main_grad)):
        own = [[t.clone().requires_grad_() for t in (w if listed else [w])] for w in given]
        for t in own[0]:
            t.grad = t.main_grad = torch.ones_like(t)._neg_view()
        for t in own[1]:
            t.main_grad = torch.zeros_like(t)
        ws = own if listed else [ts[0] for ts in own]
        tokens = torch.ones(3, 16), torch.zeros(3, 1).int(), torch.ones(3, 1)
        if sink is not None and main_grad:
            with pytest.raises(ValueError, match="main_grad: expected a tensor whose memory holds"):
                guild.routed_experts(*tokens, *ws, weight_gradients=sink)
            return
        guild.routed_experts(*tokens, *ws, weight_gradients=sink).sum().backward()
        found.append([t.grad for t in own[0]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class _OutOfMemory:
    """Ops of which one finds no memory."""

    def __init__(self, op: str = "weight_gradients_out") -> None:
        self._op = op

    def __getattr__(self, name: str) -> object:
        if name == self._op:
            raise torch.OutOfMemoryError("no memory")
        return getattr(ops, name)


class SlowOps:
    """The ops, of which one takes long enough for another thread to come in between."""

    def __init__(self) -> None:
        self.running = self.most = 0

    def __getattr__(self, name: str) -> object:
        return getattr(ops, name)

    def weight_gradients_out(self, *arguments: object) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.02)
        ops.weight_gradients_out(*arguments)
        self.running -= 1


@pytest.mark.parametrize("main_grad", [False, True])
def test_backward_in_two_threads(main_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other writes its gradients, of which none is lost."""
    sink = WeightGradients(main_grad=main_grad)
    layer = guild.MoE(8, 8, 4, 2, bias=True, weight_gradients=sink)
    experts = layer.w_up, layer.w_down, layer.b_up, layer.b_down
    for parameter in experts:
        parameter.main_grad = torch.zeros_like(parameter)
    slow, x, barrier = SlowOps(), torch.randn(16, 8), threading.Barrier(2)
    monkeypatch.setattr(sink_experts, "ops", slow)

    def gradients() -> list[torch.Tensor]:
        return [parameter.main_grad if main_grad else parameter.grad for parameter in experts]

    def run(_: int) -> None:
        out = layer(x).sum()
        barrier.wait()
        out.backward()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    both = [gradient.clone() for gradient in gradients()]
    layer(x).sum().backward()
    for gradient, sum_of_two in zip(gradients(), both, strict=True):
        torch.testing.assert_close(gradient, sum_of_two * 1.5)
    assert slow.most == 1
