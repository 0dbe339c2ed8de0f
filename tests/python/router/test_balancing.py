"""Sums and losses that keep experts balanced, against float64."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck

import guild
from guild.routing import SCORES
from oracle.routing import balance


@pytest.mark.parametrize("score", SCORES)
def test_sums_of_many_tokens(score: str, device: str) -> None:
    """Sums of half a million equal terms, whose rounding errors would all add up."""
    logits = torch.full((1 << 19, 10), 0.3, device=device)
    ids = (torch.arange(1 << 19, device=device) % 10).int()[:, None]
    sums = guild.balance_sums(logits, ids, score=score)
    exact = guild.balance_sums(logits.cpu().double(), ids.cpu(), score=score)
    for loss in ("load_balancing_loss", "z_loss"):
        got, expected = (getattr(each, loss)().cpu().double() for each in (sums, exact))
        torch.testing.assert_close(got, expected, rtol=2e-5 if device == "cuda" else 1e-6, atol=0)


def test_infinite_logits(device: str) -> None:
    """Shares by sigmoid and their gradient are as of 80; logsumexp is infinite."""
    inf = float("inf")
    logits = torch.tensor([[inf, 1, 2], [0, 1, 2]], device=device)
    ids = torch.tensor([[0], [1]], device=device, dtype=torch.int32)
    leaves = [logits.requires_grad_(), logits.detach().clamp(max=80).requires_grad_()]
    sums = [guild.balance_sums(leaf, ids, score="sigmoid") for leaf in leaves]
    assert torch.isposinf(sums[0].squares).all()
    for each in sums:
        each.load_balancing_loss().backward()
    torch.testing.assert_close(sums[0].shares, sums[1].shares)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-5, atol=1e-8)
    nothing = torch.full((1, 3), -inf, device=device)
    assert torch.isposinf(guild.balance_sums(nothing, ids[:1], score="sigmoid").squares).all()


@pytest.mark.parametrize("others", [float("nan"), float("inf"), float("-inf"), 0.0])
def test_logsumexp_of_nan(others: float, device: str) -> None:
    """NaN, as in torch.logsumexp, whatever else there is."""
    logits = torch.tensor([[float("nan"), others, others]], device=device)
    ids = torch.tensor([[1]], device=device, dtype=torch.int32)
    assert guild.balance_sums(logits, ids, score="sigmoid").squares.isnan().all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "tokens, experts, top_k, sequences",
    [(1, 1, 1, 1), (300, 8, 2, 3), (1000, 70, 6, 1), (520, 256, 8, 40), (66, 1024, 32, 2)],
)
def test_sums_against_float64(
    score: str, tokens: int, experts: int, top_k: int, sequences: int, device: str
) -> None:
    """Counts are exact, sums and both losses' gradients close; two runs have the same bits."""
    torch.manual_seed(tokens)
    logits = (3 * torch.randn(tokens, experts, device=device)).requires_grad_()
    mask = torch.rand(tokens, device=device) < 0.9 if tokens > 1 else None
    ids, _ = guild.route(logits.detach(), top_k, score=score, token_mask=mask)
    options = {"score": score, "sequences": sequences, "token_mask": mask}
    sums = guild.balance_sums(logits, ids, **options)
    exact = logits.detach().cpu().double().requires_grad_()
    real = torch.arange(tokens) if mask is None else torch.nonzero(mask.cpu()).flatten()
    of_real = real // (tokens // sequences)
    truth = balance(score, exact[real], ids.cpu()[real], of_real, sequences)
    assert torch.equal(sums.counts.cpu().double(), truth.counts)
    assert torch.equal(sums.tokens.cpu().double(), truth.tokens)
    for name in ("shares", "squares"):
        got, expected = getattr(sums, name), getattr(truth, name)
        torch.testing.assert_close(got.cpu().double(), expected, rtol=3e-6, atol=1e-6)
    for name in ("load_balancing_loss", "z_loss"):
        loss, expected = getattr(sums, name)(), getattr(truth, name)()
        torch.testing.assert_close(loss.cpu().double(), expected, rtol=2e-6, atol=0)
        (dlogits,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (exact_dlogits,) = torch.autograd.grad(expected, exact, retain_graph=True)
        error = (dlogits.cpu().double() - exact_dlogits).norm()
        assert error <= 3e-6 * exact_dlogits.norm() + 1e-9, name
        if mask is not None:
            assert not dlogits[~mask].any()
    again = guild.balance_sums(logits.detach(), ids, **options)
    for one, other in zip(sums, again, strict=True):
        assert torch.equal(one, other)


def test_gradcheck(request: pytest.FixtureRequest) -> None:
    """Both losses, in float64."""
    if request.config.getoption("--cuda-only"):
        pytest.skip("--cuda-only")
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    ids, _ = guild.route(logits.detach(), 2)
    for score in SCORES:

        def losses(logits: Tensor, score: str = score) -> tuple[Tensor, Tensor]:
            sums = guild.balance_sums(logits, ids, score=score, sequences=2)
            return sums.load_balancing_loss(), sums.z_loss()

        assert gradcheck(losses, (logits,))


def test_sums_of_steps_add_up(device: str) -> None:
    """The sums of two halves of the tokens, added, are those of all tokens."""
    torch.manual_seed(7)
    logits = torch.randn(40, 6, device=device)
    ids, _ = guild.route(logits, 2)
    halves = [guild.balance_sums(logits[i : i + 20], ids[i : i + 20]) for i in (0, 20)]
    together, whole = halves[0] + halves[1], guild.balance_sums(logits, ids)
    assert isinstance(together, guild.BalanceSums)
    assert torch.equal(together.counts, whole.counts)
    torch.testing.assert_close(together.load_balancing_loss(), whole.load_balancing_loss())
    torch.testing.assert_close(together.z_loss(), whole.z_loss())
    with pytest.raises(TypeError):
        whole + (1,)


def test_even_load_costs_one(device: str) -> None:
    """Equal logits, and ids assigned round-robin: the loss is 1, its minimum for such shares."""
    ids = torch.arange(24, dtype=torch.int32, device=device).view(12, 2) % 8
    sums = guild.balance_sums(torch.zeros(12, 8, device=device), ids)
    assert sums.load_balancing_loss().item() == pytest.approx(1)
    assert sums.z_loss().item() == pytest.approx(torch.tensor(8.0).log().square().item())


def test_no_tokens_and_unpleasant_logits(device: str) -> None:
    """Without tokens sums are zeros; padding may hold NaN; NaN anywhere else stays NaN."""
    ids = torch.zeros(0, 2, dtype=torch.int32, device=device)
    sums = guild.balance_sums(torch.zeros(0, 4, device=device), ids)
    assert not sums.counts.any() and not sums.shares.any() and not sums.squares.any()
    assert sums.load_balancing_loss() == 0 and sums.z_loss() == 0
    logits = torch.randn(4, 8, device=device)
    logits[1] = torch.nan
    logits[2, :3] = -torch.inf
    logits[3] = -1000
    mask = torch.tensor([True, False, True, True], device=device)
    ids = torch.tensor([[0, 1], [-1, -1], [5, 99], [2, 3]], dtype=torch.int32, device=device)
    for score in SCORES:
        leaf = logits.clone().requires_grad_()
        sums = guild.balance_sums(leaf, ids, score=score, token_mask=mask)
        assert sums.counts.tolist() == [[1, 1, 1, 1, 0, 1, 0, 0]]
        assert sums.shares.isfinite().all() and sums.shares.sum().item() == pytest.approx(3)
        (sums.load_balancing_loss() + sums.z_loss()).backward()
        assert leaf.grad[[0, 3]].isfinite().all() and not leaf.grad[1].any()
        assert guild.balance_sums(leaf, ids, score=score).shares.isnan().all()


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_module(over: str, device: str) -> None:
    """In training MoE keeps the sums of its last forward; both losses train the router."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    moe = guild.MoE(32, 16, 4, 2, balance_over=over, device=device, dtype=dtype)
    with pytest.raises(AttributeError, match=r"^balance_sums: expected a forward pass"):
        _ = moe.z_loss
    x = torch.randn(3, 5, 32, device=device, dtype=dtype)
    out = moe(x)
    sums = moe.balance_sums
    assert sums.counts.shape == ((1 if over == "batch" else 3), 4)
    assert torch.equal(sums.counts.sum(0).int(), moe.expert_counts)
    (moe.load_balancing_loss + moe.z_loss).backward()
    assert moe.router.weight.grad.norm() > 0 and moe.w_up.grad is None
    copied = copy.deepcopy(moe)
    assert copied.balance_sums is None
    torch.testing.assert_close(copied.eval()(x), out)
    assert copied.balance_sums is None


@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 5), (5,), (), (2, 0), (0, 5), (2, 3, 0)], ids=str)
def test_sequences_of_a_module(shape: tuple[int, ...], device: str) -> None:
    """Tokens along x's last dimension but one form a sequence, which may have none."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    moe = guild.MoE(32, 16, 4, 2, balance_over="sequence", device=device, dtype=dtype)
    x = torch.randn(*shape, 32, device=device, dtype=dtype)
    moe(x)
    sums = moe.balance_sums
    sequences = max(math.prod(shape[:-1]), 1)
    assert sums.counts.shape == (sequences, 4)
    logits = guild.router_logits(x.view(-1, 32), moe.router.weight)
    ids, _ = guild.route(logits, 2)
    mask = torch.ones(len(logits), dtype=torch.bool, device=device)
    expected = guild.balance_sums(logits, ids, sequences=sequences, token_mask=mask)
    for got, truth in zip(sums, expected, strict=True):
        assert torch.equal(got, truth)
    assert sums.load_balancing_loss().isfinite() and sums.z_loss().isfinite()
    moe.eval()
    moe.router.register_forward_hook(lambda *_: None)
    moe._balance_sums = None
    moe(x)
    assert moe.balance_sums is None  # evaluation keeps none, on either path


def test_module_compiled(device: str) -> None:
    """One graph, with the losses of eager mode."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    moe = guild.MoE(32, 16, 4, 2, balance_over="batch", device=device, dtype=dtype)
    x = torch.randn(6, 32, device=device, dtype=dtype)

    def loss(x: Tensor) -> Tensor:
        return moe(x).float().square().mean() + moe.load_balancing_loss + moe.z_loss

    expected = loss(x)
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, expected)
    got.backward()
    assert moe.router.weight.grad.norm() > 0


def test_over_ranks(tmp_path, device: str) -> None:
    """All ranks' counts are summed; without a process group the sums are the same."""
    ids = torch.zeros(2, 1, dtype=torch.int32, device=device)
    sums = guild.balance_sums(torch.zeros(2, 4, device=device), ids)
    assert sums.over_ranks() is sums
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        assert torch.equal(sums.over_ranks().counts, sums.counts)
        assert sums.over_ranks().counts is not sums.counts
    finally:
        dist.destroy_process_group()


WRONG = {
    "logits of integers": (
        lambda x, ids: guild.balance_sums(x.int(), ids),
        TypeError,
        "logits: expected a floating dtype, got int32",
    ),
    "long ids": (
        lambda x, ids: guild.balance_sums(x, ids.long()),
        TypeError,
        "ids: expected dtype int32, got int64",
    ),
    "ids of other tokens": (
        lambda x, ids: guild.balance_sums(x, ids[1:]),
        ValueError,
        r"ids: expected shape \(6, 2\), got \(5, 2\)",
    ),
    "sequences": (
        lambda x, ids: guild.balance_sums(x, ids, sequences=4),
        ValueError,
        r"sequences: expected a divisor of 6 \(tokens\), got 4",
    ),
    "score": (
        lambda x, ids: guild.balance_sums(x, ids, score="linear"),
        ValueError,
        "score: expected .softmax., .sigmoid. or .sqrtsoftplus., got .linear.",
    ),
    "mask": (
        lambda x, ids: guild.balance_sums(x, ids, token_mask=ids[:, 0]),
        TypeError,
        "token_mask: expected dtype bool, got int32",
    ),
    "sequences as a tensor": (
        lambda x, ids: guild.balance_sums(x, ids, sequences=torch.tensor([2, 3])),
        TypeError,
        "sequences: expected an int, got Tensor",
    ),
    "balance_over": (
        lambda x, ids: guild.MoE(8, 8, 4, 2, balance_over="rank"),
        ValueError,
        "balance_over: expected None, .batch. or .sequence., got .rank.",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_call(name: str, device: str) -> None:
    """An error that names the argument."""
    call, kind, message = WRONG[name]
    x = torch.zeros(6, 4, device=device)
    with pytest.raises(kind, match=f"^{message}"):
        call(x, torch.zeros(6, 2, dtype=torch.int32, device=device))


@pytest.mark.parametrize("rate", [Fraction(1, 2), np.float32(0.5), np.float64(0.5)], ids=repr)
def test_rate_of_another_kind(rate: object) -> None:
    biases = []
    for one in (0.5, rate):
        torch.manual_seed(0)
        moe = guild.MoE(16, 8, 4, 2, router="sigmoid")
        moe(torch.randn(5, 16))
        moe.balance(one)
        biases.append(moe.router.selection_bias)
    assert biases[0].any() and torch.equal(*biases)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
def test_rate_in_the_dtype_of_the_bias(default: torch.dtype) -> None:
    """Whatever torch's default dtype is."""
    moe = guild.MoE(16, 8, 4, 2, router="sigmoid")
    moe(torch.randn(5, 16))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        moe.balance(1e-8)
    finally:
        torch.set_default_dtype(before)
    moved = moe.router.selection_bias
    assert moved.any() and torch.equal(moved.abs()[moved != 0].unique(), torch.tensor([1e-8]))


def test_balance_by_given_counts(device: str) -> None:
    """As after several micro-batches: by their sum, not by the last one's counts."""
    torch.manual_seed(0)
    layer = guild.MoE(32, 16, 8, 2, router="sigmoid", device=device)
    if device == "cuda":
        layer.bfloat16()
    total = torch.zeros(8, dtype=torch.int64, device=device)
    for x in torch.randn(3, 50, 32, device=device).to(layer.w_up.dtype):
        layer(x).sum().backward()
        total += layer.expert_counts
    want = torch.sign(total.sum() - 8 * total).float()
    layer.balance(0.5, counts=total)
    assert torch.equal(layer.router.selection_bias, 0.5 * want)
    assert not torch.equal(want, torch.sign(100 - 8 * layer.expert_counts).float())
    guild.MoE(32, 16, 8, 2, router="sigmoid", device=device).balance(counts=total.int())
    for counts, error, message in (
        (total[:7], ValueError, r"expected shape \(8,\), got \(7,\)"),
        (total.float(), TypeError, "expected dtype int32 or int64, got float32"),
        (3, TypeError, r"expected a torch\.Tensor, got int"),
        (total.to("meta"), ValueError, "expected a tensor on .* like the selection bias"),
    ):
        with pytest.raises(error, match=f"^counts: {message}"):
            layer.balance(0.5, counts=counts)
