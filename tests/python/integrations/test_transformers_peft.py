"""PEFT's LoRA on experts: the same numbers as PEFT's sum of weights, which is never formed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

if not all(map(importlib.util.find_spec, ("transformers", "peft"))):
    pytest.skip("Transformers or PEFT is not installed", allow_module_level=True)

import peft  # noqa: E402
from peft.tuners.lora.layer import ParamWrapper  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import guild.integrations.transformers as guild_transformers  # noqa: E402
from allocations import allocations  # noqa: E402
from calls import both, expect_same, inputs, layouts, not_fused, odd_gate, results  # noqa: E402
from families import EXPERTS, Family, make_experts  # noqa: E402
from guild.integrations.transformers import experts as experts_module  # noqa: E402
from guild.integrations.transformers import peft as peft_module  # noqa: E402
from test_transformers_models import make_model, step, tokens  # noqa: E402

MIXTRAL = Family("mixtral", "MixtralExperts")


class Block(nn.Module):
    """A module that holds experts, in which PEFT can put its wrappers."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    @property
    def config(self) -> object:
        return self.experts.get_base_layer().config

    def forward(self, *call: Tensor) -> Tensor:
        return self.experts(*call)


def adapted(experts: nn.Module, *names: str, adapter: str = "default", **options: object) -> Block:
    """Experts with low-rank terms of these weights, none of them zero."""
    experts.requires_grad_(False)
    block = Block(experts)
    add(block, *names, adapter=adapter, **options)
    return block


def add(block: Block, *names: str, adapter: str, **options: object) -> None:
    config = peft.LoraConfig(
        **{"r": 3, "lora_alpha": 5, **options},
        target_modules=[],
        target_parameters=[f"experts.{name}" for name in names],
    )
    peft.inject_adapter_in_model(config, block, adapter)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if f".{adapter}." in name:
                parameter.normal_(std=0.5)


def both_weights(experts: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- right --------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)], ids=["both", "up", "down"])
def test_layouts(family: Family, which: tuple[int, ...]) -> None:
    """Every layout of weights: result and gradients of x, scores, A and B."""
    experts = make_experts(family)
    names = [both_weights(experts)[i] for i in which]
    block = adapted(experts, *names)
    ours, theirs = both(block, *inputs())[::-1]
    expect_same(ours, theirs)
    assert len(ours) == 3 + 2 * len(which)


@not_fused
@layouts
def test_a_gate_of_the_models_own(family: Family) -> None:
    """Two grouped products with their terms, and the model's own function between them."""
    experts = odd_gate(make_experts(family))
    block = adapted(experts, *both_weights(experts))
    ours, theirs = both(block, *inputs())[::-1]
    expect_same(ours, theirs, limit=1e-4)  # sines of large numbers


def test_rank_stabilised() -> None:
    """rsLoRA changes the terms' scale."""
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj", use_rslora=True)
    expect_same(*both(block, *inputs()))


def test_weights_that_are_trained_too() -> None:
    """The weights themselves get gradients, beside those of A and B."""
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    block.requires_grad_(True)
    theirs, ours = both(block, *inputs())
    expect_same(ours, theirs)
    assert len(ours) == 3 + 4 + 2


def test_terms_in_float32_over_bf16_weights() -> None:
    """As `get_peft_model` makes them; at least as close to float64 as PEFT's sum in bf16."""
    exact = adapted(make_experts(MIXTRAL, torch.float64), "gate_up_proj", "down_proj")
    block = adapted(make_experts(MIXTRAL, torch.bfloat16), "gate_up_proj", "down_proj")
    x, ids, scores = inputs()
    with torch.no_grad():
        for (name, one), other in zip(block.named_parameters(), exact.parameters(), strict=True):
            if "lora" in name:
                one.data = one.data.float()
            other.copy_(one)
    call = x.bfloat16(), ids, scores
    theirs, ours = both(block, *call)
    truth = results("eager", exact, call[0].double(), ids, scores.double())
    total = [0.0, 0.0]
    for name, true in truth.items():
        assert ours[name].dtype == theirs[name].dtype
        off = [float((t[name].double() - true).norm() / true.norm()) for t in (ours, theirs)]
        # A gradient with few elements may be off by chance.
        assert off[0] <= 4 * off[1], name
        total = [t + o for t, o in zip(total, off, strict=True)]
    assert total[0] <= 1.25 * total[1]


