"""guild.route against every router in float64, and on logits made to break it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import guild
from guild.routing import ROUTERS as NAMED
from oracle.routing import choice_keys, weights_of

# Names in guild.Router, and one router with every option at once.
ROUTERS = {name: guild.Router.named(name) for name in NAMED} | {
    "softmax_groups": guild.Router(groups=4, top_groups=2, selection_bias=True, scale=0.5),
    "softmax_floor": guild.Router(selection_bias=True, sum_floor=0.3),
    "sigmoid_floor": guild.Router("sigmoid", sum_floor=6.5),
    "sqrtsoftplus": guild.Router("sqrtsoftplus", renormalize=False, groups=2, group_score="max"),
}


def options(router: guild.Router) -> dict:
    """A router's options as arguments of guild.route."""
    names = ("score", "renormalize", "scale", "groups", "top_groups", "group_score", "sum_floor")
    return {name: getattr(router, name) for name in names}


def bias_of(router: guild.Router, experts: int, device: str) -> Tensor | None:
    """A bias like those that balancing finds, for routers that have one."""
    return torch.randn(experts, device=device) / 10 if router.selection_bias else None


@pytest.mark.parametrize("name", list(ROUTERS))
@pytest.mark.parametrize("experts, top_k", [(8, 2), (128, 8), (256, 8), (512, 10), (1024, 32)])
def test_against_float64(name: str, experts: int, top_k: int, device: str) -> None:
    """Ids agree where keys differ by more than 1e-6; scores within 1e-6; gradients."""
    router = ROUTERS[name]
    if router.applied_to == "input" or experts // router.groups * router.top_groups < top_k:
        top_k = 1
    torch.manual_seed(experts)
    logits = (2 * torch.randn(200, experts, device=device)).requires_grad_()
    bias = bias_of(router, experts, device)
    ids, scores = guild.route(logits, top_k, selection_bias=bias, **options(router))
    assert ids.dtype == torch.int32 and scores.dtype == torch.float32
    exact = logits.detach().cpu().double().requires_grad_()
    key, _ = choice_keys(router, exact.detach(), None if bias is None else bias.cpu().double())
    best = key.topk(top_k, 1).values
    torch.testing.assert_close(key.gather(1, ids.cpu().long()), best, atol=1e-6, rtol=0)
    expected = weights_of(router, exact, ids.cpu())
    torch.testing.assert_close(scores.cpu().double(), expected, atol=0, rtol=2e-6)
    error = (scores.cpu().double() - expected).norm() / expected.norm()
    assert error < 1e-6
    dscores = torch.randn_like(scores)
    (got,) = torch.autograd.grad(scores, logits, dscores)
    (truth,) = torch.autograd.grad(expected, exact, dscores.cpu().double())
    assert (got.cpu().double() - truth).norm() <= 3e-6 * truth.norm()


def adversarial(index: int, draw: torch.Generator) -> Tensor:
    """Logits (T, E) of one difficult kind."""
    tokens = (0, 1, 5, 33)[index % 4]
    experts = (1, 2, 7, 32, 33, 96, 128, 200, 1024)[index % 9]
    shape = tokens, experts
    normal = torch.randn(shape, generator=draw)
    kind = index % 11
    if kind == 0:  # ties
        return normal.round()
    if kind == 1:  # all equal
        return torch.full(shape, float(index % 5 - 2))
    if kind == 2:  # one hot
        return 100 * torch.nn.functional.one_hot(normal.argmax(1), experts).float()
    if kind == 3:
        return normal * 1e-42
    if kind == 4:
        return normal * 3e38
    if kind == 5:
        return torch.full(shape, float("nan"))
    values = (0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan)
    special = torch.tensor(values[: 3 + index % 4])
    chosen = special[torch.randint(len(special), shape, generator=draw)]
    if kind < 9:
        return torch.where(torch.rand(shape, generator=draw) < 0.3, chosen, normal)
    return chosen if kind == 9 else torch.full(shape, -torch.inf)


