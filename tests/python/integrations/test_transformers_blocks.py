"""Whole MoE blocks replaced in models and restored: results, checkpoints, what is left alone."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

from calls import error  # noqa: E402
from guild.integrations.transformers import experts as experts_module  # noqa: E402
from guild.integrations.transformers import (  # noqa: E402
    replace_moe_blocks,
    restore_moe_blocks,
)
from guild.integrations.transformers.block_families import FAMILIES, BlockFamily  # noqa: E402
from models import KNOWN, SIGMOID, eager, expect_same, step, tokens  # noqa: E402

models = pytest.mark.parametrize("name", KNOWN)
QWEN3 = "Qwen3MoeConfig"
# What some default configs leave out.
MISSING = {
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 64,
}


class Ops(TorchDispatchMode):
    """Records the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.read: set[int] = set()  # where the tensors lie that Guild's ops are given

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.name())
        if op.namespace == "guild":
            tensors = (a for a in args if isinstance(a, Tensor))
            self.read |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return op(*args, **(kwargs or {}))


# ---- results ------------------------------------------------------------------------------------


def test_hooks_of_accelerate_keep_no_forward_of_guild() -> None:
    """They keep the forward that they found, which restored blocks no longer have."""
    accelerate = pytest.importorskip("accelerate")
    model = eager(QWEN3)
    replaced = replace_moe_blocks(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert restore_moe_blocks(model) == replaced
    with Ops() as ops, torch.no_grad():
        model(tokens())
    assert not [name for name in ops.names if name.startswith("guild")]


@models
def test_model_is_the_same_and_comes_back(name: str) -> None:
    model = eager(name)
    classes = [type(m) for m in model.modules()]
    theirs = step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replaced = replace_moe_blocks(model)
        layers = [1] if name in SIGMOID else [0, 1]
        part = "feed_forward" if name.startswith("Llama4") else "mlp"
        assert replaced == [f"model.layers.{i}.{part}" for i in layers]
        expect_same(step(model), theirs)
        assert replace_moe_blocks(model) == []
    assert restore_moe_blocks(model) == replaced
    assert [type(m) for m in model.modules()] == classes
    again = step(model)
    assert all(torch.equal(again[key], theirs[key]) for key in theirs)
    assert restore_moe_blocks(model) == []


@models
def test_router_and_experts_run_on_guild(name: str) -> None:
    model = eager(name)
    replace_moe_blocks(model)
    with Ops() as ops:
        model(tokens())
    if name in SIGMOID:
        assert "guild::moe_layer" in ops.names and "guild::moe_forward" not in ops.names
    else:
        assert ops.names.count("guild::route") == ops.names.count("guild::moe_forward") == 2
    assert not {"aten::topk", "aten::softmax", "aten::sigmoid"} & set(ops.names) - (
        {"aten::sigmoid"} if name.startswith("Qwen") else set()  # of the shared experts' gate
    )
    places = {n: p.untyped_storage().data_ptr() for n, p in model.named_parameters()}
    assert {place for n, place in places.items() if ".experts." in n} <= ops.read  # no copies


@models
def test_double_precision(name: str) -> None:
    model = eager(name).double()
    theirs = step(model)
    replace_moe_blocks(model)
    expect_same(step(model), theirs)


@pytest.mark.parametrize("name", [n for n in KNOWN if n not in SIGMOID and n[:6] != "Llama4"])
def test_router_logits_and_their_loss_are_the_same(name: str) -> None:
    model = eager(name)
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 10.0

    def logged_step() -> dict[str, Tensor]:
        model.zero_grad()
        out = model(tokens(), labels=tokens(), output_router_logits=True)
        out.loss.backward()
        logits = {f"logits {i}": part.detach() for i, part in enumerate(out.router_logits)}
        assert len(logits) == 2
        trained = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return logits | trained | {"loss": out.loss.detach(), "aux": out.aux_loss.detach()}

    theirs = logged_step()
    replace_moe_blocks(model)
    with Ops() as ops:
        expect_same(logged_step(), theirs)
    assert ops.names.count("guild::route") == 2  # the routers are watched, and Guild's all the same
    expect_same(step(model), step(eager(name)))


def test_llama4_router_logits_are_the_same() -> None:
    model = eager("Llama4TextConfig")
    (theirs,) = block_outputs(model)
    replace_moe_blocks(model)
    (ours,) = block_outputs(model)
    assert ours[0].shape == theirs[0].shape and error(ours[1], theirs[1]) < 1e-6


def block_outputs(model: nn.Module) -> list[tuple[Tensor, ...]]:
    """The outputs of the first MoE block."""
    outs: list[tuple[Tensor, ...]] = []
    block = model.get_submodule("model.layers.0.feed_forward")
    hook = block.register_forward_hook(lambda module, args, out: outs.append(out))
    model(tokens())
    hook.remove()
    return outs


@models
def test_generation_gives_the_same_tokens(name: str) -> None:
    model = eager(name).eval()
    options = dict(max_new_tokens=4, do_sample=False)
    theirs = model.generate(tokens()[:, :5], **options)
    replace_moe_blocks(model)
    assert torch.equal(model.generate(tokens()[:, :5], **options), theirs)


@pytest.mark.parametrize("name", [QWEN3, "DeepseekV3Config", "Llama4TextConfig"])
def test_checkpointing_changes_no_bit(name: str) -> None:
    model = eager(name).train()
    replace_moe_blocks(model)
    plain = step(model)
    model.gradient_checkpointing_enable()
    checkpointed = step(model)
    assert all(torch.equal(checkpointed[key], plain[key]) for key in plain)


@pytest.mark.parametrize("name", [QWEN3, "DeepseekV3Config", "GptOssConfig", "Llama4TextConfig"])
@pytest.mark.skipif(not experts_module.COMPILES, reason="torch before 2.13")
def test_blocks_compile_without_a_break(name: str) -> None:
    model = eager(name)
    (path, *_) = replace_moe_blocks(model)
    block, x = model.get_submodule(path), torch.randn(2, 5, 32)
    torch.compiler.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    outs = [out if isinstance(out, tuple) else (out,) for out in (compiled(x), block(x))]
    for a, b in zip(*outs, strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.block)
def test_every_family_computes_what_guild_does(family: BlockFamily) -> None:
    """Built from the model's own config; replacing it tries a tiny copy, gradients included."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert replace_moe_blocks(default_block(family)) == [""]


def default_block(family: BlockFamily) -> nn.Module:
    """A block of the model's default config, or of its text part's, without allocating memory."""
    name = f"transformers.models.{family.model}.configuration_{family.model}"
    module = importlib.import_module(name)
    for config_class in vars(module).values():
        if isinstance(config_class, type) and config_class.__module__ == name:
            config = config_class()
            for option, value in MISSING.items():
                if getattr(config, option, None) is None:
                    setattr(config, option, value)
            try:
                with torch.device("meta"):
                    return family.classes()["block"](config)
            except (AttributeError, TypeError):  # the config of another part of the model
                continue
    raise LookupError(name)


# ---- checkpoints and copies ---------------------------------------------------------------------


@models
def test_checkpoints_are_the_same(name: str, tmp_path) -> None:
    model = eager(name)
    kept = {key: value.data_ptr() for key, value in model.state_dict().items()}
    theirs = step(model)
    replace_moe_blocks(model)
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == kept
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    replace_moe_blocks(loaded)
    other = {key: torch.zeros_like(value) for key, value in state.items()}
    loaded.load_state_dict(other)
    loaded.load_state_dict(state)
    expect_same(step(loaded), theirs)


@models
def test_copies_and_pickles(name: str) -> None:
    model = eager(name)
    replace_moe_blocks(model)
    expected = model(tokens()).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model)):
        assert torch.equal(other(tokens()).logits, expected)
        assert restore_moe_blocks(other)
    assert torch.equal(model(tokens()).logits, expected)


def saved(model: nn.Module) -> nn.Module:
    """The model after a round trip through torch.save, which finds classes by their names."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# ---- parts that somebody watches or wraps -------------------------------------------------------


@models
@pytest.mark.parametrize("before", [True, False])
def test_hooks_on_parts_are_called_and_heard(name: str, before: bool) -> None:
    """As expert parallelism and capturing of outputs do: a hook may change the output."""
    results = []
    for replaces in (False, True):
        model = eager(name)
        if replaces and before:
            replace_moe_blocks(model)
        called = []
        for block in (m for m in model.modules() if hasattr(m, "experts")):
            for part in (block, block.experts, getattr(block, "gate", None) or block.router):
                part.register_forward_hook(double_first(called))
        if replaces and not before:
            replace_moe_blocks(model)
        results.append((step(model), len(called)))
    (theirs, times), (ours, again) = results
    assert times == again >= 3
    expect_same(ours, theirs)


def double_first(called: list) -> Callable:
    def hook(module: nn.Module, args: tuple, out: Tensor | tuple) -> Tensor | tuple:
        called.append(module)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    return hook


@models
def test_parts_with_forwards_of_their_own_are_called(name: str) -> None:
    """Parts whose `forward` is replaced, as by Transformers' tensor parallelism, are called."""
    model = eager(name)
    replace_moe_blocks(model)
    called = []
    for block in (m for m in model.modules() if hasattr(m, "experts")):
        for part in (block.experts, getattr(block, "gate", None) or block.router):
            part.forward = counted(part.forward, called)
    expect_same(step(model), step(eager(name)))
    assert len(called) >= 2


def counted(function: Callable, called: list) -> Callable:
    def call(*args: object) -> object:
        called.append(function)
        return function(*args)

    return call


# ---- what is left alone -------------------------------------------------------------------------


def said(model: nn.Module, expected: list[str]) -> str:
    """The single warning after replacing twice, which replaces only what is expected."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        assert replace_moe_blocks(model) == expected
        assert replace_moe_blocks(model) == []
    (warning,) = record
    return str(warning.message)


def test_blocks_of_other_models_are_left_alone() -> None:
    model = eager("GraniteMoeConfig")
    message = said(model, [])
    assert "GraniteMoe" in message and "does not know blocks of this class" in message
    assert replace_moe_blocks(nn.Linear(2, 2)) == []


def test_blocks_of_derived_classes_are_left_alone() -> None:
    model = eager(QWEN3)
    block = model.model.layers[1].mlp
    block.__class__ = type("MyBlock", (type(block),), {})
    assert "MyBlock" in said(model, ["model.layers.0.mlp"])


def test_blocks_with_a_forward_of_their_own_are_left_alone() -> None:
    model = eager(QWEN3)
    block = model.model.layers[0].mlp
    block.forward = block.forward
    assert "its forward is not that of its class" in said(model, ["model.layers.1.mlp"])


def test_blocks_with_other_parts_are_left_alone() -> None:
    model = eager(QWEN3)
    gate = model.model.layers[0].mlp.gate
    gate.__class__ = type("MyRouter", (type(gate),), {})
    assert "no Qwen3MoeTopKRouter" in said(model, ["model.layers.1.mlp"])


@pytest.mark.parametrize("part", ["Qwen3MoeTopKRouter", "Qwen3MoeSparseMoeBlock"])
def test_classes_that_compute_something_else_are_left_alone(part: str, monkeypatch) -> None:
    """Classes that compute something else, as in another Transformers version, are not replaced."""
    known = getattr(modeling_qwen3_moe, part)
    forward = known.forward

    def other(self: nn.Module, x: Tensor) -> object:
        out = forward(self, x)
        return (out[0], out[1] * 1.001, out[2]) if isinstance(out, tuple) else out * 1.001

    monkeypatch.setattr(known, "forward", other)
    model = eager(QWEN3)
    assert "computes another output" in said(model, [])


def test_classes_made_in_another_way_are_left_alone(monkeypatch) -> None:
    model = eager(QWEN3)
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", None)
    with pytest.raises((TypeError, AttributeError)):
        modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(model.config)
    assert "could not be tried" in said(model, [])


def test_inside_init_empty_weights() -> None:
    """accelerate moves every new parameter to the meta device, also those of the trial."""
    accelerate = pytest.importorskip("accelerate")
    model = eager(QWEN3)
    with accelerate.init_empty_weights():
        message = said(model, [])
    assert "inside accelerate's init_empty_weights(); replace blocks after it" in message
    assert replace_moe_blocks(model)


def test_what_is_no_model_is_refused() -> None:
    for function in (replace_moe_blocks, restore_moe_blocks):
        with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got str"):
            function("Qwen/Qwen3-30B-A3B")


def test_classes_on_top_of_guilds_are_not_taken_away() -> None:
    model = eager(QWEN3)
    replace_moe_blocks(model)
    block = model.model.layers[1].mlp
    guilds = type(block)
    block.__class__ = type("Sharded", (guilds,), {})
    with pytest.raises(ValueError, match=r"model: .*model\.layers\.1\.mlp of class Sharded"):
        restore_moe_blocks(model)
    assert type(model.model.layers[0].mlp) is guilds