# ---- adapters -----------------------------------------------------------------------------------


def test_two_adapters_at_once() -> None:
    """The ranks of two active adapters are put side by side."""
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    add(block, "gate_up_proj", "down_proj", adapter="second", r=2, lora_alpha=7)
    set_adapters(block, ["default", "second"])
    theirs, ours = both(block, *inputs())
    expect_same(ours, theirs)
    assert len(ours) == 3 + 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_adapters_under_autocast_to_the_other_16_bit_dtype(dtype: torch.dtype) -> None:
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    add(block, "gate_up_proj", "down_proj", adapter="second", r=2)
    set_adapters(block, ["default", "second"])
    call = inputs()
    exact = results("eager", block, *call)
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    with torch.autocast("cpu", dtype=other):
        ours = results("guild", block.to(dtype), *call)
    expect_same({name: value.float() for name, value in ours.items()}, exact, 0.05)


def test_one_of_two_adapters() -> None:
    """Only the active one counts."""
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    add(block, "gate_up_proj", "down_proj", adapter="second", r=2)
    call = inputs()
    found = {}
    for name in ("default", "second"):
        set_adapters(block, [name])
        theirs, ours = both(block, *call)
        expect_same(ours, theirs)
        found[name] = ours["out"]
    assert not torch.allclose(*found.values())


def wrappers(block: Block) -> list[ParamWrapper]:
    return [m for m in block.modules() if isinstance(m, ParamWrapper)]


def set_adapters(block: Block, names: list[str]) -> None:
    for wrapper in wrappers(block):
        wrapper.set_adapter(names)


def test_merged_unmerged_and_disabled() -> None:
    """merge() puts the sum into the weights, unmerge() takes it out, disabling leaves it out."""
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    call = inputs()
    block.config._experts_implementation = "guild"
    out = block(*call)
    for wrapper in wrappers(block):
        wrapper.merge()
    torch.testing.assert_close(block(*call), out, rtol=1e-4, atol=1e-5)
    for wrapper in wrappers(block):
        wrapper.unmerge()
    torch.testing.assert_close(block(*call), out, rtol=1e-4, atol=1e-5)
    for wrapper in wrappers(block):
        wrapper.enable_adapters(False)
    plain = block.experts.get_base_layer()(*call)
    assert torch.equal(block(*call), plain) and not torch.allclose(plain, out)


# ---- nothing too large --------------------------------------------------------------------------


def large(name: str) -> tuple[Callable[[], None], int]:
    """A training step of adapted experts with the named implementation, and a weight's bytes."""
    torch.manual_seed(0)
    experts = make_experts(MIXTRAL)
    for weight in ("gate_up_proj", "down_proj"):
        shape = getattr(experts, weight).shape
        size = (32, *(8 * n for n in shape[1:]))
        setattr(experts, weight, nn.Parameter(torch.randn(size) * 0.05))
    experts.num_experts = 32
    block = adapted(experts, "gate_up_proj", "down_proj", r=2)
    block.config._experts_implementation = name
    x = torch.randn(3, experts.down_proj.shape[1])
    ids = torch.tensor([[0, 3], [2, 3], [0, 31]])

    def run() -> None:
        block(x, ids, torch.full((3, 2), 0.5)).sum().backward()

    run()
    return run, experts.down_proj.nbytes


def test_no_sum_is_made() -> None:
    """Forward and backward allocate nothing as large as a weight; PEFT's own way does."""
    run, weight = large("guild")
    assert max(allocations(run)) < weight / 3
    run, weight = large("eager")
    assert max(allocations(run)) >= weight


# ---- what is left to PEFT -----------------------------------------------------------------------


def test_experts_that_guild_leaves_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's sum is used, with Transformers' own products."""
    monkeypatch.setattr(experts_module, "why_not", lambda *_: "of a test")
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    with pytest.warns(UserWarning, match="Guild leaves MixtralExperts to Transformers' grouped_mm"):
        expect_same(*both(block, *inputs())[::-1])


def test_what_cannot_be_a_term_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's sum is used then, with Guild's products, and one warning says so."""
    monkeypatch.setattr(peft_module, "_why_summed", lambda _: "of a test")
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    match = "Guild leaves the LoRA of MixtralExperts to PEFT, which adds it to the weights: of a"
    with pytest.warns(UserWarning, match=match) as said:
        expect_same(*both(block, *inputs())[::-1])
    assert len(said) == 1


