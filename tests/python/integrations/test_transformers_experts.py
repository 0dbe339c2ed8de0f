"""Experts of each layout, Transformers' loop beside Guild: weights, routing, dtypes, compile."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn.utils import parametrize

pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.activations import GELUActivation  # noqa: E402
from transformers.integrations.moe import grouped_mm_experts_forward  # noqa: E402

import guild  # noqa: E402
import guild.integrations.transformers as guild_transformers  # noqa: E402
from calls import (  # noqa: E402
    FAMILIES,
    both,
    error,
    expect_same,
    inputs,
    layouts,
    not_fused,
    odd_gate,
    results,
)
from families import EXPERTS, HIDDEN, Family, make_experts  # noqa: E402
from guild.integrations.transformers import experts as experts_module  # noqa: E402
from guild.integrations.transformers import unfused  # noqa: E402

# ---- weights ------------------------------------------------------------------------------------


@layouts
def test_frozen_weights_get_no_gradient(family: Family) -> None:
    experts = make_experts(family)
    call = inputs()
    trained, _ = both(experts, *call)
    names = [name for name, _ in experts.named_parameters()]
    for name in names:
        experts.requires_grad_(True)
        experts.get_parameter(name).requires_grad_(False)
        ours = results("guild", experts, *call)
        assert f"d {name}" not in ours
        expect_same(ours, {key: value for key, value in trained.items() if key != f"d {name}"})
    experts.requires_grad_(False)
    ours = results("guild", experts, *call)
    expect_same(ours, {name: trained[name] for name in ("out", "d x", "d scores")})


@layouts
@pytest.mark.parametrize("fused", [True, False])
@not_fused
def test_weights_are_read_in_place(family: Family, fused: bool, monkeypatch) -> None:
    experts = make_experts(family) if fused else odd_gate(make_experts(family))
    seen = []

    def watched(function):
        def call(*args: object, **options: object) -> Tensor:
            seen.extend(a for a in args if isinstance(a, Tensor))
            return function(*args, **options)

        return call

    monkeypatch.setattr(experts_module, "routed_experts", watched(guild.routed_experts))
    monkeypatch.setattr(unfused, "grouped_mm", watched(guild.grouped_mm))
    results("guild", experts, *inputs())
    places = {tensor.untyped_storage().data_ptr() for tensor in seen}
    assert {p.untyped_storage().data_ptr() for p in experts.parameters()} <= places


def test_parametrized_weights_pass_gradients_on() -> None:
    """As PEFT applies its adapters to expert weights: W + B A in place of the parameter."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(EXPERTS, 2, HIDDEN))
            self.b = nn.Parameter(torch.randn(EXPERTS, 16, 2))

        def forward(self, weight: Tensor) -> Tensor:
            return torch.baddbmm(weight, self.b, self.a)

    torch.manual_seed(0)
    experts = make_experts(FAMILIES[0]).requires_grad_(False)
    parametrize.register_parametrization(experts, "gate_up_proj", Added())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager, ours = both(experts, *inputs())
    assert "d parametrizations.gate_up_proj.0.a" in ours
    expect_same(ours, eager)


def test_dtensor_weights_are_taken_by_their_local_part() -> None:
    torch.manual_seed(0)
    experts, call = make_experts(FAMILIES[1]), inputs()
    expected = results("eager", experts, *call)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name, parameter in list(experts.named_parameters()):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(experts, name, nn.Parameter(sharded))
        ours = results("guild", experts, *call)
        assert isinstance(ours["d down_proj"], DTensor)
        local = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in ours.items()}
        expect_same(local, expected)
    finally:
        dist.destroy_process_group()


# ---- routing ------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("tokens", [1, 2])
def test_few_tokens(family: Family, tokens: int) -> None:
    torch.manual_seed(tokens)
    eager, ours = both(make_experts(family), *inputs(tokens))
    expect_same(ours, eager)


@layouts
@pytest.mark.parametrize("fused", [True, False])
@not_fused
def test_no_tokens(family: Family, fused: bool) -> None:
    experts = make_experts(family) if fused else odd_gate(make_experts(family))
    ours = results("guild", experts, *inputs(0))
    assert ours["out"].shape == ours["d x"].shape == (0, HIDDEN)
    for name, parameter in experts.named_parameters():
        assert torch.equal(ours[f"d {name}"], torch.zeros_like(parameter))


