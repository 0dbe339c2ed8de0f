"""Calls of a layer over ranks: experts as lists and with LoRA, and ranks whose calls differ.

Run by test_four_ranks.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import guild
from layer_checks import tokens_of, weights_of
from processes import gathered

_EXPERTS, _HIDDEN, _INNER, _RANK = 8, 16, 12, 3


def new_group(exact: bool = False, engine: str = "nccl") -> guild.ExpertParallel:
    """A group of all ranks for one check, so that an error in it stays there."""
    everyone = dist.new_group(list(range(dist.get_world_size())))
    return guild.ExpertParallel(everyone, exact=exact, timeout=60.0, engine=engine, max_tokens=200)


def terms() -> dict[str, Tensor]:
    """LoRA's A and B of both projections, for every expert."""
    draw = torch.Generator().manual_seed(2)
    shapes = {
        "up_a": (_RANK, _HIDDEN),
        "up_b": (2 * _INNER, _RANK),
        "down_a": (_RANK, _INNER),
        "down_b": (_HIDDEN, _RANK),
    }
    return {n: torch.randn(_EXPERTS, *s, generator=draw).double() for n, s in shapes.items()}


def pair_of_lists(rank: int) -> None:
    """Gate and up as two lists, as one process takes them."""
    draw = torch.Generator().manual_seed(4)
    sizes = ((2 * _INNER, _HIDDEN), (_HIDDEN, _INNER))
    w_up, w_down = (torch.randn(_EXPERTS, *s, generator=draw).double() for s in sizes)
    own = tokens_of(rank, 5, torch.float64, lists=False)
    tokens = own["x"], own["ids"], own["scores"]
    wanted = guild.routed_experts(*tokens, w_up, w_down)
    for group in (new_group(), new_group(engine="peer")):
        local = group.local_experts(_EXPERTS)
        mine = slice(local.start, local.stop)
        halves = tuple(list(half.clone()) for half in w_up[mine].chunk(2, 1))
        down = [w.clone().requires_grad_() for w in w_down[mine]]
        torch.testing.assert_close(group.routed_experts(*tokens, halves, down), wanted)


def run(call: Callable, tokens: dict, experts: slice, lists: bool, lora: bool) -> dict:
    """Output and every gradient; lists: w_up's in order in memory, w_down's in reverse."""
    names = "w_up", "w_down", "b_up", "b_down"
    whole = weights_of(_EXPERTS, guild.Activation(), True, torch.float64)
    leaves = dict(zip(names, (w[experts].clone() for w in whole), strict=True))
    leaves |= {n: t[experts].clone() for n, t in terms().items()} if lora else {}
    given: dict[str, Any] = {n: t.requires_grad_() for n, t in leaves.items()}
    if lists:
        flipped = leaves["w_down"].detach().flip(0)
        leaves["w_down"] = [t.requires_grad_() for t in reversed(flipped.unbind())]
        given["w_down"], given["w_up"] = leaves["w_down"], list(leaves["w_up"].unbind())
    options = {n: given[n] for n in names}
    if lora:
        options["lora_up"] = guild.LoRA(given["up_a"], given["up_b"], 0.5)
        options["lora_down"] = guild.LoRA(given["down_a"], given["down_b"])
    x = tokens["x"].clone().requires_grad_()
    out = call(x, tokens["ids"], tokens["scores"], **options)
    out.backward(tokens["dout"])
    found = {"out": out.detach(), "x": x.grad}
    for name, leaf in leaves.items():
        gradients = [t.grad for t in leaf] if isinstance(leaf, list) else leaf.grad
        found[name] = torch.stack(gradients) if isinstance(leaf, list) else gradients
    return found


