"""Recomputed pre-activations, and weight gradients that go elsewhere or come later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import guild
from guild import MoE, WeightGradients, experts_mlp, routed_experts
from guild._torch.operators import ops

SIZES = {"hidden": 24, "intermediate": 16, "experts": 5, "top_k": 2}
PARAMETERS = ("w_up", "w_down", "b_up", "b_down")


def make_layer(device: str, dtype: torch.dtype, **more: object) -> MoE:
    torch.manual_seed(0)
    return MoE(**SIZES, bias=True, device=device, dtype=dtype, **more)


def batches(device: str, dtype: torch.dtype, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = [torch.randn(2, 40, SIZES["hidden"], generator=generator) for _ in range(count)]
    return [(x.to(device, dtype), dout.to(device, dtype)) for x, dout in pairs]


def run(layer: MoE, x: Tensor, dout: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    layer(x).backward(dout)
    return x.grad


@pytest.fixture(params=["float64", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if device == "cuda" and request.param == "float64":
        pytest.skip("the GPU has no float64")
    return getattr(torch, request.param)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("weight_gradients", [None, WeightGradients()])
def test_rounded_tokens(
    device: str, dtype: torch.dtype, recompute: bool, weight_gradients: WeightGradients | None
) -> None:
    (batch,) = batches(device, dtype, 1)
    router = guild.Router(rounding="nearest", tile=8)
    plain = make_layer(device, dtype, router=router)
    more = {"recompute": recompute, "weight_gradients": weight_gradients}
    other = make_layer(device, dtype, router=router, **more)
    assert torch.equal(run(plain, *batch), run(other, *batch))
    assert not (other.expert_counts % 8).any()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, other.get_parameter(name).grad), name


@pytest.mark.parametrize("recompute", [False, True])
def test_grad_is_what_autograd_gives(device: str, dtype: torch.dtype, recompute: bool) -> None:
    (batch,) = batches(device, dtype, 1)
    plain = make_layer(device, dtype)
    other = make_layer(device, dtype, recompute=recompute, weight_gradients=WeightGradients())
    assert torch.equal(run(plain, *batch), run(other, *batch))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, other.get_parameter(name).grad), name


def test_a_gradient_of_any_strides(device: str, dtype: torch.dtype) -> None:
    ((x, dout),) = batches(device, dtype, 1)
    one_row = dout[:1, :1].expand_as(dout)
    plain = make_layer(device, dtype)
    other = make_layer(device, dtype, weight_gradients=WeightGradients())
    assert torch.equal(run(plain, x, one_row), run(other, x, one_row))
    assert torch.equal(plain.w_down.grad, other.w_down.grad)


def test_recompute_gives_the_same_bits(device: str, dtype: torch.dtype) -> None:
    (batch,) = batches(device, dtype, 1)
    plain, other = make_layer(device, dtype), make_layer(device, dtype, recompute=True)
    assert torch.equal(run(plain, *batch), run(other, *batch))
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, other.get_parameter(name).grad), name


@pytest.mark.parametrize("weight_gradients", [None, WeightGradients()])
def test_recompute_keeps_no_pre_activations(
    device: str, dtype: torch.dtype, weight_gradients: WeightGradients | None
) -> None:
    kept: list[Tensor] = []
    (x, _), *_ = batches(device, dtype, 1)
    layer = make_layer(device, dtype, recompute=True, weight_gradients=weight_gradients)
    parameters = {p.data_ptr() for p in layer.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x.requires_grad_())
    rows = x.shape[0] * SIZES["top_k"]
    widest = max(t.numel() for t in kept if t.data_ptr() not in parameters)
    assert widest <= x.numel() < rows * 2 * SIZES["intermediate"]


@pytest.mark.parametrize("delayed", [False, True])
def test_main_grad_sums_in_float32(device: str, dtype: torch.dtype, delayed: bool) -> None:
    sink = WeightGradients(main_grad=True, delayed=delayed)
    layer = make_layer(device, dtype, weight_gradients=sink)
    for name in PARAMETERS:
        parameter = layer.get_parameter(name)
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    truth = make_layer(device, dtype).to("cpu").double()
    data = batches(device, dtype, 8)
    for x, dout in data:
        run(layer, x, dout)
        run(truth, x.cpu().double(), dout.cpu().double())
    assert sink.pending == (8 if delayed else 0)
    if delayed:
        assert not layer.w_up.main_grad.any()
        sink.compute()
    # bfloat16 pre-activations are rounded; the sum itself is not.
    bound = 1e-5 if dtype == torch.float64 else 2e-2
    for name in PARAMETERS:
        parameter = layer.get_parameter(name)
        exact = truth.get_parameter(name).grad
        error = (parameter.main_grad.cpu().double() - exact).norm() / exact.norm()
        assert error < bound, name
        assert parameter.grad is None


def test_delayed_gradients_wait(device: str, dtype: torch.dtype) -> None:
    sink = WeightGradients(delayed=True)
    plain, layer = make_layer(device, dtype), make_layer(device, dtype, weight_gradients=sink)
    data = batches(device, dtype, 2)
    for batch in data:
        assert torch.equal(run(plain, *batch), run(layer, *batch))
    assert layer.w_up.grad is None and sink.pending == 2
    sink.compute()
    assert sink.pending == 0
    for name in PARAMETERS:
        ours, autograd = layer.get_parameter(name).grad, plain.get_parameter(name).grad
        torch.testing.assert_close(ours, autograd, rtol=2e-2, atol=2e-2)


def test_delayed_sums_are_in_the_order_of_backward(device: str, dtype: torch.dtype) -> None:
    """Bit for bit what immediate sums are; in another order they have other bits."""
    data = batches(device, dtype, 5)
    totals = []
    for delayed, order in ((False, data), (True, data), (False, data[::-1])):
        sink = WeightGradients(main_grad=True, delayed=delayed)
        layer = make_layer(device, dtype, weight_gradients=sink)
        for name in PARAMETERS:
            parameter = layer.get_parameter(name)
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        for batch in order:
            run(layer, *batch)
        sink.compute()
        totals.append([layer.get_parameter(name).main_grad for name in ("w_up", "w_down")])
    for immediate, late, reversed_order in zip(*totals, strict=True):
        assert torch.equal(immediate, late)
        assert not torch.equal(immediate, reversed_order)


def routed_by_lists(x: Tensor, sink: WeightGradients | None) -> tuple[Tensor, dict[str, Tensor]]:
    """A layer of lists, and the caller's tensors that backward and compute read."""
    torch.manual_seed(3)
    w_up, w_down = (torch.randn(s).to(x).requires_grad_() for s in ((3, 16, 16), (3, 16, 8)))
    ids = torch.tensor([0, 1, 2, 2, 0, 1], dtype=torch.int32, device=x.device)
    scores = torch.rand(6, device=x.device, requires_grad=True)
    token_offsets = torch.tensor([0, 2, 3, 3, 6], dtype=torch.int32, device=x.device)
    more = {"token_offsets": token_offsets, "weight_gradients": sink}
    out = routed_experts(x, ids, scores, w_up, w_down, **more)
    return out, {"x": x, "token_offsets": token_offsets}


