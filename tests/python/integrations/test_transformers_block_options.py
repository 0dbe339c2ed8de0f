"""Single MoE blocks, replaced, with every option of their routers and in every dtype."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

pytest.importorskip("transformers", reason="Transformers is not installed")

from calls import error  # noqa: E402
from guild.integrations.transformers import (
    block_forwards,  # noqa: E402
    replace_moe_blocks,  # noqa: E402
)
from guild.integrations.transformers import experts as experts_module  # noqa: E402
from models import KNOWN, SIGMOID, eager  # noqa: E402

HIDDEN, TOKENS = 32, 192
QWENS = ("Qwen2MoeConfig", "Qwen3MoeConfig", "Qwen3NextConfig", "OlmoeConfig")
OPTIONS = {name: [{}, {"num_experts_per_tok": 1}] for name in KNOWN}
for name in QWENS:
    OPTIONS[name] += [{"norm_topk_prob": True}, {"norm_topk_prob": False}]
for name in SIGMOID:
    OPTIONS[name] += [
        {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    ]
OPTIONS["MixtralConfig"] += [{"router_jitter_noise": 0.1}, {"hidden_act": "gelu_pytorch_tanh"}]
OPTIONS["Llama4TextConfig"] += [{"num_experts_per_tok": 2}, {"hidden_act": "gelu"}]
# An activation that Guild does not know: the experts run unfused, or with Llama 4 in the model.
ODD = {name: {"hidden_act": "mish"} for name in KNOWN if name != "GptOssConfig"}
models = pytest.mark.parametrize("name", KNOWN)


def block_pair(name: str, **options: object) -> tuple[nn.Module, nn.Module]:
    """A random block, and its copy on Guild."""
    model = eager(name, **options)
    block = next(m for m in model.modules() if hasattr(m, "experts"))
    torch.manual_seed(3)
    for tensor in (*block.parameters(), *block.buffers()):
        nn.init.normal_(tensor, std=0.3)
    return block, on_guild(block)


def on_guild(block: nn.Module) -> nn.Module:
    holder = nn.ModuleList([copy.deepcopy(block)])
    assert replace_moe_blocks(holder) == ["0"]
    return holder[0]


def test_random_state_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are tried on the CPU: no GPU is reseeded, and the CPU's state comes back."""
    model = eager("MixtralConfig", router_jitter_noise=0.1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("reseeded"))
    before = torch.get_rng_state()
    assert replace_moe_blocks(model)
    assert torch.equal(torch.get_rng_state(), before)


