"""What every op promises for any routing: zeros, skips, same bits, strides, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import guild
from guild._torch.operators import ops
from layers import ACTIVATIONS, CASES, make_layer
from oracle.steps import compute
from tolerance import relative_error

FLAGS = (*ACTIVATIONS["gpt_oss"].scalars, False, False)


def dtypes_of(device: str) -> tuple[torch.dtype, ...]:
    """One 16-bit dtype on a GPU, one more dtype on the CPU."""
    return (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16)


def layer_of(name: str, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    """A case of tests/cases.csv with gpt-oss's activation and biases."""
    return make_layer(CASES[name], ACTIVATIONS["gpt_oss"], dtype, device, seed=seed)


def run(layer, **changed) -> dict[str, Tensor]:
    """Output and all gradients of `routed_experts`."""
    arguments = {**layer.arguments("concatenated"), **changed}
    x, scores = layer.x.detach().requires_grad_(), layer.scores.detach().requires_grad_()
    out = guild.routed_experts(x, layer.ids, scores, **arguments)
    out.backward(layer.dout)
    weights = {n: t.grad for n, t in arguments.items() if isinstance(t, Tensor)}
    return {"out": out.detach(), "x": x.grad, "scores": scores.grad, **weights}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Raise unless every tensor has the same bits."""
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_memory_is_poisoned(device: str) -> None:
    """The tests rely on it: an element that a kernel does not write is noticed."""
    layer = layer_of("sentinel_ids", device)
    w_up, w_down = layer.arguments("concatenated")["w_up"], layer.down
    _, h, offsets, *_ = ops.moe_forward(
        layer.x, layer.ids, layer.scores, None, None, w_up, None, w_down, None, None, *FLAGS, True
    )
    unwritten = h[int(offsets[-1]) :].float()
    assert unwritten.numel() > 0
    assert (unwritten.isnan() | (unwritten.abs() > 1e30)).all()


def test_sentinel_ids_are_skipped(device: str) -> None:
    """Whatever x, scores and dout hold at a token without experts affects no result."""
    for dtype in dtypes_of(device):
        layer = layer_of("sentinel_ids", device, dtype)
        layer.ids[3] = CASES["sentinel_ids"].experts  # a token with nothing but sentinels
        clean = run(layer)
        assert not clean["out"][3].any() and not clean["x"][3].any()
        assert not clean["scores"][(layer.ids < 0) | (layer.ids >= 6)].any()
        dirty = replace(layer, x=layer.x.clone(), dout=layer.dout.clone())
        dirty.scores = torch.where((layer.ids < 0) | (layer.ids >= 6), float("nan"), layer.scores)
        dirty.x[3] = float("nan")
        dirty.dout[3] = float("nan")
        assert_same(clean, run(dirty))


def test_empty_experts_get_zero_gradients(device: str) -> None:
    """Exact zeros for experts without rows; finite, non-zero numbers for the others."""
    for dtype in dtypes_of(device):
        layer = layer_of("empty_experts", device, dtype)
        got = run(layer)
        for name in ("w_up", "w_down", "b_up", "b_down"):
            assert not got[name][1::2].any(), name
            assert got[name][0::2].flatten(1).abs().sum(1).gt(0).all(), name
            assert got[name].isfinite().all(), name


def test_no_tokens(device: str) -> None:
    """T = 0: empty results, zero gradients of the weights."""
    for dtype in dtypes_of(device):
        got = run(layer_of("no_tokens", device, dtype))
        assert got["out"].shape == got["x"].shape == (0, 32)
        for name in ("w_up", "w_down", "b_up", "b_down"):
            assert not got[name].any(), name


def test_ids_of_either_width(device: str) -> None:
    """int32 and int64 ids give the same bits, contiguous or not."""
    layer = layer_of("sentinel_ids", device)
    got = run(layer)
    assert_same(got, run(replace(layer, ids=layer.ids.int())))
    wide = torch.stack((layer.ids, layer.ids), 2)[:, :, 0]
    assert not wide.is_contiguous()
    assert_same(got, run(replace(layer, ids=wide)))


@pytest.mark.parametrize("name", ["all_to_one", "matrix_tiles", "many_experts", "tile_rows"])
def test_two_runs_give_the_same_bits(name: str, device: str) -> None:
    """The same call twice, on the CPU with another number of threads."""
    layer = layer_of(name, device)
    first = run(layer)
    torch.set_num_threads(3)
    assert_same(first, run(layer))


def test_strided_operands(device: str) -> None:
    """Views with strides that the kernels can read give the bits of packed ones."""
    layer = layer_of("matrix_tiles", device)
    packed = run(layer)

    def spread(t: Tensor, dim: int) -> Tensor:
        """The same values, every other slice of a tensor twice as long."""
        shape = list(t.shape)
        shape[dim] *= 2
        both = torch.full(shape, float("nan"), dtype=t.dtype, device=t.device)
        view = both[(slice(None),) * dim + (slice(0, None, 2),)]
        view.copy_(t)
        return view.detach().requires_grad_()

    arguments = layer.arguments("concatenated")
    changed = {n: spread(arguments[n], 0) for n in ("w_up", "w_down", "b_up", "b_down")}
    assert_same(packed, run(replace(layer, x=spread(layer.x, 0), dout=spread(layer.dout, 0))))
    assert_same(packed, run(layer, **changed))
    assert_same(packed, run(layer, w_up=spread(arguments["w_up"], 1)))


def test_gradients_lie_as_the_weights_do(device: str) -> None:
    """A transposed view of a parameter gets a gradient that the parameter can take as it is."""
    layer = layer_of("matrix", device)
    arguments = layer.arguments("concatenated")
    parameter = arguments["w_down"].detach().mT.contiguous().requires_grad_()
    expected = run(layer)["w_down"]
    got = run(layer, w_down=parameter.mT.detach().requires_grad_())["w_down"]
    assert got.stride() == parameter.mT.stride()
    assert torch.equal(got, expected)


def test_nan_stays_where_it_is(device: str) -> None:
    """NaN in one token's input reaches that token's output, and no other token's."""
    layer = layer_of("matrix", device)
    clean = run(layer)["out"]
    layer.x[5] = float("nan")
    out = run(layer)["out"]
    assert out[5].isnan().all()
    others = torch.arange(out.shape[0], device=device) != 5
    assert torch.equal(out[others], clean[others])