@pytest.mark.parametrize("sink", [None, WeightGradients(), WeightGradients(delayed=True)])
@pytest.mark.parametrize("name", ["x", "token_offsets"])
def test_overwritten_before_backward(
    device: str, dtype: torch.dtype, sink: WeightGradients | None, name: str
) -> None:
    out, given = routed_by_lists(torch.randn(4, 16).to(device, dtype), sink)
    given[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["x", "the output's gradient", "x_sorted", "offsets"])
def test_overwritten_before_compute(device: str, dtype: torch.dtype, name: str) -> None:
    """What a delayed gradient is made of is compared with what backward saw."""
    sink = WeightGradients(delayed=True)
    if name in ("x_sorted", "offsets"):
        given = sorted_case(device, dtype)
        w_up = (given["gate"], given["up"])
        rows = given["x_sorted"] = given["x_sorted"].detach()
        out = experts_mlp(rows, given["offsets"], w_up, given["w_down"], weight_gradients=sink)
    else:
        out, given = routed_by_lists(torch.randn(4, 16).to(device, dtype), sink)
    given["the output's gradient"] = torch.ones_like(out)
    out.backward(given["the output's gradient"])
    given[name].zero_()
    for _ in range(2):  # the gradient stays missing
        with pytest.raises(RuntimeError, match=f"^{name}: expected to find it as backward left"):
            sink.compute()
    assert sink.pending == 1


