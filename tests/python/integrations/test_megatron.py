"""Guild's experts in Megatron-Core's own MoE layer, beside SequentialMLP.

Without a GPU the layer runs on the CPU in one process over gloo, and three names are patched:
Megatron-Core asks CUDA for the device, waits for it before it saves, and looks for a GEMM of
Transformer Engine's that it defines only where that is installed.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import guild
from guild._torch.expert_lists import view_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

from guild.integrations.megatron import GroupedMLP, use_guild

HIDDEN, INNER, EXPERTS = 16, 8, 4


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "ranks"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("error", guild.CopiedWeightsWarning)
        yield


def config(**more: object) -> TransformerConfig:
    """A tiny layer's config; options that __post_init__ allows only with others are set later."""
    later = {n: more.pop(n) for n in ("delay_wgrad_compute",) if n in more}
    given = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": INNER,
        "ffn_hidden_size": INNER,
        "moe_router_topk": 2,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "bias_activation_fusion": False,
    }
    made = TransformerConfig(**{**given, **more})
    for name, value in later.items():
        setattr(made, name, value)
    return made


def spec() -> ModuleSpec:
    return get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)


def layers(**more: object) -> tuple[MoELayer, MoELayer]:
    """Megatron-Core's own layer, and the same with Guild's experts."""
    torch.manual_seed(0)
    trainers = ("gradient_accumulation_fusion", "delay_wgrad_compute")
    alone = {name: value for name, value in more.items() if name not in trainers}
    plain = MoELayer(config(**alone), spec().submodules)
    ours = MoELayer(config(**more), use_guild(spec()).submodules)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.3)
        ours.router.load_state_dict(plain.router.state_dict())
        for name, parameter in experts_of(plain).items():
            experts_of(ours)[name].copy_(parameter)
    if plain.config.add_bias_linear:  # SequentialMLP's backward fails with biases
        plain.experts.forward = lambda *call: (with_biases(plain.experts, *call), None)
    return plain, ours


def with_biases(experts: torch.nn.Module, rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
    """SwiGLU experts with biases, computed by hand."""
    parts = []
    splits = zip(rows.split(counts.tolist()), probs.split(counts.tolist()), strict=True)
    for mlp, (x, p) in zip(experts.local_experts, splits, strict=True):
        gate, up = F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, mlp.linear_fc2.weight, mlp.linear_fc2.bias)
        parts.append(y * p[:, None])
    return torch.cat(parts)


def experts_of(layer: MoELayer) -> dict[str, Tensor]:
    """The experts' parameters by projection, kind and number, under Guild's names."""
    if isinstance(layer.experts, GroupedMLP):
        return dict(layer.experts.named_parameters())
    return {
        f"{name}{i}": parameter
        for i, expert in enumerate(layer.experts.local_experts)
        for name, parameter in expert.named_parameters()
    }