@layouts
@pytest.mark.parametrize("fused", [True, False])
@not_fused
def test_slots_of_other_ranks_are_skipped(family: Family, fused: bool) -> None:
    torch.manual_seed(0)
    x, ids, scores = inputs()
    whole = make_experts(family)
    parts = [rank_part(whole, family, rank, ids, scores) for rank in range(2)]
    if not fused:
        whole, parts = odd_gate(whole), [(odd_gate(part), *rest) for part, *rest in parts]
    expected = results("guild", whole, x, ids, scores)
    ranks = [results("guild", part, x, *rest) for part, *rest in parts]
    for name in ("out", "d x", "d scores"):
        assert error(ranks[0][name] + ranks[1][name], expected[name]) < 1e-5, name
    for name, _ in whole.named_parameters():
        joined = torch.cat([rank[f"d {name}"] for rank in ranks])
        assert error(joined, expected[f"d {name}"]) < 1e-5, name


@layouts
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("nobody", [-1, EXPERTS, EXPERTS + 3])
@not_fused
def test_ids_out_of_range_are_nobodys(family: Family, fused: bool, nobody: int) -> None:
    """Whatever their weight: as if an expert elsewhere had the slot with a weight of zero."""
    torch.manual_seed(0)
    x, ids, scores = inputs()
    experts = make_experts(family) if fused else odd_gate(make_experts(family))
    skipped = torch.rand(ids.shape) < 0.4
    ours = results("guild", experts, x, ids.masked_fill(skipped, nobody), scores)
    expected = results("guild", experts, x, ids, scores.masked_fill(skipped, 0))
    expected["d scores"] = expected["d scores"].masked_fill(skipped, 0)
    expect_same(ours, expected)


def rank_part(
    whole: nn.Module, family: Family, rank: int, ids: Tensor, scores: Tensor
) -> tuple[nn.Module, Tensor, Tensor]:
    """One of two ranks: half of the experts, and the ids that Transformers' EP router leaves it."""
    size = EXPERTS // 2
    part = make_experts(family)
    for name, parameter in whole.named_parameters():
        rows = parameter.detach()[rank * size : (rank + 1) * size]
        setattr(part, name, nn.Parameter(rows.clone()))
    part.num_experts = size
    foreign = ids // size != rank
    return part, (ids % size).masked_fill(foreign, size), scores.masked_fill(foreign, 0)


# ---- dtypes -------------------------------------------------------------------------------------


@layouts
def test_autocast_computes_in_its_dtype_with_float32_masters(family: Family) -> None:
    torch.manual_seed(0)
    experts, (x, ids, scores) = make_experts(family), inputs()
    exact = results("eager", experts, x, ids, scores)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = results("guild", experts, x, ids, scores)
    halved = make_experts(family, torch.bfloat16)
    halved.load_state_dict(experts.state_dict())
    same = results("guild", halved, x.bfloat16(), ids, scores)
    assert torch.equal(ours["out"], same["out"].float())
    expect_same(ours, exact, 0.03)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@layouts
def test_dtypes_of_the_cpu(family: Family, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts, (x, ids, scores) = make_experts(family), inputs()
    exact = results("eager", experts, x, ids, scores)
    ours = results("guild", experts.to(dtype), x.to(dtype), ids, scores.to(dtype))
    limit = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 4e-3}.get(dtype, 0.03)
    assert {value.dtype for value in ours.values()} == {dtype}
    expect_same({name: value.float() for name, value in ours.items()}, exact, limit)


def test_autocast_takes_the_input_as_it_is() -> None:
    """The input is not cast to the weights' dtype first, in which it may overflow."""
    experts, (x, ids, scores) = make_experts(FAMILIES[0], torch.float16), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = guild_transformers.experts_forward(experts, 1e5 * x, ids, scores)
    assert out.isfinite().all()


def test_wider_input_than_weights() -> None:
    """A float32 norm before bf16 experts: the result has the input's dtype."""
    experts, (x, ids, scores) = make_experts(FAMILIES[0], torch.bfloat16), inputs()
    out = guild_transformers.experts_forward(experts, x, ids, scores)
    assert out.dtype == torch.float32
    narrow = guild_transformers.experts_forward(experts, x.bfloat16(), ids, scores)
    assert torch.equal(out, narrow.float())


@not_fused
def test_hooks_on_the_activation_see_the_tokens() -> None:
    """And nothing else, such as the numbers that Guild tries an activation with."""
    torch.manual_seed(0)
    experts, call = make_experts(FAMILIES[0]), inputs()
    seen: list[Tensor] = []
    experts.act_fn.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    for name in ("grouped_mm", "guild"):
        results(name, experts, *call)
    theirs, ours = (rows.norm(dim=1).sort().values for rows in seen)  # in any order
    assert error(ours, theirs) < 1e-5


# ---- torch.compile ------------------------------------------------------------------------------


compiles = pytest.mark.skipif(not experts_module.COMPILES, reason="torch before 2.13")


