"""Token rounding: its contract against float64, its gradients, unpleasant logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import guild
from guild.routing import ROUNDINGS, SCORES
from oracle.routing import rounded_counts, weigh
from test_routing import adversarial

ROUTERS = [
    guild.Router(score, renormalize, scale=1.5) for score in SCORES for renormalize in (False, True)
] + [guild.Router(sum_floor=0.5), guild.Router("sqrtsoftplus", sum_floor=3.0)]


def options(router: guild.Router) -> dict:
    """A router as arguments of guild.round_tokens."""
    names = ("score", "renormalize", "scale", "sum_floor")
    return {name: getattr(router, name) for name in names}


def members_of(ids: Tensor, token_offsets: Tensor, experts: int) -> Tensor:
    """The lists as bool (T, E), on the CPU; also checks that they are valid lists."""
    tokens, used = token_offsets.shape[0] - 1, int(token_offsets[-1])
    assert token_offsets[0] == 0 and (token_offsets.diff() >= 0).all()
    assert (ids[used:] == -1).all() and ((ids[:used] >= 0) & (ids[:used] < experts)).all()
    token = torch.repeat_interleave(torch.arange(tokens), token_offsets.diff().long())
    places = token * experts + ids[:used]
    assert (places.diff() > 0).all()  # ascending, no expert twice
    members = torch.zeros(tokens * experts, dtype=torch.bool)
    members[places] = True
    return members.view(tokens, experts)


def chosen_of(ids: Tensor, experts: int) -> Tensor:
    """(T, K) ids as bool (T, E); -1 chooses nothing."""
    chosen = torch.zeros(ids.shape[0], experts + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(ids < 0, experts, ids).long(), True)
    return chosen[:, :-1]


def expect_contract(
    members: Tensor, chosen: Tensor, key: Tensor, rounding: str, tile: int, real: Tensor
) -> None:
    """Counts are whole tiles and change by less than a tile; the best are kept by key, float64."""
    before, after, most = chosen.sum(0), members.sum(0), int(real.sum())
    assert not members[~real].any()
    assert ((after % tile == 0) | (after == most)).all()
    assert ((after - before).abs() < tile).all()
    whole = before % tile == 0
    assert torch.equal(members[:, whole], chosen[:, whole])
    down, up = rounded_counts(before, rounding, tile, most)
    assert ((after == up) | (after == down)).all()
    if rounding == "balanced" and (up == down + tile * ~whole).all():
        assert ((after.cumsum(0) - before.cumsum(0)).abs() <= tile / 2).all()
    for e in range(chosen.shape[1]):
        kept, dropped = members[:, e] & chosen[:, e], chosen[:, e] & ~members[:, e]
        added, others = members[:, e] & ~chosen[:, e], real & ~members[:, e] & ~chosen[:, e]
        assert not (dropped.any() and added.any())
        for better, worse in ((kept, dropped), (added, others)):
            if dropped.any() if better is kept else added.any():
                if better.any() and worse.any():
                    assert key[better, e].min() >= key[worse, e].max() - 1e-5


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "tokens, experts, top_k, tile",
    [(1, 1, 1, 1), (40, 4, 2, 8), (300, 8, 2, 128), (777, 70, 6, 16), (90, 1024, 8, 2)],
)
def test_against_float64(
    rounding: str, tokens: int, experts: int, top_k: int, tile: int, device: str
) -> None:
    """The contract, and scores and gradients of every router, with padding; repeatable bits."""
    for index, router in enumerate(ROUTERS):
        torch.manual_seed(tokens + index)
        bias = torch.randn(experts, device=device)
        logits = (2 * torch.randn(tokens, experts, device=device) + bias).requires_grad_()
        mask = torch.rand(tokens, device=device) < 0.95 if tokens > 1 else None
        score = router.score
        chosen_ids, _ = guild.route(logits.detach(), top_k, score=score, token_mask=mask)
        given = {"rounding": rounding, "tile": tile, "seed": 5, **options(router)}
        ids, scores, offsets = guild.round_tokens(logits, chosen_ids, **given)
        assert ids.shape[0] <= tokens * top_k + experts * (tile - 1)
        members = members_of(ids.cpu(), offsets.cpu(), experts)
        exact = logits.detach().cpu().double().requires_grad_()
        key = exact.detach().log_softmax(1) if score == "softmax" else exact.detach()
        real = torch.ones(tokens, dtype=torch.bool) if mask is None else mask.cpu()
        chosen = chosen_of(chosen_ids.cpu(), experts)
        expect_contract(members, chosen, key, rounding, tile, real)
        used = int(offsets[-1])
        expected = weigh(router, exact, *torch.nonzero(members, as_tuple=True))
        assert not scores[used:].any()
        got = scores[:used].cpu().double()
        torch.testing.assert_close(got, expected, rtol=3e-6, atol=1e-12)
        dscores = torch.randn_like(scores)
        (dlogits,) = torch.autograd.grad(scores, logits, dscores)
        (truth,) = torch.autograd.grad(expected, exact, dscores[:used].cpu().double())
        cancelled = 1e-6 * expected.detach().norm()  # sums that are zero in exact arithmetic
        assert (dlogits.cpu().double() - truth).norm() <= 3e-6 * truth.norm() + cancelled
        again = guild.round_tokens(logits.detach(), chosen_ids, **given)
        for one, other in zip((ids, scores, offsets), again, strict=True):
            assert torch.equal(one, other)


def test_gradcheck(request: pytest.FixtureRequest) -> None:
    """Scores of kept and added tokens, in float64."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    torch.manual_seed(0)
    logits = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    ids, _ = guild.route(logits.detach(), 2)
    for router in ROUTERS:
        for rounding in ("up", "down"):
            given = {"rounding": rounding, "tile": 4, **options(router)}

            def scores(logits: Tensor, given: dict = given) -> Tensor:
                return guild.round_tokens(logits, ids, **given)[1]

            assert gradcheck(scores, (logits,))


