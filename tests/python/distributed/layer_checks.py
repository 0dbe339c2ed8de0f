"""A layer's experts on two and four ranks, against one process, and what goes wrong.

Run by test_four_ranks.py.
"""

from __future__ import annotations

import copy
import functools
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import guild
from fuzz_draw import Draw
from fuzz_parallel import ParallelCase
from guild.bench.parallel import measure_parallel
from guild.bench.presets import Shape
from guild.distributed.placement import clip_grad_norm_
from processes import gathered

_RANKS, _LIMIT = 4, 60.0
_CASES = 24


@functools.cache
def group_of(
    size: int, exact: bool = False, engine: str = "nccl", capacity: float | None = None
) -> guild.ExpertParallel:
    """A group of all four ranks, or of this rank's pair."""
    group = None
    if size != _RANKS:
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))["ep"]
    room = {"engine": engine, "max_tokens": 64, "capacity": capacity}
    return guild.ExpertParallel(group, exact=exact, timeout=_LIMIT, **room)


def random_layers(rank: int) -> None:
    """Every option of the layer, with any number of tokens on each rank."""
    for seed in range(_CASES):
        exact, size = seed % 2 == 1, (2, 4)[seed // 2 % 2]
        case = ParallelCase.drawn(seed, size)
        how = (("nccl", None), ("peer", None), ("peer", float(2 * size)))[seed // 4 % 3]
        failures = case.failures(group_of(size, exact, *how))
        assert not failures, (rank, seed, exact, how, case, failures)


def exact_bits(rank: int) -> None:
    """All results of one process with the tokens of all ranks, experts' gradients included."""
    for seed in range(12):
        draw, size = Draw(seed), (2, 4)[seed % 2]
        group = group_of(size, True, ("nccl", "peer")[seed // 2 % 2])
        dtype = (torch.float32, torch.bfloat16, torch.float64)[seed // 2 % 3]
        options = {
            "activation": draw.activation(),
            "order": draw.pick("concatenated", "interleaved"),
            "recompute": draw.chance(0.3),
        }
        whole = weights_of(8, options["activation"], draw.chance(0.5), dtype)
        own = tokens_of(rank, (7, 0, 30, 1)[rank], dtype, draw.chance(0.3))
        everyone = {name: gathered(t, group.group) for name, t in own.items()}
        before = sum(t.shape[0] for t in everyone["x"][: group.rank])
        slots = sum(t.shape[0] for t in everyone["ids"][: group.rank])
        joined = {n: torch.cat(t) for n, t in everyone.items() if n != "token_offsets"}
        if "token_offsets" in own:
            counts = [t.diff() for t in everyone["token_offsets"]]
            joined["token_offsets"] = F.pad(torch.cat(counts).cumsum(0).int(), (1, 0))
        mine = group.local_experts(8)
        local = [None if w is None else w[mine.start : mine.stop] for w in whole]
        got = run_experts(group.routed_experts, own, local, options)
        expected = run_experts(guild.routed_experts, joined, whole, options)
        for name, value in got.items():
            here = slice(mine.start, mine.stop)
            if name in own or name == "out":
                start = slots if name == "scores" else before
                here = slice(start, start + value.shape[0])
            assert torch.equal(value, expected[name][here]), (seed, name, dtype, options)


def weights_of(experts: int, activation: Any, bias: bool, dtype: torch.dtype) -> list:
    """The weights of a layer of widths 16 and 12, the same on every rank."""
    draw, width = torch.Generator().manual_seed(1), guild.Activation.width(activation, 12)
    shapes = (experts, width, 16), (experts, 16, 12), (experts, width), (experts, 16)
    weights = [torch.randn(s, generator=draw).to(dtype) for s in shapes]
    return weights if bias else [*weights[:2], None, None]


def tokens_of(rank: int, count: int, dtype: torch.dtype, lists: bool) -> dict[str, Tensor]:
    """A rank's tokens and their choices, some of which name no expert of the layer."""
    draw = torch.Generator().manual_seed(rank)
    x, residual, dout = (torch.randn(count, 16, generator=draw).to(dtype) for _ in range(3))
    ids = torch.rand(count, 8, generator=draw).argsort(1)[:, :3].int() - int(rank == 2)
    scores = torch.rand(count, 3, generator=draw)
    own = {"x": x, "ids": ids, "scores": scores, "residual": residual, "dout": dout}
    if lists:
        lengths = torch.randint(0, 4, (count,), generator=draw)
        kept = torch.arange(3) < lengths[:, None]
        own |= {"ids": ids[kept], "scores": scores[kept]}
        own["token_offsets"] = F.pad(lengths.cumsum(0).int(), (1, 0))
    return own


def run_experts(call: Any, given: dict, weights: list, options: dict) -> dict[str, Tensor]:
    """The output and all gradients."""
    leaves = {n: given[n].clone().requires_grad_() for n in ("x", "scores", "residual")}
    names = ("w_up", "w_down", "b_up", "b_down")
    layer = {
        n: None if w is None else w.clone().requires_grad_()
        for n, w in zip(names, weights, strict=True)
    }
    more = {"residual": leaves["residual"], "token_offsets": given.get("token_offsets")}
    out = call(leaves["x"], given["ids"], leaves["scores"], **layer, **more, **options)
    out.backward(given["dout"])
    tensors = (leaves | layer).items()
    return {"out": out.detach()} | {n: t.grad for n, t in tensors if t is not None}


def exact_layer(rank: int) -> None:
    """Router and experts in one: x's gradient is rounded once, as in one process.

    Products of integers have no rounding, so that the bits do not depend on the number of tokens.
    """
    group = group_of(4, exact=True)
    torch.manual_seed(0)
    for router in ("softmax", "topk_softmax", "sigmoid"):
        sizes = 16, 8, 8, 3, guild.Activation("relu", gated=False)
        whole = guild.MoE(*sizes, router=router, shared_experts=1)
        layer = guild.MoE(*sizes, router=router, shared_experts=1, expert_group=group)
        state, mine = whole.state_dict(), group.local_experts(8)
        for name, weight in state.items():
            torch.randint(-2, 3, weight.shape, out=(whole_numbers := torch.empty_like(weight)))
            weight.copy_(whole_numbers)
            if name in ("w_up", "w_down"):
                state[name] = weight[mine.start : mine.stop]
        layer.load_state_dict(state)
        x = torch.randint(-3, 4, (20, 16), generator=torch.Generator().manual_seed(rank)).float()
        xs = [x.clone().requires_grad_() for _ in range(2)]
        outs = [one(x) for one, x in zip((whole, layer), xs, strict=True)]
        dout = torch.randint(-3, 4, outs[0].shape).float()
        for out in outs:
            out.backward(dout)
        assert torch.equal(*outs) and torch.equal(xs[0].grad, xs[1].grad)
        assert torch.equal(whole.router.weight.grad, layer.router.weight.grad)


def rows_go_once(rank: int) -> None:
    """A row goes once to a rank with several of its token's experts, and not to one with none."""
    group = group_of(4)
    sent = []
    exchange = group._ranks.exchange

    def counted(rows, to, *rest):
        sent.append((rows.shape[1:], list(to)))
        return exchange(rows, to, *rest)

    group._ranks.exchange = counted
    ids = torch.tensor([[0, 1, 7], [2, 3, 2], [0, 1, 1], [-1, 8, 9]])
    x = torch.randn(4, 16, requires_grad=True)
    mine = group.local_experts(8)
    weights = [
        w[mine.start : mine.stop]
        for w in weights_of(8, guild.Activation(), False, torch.float32)[:2]
    ]
    out = group.routed_experts(x, ids, torch.ones(4, 3), *weights)
    out.sum().backward()
    group._ranks.exchange = exchange
    assert not out[3].any() and not x.grad[3].any()
    rows = [to for shape, to in sent if shape == (16,)]
    back = [4 * n for n in (2, 1, 0, 1)]
    everyone = [2, 1, 0, 1]
    assert rows[0] == everyone and rows[2] == everyone  # x, then the gradient of the output
    assert sum(rows[1]) == back[rank] and sum(rows[3]) == back[rank]


def mismatches(rank: int) -> None:
    """Ranks whose calls differ all get the same error, and the group stays usable."""
    group = group_of(4)
    for name, sizes, on_one in (
        ("hidden", (16, 8, 4, 2), (24, 8, 4, 2)),
        ("intermediate", (16, 8, 4, 2), (16, 16, 4, 2)),
        ("experts", (16, 8, 4, 2), (16, 8, 8, 2)),
    ):
        layer = guild.MoE(*(on_one if rank == 2 else sizes), expert_group=group)
        with pytest.raises(ValueError, match=rf"^expert_group: .* got {name} .* on rank 2") as e:
            layer(torch.randn(5, layer.hidden))
        assert len(set(_texts(str(e.value)))) == 1
    layer = guild.MoE(16, 8, 4, 2, expert_group=group, dtype=torch.bfloat16 if rank else None)
    with pytest.raises(ValueError, match="got dtype float32 on rank 0, bfloat16 on rank 1"):
        layer(torch.randn(5, 16, dtype=layer.w_up.dtype))
    first, second = (guild.MoE(16, 8, 4, 2, expert_group=group) for _ in range(2))
    x = torch.randn(5, 16)
    with pytest.raises(ValueError, match="got layer"):
        (second if rank == 1 else first)(x)
    with pytest.raises(ValueError, match="got gradients"), torch.set_grad_enabled(rank != 3):
        first(x)
    one, two = first(x), second(x)
    with pytest.raises(RuntimeError, match="the same order"):
        (two if rank == 1 else one).sum().backward()
    for doubt in (True, False):  # as backward leaves it on a GPU
        group._ranks._doubt = torch.tensor(doubt)
        with pytest.raises(RuntimeError, match="the same order") if doubt else nullcontext():
            first(x)
    assert torch.isfinite(first(x)).all()


def _texts(text: str) -> list[str]:
    everyone: list = [None] * _RANKS
    dist.all_gather_object(everyone, text)
    return everyone


def arguments(rank: int) -> None:
    """Each wrong argument is named."""
    group = group_of(4)
    for error, text, call in (
        (TypeError, "^group: expected a ProcessGroup", lambda: guild.ExpertParallel(3)),
        (ValueError, "^timeout: ", lambda: guild.ExpertParallel(timeout=-1.0)),
        (ValueError, "^timeout: ", lambda: guild.ExpertParallel(timeout=float("inf"))),
        (TypeError, "^exact: ", lambda: guild.ExpertParallel(exact=1)),
        (ValueError, "^engine: ", lambda: guild.ExpertParallel(engine="pigeon")),
        (ValueError, "^max_tokens: ", lambda: guild.ExpertParallel(max_tokens=0)),
        (ValueError, "^capacity: ", lambda: guild.ExpertParallel(capacity=-1.0)),
        (TypeError, "^expert_group: ", lambda: guild.MoE(8, 8, 4, 2, expert_group="ep")),
        (ValueError, "^experts: .* 4 ", lambda: guild.MoE(8, 8, 6, 2, expert_group=group)),
    ):
        with pytest.raises(error, match=text):
            call()
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ValueError, match=r"^group: expected a mesh of one dimension"):
        guild.ExpertParallel(mesh)
    others = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match=r"^group: expected one that this rank is in"):
            guild.ExpertParallel(others)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(guild.MoE(8, 8, 4, 2, expert_group=group))
    sink = guild.WeightGradients()
    layer = guild.MoE(8, 8, 4, 2, expert_group=group_of(4, True), weight_gradients=sink)
    assert f"ExpertParallel(size=4, rank={rank}, engine='nccl')" in repr(layer)
    assert "WeightGradients(main_grad=False, delayed=False)" in repr(layer)
    with pytest.raises(ValueError, match=r"^weight_gradients: "):
        layer(torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"^out: expected None with experts on other ranks"):
        layer(torch.randn(2, 8), out=torch.empty(2, 8))
    tokens = torch.randn(2, 8), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    weights = torch.randn(1, 16, 8), torch.randn(1, 8, 8)
    absent = {"out": torch.empty(2, 8), "expert_map": torch.zeros(4, dtype=torch.int32)}
    absent["fp8"] = guild.FP8()
    for name, value in absent.items():
        with pytest.raises(ValueError, match=f"^{name}: expected None with experts on other"):
            group.routed_experts(*tokens, *weights, **{name: value})


def other_ways(rank: int) -> None:
    """Gradient sinks, activation checkpoints, no gradients, a group of one, seeds."""
    group = group_of(2)
    torch.manual_seed(3)
    plain = guild.MoE(16, 8, 4, 2, expert_group=group)
    x = torch.randn(5 + rank, 16)
    plain(x).square().sum().backward()
    for name in ("main_grad", "grad"):
        sink = guild.WeightGradients(main_grad=name == "main_grad", delayed=True)
        layer = copy.deepcopy(plain).requires_grad_()
        layer.weight_gradients = sink
        layer.zero_grad()
        for leaf in layer.parameters():
            leaf.main_grad = torch.zeros_like(leaf)
        layer(x).square().sum().backward()
        sink.compute()
        torch.testing.assert_close(getattr(layer.w_up, name), plain.w_up.grad)
    again = copy.deepcopy(plain)
    again.zero_grad()
    checkpoint(again, x, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close(again.w_down.grad, plain.w_down.grad)
    with torch.no_grad():
        torch.testing.assert_close(again(x), plain(x))
    torch.manual_seed(3)
    one = guild.MoE(
        16,
        8,
        4,
        2,
        expert_group=guild.ExpertParallel(dist.new_group([rank], use_local_synchronization=True)),
    )
    torch.testing.assert_close(one(x), plain(x))
    assert torch.equal(gathered(plain.router.weight)[0], plain.router.weight)
    first, second = gathered(plain.w_up, group.group)
    assert not torch.equal(first, second)


def checkpoints(rank: int) -> None:
    """With checkpoints, the second forward runs inside the experts' own backward."""
    for exact, engine in ((False, "nccl"), (True, "nccl"), (False, "peer"), (True, "peer")):
        torch.manual_seed(3)
        layer = guild.MoE(16, 8, 4, 2, router_bias=True, expert_group=group_of(4, exact, engine))
        x = torch.randn(5 + rank, 16)
        found = []
        for call in (layer, functools.partial(checkpoint, layer, use_reentrant=False)):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            call(leaf).sum().backward()
            found.append([leaf.grad, *(p.grad for p in layer.parameters())])
        assert all(map(torch.equal, *found)), (exact, engine)


def default_dtype(rank: int) -> None:
    """Results, norms included, are the same whatever torch's default dtype is."""
    weights = [w[:2] for w in weights_of(8, guild.Activation(), False, torch.float32)[:2]]
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(torch.float32)
        own = tokens_of(rank, (7, 0, 30, 1)[rank], torch.float32, False)
        torch.set_default_dtype(dtype)
        try:
            for engine in ("nccl", "peer"):
                call = group_of(4, engine=engine).routed_experts
                got = run_experts(call, own, [*weights, None, None], {})
                for name, value in found.setdefault(engine, got).items():
                    assert torch.equal(got[name], value), (engine, dtype, name)
            assert clip_grad_norm_([torch.nn.Parameter(torch.ones(3))], 1.0).dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)


def balance_counts_every_token(rank: int) -> None:
    """The selection bias moves as it would with all tokens in one process."""
    router = guild.Router("sigmoid", selection_bias=True)
    torch.manual_seed(0)
    alone = guild.MoE(16, 8, 8, 2, router=router)
    layer = guild.MoE(16, 8, 8, 2, router=router, expert_group=group_of(2))
    layer.router.load_state_dict(alone.router.state_dict())
    x = torch.randn(30, 16, generator=torch.Generator().manual_seed(rank))
    layer(x)
    layer.balance(0.01)
    alone(torch.cat(gathered(x)))
    alone.balance(0.01, dist.new_group([rank], use_local_synchronization=True))
    assert torch.equal(layer.router.selection_bias, alone.router.selection_bias)
    assert layer.router.selection_bias.unique().numel() > 1


def benchmark(rank: int) -> None:
    """The benchmark checks the layer, and every rank gets the same record."""
    shape = {"toy": Shape(16, 32, 8, 8, 2)}
    how = "random", torch.float32, torch.device("cpu"), 2, 0.001
    record = measure_parallel(shape, *how, beside=["torchtitan"])  # where it is installed
    assert ("torchtitan" in record["engines"]) != ("torchtitan" in record["skipped"])
    (case,) = record["cases"]
    assert case["error"] < 1e-5 and 0 < case["efficiency"]["forward"] < 1
    assert len(set(_texts(repr(case["milliseconds"])))) == 1
    few = {f"toy {tokens}": Shape(tokens, 32, 8, 8, 2) for tokens in (1, 4)}
    for room in (None, 16):
        record = measure_parallel(few, *how, engine="peer", inference=True, max_tokens=room)
        assert record["engines"] == ["peer"] and record["inference"]
        for case in record["cases"]:
            assert set(case["milliseconds"]) == {"forward", "forward alone"}


CHECKS = (
    random_layers,
    exact_bits,
    exact_layer,
    rows_go_once,
    mismatches,
    arguments,
    other_ways,
    checkpoints,
    default_dtype,
    balance_counts_every_token,
    benchmark,
)
