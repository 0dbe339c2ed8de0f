"""A whole training step: the same bits every time, no host wait, one CUDA graph, exact sums."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import guild
from guild._torch.operators import ops
from layers import ACTIVATIONS, CASES, make_layer

_REPEATS = 20
_MICRO_BATCHES = 8


class Training:
    """A guild.MoE with biases and shared experts, its data and its optimiser on a GPU.

    Attributes
    ----------
    x, target : torch.Tensor
        (96, 64), read by every step; `feed` puts others there.
    loss : torch.Tensor
        Of the last step.
    """

    def __init__(self, capturable: bool) -> None:
        torch.manual_seed(3)
        place = {"device": "cuda", "dtype": torch.bfloat16}
        router = guild.Router(score="sigmoid", selection_bias=True)
        self.moe = guild.MoE(64, 40, 8, 2, bias=True, shared_experts=1, router=router, **place)
        self.x, self.target = (torch.empty(96, 64, **place) for _ in range(2))
        self.feed(0)
        self.loss = torch.zeros((), device="cuda")
        self._optimizer = torch.optim.AdamW(
            self.moe.parameters(), lr=1e-2, fused=True, capturable=capturable
        )

    def feed(self, step: int) -> None:
        """Set new tokens, which with every step lean more towards one direction and its experts."""
        draw = torch.Generator("cuda").manual_seed(step)
        for tensor in (self.x, self.target):
            tensor.normal_(generator=draw)
        lean = self.moe.router.weight.detach()[step % 8]
        self.x.add_(lean.sign() * 0.4 * (step % 5))

    def step(self) -> None:
        """Forward, backward, balancing, optimiser."""
        self._optimizer.zero_grad()
        loss = (self.moe(self.x).float() - self.target.float()).square().mean()
        loss.backward()
        self.loss = loss.detach()  # nothing keeps the graph, which belongs to this stream
        self.moe.balance()
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Copies of weights, gradients, the selection bias, the counts and the loss."""
        named = dict(self.moe.state_dict())
        named |= {f"{name} gradient": p.grad for name, p in self.moe.named_parameters()}
        named |= {"counts": self.moe.expert_counts, "loss": self.loss}
        return {name: tensor.detach().clone() for name, tensor in named.items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Raise unless every tensor has the same bits."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_whole_step_in_a_graph(gpu: str) -> None:
    """Capture forward, backward and AdamW once; replays with other data train as eager does."""
    captured, eager = Training(capturable=True), Training(capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.step()  # the optimiser makes its state
    torch.cuda.current_stream().wait_stream(side)
    eager.step()
    assert_same(captured.state(), eager.state())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    loads = []
    for step in range(1, 7):
        captured.feed(step)
        eager.feed(step)
        assert torch.equal(captured.x, eager.x)
        graph.replay()
        eager.step()
        assert_same(captured.state(), eager.state())
        loads.append(tuple(captured.moe.expert_counts.tolist()))
    assert len(set(loads)) == len(loads)  # another routing every time


def test_step_never_waits_for_the_gpu(gpu: str) -> None:
    """Nothing raises where torch forbids synchronisation, and no wait is in the trace."""
    training = Training(capturable=False)
    training.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = traced(training.step)
    assert any("guild::" in name for name in names)
    assert not waits(names)


def test_the_trace_sees_a_wait(gpu: str) -> None:
    """Makes sure that the check above can fail."""
    x = torch.ones(3, device=gpu)
    assert waits(traced(lambda: x.sum().item()))


def waits(names: list[str]) -> list[str]:
    """What the host waits in: synchronising calls, and copies between host and device."""
    if not any("cudaLaunchKernel" in name for name in names):
        pytest.skip("torch's profiler records no CUDA calls on this machine")
    return [n for n in names if any(w in n for w in ("Synchronize", "Memcpy HtoD", "Memcpy DtoH"))]


def traced(step: Callable[[], object]) -> list[str]:
    """Names of all that host and device did during one step.

    The profiler itself waits before and after, so only what begins within the step counts.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("the step"):
            step()
    events = profiler.events()
    (span,) = [e.time_range for e in events if e.name == "the step" and e.device_type.name == "CPU"]
    on_host = [
        e.name
        for e in events
        if e.device_type.name == "CPU" and span.start <= e.time_range.start <= span.end
    ]
    return on_host + [e.name for e in events if e.device_type.name == "CUDA"]


@pytest.mark.parametrize("name", ["matrix_tiles", "tile_rows", "many_experts"])
def test_gradients_repeat_bit_for_bit(name: str, device: str) -> None:
    """Twenty runs through the router as well: every gradient has the bits of the first."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = CASES[name]
    torch.manual_seed(1)
    moe = guild.MoE(
        case.hidden,
        case.intermediate,
        case.experts,
        case.top_k,
        "gpt_oss",
        bias=True,
        device=device,
        dtype=dtype,
    )
    for bias in (moe.b_up, moe.b_down):
        nn.init.normal_(bias)
    x = torch.randn(case.tokens, case.hidden, device=device, dtype=dtype).requires_grad_()
    dout = torch.randn_like(x)

    def run() -> list[Tensor]:
        out = moe(x)
        return [out.detach(), *torch.autograd.grad(out, (x, *moe.parameters()), dout)]

    first = run()
    for _ in range(_REPEATS - 1):
        for got, expected in zip(run(), first, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["empty_experts", "long_expert"])
def test_float32_sums_over_micro_batches(name: str, device: str) -> None:
    """Eight micro-batches added into float32 gradients: a float64 sum of the same products."""
    batches = [
        make_layer(CASES[name], ACTIVATIONS["swiglu"], torch.bfloat16, device, seed=seed)
        for seed in range(_MICRO_BATCHES)
    ]
    case = batches[0].case
    experts, width = case.experts, 2 * case.intermediate
    shapes = {
        "dw_up": (experts, width, case.hidden),
        "dw_down": (experts, case.hidden, case.intermediate),
        "db_up": (experts, width),
        "db_down": (experts, case.hidden),
    }
    sums = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    exact = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for layer in batches:
        routing = ops.sort_by_expert(layer.ids, layer.scores, experts)
        rows = layer.ids.numel()
        dh = torch.randn(rows, width, device=device).bfloat16()
        a = torch.randn(rows, case.intermediate, device=device).bfloat16()
        add_gradients(layer.x, layer.dout, dh, a, routing, sums)
        add_exactly(layer.x, layer.dout, dh, a, routing, exact)
    for which, total in sums.items():
        error = (total.cpu().double() - exact[which]).norm() / exact[which].norm()
        assert error < 1e-5, f"{which}: {error:.2e}"
        empty = exact[which].flatten(1).abs().sum(1) == 0
        assert not total[empty.to(device)].any()  # experts without rows


Routing = tuple[Tensor, ...]  # offsets, row_token, slot_row, row_score


def add_gradients(
    x: Tensor, dout: Tensor, dh: Tensor, a: Tensor, routing: Routing, sums: dict[str, Tensor]
) -> None:
    """One micro-batch's gradients of weights and biases, added by the ops."""
    offsets, row_token, _, row_score = routing
    ops.up_weight_gradient_out(
        x, dh, offsets, row_token, sums["dw_up"], None, True, False, False, True
    )
    ops.down_weight_gradient_out(dout, a, offsets, row_token, sums["dw_down"], False, True)
    ops.bias_gradient_out(dh, offsets, None, None, sums["db_up"], True)
    ops.bias_gradient_out(dout, offsets, row_token, row_score, sums["db_down"], True)


def add_exactly(
    x: Tensor, dout: Tensor, dh: Tensor, a: Tensor, routing: Routing, sums: dict[str, Tensor]
) -> None:
    """The same sums in float64."""
    offsets, row_token, _, row_score = (t.cpu() for t in routing)
    x, dout, dh, a, score = (t.cpu().double() for t in (x, dout, dh, a, row_score))
    for e in range(len(offsets) - 1):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        token = row_token[rows]
        sums["dw_up"][e] += dh[rows].T @ x[token]
        sums["dw_down"][e] += dout[token].T @ a[rows]
        sums["db_up"][e] += dh[rows].sum(0)
        sums["db_down"][e] += (score[rows, None] * dout[token]).sum(0)


def test_copy_of_a_layer_with_something_pending() -> None:
    """The copy has nothing to compute; the original computes its own."""
    moe = guild.MoE(8, 6, 4, 2, weight_gradients=guild.WeightGradients(delayed=True))
    x = torch.randn(5, 8)
    moe(x).sum().backward()
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert other.weight_gradients.delayed and other.weight_gradients.pending == 0
        other.weight_gradients.compute()
        assert other.w_up.grad is None
        other(x).sum().backward()
        assert (other.weight_gradients.pending, moe.weight_gradients.pending) == (1, 1)
    moe.weight_gradients.compute()
    assert moe.w_up.grad is not None


@pytest.mark.parametrize("main_grad", [False, True])
def test_one_parameter_as_two(main_grad: bool) -> None:
    """Gate and up, or both biases: one op would write one gradient over the other."""
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    x, half, w = torch.randn(5, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    sink = {"weight_gradients": guild.WeightGradients(main_grad=main_grad)}
    half, bias = torch.nn.Parameter(half), torch.nn.Parameter(torch.randn(2, 8))
    for parameter in (half, bias):
        parameter.main_grad = torch.zeros_like(parameter)
    match = r"^w_up\[1\] \(up\): expected another parameter than w_up\[0\] \(gate\)"
    with pytest.raises(ValueError, match=match):
        guild.experts_mlp(x, offsets, (half, half), w, **sink)
    ungated = {"activation": "silu_ungated", **sink}
    with pytest.raises(ValueError, match=r"^b_down: expected another parameter than b_up"):
        guild.experts_mlp(x, offsets, w, w, bias, bias, **ungated)
    guild.experts_mlp(x, offsets, half, half, **ungated).sum().backward()  # two ops, the sum
    got = half.main_grad if main_grad else half.grad
    same = half.detach().requires_grad_()
    guild.experts_mlp(x, offsets, same, same, activation="silu_ungated").sum().backward()
    torch.testing.assert_close(got, same.grad)