def test_nan_logits_choose_experts_that_exist(device: str) -> None:
    """NaN ranks last, and never indexes out of range."""
    logits = torch.randn(9, 6, device=device)
    logits[2] = float("nan")
    logits[4, 1:] = float("nan")
    ids, _ = guild.route(logits, 3)
    assert ((ids >= 0) & (ids < 6)).all()
    assert ids.sort(1).values.diff().gt(0).all()  # no expert twice
    assert ids[4, 0] == 0


def test_saved_for_backward(device: str) -> None:
    """x and the weights by reference, h, 20 bytes of routing a slot; no other float tensor."""
    layer = layer_of("matrix_tiles", device)
    arguments = layer.arguments("concatenated")
    x = layer.x.detach().requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        guild.routed_experts(x, layer.ids, layer.scores, **arguments)
    given = {t.data_ptr() for t in (x, *arguments.values()) if isinstance(t, Tensor)}
    fresh = [t for t in saved if t.data_ptr() not in given]
    case = layer.case
    slots = case.tokens * case.top_k
    h_bytes = slots * 2 * case.intermediate * 2
    total = sum(t.numel() * t.element_size() for t in fresh)
    assert total <= h_bytes + 20 * slots + 4 * (case.experts + 1)


# ---- CUDA graphs --------------------------------------------------------------------------------