@pytest.mark.parametrize("how", ["plain", "delayed", "main_grad"])
@pytest.mark.parametrize("lists", [False, True])
def test_who_wants_a_gradient_is_decided_in_forward(
    device: str, dtype: torch.dtype, how: str, lists: bool
) -> None:
    """As by autograd: who is frozen in forward or before backward gets none, later changes nothing.

    One weight at a time is frozen, so that the other's gradient shows that backward ran.
    """
    x = torch.randn(30, 24, device=device, dtype=dtype)
    chosen = torch.arange(30, device=device)[:, None] % 5, torch.ones(30, 1, device=device)

    def gradients(frozen: int, at: str, sink: WeightGradients | None) -> list[Tensor | None]:
        layer = make_layer(device, dtype)
        weights: list = [layer.w_up, layer.w_down]
        if lists:
            weights = [[torch.nn.Parameter(w) for w in p.detach().unbind()] for p in weights]
        members = [p if lists else [p] for p in weights]
        for tensor in (t for p in members for t in p):
            tensor.main_grad = torch.zeros(tensor.shape, device=device)

        def freeze(value: bool) -> None:
            for tensor in members[frozen]:
                tensor.requires_grad_(not value)

        freeze(at == "forward")
        out = routed_experts(x, *chosen, *weights, weight_gradients=sink)
        freeze(at == "backward")
        out.sum().backward()
        freeze(at == "compute")
        if sink is not None:
            sink.compute()
        where = "main_grad" if sink is not None and sink.main_grad else "grad"
        found = [[getattr(t, where) for t in p] for p in members]
        return [None if p[0] is None or not p[0].any() else torch.stack(p) for p in found]

    for frozen in (0, 1):
        for at in ("forward", "backward", "compute"):
            sink = WeightGradients(delayed=how == "delayed", main_grad=how == "main_grad")
            got, wanted = gradients(frozen, at, sink), gradients(frozen, at, None)
            if at == "backward":  # autograd itself then skips it
                assert got[frozen] is None
            for one, other in zip(got, wanted, strict=True):
                assert (one is None) == (other is None), (frozen, at)
                assert one is None or torch.allclose(one.to(dtype), other, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("only", ["gate", "up"])
def test_half_of_a_pair_wants_a_gradient(device: str, dtype: torch.dtype, only: str) -> None:
    """Of routed tokens and of sorted rows, by autograd and by a sink."""
    for routed in (False, True):
        for sink in (None, WeightGradients()):
            whole, half = sorted_case(device, dtype), sorted_case(device, dtype)
            for name in ("x_sorted", "gate", "up", "w_down"):
                half[name].requires_grad_(name == only)
            for case, more in ((whole, None), (half, sink)):
                weights = (case["gate"], case["up"]), case["w_down"]
                if routed:
                    ids = torch.arange(30, device=device)[:, None] % 3
                    chosen = ids, torch.ones(30, 1, device=device)
                    out = routed_experts(case["x_sorted"], *chosen, *weights, weight_gradients=more)
                else:
                    rows = case["x_sorted"], case["offsets"]
                    out = experts_mlp(*rows, *weights, weight_gradients=more)
                out.sum().backward()
            assert half[only].grad.any()
            assert torch.equal(half[only].grad, whole[only].grad)


def test_biases_of_two_dtypes(device: str) -> None:
    """Under autocast each gets its gradient in its own dtype."""
    grads = []
    for sink in (None, WeightGradients()):
        torch.manual_seed(4)
        x, w_up, w_down, b_up, b_down = (
            torch.randn(s, device=device)
            for s in ((6, 16), (3, 16, 16), (3, 16, 8), (3, 16), (3, 16))
        )
        b_down = b_down.bfloat16()
        layer = [t.requires_grad_() for t in (w_up, w_down, b_up, b_down)]
        ids = torch.arange(6, device=device)[:, None] % 3
        with torch.autocast(device, dtype=torch.bfloat16):
            out = routed_experts(
                x, ids, torch.ones(6, 1, device=device), *layer, weight_gradients=sink
            )
        out.float().square().sum().backward()
        assert [t.grad.dtype for t in layer] == [t.dtype for t in layer]
        grads.append([t.grad for t in layer])
    for expected, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-1)