def test_one_expert_is_left_to_peft() -> None:
    """With a single expert PEFT gives the factors another meaning."""
    experts = make_experts(MIXTRAL)
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(getattr(experts, name)[:1].detach()))
    experts.num_experts = 1
    block = adapted(experts, "gate_up_proj", "down_proj")
    x, ids, scores = inputs()
    with pytest.warns(UserWarning, match="PEFT takes its weight for that of one expert"):
        expect_same(*both(block, x, ids[:, :1] * 0, scores[:, :1])[::-1])


def test_another_implementation_is_peft_alone() -> None:
    """grouped_mm and PEFT's sum run, unless Guild has replaced them."""
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    call = inputs()
    expect_same(results("grouped_mm", block, *call), results("eager", block, *call))
    with guild_transformers.enabled():
        expect_same(results("grouped_mm", block, *call), results("guild", block, *call), 1e-30)


def test_a_forward_without_guild_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running without the terms would be wrong, so it is refused."""
    block = adapted(make_experts(MIXTRAL), "gate_up_proj")
    block.config._experts_implementation = "guild"
    monkeypatch.setattr(type(block.experts.get_base_layer()), "forward", lambda _, x, *__: x)
    with pytest.raises(RuntimeError, match="MixtralExperts: expected its forward to be Guild's"):
        block(*inputs())


def test_peft_imported_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """After register(): the first forward takes PEFT's way, those after it Guild's."""
    own = ParamWrapper._activate_lora.guild_original
    monkeypatch.setattr(ParamWrapper, "_activate_lora", own)
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    call = inputs()
    first, second = (results("guild", block, *call) for _ in range(2))
    assert hasattr(ParamWrapper._activate_lora, "guild_original")
    expect_same(second, first)


# ---- models -------------------------------------------------------------------------------------


def peft_model(implementation: str, name: str = "Qwen3MoeConfig") -> nn.Module:
    return with_adapters(make_model(name, experts_implementation=implementation))


def with_adapters(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def test_training() -> None:
    """50 steps of a tiny model give the same losses, which fall."""
    losses = {}
    for name in ("eager", "guild"):
        model = peft_model(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        losses[name] = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = model(tokens(), labels=tokens()).loss
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["guild"] == pytest.approx(losses["eager"], abs=1e-4)
    assert losses["guild"][-1] < losses["guild"][0] - 0.1


def random_terms(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
    return model


@pytest.mark.parametrize("first", ["adapters", "blocks"])
def test_replaced_blocks(first: str) -> None:
    """Whole blocks replaced by Guild's, with adapters added before or afterwards."""
    expected = step(random_terms(peft_model("eager")))
    if first == "adapters":
        model = peft_model("guild")
        assert guild_transformers.replace_moe_blocks(model)
    else:
        model = make_model("Qwen3MoeConfig", experts_implementation="eager")
        assert guild_transformers.replace_moe_blocks(model)
        model = with_adapters(model)
    expect_same(step(random_terms(model)), expected)


def test_gradient_checkpointing() -> None:
    """The recomputed forward has the terms too."""
    found = []
    for checkpointed in (False, True):
        model = random_terms(peft_model("guild", "MixtralConfig").train())
        if checkpointed:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        found.append(step(model))
    expect_same(*found, limit=1e-6)


def test_compiled() -> None:
    """Experts with terms compile into one graph; an older torch runs Transformers' own code."""
    torch._dynamo.reset()
    block = adapted(make_experts(MIXTRAL), "gate_up_proj", "down_proj")
    call = inputs()
    block.config._experts_implementation = "guild"
    expected = block(*call)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=experts_module.COMPILES)
    limit = 1e-6 if experts_module.COMPILES else 1e-4
    torch.testing.assert_close(compiled(*call), expected, rtol=limit, atol=limit)


def test_names_in_use() -> None:
    """The names in PEFT and Transformers that the integration depends on exist."""
    assert ALL_EXPERTS_FUNCTIONS["guild"] is experts_module.experts_forward
    block = adapted(make_experts(MIXTRAL), "gate_up_proj")
    wrapper = block.experts
    assert wrapper.num_experts == EXPERTS and wrapper.parameter_name == "gate_up_proj"
    assert not peft_module.terms_of(wrapper.get_base_layer())