def graphed(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a step after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_graph_replays_with_other_routing(gpu: str) -> None:
    """Capture forward and backward once; replay with other tokens, ids and scores."""
    first = layer_of("matrix_tiles", gpu)
    arguments = first.arguments("concatenated")
    x, scores, ids = first.x.clone().requires_grad_(), first.scores.clone(), first.ids.clone()
    scores.requires_grad_()
    weights = [t for t in arguments.values() if isinstance(t, Tensor)]
    results: list[Tensor] = []

    def step() -> None:
        out = guild.routed_experts(x, ids, scores, **arguments)
        results[:] = [out, *torch.autograd.grad(out, (x, scores, *weights), first.dout)]

    graph = graphed(step)
    for seed in (1, 2, 3):
        other = layer_of("matrix_tiles", gpu, seed=seed)
        other.ids[: 8 * seed] = seed  # a very different balance
        with torch.no_grad():
            x.copy_(other.x)
            scores.copy_(other.scores)
        ids.copy_(other.ids)
        graph.replay()
        expected = run(replace(first, x=other.x, ids=other.ids, scores=other.scores))
        for value, name in zip(results, ("out", "x", "scores"), strict=False):
            assert torch.equal(value, expected[name]), name
        for value, name in zip(results[3:], ("w_up", "w_down", "b_up", "b_down"), strict=True):
            assert torch.equal(value, expected[name]), name


def test_moe_in_a_graph(gpu: str) -> None:
    """The module too: router, sort, experts and counts without a host wait."""
    torch.manual_seed(0)
    moe = guild.MoE(64, 32, 8, 2, shared_experts=1, device=gpu, dtype=torch.bfloat16)
    x = torch.randn(48, 64, device=gpu, dtype=torch.bfloat16)
    kept: dict[str, Tensor] = {}

    def step() -> None:
        kept["out"] = moe(x)
        kept["counts"] = moe.expert_counts
        moe.zero_grad()
        kept["out"].float().square().sum().backward()

    graph = graphed(step)
    x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = kept["out"].clone(), kept["counts"].clone(), moe.w_up.grad.clone()
    step()
    assert torch.equal(replayed[0], kept["out"])
    assert torch.equal(replayed[1], kept["counts"])
    assert torch.equal(replayed[2], moe.w_up.grad)
    assert int(kept["counts"].sum()) == 96


def test_no_host_wait(gpu: str) -> None:
    """Forward and backward do not raise where torch forbids synchronisation."""
    layer = layer_of("matrix_tiles", gpu)
    run(layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_layer_compared_with_is_right(device: str) -> None:
    """The run that others are compared with bit for bit is itself right."""
    layer = layer_of("matrix_tiles", device)
    assert relative_error(run(layer)["out"], compute(layer)["o"]) < 0.01


def test_accumulation_in_float32(device: str) -> None:
    """main_grad: gradients add to float32 buffers; experts without rows leave them alone."""
    layer = layer_of("empty_experts", device)
    offsets, row_token, _, row_score = ops.sort_by_expert(layer.ids, layer.scores, 16)
    rows = layer.ids.numel()
    w_up = layer.arguments("concatenated")["w_up"]
    dh = torch.randn(rows, w_up.shape[1], device=device).bfloat16()
    a = torch.randn(rows, layer.down.shape[2], device=device).bfloat16()
    gradient = (layer.dout, dh, offsets, row_token, row_score, layer.down, *FLAGS)
    calls = (
        (
            w_up.shape,
            lambda out, add: ops.up_weight_gradient_out(
                layer.x, dh, offsets, row_token, out, None, True, False, False, add
            ),
        ),
        (
            layer.down.shape,
            lambda out, add: ops.down_weight_gradient_out(
                layer.dout, a, offsets, row_token, out, False, add
            ),
        ),
        (
            layer.down.shape[:2],
            lambda out, add: ops.bias_gradient_out(
                layer.dout, offsets, row_token, row_score, out, add
            ),
        ),
        (w_up.shape[:2], lambda out, add: ops.down_gradient(*gradient, out, None, add)),
        (layer.down.shape[:2], lambda out, add: ops.down_gradient(*gradient, None, out, add)),
    )
    for shape, call in calls:
        once = torch.full(shape, float("nan"), device=device)
        call(once, False)
        assert not once[1::2].any()
        start = torch.randn(shape, device=device)
        buffer = start.clone()
        call(buffer, True)
        call(buffer, True)
        assert torch.equal(buffer[1::2], start[1::2])
        torch.testing.assert_close(buffer, start + 2 * once, rtol=1e-5, atol=1e-4)
