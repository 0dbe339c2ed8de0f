"""What replaced blocks hand to their parts, take from them, and leave in their input."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Size, Tensor, nn

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

from calls import error  # noqa: E402
from guild.integrations.transformers import register, replace_moe_blocks  # noqa: E402
from guild.integrations.transformers.block_families import FAMILIES, BlockFamily  # noqa: E402
from guild.integrations.transformers.block_trial import _tiny  # noqa: E402
from models import KNOWN, SIZES, eager, expect_same, step, tokens  # noqa: E402
from odd_modules import Rows  # noqa: E402
from test_transformers_block_options import block_pair, on_guild, random_tokens  # noqa: E402
from test_transformers_blocks import default_block, said  # noqa: E402

QWEN3 = "Qwen3MoeConfig"
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.block)


# ---- inputs -------------------------------------------------------------------------------------


@families
def test_parts_get_the_shapes_that_the_model_gives_them(family: BlockFamily) -> None:
    own = _tiny(family, default_block(family))
    ours = on_guild(own)
    expected, found = shapes_given(own), shapes_given(ours)
    assert {"experts", family.router_name} <= expected.keys()
    assert found == expected


def shapes_given(block: nn.Module) -> dict[str, list[Size]]:
    """The shapes of the arguments of each part, which is watched by a hook."""
    shapes: dict[str, list[Size]] = {}

    def watch(name: str, part: nn.Module) -> None:
        def hook(module: nn.Module, args: tuple) -> None:
            shapes[name] = [a.shape for a in args]

        part.register_forward_pre_hook(hook)

    for name, part in block.named_children():
        watch(name, part)
    block(torch.randn(2, 3, 16, dtype=torch.float64))
    return shapes


# ---- outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DeepseekV3Config", "Qwen2MoeConfig"])
@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.mean(0, keepdim=True).expand_as(x),
        lambda x: x.mT.contiguous().mT,
        lambda x: x.new_full((1,), 3.0),
        lambda x: 0.5,
        None,
    ],
)
def test_shared_experts_may_return_anything(name: str, made: Callable | None) -> None:
    """That can be added to the others' output; an empty nn.Sequential returns its input."""
    own = block_pair(name, n_group=1, topk_group=1)[0]
    shared = "shared_expert" if hasattr(own, "shared_expert") else "shared_experts"
    setattr(own, shared, nn.Sequential() if made is None else Rows(made))
    ours, x = on_guild(own), random_tokens()
    assert error(output(ours, x), output(own, x)) < 1e-5


def output(block: nn.Module, x: Tensor) -> Tensor:
    out = block(x)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", ["DeepseekV3Config", "Qwen2MoeConfig"])
def test_random_numbers_are_drawn_in_the_models_order(name: str) -> None:
    own = block_pair(name, n_group=1, topk_group=1)[0]
    for part in ("gate", "shared_expert", "shared_experts", "shared_expert_gate"):
        if hasattr(own, part):
            getattr(own, part).register_forward_pre_hook(lambda m, x: x[0] + torch.rand_like(x[0]))
    ours, x, outs = on_guild(own), random_tokens(), []
    for block in (ours, own):
        torch.manual_seed(5)
        outs.append(output(block, x))
    assert error(*outs) < 1e-5


@pytest.mark.parametrize("replaces", [True, False])
def test_scores_of_a_router_that_llama4_watches_are_used(replaces: bool) -> None:
    """From a hook, or from a forward that takes the place of the router's."""
    outs = []
    for block in block_pair("Llama4TextConfig"):
        if replaces:
            block.router.forward = lambda x, own=block.router.forward: halved(own(x))
        else:
            block.router.register_forward_hook(lambda module, args, out: halved(out))
        outs.append(block(random_tokens()))
    (theirs, logits), (ours, again) = outs
    assert error(ours, theirs) < 1e-5 and torch.equal(again, logits)