def test_no_graph_through_a_sink() -> None:
    """create_graph=True, forward mode and torch.func: each an error, none a gradient less."""
    x = torch.randn(4, 16, requires_grad=True)
    out, _ = routed_by_lists(x, WeightGradients())
    with pytest.raises(NotImplementedError, match="weight_gradients: expected backward without"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    layer = make_layer("cpu", torch.float32, weight_gradients=WeightGradients())
    message = r"weight_gradients: expected None under torch\.func"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.grad(lambda x: layer(x).sum())(torch.randn(4, SIZES["hidden"]))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(RuntimeError, match="forward"):
            routed_by_lists(dual, WeightGradients())


def sorted_case(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(2)
    place = {"device": device, "dtype": dtype}
    return {
        "x_sorted": torch.randn(30, 16, **place, requires_grad=True),
        "offsets": torch.tensor([0, 9, 9, 24], device=device, dtype=torch.int32),
        "gate": torch.randn(3, 8, 16, **place, requires_grad=True),
        "up": torch.randn(3, 8, 16, **place, requires_grad=True),
        "w_down": torch.randn(3, 16, 8, **place, requires_grad=True),
    }


def test_sorted_rows_and_a_pair_of_weights(device: str, dtype: torch.dtype) -> None:
    results = []
    for more in ({}, {"recompute": True}, {"weight_gradients": WeightGradients()}):
        case = sorted_case(device, dtype)
        w_up = (case["gate"], case["up"])
        out = experts_mlp(case["x_sorted"], case["offsets"], w_up, case["w_down"], **more)
        out.backward(torch.ones_like(out))
        results.append([out, *(t.grad for t in case.values() if t.requires_grad)])
    for other in results[1:]:
        for expected, got in zip(results[0], other, strict=True):
            assert torch.equal(expected, got)


def test_rows_before_the_first_expert(device: str, dtype: torch.dtype) -> None:
    """They belong to nobody, as those past the last do: no gradient, by either way."""
    grads = []
    for sink in (None, WeightGradients()):
        case = sorted_case(device, dtype)
        case["offsets"][0] = 4
        w_up = (case["gate"], case["up"])
        more = {"weight_gradients": sink}
        out = experts_mlp(case["x_sorted"], case["offsets"], w_up, case["w_down"], **more)
        out.sum().backward()
        assert not out[:4].any() and not out[24:].any() and out[4:24].any()
        grads.append([t.grad for t in case.values() if t.requires_grad])
        assert not grads[-1][0][:4].any()
    for expected, got in zip(*grads, strict=True):
        assert torch.equal(expected, got)


def test_compiled(device: str, dtype: torch.dtype) -> None:
    sink = WeightGradients(delayed=True)
    plain, layer = make_layer(device, dtype), make_layer(device, dtype, weight_gradients=sink)
    (batch,) = batches(device, dtype, 1)
    compiled = torch.compile(layer, backend="aot_eager")
    assert torch.equal(run(plain, *batch), run(compiled, *batch))
    sink.compute()
    assert torch.equal(plain.w_up.grad, layer.w_up.grad)


def test_frozen_weights_get_nothing(device: str, dtype: torch.dtype) -> None:
    layer = make_layer(device, dtype, weight_gradients=WeightGradients())
    layer.w_up.requires_grad_(False)
    layer.b_down.requires_grad_(False)
    run(layer, *batches(device, dtype, 1)[0])
    assert layer.w_up.grad is None and layer.b_down.grad is None
    assert layer.w_down.grad is not None and layer.b_up.grad is not None


def test_blocks_pass_over_empty_experts_together(gpu: str) -> None:
    """One expert has all rows: pairs of blocks take many tiles with nothing to sum."""
    rows, hidden, inner, experts, busy = 131072, 512, 1024, 64, 5
    place = {"device": gpu, "dtype": torch.bfloat16}
    dout, a = torch.randn(rows, hidden, **place), torch.randn(rows, inner, **place)
    offsets = torch.zeros(experts + 1, device=gpu, dtype=torch.int32)
    offsets[busy + 1 :] = rows
    expected = dout.T.float() @ a.float()
    first = None
    for _ in range(20):
        dw = torch.full((experts, hidden, inner), float("nan"), **place)
        ops.down_weight_gradient_out(dout, a, offsets, None, dw, False, False)
        first = dw if first is None else first
        assert torch.equal(dw, first)
    error = (first[busy].float() - expected).norm() / expected.norm()
    assert error < 0.004
    assert first[:busy].count_nonzero() == 0 and first[busy + 1 :].count_nonzero() == 0