def run(layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """The result, and the input's gradient."""
    torch.manual_seed(1)
    x = torch.randn(12, 2, HIDDEN, requires_grad=True)
    out, bias = layer(x)
    assert bias is None
    out.square().sum().backward()
    return out.detach(), x.grad


def same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


VARIANTS = {
    "swiglu": {},
    "bias": {"add_bias_linear": True},
    "geglu": {"activation_func": F.gelu},
    "gpt_oss": {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    },
    "relu2": {"activation_func": squared_relu, "gated_linear_unit": False},
    "scores_first": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
    "one_expert": {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_like_sequential_experts(variant: str) -> None:
    plain, ours = layers(**VARIANTS[variant])
    out, dx = run(plain)
    our_out, our_dx = run(ours)
    same(our_out, out)
    same(our_dx, dx)
    same(ours.router.weight.grad, plain.router.weight.grad)
    for name, parameter in experts_of(plain).items():
        gradient = experts_of(ours)[name].grad
        same(gradient, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_under_distributed_data_parallel(
    fused: bool, delayed: bool, overlap: bool, sharded: bool
) -> None:
    """Its buffers hold parameters and main_grads in the experts' order, and its hooks run.

    Without copies; in small buckets where reduction overlaps backward, which it checks itself.
    """
    plain, ours = layers(gradient_accumulation_fusion=fused, delay_wgrad_compute=delayed)
    ddp = DistributedDataParallel(
        ours.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            use_distributed_optimizer=sharded,
            delay_wgrad_compute=delayed,
            bucket_size=600 if overlap else None,
        ),
        ours,
    )
    for linear in (ours.experts.linear_fc1, ours.experts.linear_fc2):
        assert view_of(linear.weights) is not None
        assert view_of([w.main_grad for w in linear.weights]) is not None
    ddp.zero_grad_buffer()
    for last in (False, True):
        if not last:
            with ddp.no_sync():
                same(run(ddp)[0], run(plain)[0])
                ours.backward_dw()
        else:
            same(run(ddp)[0], run(plain)[0])
            if delayed and fused:
                assert ours.experts._sink.pending == 1
            ours.backward_dw()
    ddp.finish_grad_sync()
    for name, parameter in experts_of(ours).items():
        assert parameter.grad is None
        same(parameter.main_grad, experts_of(plain)[name].grad)


# ---- checkpoints --------------------------------------------------------------------------------


def shards(experts: torch.nn.Module, metadata: dict[str, Any] | None) -> dict[tuple, Tensor]:
    """What a distributed checkpoint receives: data by key and place."""
    if metadata is not None:
        metadata = {**metadata}
    found = {}
    for value in experts.sharded_state_dict("decoder.experts.", (), metadata).values():
        parts = value.build() if isinstance(value, ShardedTensorFactory) else [value]
        for part in parts:
            place = getattr(part, "global_offset", None)
            kind = part.key, part.global_shape, place, part.replica_id
            assert kind not in found
            found[kind] = part.data
    return found


@pytest.mark.parametrize("metadata", [None, {"singleton_local_shards": True}])
@pytest.mark.parametrize("variant", ["swiglu", "bias", "relu2"])
def test_distributed_checkpoints_are_interchangeable(
    variant: str, metadata: dict[str, Any] | None
) -> None:
    plain, ours = layers(**VARIANTS[variant])
    wanted, got = (shards(layer.experts, metadata) for layer in (plain, ours))
    assert got.keys() == wanted.keys()
    assert any("linear_fc2.weight" in key for key, *_ in got)
    for kind, data in wanted.items():
        if isinstance(data, Tensor) and "_extra_state" not in kind[0]:
            assert torch.equal(got[kind], data), kind


@pytest.mark.parametrize("metadata", [None, {"singleton_local_shards": True}])
@pytest.mark.parametrize("variant", ["swiglu", "bias"])
@pytest.mark.parametrize("saved_by_guild", [False, True])
def test_through_a_distributed_checkpoint_on_disk(
    variant: str, metadata: dict[str, Any] | None, saved_by_guild: bool, tmp_path: Path
) -> None:
    """What either layer's experts save the other's load, into unevenly spaced memory too."""

    def state_of(layer: MoELayer) -> dict[str, Any]:
        return layer.sharded_state_dict("decoder.mlp.", (), metadata and {**metadata})

    plain, ours = layers(**VARIANTS[variant])
    saver, loader = (ours, plain) if saved_by_guild else (plain, ours)
    wanted = {name: parameter.detach().clone() for name, parameter in experts_of(plain).items()}
    dist_checkpointing.save(state_of(saver), str(tmp_path))
    with torch.no_grad():
        for parameter in loader.parameters():
            parameter.zero_()
    if loader is ours:
        for parameter in ours.experts.parameters():
            parameter.data = parameter.data.clone()
    out = run(saver)[0]
    loaded = dist_checkpointing.load(state_of(loader), str(tmp_path))
    found = {name.removeprefix("decoder.mlp."): value for name, value in loaded.items()}
    loader.load_state_dict(found)
    for name, parameter in experts_of(loader).items():
        assert torch.equal(parameter, wanted[name]), name
    same(run(loader)[0], out)


def test_ranks_have_their_place_in_a_checkpoint() -> None:
    """Expert parallelism over 2 ranks, each expert over 2: sizes, offsets, replicas."""

    def group(rank: int, size: int) -> SimpleNamespace:
        return SimpleNamespace(rank=lambda: rank, size=lambda: size)

    groups = SimpleNamespace(ep=group(1, 2), expt_tp=group(1, 2), expt_dp=group(3, 4))
    experts = GroupedMLP(2, config(expert_model_parallel_size=1), pg_collection=groups)
    assert experts.linear_fc1.weight1.shape == (INNER, HIDDEN)
    assert experts.linear_fc2.weight1.shape == (HIDDEN, INNER // 2)
    found = shards(experts, {"dp_cp_group": group(0, 1)})
    fc1 = {k[2] for k in found if k[0].endswith("linear_fc1.weight")}
    fc2 = {k[2] for k in found if k[0].endswith("linear_fc2.weight")}
    shapes = {k[1] for k in found if k[0].endswith("weight")}
    assert shapes == {(4, 2 * INNER, HIDDEN), (4, HIDDEN, INNER)}
    half = INNER // 2
    assert fc1 == {(e, r, 0) for e, r in itertools.product((2, 3), (half, INNER + half))}
    assert fc2 == {(e, 0, half) for e in (2, 3)}
    assert {k[3][2] for k in found} == {3}


def test_checkpoint_of_one_process_loads() -> None:
    """Names in state_dict are TEGroupedMLP's; extra entries that FP8 leaves there are skipped."""
    _, ours = layers()
    state = ours.state_dict()
    assert {f"experts.linear_fc{k}.weight{i}" for k in (1, 2) for i in range(EXPERTS)} < set(state)
    state["experts.linear_fc1._extra_state"] = torch.zeros(1)
    _, other = layers(add_bias_linear=False)
    with torch.no_grad():
        other.experts.linear_fc1.weight0.zero_()
    other.load_state_dict(state)
    same(run(other)[0], run(ours)[0])


# ---- specs --------------------------------------------------------------------------------------


def test_use_guild_finds_the_experts() -> None:
    """A block's layers without experts keep their spec objects, and the given spec is unchanged."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(
        config(num_layers=2, moe_layer_freq=[0, 1], normalization="LayerNorm"),
        use_transformer_engine=False,
    )
    exchanged = use_guild(block)
    dense, sparse = exchanged.layer_specs
    assert dense is block.layer_specs[0]
    assert sparse.submodules.mlp.submodules.experts.module is GroupedMLP
    assert block.layer_specs[1].submodules.mlp.submodules.experts.module is not GroupedMLP
    with pytest.raises(ValueError, match="spec: expected one with an MoE layer"):
        use_guild(dense)


def test_use_guild_looks_into_partial_functions() -> None:
    """Megatron-Core 0.18 and later have these in place of a ModuleSpec, and name the experts."""
    submodules = MoESubmodules(experts=ModuleSpec(module=object))
    built = functools.partial(MoELayer, submodules=submodules)
    exchanged = use_guild(built)
    assert exchanged.func is MoELayer
    assert exchanged.keywords["submodules"].experts.module is GroupedMLP
    assert built.keywords["submodules"] is submodules
    groups = moe_utils.get_default_pg_collection()
    GroupedMLP(EXPERTS, config(), pg_collection=groups, name="experts")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"activation_func": torch.tanh}, "activation_func: expected silu, .*, got tanh"),
        ({"fp8": "hybrid"}, "fp8: expected None with Guild's experts, got 'hybrid'"),
        ({"moe_mlp_glu_interleave_size": 4}, "moe_mlp_glu_interleave_size: expected None"),
        ({"fp4": "e2m1"}, "fp4: expected None with Guild's experts, got 'e2m1'"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
            "offload_modules: expected neither expert_fc1 nor moe_act",
        ),
    ],
)
def test_what_is_not_supported_says_so(more: dict[str, Any], message: str) -> None:
    made = config()
    for name, value in more.items():
        setattr(made, name, value)
    with pytest.raises(ValueError, match=message):
        GroupedMLP(EXPERTS, made, pg_collection=layers()[0].experts)