def lists_and_low_rank(rank: int) -> None:
    """Lists of weights and LoRA terms, against one process with all tokens."""
    group = new_group()
    own = tokens_of(rank, (7, 0, 9, 1)[rank], torch.float64, lists=False)
    everyone = {name: gathered(tensor) for name, tensor in own.items()}
    joined = {name: torch.cat(tensors) for name, tensors in everyone.items()}
    before = sum(len(x) for x in everyone["x"][:rank])
    local = group.local_experts(_EXPERTS)
    mine, rows = slice(local.start, local.stop), slice(before, before + len(own["x"]))
    warnings.simplefilter("ignore", guild.CopiedWeightsWarning)  # this process has no pytest
    engines = group, new_group(engine="peer")
    for lists, lora in ((True, False), (False, True), (True, True)):
        truth = run(guild.routed_experts, joined, slice(None), False, lora)
        for ranks in engines:
            for name, value in run(ranks.routed_experts, own, mine, lists, lora).items():
                part, close = rows if name in ("out", "x") else mine, {"rtol": 1e-10, "atol": 1e-10}
                torch.testing.assert_close(value, truth[name][part], **close, msg=name)
    exact = new_group(exact=True)
    with pytest.raises(ValueError, match=r"^lora_up: expected None with ExpertParallel\(exact="):
        run(exact.routed_experts, own, mine, False, True)
    got = run(exact.routed_experts, own, mine, True, False)
    truth = run(guild.routed_experts, joined, slice(None), False, False)
    torch.testing.assert_close(got["w_down"], truth["w_down"][mine])
    lora, biases = rank == 2, "b_up, b_down"
    text = f"({biases}) on rank 0, ({biases}) on rank 1, ({biases}, LoRA) on rank 2"
    with pytest.raises(ValueError, match=re.escape(text)):
        run(group.routed_experts, own, mine, False, lora)


def other_activations(rank: int) -> None:
    """Experts that would compute something else on one rank are an error."""
    group = new_group()
    for text, one, others in (
        (
            "(alpha, limit) (1, inf) on rank 0, (1, inf) on rank 1, (1.5, inf)",
            {"alpha": 1.5},
            {},
        ),
        ("(alpha, limit) (1, inf) on rank 0, (1, inf) on rank 1, (1, 7) on", {"limit": 7.0}, {}),
        (
            "(activation, up_offset) (gated silu, 0) on rank 0, (gated silu, 0) on rank 1, (silu",
            {"gated": False},
            {},
        ),
    ):
        activation = guild.Activation(**(one if rank == 2 else others))
        layer = guild.MoE(16, 8, 8, 2, activation, expert_group=group)
        with pytest.raises(ValueError, match=f"^expert_group: .* got {re.escape(text)}"):
            layer(torch.randn(3, 16))
    layer = guild.MoE(16, 8, 8, 2, bias=rank == 1, expert_group=group)
    text = r"got options none on rank 0, \(b_up, b_down\) on rank 1"
    with pytest.raises(ValueError, match=text):
        layer(torch.randn(3, 16))
    layer = guild.MoE(16, 8, 8, 2, expert_group=group)
    text = r"got gradients \(scores, weights\) on rank 0, \(x, scores, weights\) on rank 1"
    with pytest.raises(ValueError, match=text):
        layer(torch.randn(3, 16, requires_grad=rank == 1))