def test_compiled_by_an_earlier_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own products run, with the same result."""
    monkeypatch.setattr(experts_module, "COMPILES", False)
    torch.manual_seed(0)
    experts, call = make_experts(Family("mixtral", "MixtralExperts")), inputs()
    expected = results("eager", experts, *call)["out"]
    torch._dynamo.reset()
    whole = torch.compile(guild_transformers.experts_forward, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(whole(experts, *call), expected)
    torch._dynamo.reset()


@compiles
@layouts
@pytest.mark.parametrize("fused", [True, False])
@not_fused
def test_compiled_without_a_break(family: Family, fused: bool) -> None:
    torch.manual_seed(0)
    experts = make_experts(family) if fused else odd_gate(make_experts(family))
    call = inputs()
    expected = results("guild", experts, *call)
    torch._dynamo.reset()
    function = guild_transformers.experts_forward
    whole = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, scores = call[0].requires_grad_(), call[2].requires_grad_()
    experts.zero_grad()
    out = whole(experts, x, call[1], scores)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    expect_same({"out": out.detach(), "d x": x.grad}, {k: expected[k] for k in ("out", "d x")})
    assert error(experts.down_proj.grad, expected["d down_proj"]) < 1e-5


@compiles
def test_compiled_code_is_not_reused_for_another_limit() -> None:
    torch.manual_seed(0)
    family = Family("deepseek_v4", "DeepseekV4Experts")
    torch._dynamo.reset()
    whole = torch.compile(guild_transformers.experts_forward, fullgraph=True, backend="eager")
    x, ids, scores = inputs()
    for limit in (10.0, 0.25):
        experts = make_experts(family)
        experts.limit = limit
        expected = results("eager", experts, x, ids, scores)["out"]
        assert error(whole(experts, x, ids, scores).detach(), expected) < 1e-5


class Clipped(nn.Module):
    """SiLU of numbers within bounds."""

    limit = 7.0
    bounds: tuple

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x.clamp(*getattr(self, "bounds", (-self.limit, self.limit))))


def gated_by(act: Callable, pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return act(gate) * up


# More than one each: torch.compile turns a float that has changed once into a variable.
CHANGES = {
    "alpha": ("GptOssExperts", [("alpha", 1.0), ("alpha", 2.0), ("alpha", 3.0)]),
    "limit": ("GptOssExperts", [("limit", 0.5), ("limit", 0.25), ("limit", 1.0)]),
    "activation": ("MixtralExperts", [("act_fn", nn.ReLU()), ("act_fn", nn.GELU())]),
    "activation without a gate": (
        "NemotronHExperts",
        [("act_fn", nn.ReLU()), ("act_fn", nn.SiLU())],
    ),
    "option of the activation": (
        "MixtralExperts",
        [("act_fn", nn.GELU()), ("act_fn.approximate", "tanh"), ("act_fn.approximate", "none")],
    ),
    "number of the activation": (
        "MixtralExperts",
        [("act_fn", nn.LeakyReLU(s)) for s in (0.5, 0.25)]
        + [("act_fn.negative_slope", s) for s in (0.75, 0.0)],
    ),
    "function of the activation": (
        "MixtralExperts",
        [("act_fn", GELUActivation()), ("act_fn.act", F.relu), ("act_fn.act", F.silu)],
    ),
    "tuple": (
        "MixtralExperts",
        [("act_fn", Clipped())] + [("act_fn.bounds", (-1e9, top)) for top in (1e9, 1.0, 0.5)],
    ),
    "class of the activation": (
        "MixtralExperts",
        [("act_fn", type("Clipped", (Clipped,), {})())]
        + [("act_fn.__class__.limit", limit) for limit in (1e9, 1.0, 0.5)],
    ),
    "number of NumPy's": (
        "GptOssExperts",
        [("limit", np.float32(limit)) for limit in (0.5, 0.25, 1.0)],
    ),
    "gate": (
        "MixtralExperts",
        [("_apply_gate", partial(gated_by, act)) for act in (F.silu, F.relu, F.gelu)],
    ),
}


@compiles
@pytest.mark.parametrize("what", CHANGES)
@not_fused
def test_compiled_code_is_not_reused_after_a_change(what: str) -> None:
    torch.manual_seed(0)
    class_name, changes = CHANGES[what]
    family = next(family for family in FAMILIES if family.class_name == class_name)
    experts, (x, ids, scores) = make_experts(family), inputs()
    torch._dynamo.reset()
    whole = torch.compile(guild_transformers.experts_forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        whole(experts, x, ids, scores)
        for path, value in changes:
            owner, _, name = path.rpartition(".")
            setattr(operator.attrgetter(owner)(experts) if owner else experts, name, value)
            expected = grouped_mm_experts_forward(experts, x, ids, scores)
            assert error(whole(experts, x, ids, scores), expected) < 1e-5, (path, value)
