"""Guild's experts in torchtitan's own MoE layers, activated as its configs activate overrides.

In bfloat16, which is what torchtitan's experts compute in: both are compared with the same layer in
float64, and Guild's error is at most twice torchtitan's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan.models.common.moe", reason="torchtitan is not installed")
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common.config_utils import make_routed_experts_config
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import (
        GroupedExperts,
        MoE,
        RoutedExperts,
        TokenChoiceTopKRouter,
    )
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, swiglu

DIM, INNER, EXPERTS, TOP_K = 32, 16, 4, 2
TARGETS = {
    "experts": "guild.integrations.torchtitan.fused_grouped_experts",
    "routed": "guild.integrations.torchtitan.fused_routed_experts",
}


def config(gpt_oss: bool = False) -> MoE.Config:
    routed = make_routed_experts_config(
        dim=DIM,
        hidden_dim=INNER,
        num_experts=EXPERTS,
        top_k=TOP_K,
        param_init={},
        comm_backend="standard",
    )
    if gpt_oss:
        sizes = {"dim": DIM, "hidden_dim": INNER, "num_experts": EXPERTS}
        routed.inner_experts = GptOssGroupedExperts.Config(**sizes, swiglu_limit=0.5)
    router = TokenChoiceTopKRouter.Config(
        num_experts=EXPERTS,
        gate=Linear.Config(in_features=DIM, out_features=EXPERTS, bias=False),
        top_k=TOP_K,
        score_func="softmax",
        route_norm=True,
    )
    return MoE.Config(num_experts=EXPERTS, routed_experts=routed, router=router)


def build(target: str | None, gpt_oss: bool = False) -> MoE:
    """An MoE layer whose weights depend on their names alone; target: one of TARGETS."""
    cfg = config(gpt_oss)
    if target is not None:
        said = apply_overrides(OverrideConfig(imports=[TARGETS[target]]), cfg)
        assert len(said) == 1 and "Guild" in said[0]
    moe = cfg.build()
    with torch.no_grad():
        for i, (_, parameter) in enumerate(sorted(moe.named_parameters())):
            torch.manual_seed(i)
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
            parameter.copy_(parameter.bfloat16())  # so that nothing is lost in its cast
    return moe


def exact(experts: GroupedExperts, e: int, rows: Tensor) -> Tensor:
    """One expert by hand, in the parameters' dtype."""
    if isinstance(experts, GptOssGroupedExperts):
        h = F.linear(rows, experts.mlp1_weight_EGD[e], experts.mlp1_bias_EG[e])
        a = swiglu(h, limit=experts.swiglu_limit)
        return F.linear(a, experts.mlp2_weight_EDF[e], experts.mlp2_bias_ED[e])
    a = F.silu(rows @ experts.w1_EFD[e].T) * (rows @ experts.w3_EFD[e].T)
    return a @ experts.w2_EDF[e].T


def by_hand(routed: RoutedExperts, x: Tensor, scores: Tensor, ids: Tensor, _: Tensor) -> Tensor:
    tokens, out = x.view(-1, DIM), torch.zeros_like(x).view(-1, DIM)
    for e in range(EXPERTS):
        token, slot = torch.nonzero(ids.view(-1, TOP_K) == e, as_tuple=True)
        rows = exact(routed.inner_experts, e, tokens[token])
        out = out.index_add(0, token, rows * scores.view(-1, TOP_K)[token, slot, None])
    return out.view(x.shape)


def run(routed: RoutedExperts, forward: Callable | None = None) -> dict[str, Tensor]:
    """The result and gradients, by name; forward: used instead of the module's own."""
    torch.manual_seed(9)
    dtype = next(routed.parameters()).dtype
    x = torch.randn(2, 10, DIM).bfloat16().to(dtype).requires_grad_()
    scores = torch.rand(2, 10, TOP_K)
    scores = scores.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    ids = torch.rand(2, 10, EXPERTS).argsort(-1)[..., :TOP_K].contiguous()
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    out = (forward or type(routed).forward)(routed, x, scores, ids, counts)
    out.square().sum().backward()
    found = {name: p.grad for name, p in routed.named_parameters()}
    return {**found, "out": out.detach(), "x": x.grad, "scores": scores.grad}


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_as_right_as_torchtitan(target: str, gpt_oss: bool) -> None:
    plain, ours = (build(t, gpt_oss).routed_experts.bfloat16() for t in (None, target))
    assert type(ours.inner_experts).__name__.startswith("Guild")
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in ours.named_parameters()]
    truth = run(build(None, gpt_oss).routed_experts.double(), by_hand)
    theirs, got = run(plain), run(ours)
    for name, value in truth.items():
        assert error(got[name], value) <= 2 * error(theirs[name], value) + 1e-6, name