def halved(out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return out[0] / 2, out[1]


# ---- noise --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [("MixtralConfig", {"router_jitter_noise": 0.1}), *((name, {}) for name in KNOWN)],
)
def test_input_is_left_as_the_model_leaves_it(name: str, options: dict) -> None:
    inputs = []
    for block in block_pair(name, **options):
        torch.manual_seed(1)
        inputs.append(random_tokens())
        with torch.no_grad():
            block.train()(inputs[-1])
    assert torch.equal(*inputs)
    changes = not torch.equal(inputs[0], random_tokens())
    assert changes == bool(options)


def test_noise_of_a_model_that_adds_the_input_to_the_output() -> None:
    torch.manual_seed(0)
    sizes = dict(intermediate_size=24, num_local_experts=4, head_dim=16, router_jitter_noise=0.3)
    config = transformers.MiniMaxConfig(**SIZES, **sizes, layer_types=["full_attention"] * 2)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    theirs = noisy_step(model.train())
    assert len(replace_moe_blocks(model)) == 2
    expect_same(noisy_step(model), theirs)


def noisy_step(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return step(model)


# ---- what is left alone -------------------------------------------------------------------------


def test_classes_that_change_their_input_are_left_alone(monkeypatch) -> None:
    of_block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock
    own = of_block.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        out = own(self, x * 1)  # backward needs what it is called with
        x *= 2
        return out

    monkeypatch.setattr(of_block, "forward", forward)
    assert "computes another value of its input in training" in said(eager(QWEN3), [])


def test_classes_that_compute_something_else_in_evaluation_are_left_alone(monkeypatch) -> None:
    of_router = modeling_qwen3_moe.Qwen3MoeTopKRouter
    own = of_router.forward

    def forward(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        logits, scores, ids = own(self, x)
        return logits, scores if self.training else scores / 2, ids

    monkeypatch.setattr(of_router, "forward", forward)
    assert "computes another output 0 in evaluation" in said(eager(QWEN3), [])


def test_groups_with_fewer_experts_than_are_chosen_are_left_alone() -> None:
    model = eager("DeepseekV3Config", n_group=4, topk_group=1, num_experts_per_tok=4)
    message = said(model, [])
    assert "a token's best groups have fewer experts than it chooses" in message
    model(tokens())


def test_top_k_that_is_not_the_configs() -> None:
    """Lowered before the replacement; raised after it beyond what the best groups hold."""
    own = block_pair("DeepseekV3Config", num_experts_per_tok=4, n_group=2, topk_group=1)[0]
    own.gate.top_k = 1
    ours, x = on_guild(own), random_tokens()
    for top_k in (1, 2, own.gate.num_experts // 2 + 1):
        own.gate.top_k = ours.gate.top_k = top_k
        assert error(output(ours, x), output(own, x)) < 1e-5, top_k


class Experts(nn.ModuleDict):
    """Experts with weights of their own each, as those of Switch Transformers and NLLB."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts({"expert_0": nn.Linear(2, 2)})


def test_experts_of_any_kind_are_warned_of() -> None:
    assert "Guild leaves Block to the model" in said(nn.Sequential(Block(), Block()), [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MixtralConfig", "Guild does not know the activation of MixtralExperts"),
        ("Llama4TextConfig", "leaves Llama4TextExperts to the model: .* its activation"),
    ],
)
def test_unknown_activation_is_warned_of_in_forward(name: str, words: str) -> None:
    """Once, and not by the tiny copy, whose warnings nobody sees."""
    model = eager(name, hidden_act="mish")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replace_moe_blocks(model)
    with pytest.warns(UserWarning, match=words) as record:
        model(tokens())
        model(tokens())
    assert len(record) == 1


def test_unknown_activation_is_warned_of_once() -> None:
    """By the model's own name for its experts, before its blocks are replaced and after."""
    register()
    model = eager(QWEN3, hidden_act="mish")
    model.set_experts_implementation("guild")
    with pytest.warns(UserWarning, match="the activation of Qwen3MoeExperts, or there") as record:
        model(tokens())
        assert replace_moe_blocks(model)
        model(tokens())
    assert len(record) == 1