def results(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs and all gradients."""
    torch.manual_seed(1)
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = block(x * 1)
    outs = out if isinstance(out, tuple) else (out,)
    weights = [torch.linspace(-1, 1, o.numel()).view_as(o).to(o) for o in outs]
    sum((o * w).sum().double() for o, w in zip(outs, weights, strict=True)).backward()
    trained = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
    return {f"out {i}": o.detach() for i, o in enumerate(outs)} | {"d x": x.grad} | trained


def expect_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within 1e-5; a router that gives all weight to a token's only expert has no gradient."""
    assert found.keys() == expected.keys()
    noise = 1e-7 * max(value.norm() for value in expected.values())
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert (found[key] - value).norm() < 1e-5 * value.norm() + noise, key


def router_of(block: nn.Module) -> nn.Module:
    return block.gate if hasattr(block, "gate") else block.router


def random_tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(2, TOKENS // 2, HIDDEN).to(dtype)


CASES = [(name, option) for name in KNOWN for option in OPTIONS[name]]


@pytest.mark.parametrize(("name", "option"), CASES, ids=lambda part: str(part).strip("{}"))
def test_every_option_of_the_router(name: str, option: dict) -> None:
    own, ours = block_pair(name, **option)
    x = random_tokens()
    expected = results(own, x)
    assert len(expected) > 4
    expect_close(results(ours, x), expected)


@pytest.mark.parametrize("name", ODD)
def test_activations_that_guild_does_not_know(name: str) -> None:
    own, ours = block_pair(name, **ODD[name])
    x = random_tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expect_close(results(ours, x), results(own, x))


@models
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bits_choose_the_same_experts(name: str, autocast: bool, device: str) -> None:
    """Except tokens whose last two choices have equal logits: torch.topk may take either."""
    own, _ = block_pair(name)
    x = random_tokens().to(device)
    own = own.to(device)
    if not autocast:
        x, own = x.bfloat16(), own.bfloat16()
    ours = on_guild(own)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        theirs, mine = (router_of(block)(x.view(-1, HIDDEN)) for block in (own, ours))
        expected, found = results(own, x), results(ours, x)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
    logits = theirs[1] if name.startswith("Llama4") else theirs[0]
    clear = ~ties(logits, router_of(own).top_k)
    if name in SIGMOID:
        clear[:] = True  # with a bias and, but under autocast, in float32
    assert clear.sum() > 0.9 * TOKENS
    assert torch.equal(choice(mine)[clear], choice(theirs)[clear])
    for key in ("out 0", "d x"):
        assert found[key].dtype == expected[key].dtype
        a, b = (r[key].reshape(-1, HIDDEN)[clear].double() for r in (found, expected))
        assert error(a, b) < 0.01, key


def ties(logits: Tensor, top_k: int) -> Tensor:
    """Which tokens' choices depend on a tie."""
    ranked = logits.sort(-1, descending=True).values
    return ranked[:, top_k - 1] == ranked[:, top_k]


def choice(routed: tuple[Tensor, ...]) -> Tensor:
    """The chosen experts of each token in ascending order, or Llama 4's mask of them."""
    return routed[2].sort(-1).values if len(routed) == 3 else routed[0] > 0


def test_selection_bias_of_16_bits_chooses_the_same() -> None:
    """Converting a whole model also converts its selection bias."""
    own, _ = block_pair("DeepseekV3Config")
    own = own.bfloat16()
    assert own.gate.e_score_correction_bias.dtype == torch.bfloat16
    ours, x = on_guild(own), random_tokens(torch.bfloat16)
    theirs, mine = (choice(block.gate(x)) for block in (own, ours))
    assert torch.equal(mine, theirs)
    assert error(results(ours, x)["out 0"].double(), results(own, x)["out 0"].double()) < 0.01


@pytest.mark.parametrize("name", ["Qwen3MoeConfig", "DeepseekV3Config", "Llama4TextConfig"])
def test_what_guild_cannot_do_is_left_to_the_model(name: str, monkeypatch) -> None:
    """In its experts, its router, or the block as one op; warned of as for a foreign device."""
    own, ours = block_pair(name)
    x = random_tokens()
    expected = results(own, x)
    monkeypatch.setitem(experts_module.MOST_EXPERTS, "cpu", 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = results(ours, x)
        results(ours, x)
    assert len(said) == 1 and "it takes at most 3 experts on a cpu device" in str(said[0].message)
    expect_close(found, expected)


@pytest.mark.parametrize("name", ["Qwen3MoeConfig", "DeepseekV3Config", "Llama4TextConfig"])
def test_rows_that_the_kernels_cannot_read_are_left_to_the_models_loop(
    name: str, monkeypatch
) -> None:
    own, ours = block_pair(name)
    x = random_tokens()
    expected = results(own, x)
    for module in (experts_module, block_forwards):
        monkeypatch.setattr(module, "misaligned", lambda *weights: "it needs other rows")
    with pytest.warns(UserWarning, match="it needs other rows"), torch.no_grad():
        ours(x)
    expect_close(results(ours, x), expected)


@pytest.mark.parametrize("name", ["Qwen3MoeConfig", "DeepseekV3Config", "Llama4TextConfig"])
def test_one_token_and_none(name: str) -> None:
    own, ours = block_pair(name)
    x = random_tokens()
    expect_close(results(ours, x[:1, :1]), results(own, x[:1, :1]))
    empty = results(ours, x[:, :0])
    assert empty["d x"].shape == (2, 0, HIDDEN) and not empty["out 0"].numel()
    assert all(not empty[key].any() for key in empty)


def test_block_with_some_of_the_experts_leaves_the_others_out() -> None:
    """As on one rank of several: ids of experts on other ranks are skipped."""
    own, ours = block_pair("DeepseekV3Config")
    x, half = random_tokens(), len(own.experts.down_proj) // 2
    with torch.no_grad():
        own.experts.down_proj[half:] = 0
        for name, parameter in list(ours.experts.named_parameters()):
            setattr(ours.experts, name, nn.Parameter(parameter[:half].clone()))
    expected, found = results(own, x), results(ours, x)
    assert error(found["out 0"], expected["out 0"]) < 1e-5
    assert error(found["d x"], expected["d x"]) < 1e-5


def test_router_of_dtensors_is_the_models_own() -> None:
    _, ours = block_pair("Qwen3MoeConfig")
    x = random_tokens().view(-1, HIDDEN)
    expected = ours.gate(x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(ours.gate.weight.detach(), mesh, [Replicate()])
        ours.gate.weight = nn.Parameter(weight)
        found = ours.gate(distribute_tensor(x, mesh, [Replicate()]))
        assert all(isinstance(t, DTensor) for t in found)
        assert torch.equal(found[2].to_local(), expected[2])
        assert error(found[1].to_local(), expected[1]) < 1e-6
    finally:
        dist.destroy_process_group()