def test_in_a_whole_layer() -> None:
    """With torchtitan's router: the same tokens go to the same experts."""
    torch.manual_seed(3)
    x = torch.randn(2, 10, DIM)
    plain, ours = build(None), build("routed")
    torch.testing.assert_close(ours(x), plain(x), rtol=2e-2, atol=2e-2)
    assert torch.equal(ours.tokens_per_expert_E, plain.tokens_per_expert_E)


def test_weights_are_read_in_place() -> None:
    """bfloat16 parameters reach Guild's op as they are."""
    moe = build("experts").bfloat16()
    experts = moe.routed_experts.inner_experts
    layer = experts.layer()
    places = [t.data_ptr() for t in (*layer["w_up"], layer["w_down"])]
    parameters = (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)
    assert places == [p.data_ptr() for p in parameters]


def test_rows_of_nobody_are_zero() -> None:
    """Dispatchers with a fixed capacity leave rows without a token at the end."""
    experts = build("experts").routed_experts.inner_experts
    x = torch.randn(12, DIM).bfloat16()
    x[9:] = torch.nan
    out = experts(x, torch.tensor([4, 0, 3, 2]))
    assert not out[9:].any() and out[:9].isfinite().all() and out[:9].any()


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed, "_spmd_backend", "default")  # whose groups come from meshes
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("target", TARGETS)
def test_dtensors_and_expert_parallelism(one_rank: None, target: str) -> None:
    """Sharded parameters behind the all-to-all dispatcher, over a mesh of one rank."""
    expected, moe = run(build(target).routed_experts), build(target)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    routed = moe.routed_experts
    routed.token_dispatcher.wire_meshes(ep_mesh=mesh)
    experts = routed.inner_experts
    for name, parameter in list(experts.named_parameters()):
        sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        experts.register_parameter(name, torch.nn.Parameter(sharded))
    got = run(routed)
    for name, value in expected.items():
        gradient = got[name].to_local() if hasattr(got[name], "to_local") else got[name]
        torch.testing.assert_close(gradient, value, rtol=2e-2, atol=2e-2 * float(value.abs().max()))


@pytest.mark.parametrize("backend", ["default", "spmd_types"])
def test_ranks_that_share_an_expert_add_parts_of_its_bias(
    one_rank: None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss's second bias is divided by the ranks of tensor parallelism, as torchtitan does."""
    from torchtitan.distributed import spmd_types

    from guild.integrations.torchtitan import experts as integration

    monkeypatch.setattr(integration, "get_spmd_backend", lambda: backend)
    monkeypatch.setattr(spmd_types, "spmd_mesh_size", lambda axis: 2 if axis == "tp" else 1)
    experts = build("experts", gpt_oss=True).routed_experts.inner_experts
    bias = experts.mlp2_bias_ED.detach()
    part = 2 if backend == "spmd_types" else 1  # parameters here lie on no mesh
    torch.testing.assert_close(experts.layer()["b_down"].detach(), bias / part)


def test_other_experts_are_left_alone() -> None:
    """A subclass that Guild does not know keeps its own forward."""
    from guild.integrations.torchtitan import fused_grouped_experts, fused_routed_experts

    class Quantised(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    sizes = {"dim": DIM, "hidden_dim": INNER, "num_experts": EXPERTS}
    cfg = Quantised.Config(**sizes)
    assert fused_grouped_experts(cfg) is cfg
    routed = config().routed_experts
    routed.inner_experts = cfg
    moe = config()
    moe.routed_experts = fused_routed_experts(routed)
    layer = moe.build()
    assert type(layer.routed_experts.inner_experts) is Quantised
    assert not layer.routed_experts._is_local()


def test_compiled() -> None:
    moe = build("routed")
    torch.manual_seed(9)
    x = torch.randn(2, 10, DIM)
    expected = moe(x)
    moe.routed_experts = torch.compile(moe.routed_experts, backend="aot_eager", fullgraph=True)
    assert torch.equal(moe(x), expected)