def transforms(rank: int) -> None:
    """Function transforms are refused before the first message, so the group stays usable."""

    def jvp(layer: guild.MoE, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            w_up, w_down = layer.w_up.detach(), layer.w_down.detach()
            ids = torch.zeros(len(x), 1, dtype=torch.int32)
            return layer.expert_group.routed_experts(dual, ids, x[:, :1], w_up, w_down)

    def jvp_of_a_half(layer: guild.MoE, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            gate, up = layer.w_up.detach().chunk(2, 1)
            halves = torch.autograd.forward_ad.make_dual(gate, gate), up
            ids = torch.zeros(len(x), 1, dtype=torch.int32)
            down = layer.w_down.detach()
            return layer.expert_group.routed_experts(x, ids, x[:, :1], halves, down)

    def jvp_of_low_rank(layer: guild.MoE, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            a = torch.randn(2, 4, 8)
            terms = guild.LoRA(torch.autograd.forward_ad.make_dual(a, a), torch.randn(2, 16, 4))
            ids = torch.zeros(len(x), 1, dtype=torch.int32)
            weights = layer.w_up.detach(), layer.w_down.detach()
            call = layer.expert_group.routed_experts
            return call(x, ids, x[:, :1], *weights, lora_down=terms)

    x = torch.randn(4, 16)
    for engine in ("nccl", "peer"):
        layer = guild.MoE(16, 8, 8, 2, expert_group=new_group(engine=engine))
        for call in (
            jvp,
            jvp_of_a_half,
            jvp_of_low_rank,
            lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
            lambda layer, x: torch.func.vmap(layer)(x.view(2, 2, 16)),
            lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
        ):
            with pytest.raises(NotImplementedError, match=r"^expert_group: .* outside of torch"):
                call(layer, x)
        assert torch.isfinite(layer(x)).all()


def wrong_arguments(rank: int) -> None:
    """Wrong experts and sinks are refused before the first message: the group stays usable."""
    x, ids, scores = torch.randn(5, 6), torch.randint(0, 8, (5, 2)), torch.rand(5, 2)

    def parameters(experts: int = 2) -> dict[str, Tensor]:
        shapes = {"w_up": (experts, 8, 6), "w_down": (experts, 6, 4)}
        return {n: torch.randn(s, requires_grad=True) for n, s in shapes.items()}

    good = parameters()
    one, many = {**good, "w_up": good["w_up"] * 2}, parameters(1025)
    halves = {**good, "b_up": (torch.zeros(2, 4), torch.zeros(2, 4))}
    sink, main = guild.WeightGradients(), guild.WeightGradients(main_grad=True)
    for engine in ("nccl", "peer"):
        group = new_group(engine=engine)
        for given, weight_gradients, text in (
            (good, main, r"^w_up\.main_grad: expected a float32 tensor, got None"),
            (one, sink, "^w_up: expected a parameter"),
            (halves, sink, "^b_up: expected one tensor with weight_gradients, got a pair"),
            (many, None, "^w_down: expected 1 to 4096 experts on all ranks, got 4100"),
        ):
            with pytest.raises(ValueError, match=text):
                group.routed_experts(x, ids, scores, **given, weight_gradients=weight_gradients)
        assert group._ranks.calls == 0
        group.routed_experts(x, ids, scores, **good, weight_gradients=sink).sum().backward()
        assert good["w_up"].grad.any()
    layer = guild.MoE(16, 8, 8, 2)
    guild.distribute_experts(layer, init_device_mesh("cpu", (dist.get_world_size(),)))
    layer.weight_gradients = sink
    x = torch.randn(5, 16)
    with pytest.raises(ValueError, match=r"^weight_gradients: expected None with .* as DTensors"):
        layer(x)
    layer.weight_gradients = None
    layer(x).sum().backward()
    assert layer.w_up.grad is not None


def default_device(rank: int) -> None:
    """With another default device than the tokens', engines still allocate where they must."""
    for engine in ("nccl", "peer"):
        layer = guild.MoE(16, 8, 8, 2, expert_group=new_group(engine=engine))
        x = torch.randn(5, 16)
        with torch.device("meta"):
            out = layer(x)
            out.sum().backward()
        assert torch.equal(out, layer(x)) and layer.w_up.grad.isfinite().all()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        layer = guild.MoE(16, 8, 8, 2)
        guild.distribute_experts(layer, mesh)
        layer.to_empty(device="cpu")
        layer.reset_parameters()
    assert torch.isfinite(layer(x)).all()


def the_first_call(rank: int) -> None:
    """Engines that do not match are an error on all ranks, and no rank waits in vain."""
    ranks = list(range(dist.get_world_size()))
    everyone = dist.new_group(ranks, timeout=timedelta(seconds=20))  # of what has none of its own
    engine = "peer" if rank else "nccl"
    layer = guild.MoE(16, 8, 8, 2, expert_group=guild.ExpertParallel(everyone, engine=engine))
    told = "forward of call 1 on rank 0, choice of an engine of call 1 on rank 1"
    told += ", .*; engine is 'nccl' on rank 0, 'peer' on rank 1, 'peer' on rank 2"
    with pytest.raises(RuntimeError, match=f"^expert_group: .* the same order, got {told}"):
        layer(torch.randn(3, 16))


def first_calls(rank: int) -> None:
    """A rank whose host waits for the others' finds that they are in a call of the peer engine."""
    x = torch.randn(3, 16)
    for engine in ("nccl", "peer"):
        group = new_group(engine=engine)
        first, second = (guild.MoE(16, 8, 8, 2, expert_group=group) for _ in range(2))
        first(x)
        dist.barrier()  # else a rank may meet the others' error at the end of this call
        with pytest.raises(ValueError, match=r"got layer .*2 on rank 1"):
            (second if rank == 1 else first)(x)
        router = guild.Router(rounding="nearest", tile=4)
        for before in ((False, True, False), ()):
            layer = guild.MoE(16, 8, 8, 2, router=router, expert_group=new_group(engine=engine))
            for training in before:
                layer.train(training)(x).sum().backward()
            dist.barrier()
            with pytest.raises(ValueError, match=r"got options .*\(token_offsets\) on rank 1"):
                layer.train(rank == 1)(x)


class InAHookError(Exception):
    """A user's own exception."""


def one_pass_less(rank: int) -> None:
    """Rank 1 skips a forward or backward pass, or raises in it: all ranks get the same error."""

    def step(layer: guild.MoE, skips: bool, how: str) -> None:
        out, x = layer(torch.randn(3 + rank, 16)), torch.randn(40 * rank, 16)
        if how == "forward":
            if not skips:
                layer(x)
            out.sum().backward()
            return
        if skips and how == "raises":
            out.register_hook(mock.Mock(side_effect=InAHookError))
            with pytest.raises(InAHookError):
                out.sum().backward()
        elif skips and how == "part":
            torch.autograd.grad(out.sum(), layer.w_up)
        elif not skips:
            out.sum().backward()
        layer(x)

    for how, text in (
        ("forward", "forward of call 2 on rank 0, backward of the output of call 1 on rank 1"),
        ("backward", "backward of the output of call 1 on rank 0, forward of call 2 on rank 1"),
        ("raises", "backward of the output of call 1 on rank 0, forward of call 2 on rank 1"),
        ("part", "backward of the tokens of call 1 on rank 0, forward of call 2 on rank 1"),
    ):
        layer = guild.MoE(16, 8, 8, 2, expert_group=new_group())
        with pytest.raises(RuntimeError, match=f"^expert_group: .* the same order, got {text}"):
            step(layer, rank == 1, how)
    for how in ("forward", "backward", "raises"):
        layer = guild.MoE(16, 8, 8, 2, expert_group=new_group(engine="peer"))
        with pytest.raises(RuntimeError, match=r"^expert_group: .* the same order, got ") as caught:
            step(layer, rank == 1, how)
        where = re.findall(r"(forward|backward) of call ([12]) on rank ([0-3])", str(caught.value))
        assert len({found[:2] for found in where}) == 2  # rank 1 is elsewhere than the others
        assert {found[:2] for found in where if found[2] != "1"} == {where[0][:2]}


def averaged_by_ddp(rank: int) -> None:
    """DistributedDataParallel averages what autograd has; gradients elsewhere are an error."""

    def model_of(sink: guild.WeightGradients | None) -> DistributedDataParallel:
        torch.manual_seed(0)
        layer = guild.MoE(16, 8, 4, 2, weight_gradients=sink)
        if sink is not None and sink.main_grad:
            for p in (layer.w_up, layer.w_down):
                p.main_grad = torch.zeros_like(p)
        return DistributedDataParallel(layer)

    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(rank))
    plain = model_of(None)
    plain(x).square().sum().backward()
    at_once = model_of(guild.WeightGradients())
    at_once(x).square().sum().backward()
    for name in ("w_up", "w_down"):
        expected = getattr(plain.module, name).grad
        assert torch.equal(gathered(expected)[0], expected)
        torch.testing.assert_close(getattr(at_once.module, name).grad, expected)
    for options in ({"delayed": True}, {"main_grad": True}):
        sink = guild.WeightGradients(**options)
        model = model_of(sink)
        with pytest.raises(ValueError, match=r"^weight_gradients: .* DistributedDataParallel"):
            model(x)
        with model.no_sync():
            model(x).square().sum().backward()
        sink.compute()
        for name in ("w_up", "w_down"):
            parameter = getattr(model.module, name)
            gradient = parameter.main_grad if sink.main_grad else parameter.grad
            dist.all_reduce(gradient)
            expected = getattr(plain.module, name).grad
            torch.testing.assert_close(gradient / dist.get_world_size(), expected)


def middle_of_a_step(rank: int) -> None:
    """A rank that fails between two messages reports it in every later call."""
    layer = guild.MoE(16, 8, 8, 2, expert_group=new_group())
    ranks = layer.expert_group._ranks
    with pytest.raises(InAHookError), ranks.in_step("forward"):
        raise InAHookError
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this rank raised InAHookError in the forward of"):
            layer(torch.randn(2, 16))


def destroyed(rank: int) -> None:
    """Calling a destroyed group is an error."""
    layer = guild.MoE(16, 8, 8, 2, expert_group=new_group())
    out = layer(torch.randn(2, 16))
    dist.destroy_process_group(layer.expert_group.group)
    with pytest.raises(RuntimeError, match=r"^expert_group: its process group has been destroyed"):
        layer(torch.randn(2, 16))
    with pytest.raises(RuntimeError, match=r"^expert_group: its process group has been destroyed"):
        out.sum().backward()


CHECKS = (
    pair_of_lists,
    lists_and_low_rank,
    other_activations,
    transforms,
    wrong_arguments,
    default_device,
    the_first_call,
    first_calls,
    one_pass_less,
    averaged_by_ddp,
    middle_of_a_step,
    destroyed,
)