@pytest.mark.parametrize("part", range(10))
def test_adversarial_logits(part: int, device: str) -> None:
    """1,000 tensors: valid lists, whole tiles, less than a tile changed, repeatable bits."""
    draw = torch.Generator().manual_seed(part)
    for index in range(100 * part, 100 * part + 100):
        logits = adversarial(index, draw).to(device)
        tokens, experts = logits.shape
        router = ROUTERS[index // 7 % len(ROUTERS)]
        top_k = min(experts, (1, 2, 8, 32, experts)[index % 5])
        rounding, tile = ROUNDINGS[index // 3 % 5], (1, 3, 8, 128)[index // 2 % 4]
        chosen_ids, _ = guild.route(logits, top_k, score=router.score)
        logits.requires_grad_()
        given = {"rounding": rounding, "tile": tile, "seed": index, **options(router)}
        ids, scores, offsets = guild.round_tokens(logits, chosen_ids, **given)
        members = members_of(ids.cpu(), offsets.cpu(), experts)
        before, after = chosen_of(chosen_ids.cpu(), experts).sum(0), members.sum(0)
        assert ((after % tile == 0) | (after == tokens)).all(), index
        assert ((after - before).abs() < tile).all(), index
        (dlogits,) = torch.autograd.grad(scores, logits, torch.ones_like(scores))
        if tokens and logits.detach().abs().max() < 60:
            assert scores.isfinite().all() and dlogits.isfinite().all(), index
        again = guild.round_tokens(logits.detach(), chosen_ids, **given)
        assert torch.equal(ids, again[0]) and torch.equal(offsets, again[2]), index
        bits = scores.detach().view(torch.int32)
        assert torch.equal(bits, again[1].view(torch.int32)), index


def test_ties_go_to_the_smaller_token(device: str) -> None:
    """With equal logits the first tokens are kept, and the first of the others are added."""
    logits = torch.zeros(5000, 3, device=device)
    ids = (torch.arange(5000, dtype=torch.int32, device=device) % 2)[:, None].contiguous()
    for rounding, count in (("down", 2048), ("up", 3072)):
        lists, _, offsets = guild.round_tokens(logits, ids, rounding=rounding, tile=1024)
        members = members_of(lists.cpu(), offsets.cpu(), 3)
        assert members.sum(0).tolist() == [count, count, 0]
        if rounding == "down":
            assert members[:4096, 0].sum() == 2048 and members[:4096, 1].sum() == 2048
        else:
            assert members[1 : 2 * 572 : 2, 0].all() and not members[2 * 572 + 1 :: 2, 0].any()


def test_stochastic(device: str) -> None:
    """Rounds up with the probability of the remainder; the seed, int or tensor, decides."""
    torch.manual_seed(0)
    logits = torch.randn(2000, 64, device=device)
    ids, _ = guild.route(logits, 1)
    counts = torch.bincount(ids.flatten(), minlength=64).cpu()
    rest = (counts % 16).sum() / 16
    ups = []
    for seed in range(40):
        given = torch.tensor([seed], device=device) if seed % 2 else seed
        lists, _, offsets = guild.round_tokens(
            logits, ids, rounding="stochastic", tile=16, seed=given
        )
        after = members_of(lists.cpu(), offsets.cpu(), 64).sum(0)
        ups.append((after > counts).sum())
    mean = torch.stack(ups).float().mean()
    assert abs(mean - rest) < 3, (mean, rest)
    assert len({int(up) for up in ups}) > 3
    torch.manual_seed(1)
    first = guild.round_tokens(logits, ids, rounding="stochastic", tile=16)[0]
    torch.manual_seed(1)
    assert torch.equal(first, guild.round_tokens(logits, ids, rounding="stochastic", tile=16)[0])


@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: f"{r.score}-{r.renormalize}")
def test_module(router: guild.Router, device: str) -> None:
    """Whole tiles in training, plain top-k in evaluation; output and gradients by expert."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    given = options(router)
    rounded = guild.Router(**given, rounding="nearest", tile=8)
    moe = guild.MoE(32, 16, 6, 2, router=rounded, bias=True, device=device, dtype=dtype)
    for bias in (moe.b_up, moe.b_down):
        torch.nn.init.normal_(bias)
    x = torch.randn(100, 32, device=device, dtype=dtype, requires_grad=True)
    out = moe(x)
    assert (moe.expert_counts % 8 == 0).all()
    logits = guild.router_logits(x, moe.router.weight)
    ids, _ = guild.route(logits, 2, **given)
    lists, scores, offsets = guild.round_tokens(logits, ids, tile=8, **given)
    members = members_of(lists.cpu(), offsets.cpu(), 6)
    dense = torch.zeros(100, 6, device=device)
    dense[members.to(device)] = scores[: int(offsets[-1])]
    every = torch.arange(6, device=device).expand(100, 6)
    weights = (moe.w_up, moe.w_down, moe.b_up, moe.b_down)
    expected = guild.routed_experts(x, every, dense, *weights)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if device == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out, expected, **tolerance)
    dout = torch.randn_like(out)
    wanted = (x, moe.router.weight, *weights)
    for got, truth in zip(
        torch.autograd.grad(out, wanted, dout),
        torch.autograd.grad(expected, wanted, dout),
        strict=True,
    ):
        assert (got - truth).norm() <= (3e-2 if device == "cuda" else 1e-5) * truth.norm()
    plain = guild.MoE(32, 16, 6, 2, router=guild.Router(**given), bias=True, device=device)
    plain.to(dtype).load_state_dict(moe.state_dict())
    assert torch.equal(moe.eval()(x), plain.eval()(x))


def test_module_compiled(device: str) -> None:
    """One graph, with eager mode's output."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    router = guild.Router(rounding="balanced", tile=4)
    moe = guild.MoE(32, 16, 4, 2, router=router, balance_over="batch", device=device, dtype=dtype)
    x = torch.randn(30, 32, device=device, dtype=dtype)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), moe(x))
    compiled(x).sum().backward()
    assert moe.router.weight.grad.norm() > 0