@pytest.mark.parametrize("part", range(10))
def test_adversarial_logits(part: int, device: str) -> None:
    """1,000 tensors: K distinct ids in range, numbers ranked above NaN, repeatable bits."""
    draw = torch.Generator().manual_seed(part)
    routers = list(ROUTERS.values())
    for index in range(100 * part, 100 * part + 100):
        logits = adversarial(index, draw).to(device)
        tokens, experts = logits.shape
        router = routers[index // 7 % len(routers)]
        if experts % router.groups:
            router = guild.Router()
        most = experts // router.groups * router.top_groups
        top_k = min(most, (1, 2, 8, 32, experts)[index % 5])
        bias = bias_of(router, experts, device)
        given = {"selection_bias": bias, **options(router)}
        logits.requires_grad_()
        ids, scores = guild.route(logits, top_k, **given)
        assert ((ids >= 0) & (ids < experts)).all(), index
        assert (ids.sort(1).values.diff() > 0).all(), index
        if router.groups == 1 and bias is None:
            exact = logits.detach().double()
            order = exact.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-1e300)
            chosen = order.gather(1, ids.long())
            assert (chosen[:, 1:] <= chosen[:, :-1]).all(), index
            assert (ids.diff() > 0)[chosen[:, 1:] == chosen[:, :-1]].all(), index
        (dlogits,) = torch.autograd.grad(scores, logits, torch.ones_like(scores))
        finite = logits.detach().abs().amax(1) < 1e3 if tokens else torch.zeros(0)
        assert scores[finite > 0].isfinite().all() and dlogits[finite > 0].isfinite().all(), index
        again = guild.route(logits.detach(), top_k, **given)
        assert torch.equal(ids, again[0]), index
        assert torch.equal(scores.detach().view(torch.int32), again[1].view(torch.int32)), index


@pytest.mark.parametrize("tokens", [1, 5, 5000])
def test_infinite_logits_behind_a_bias(tokens: int, device: str) -> None:
    """A softmax of an infinite logit is NaN, even where its expert is not among the chosen."""
    logits = torch.tensor([0, 1, 2, torch.inf], device=device).repeat(tokens, 1)
    bias = torch.zeros(4, device=device)
    for renormalize in (False, True):
        _, scores = guild.route(logits, 2, selection_bias=bias, renormalize=renormalize)
        assert scores.isnan().all()


@pytest.mark.parametrize("tokens", [1, 5000])
def test_gradients_of_nan_logits_with_a_floor(tokens: int, device: str) -> None:
    """Experts that were not chosen get no gradient where the weights are relative."""
    row = torch.tensor([0, 1, torch.nan, 3], device=device)
    logits = row.repeat(tokens, 1).requires_grad_()
    ids, scores = guild.route(logits, 2, sum_floor=0.01)
    (found,) = torch.autograd.grad(scores.sum(), logits)
    assert ids[0].tolist() == [3, 1] and (found[:, 0] == 0).all()


def test_tiny_weights() -> None:
    """p below the square root of the smallest number; on the CPU, whose exp is its own."""
    logits = torch.tensor([[-88.0, -90.0, -200.0]])
    options = {"score": "sqrtsoftplus", "renormalize": False}
    got, expected = (guild.route(x, 2, **options)[1].double() for x in (logits, logits.double()))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


def test_padded_tokens(device: str) -> None:
    """Where token_mask is False a token gets no expert, weight, gradient or row in the layer."""
    torch.manual_seed(0)
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    logits = torch.randn(6, 8, device=device, requires_grad=True)
    all_ids, all_scores = guild.route(logits, 3)
    ids, scores = guild.route(logits, 3, token_mask=mask)
    assert torch.equal(ids, all_ids.where(mask[:, None], -1))
    assert torch.equal(scores, all_scores.where(mask[:, None], 0))
    scores.square().sum().backward()
    assert not logits.grad[~mask].any() and logits.grad[mask].any()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    moe = guild.MoE(32, 16, 4, 2, device=device, dtype=dtype)
    x = torch.randn(2, 3, 32, device=device, dtype=dtype)
    out = moe(x, token_mask=mask.view(2, 3))
    assert int(moe.expert_counts.sum()) == 2 * 4
    torch.testing.assert_close(out, moe(x) * mask.view(2, 3, 1))
    assert not out[~mask.view(2, 3)].any()


@pytest.mark.parametrize("name", ["softmax", "ernie4_5", "deepseek_v2", "sqrtsoftplus"])
@pytest.mark.parametrize("experts, top_k", [(72, 6), (128, 12), (128, 20)])
def test_a_token_has_the_same_bits_in_any_company(
    name: str, experts: int, top_k: int, device: str
) -> None:
    """Also beyond 4,096 tokens, where a GPU gives each token fewer lanes."""
    router = ROUTERS[name]
    torch.manual_seed(top_k)
    if experts // router.groups * router.top_groups < top_k:
        top_k = 6
    logits, bias = torch.randn(4100, experts, device=device) * 3, bias_of(router, experts, device)
    everyone = guild.route(logits, top_k, selection_bias=bias, **options(router))
    for some in (slice(0, 1), slice(7, 107), slice(2000, 4096)):
        alone = guild.route(logits[some], top_k, selection_bias=bias, **options(router))
        for value, expected in zip(alone, everyone, strict=True):
            assert torch.equal(value, expected[some])