def test_a_seed_of_its_own_each_time(device: str) -> None:
    """Without a given seed every call draws anew, reproducibly after torch.manual_seed."""
    logits = torch.randn(300, 8, device=device)
    ids, _ = guild.route(logits, 2)

    def counts() -> Tensor:
        lists, _, _ = guild.round_tokens(logits, ids, rounding="stochastic", tile=64)
        return lists[lists >= 0].bincount(minlength=8)

    torch.manual_seed(5)
    first = torch.stack([counts() for _ in range(12)])
    assert (first % 64 == 0).all() and first.unique(dim=0).shape[0] > 1
    torch.manual_seed(5)
    assert torch.equal(torch.stack([counts() for _ in range(12)]), first)


def test_no_tokens(device: str) -> None:
    """There is nothing to round."""
    none = torch.zeros(0, 2, dtype=torch.int32, device=device)
    ids, scores, offsets = guild.round_tokens(torch.zeros(0, 4, device=device), none)
    assert ids.numel() == 0 and scores.numel() == 0 and offsets.tolist() == [0]


WRONG = {
    "rounding: expected 'nearest', .* got 'off'": {"rounding": "off"},
    "tile: expected .* got 0": {"tile": 0},
    "seed: expected dtype int64, got int32": {
        "rounding": "stochastic",
        "seed": torch.zeros(1, dtype=torch.int32),
    },
    "score: expected 'softmax', 'sigmoid' or 'sqrtsoftplus'": {"score": "linear"},
    "scale: expected 0 or a number in float32's normal range": {"scale": float("inf")},
    "ids: expected dtype int32": {"ids": torch.zeros(6, 2)},
    r"ids: expected shape \(6, 2\)": {"ids": torch.zeros(5, 2, dtype=torch.int32)},
    "logits: expected a floating dtype": {"logits": torch.zeros(6, 4, dtype=torch.int32)},
}


@pytest.mark.parametrize("message", list(WRONG))
def test_wrong_call(message: str, device: str) -> None:
    """An error that names the argument."""
    given = {"logits": torch.zeros(6, 4), "ids": torch.zeros(6, 2, dtype=torch.int32)}
    given |= WRONG[message]
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        guild.round_tokens(moved.pop("logits"), moved.pop("ids"), **moved)


def test_wrong_router() -> None:
    """Rounding is not defined for routers that weight the input."""
    with pytest.raises(ValueError, match=r"^rounding: expected None where"):
        guild.Router("sigmoid", applied_to="input", rounding="up")
    with pytest.raises(ValueError, match=r"^rounding: expected None, 'nearest'"):
        guild.Router(rounding="off")


def test_graph_replays_with_other_logits(gpu: str) -> None:
    """A graph captured once gives eager's results for other logits and seeds."""
    torch.manual_seed(0)
    logits, seed = torch.randn(500, 32, device=gpu), torch.ones(1, dtype=torch.int64, device=gpu)

    def run() -> tuple[Tensor, ...]:
        ids, _ = guild.route(logits, 4)
        return guild.round_tokens(logits, ids, rounding="stochastic", tile=16, seed=seed)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    for number in range(3):
        logits.normal_()
        seed.fill_(number)
        graph.replay()
        for got, expected in zip(kept, run(), strict=True):
            assert torch.equal(got, expected)
