"""The peer engine against the process group's and one process, on CPU ranks or one GPU per rank.

Run by test_four_ranks.py and test_peer_gpus.py.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import guild
from processes import gathered

MOST_TOKENS = 96


class Sizes(NamedTuple):
    """Sizes of a layer."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


SMALL = Sizes(8, 3, 64, 48)
LARGE = Sizes(16, 4, 2048, 512)  # with LARGE_TOKENS, rows come during products on a GPU
LARGE_TOKENS = 4096
WIDE = Sizes(16, 1, 7168, 1024)  # with twice as many, sums are also sent during products
MANY = Sizes(32, 24, 264, 16), Sizes(96, 40, 64, 16)  # choices of a token


def device() -> torch.device:
    """The device of this rank."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@functools.cache
def group_of(
    engine: str, exact: bool = False, capacity: float | None = None, tokens: int = MOST_TOKENS
):
    """A group of all ranks."""
    room = {"max_tokens": tokens, "capacity": capacity}
    return guild.ExpertParallel(exact=exact, timeout=60.0, engine=engine, **room)


class Step:
    """A rank's experts and tokens, and a step over them with any engine."""

    def __init__(self, seed: int, tokens: int, skew: bool = False, sizes: Sizes = SMALL) -> None:
        self.sizes = sizes
        here, size, rank = device(), dist.get_world_size(), dist.get_rank()
        self.dtype = torch.bfloat16 if here.type == "cuda" else torch.float32
        draw = torch.Generator().manual_seed(seed)
        experts, _, hidden, intermediate = sizes
        shapes = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
        self.whole = [self.on_device(torch.randn(s, generator=draw) / 8) for s in shapes]
        local = experts // size
        mine = slice(rank * local, (rank + 1) * local)
        self.weights = [w[mine].clone().requires_grad_() for w in self.whole]
        self.x, self.scores, self.dout = (torch.empty(0),) * 3
        self.ids = torch.empty(0)
        self.draw(seed, tokens, skew)

    def on_device(self, values: Tensor) -> Tensor:
        """The values on this rank's device, in the layer's dtype."""
        return values.to(device(), self.dtype)

    def draw(self, seed: int, tokens: int, skew: bool = False) -> None:
        """Draw new tokens; skew: all go to the first rank's experts. Some ids name no expert."""
        draw = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        every, top_k, hidden, _ = self.sizes
        experts = every // dist.get_world_size() if skew else every
        self.x = self.on_device(torch.randn(tokens, hidden, generator=draw)).requires_grad_()
        self.dout = self.on_device(torch.randn(tokens, hidden, generator=draw))
        ids = torch.rand(tokens, every, generator=draw).argsort(1)[:, :top_k] % experts
        ids[torch.rand(ids.shape, generator=draw) < 0.1] = -1
        self.ids = ids.int().to(device())
        scores = torch.rand(tokens, top_k, generator=draw).to(device())
        self.scores = scores.requires_grad_()

    def run(self, group: guild.ExpertParallel, recompute: bool = False) -> list[Tensor]:
        """Output and gradients of x, scores and those weights that require them."""
        routing = self.x, self.ids, self.scores
        out = group.routed_experts(*routing, *self.weights, residual=self.dout, recompute=recompute)
        leaves = [t for t in (self.x, self.scores, *self.weights) if t.requires_grad]
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout)]

    def alone(self) -> list[Tensor]:
        """This rank's part of what one process gives for the tokens of all ranks."""
        size, rank = dist.get_world_size(), dist.get_rank()
        everyone = [gathered(t) for t in (self.x, self.scores, self.dout, self.ids)]
        joined = [torch.cat([t.to(device()) for t in ts]) for ts in everyone]
        x, scores, dout, ids = joined
        x, scores = x.requires_grad_(), scores.requires_grad_()
        whole = [w.clone().requires_grad_() for w in self.whole]
        out = guild.routed_experts(x, ids, scores, *whole, residual=dout)
        gradients = torch.autograd.grad(out, (x, scores, *whole), dout)
        counts = [t.shape[0] for t in everyone[0]]
        first = sum(counts[:rank])
        local = self.sizes.experts // size
        rows, experts = slice(first, first + counts[rank]), slice(rank * local, (rank + 1) * local)
        parts = [rows, rows, rows, experts, experts]
        return [t[part] for t, part in zip((out.detach(), *gradients), parts, strict=True)]


def expect_equal(got: list[Tensor], expected: list[Tensor], what: object) -> None:
    """Both must be equal bit for bit."""
    names = ("out", "x", "scores", "w_up", "w_down")[: len(expected)]
    for name, value, truth in zip(names, got, expected, strict=True):
        assert torch.equal(value, truth), (what, name, (value - truth).abs().max())


def tokens_of(rank: int, seed: int) -> int:
    """A number of tokens for this rank, which may be zero."""
    return ((40, 0, 96, 7), (0, 96, 1, 30), (64, 64, 64, 64), (0, 0, 0, 0))[seed % 4][rank % 4]


def same_as_process_group(rank: int) -> None:
    """The same bits as rows sent by all_to_all_single, however tokens are routed."""
    for seed in range(8):
        step = Step(seed, tokens_of(rank, seed), skew=seed % 3 == 2)
        expected = step.run(group_of("nccl"))
        for capacity in (None, 1.0 * dist.get_world_size()):
            got = step.run(group_of("peer", capacity=capacity), recompute=seed % 2 == 1)
            expect_equal(got, expected, (rank, seed, capacity))


def divided_products(rank: int) -> None:
    """The same bits where rows travel during products, for which small products are too short."""
    if device().type != "cuda":
        return
    for sizes, seed in itertools.product((LARGE, WIDE), range(4)):
        most = LARGE_TOKENS if sizes == LARGE else 2 * LARGE_TOKENS
        tokens = most if seed % 2 == 0 else most // (rank + 1)
        step = Step(seed, tokens, skew=seed == 2, sizes=sizes)
        expected = step.run(group_of("nccl"))
        enough = float(dist.get_world_size()) if seed == 2 else 1.5
        for recompute, capacity in itertools.product((False, True), (None, enough)):
            got = step.run(group_of("peer", capacity=capacity, tokens=most), recompute)
            expect_equal(got, expected, (rank, sizes, seed, recompute, capacity))


def divided_replays(rank: int) -> None:
    """A graph of a step whose rows travel during products has the same bits too."""
    if device().type != "cuda":
        return
    for sizes, most in ((LARGE, LARGE_TOKENS), (WIDE, 2 * LARGE_TOKENS)):
        step, group = Step(9, most, sizes=sizes), group_of("peer", tokens=most)
        expected = step.run(group_of("nccl"))
        torch.cuda.synchronize()
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            step.run(group)
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            results = step.run(group)
        for _ in range(20):
            graph.replay()
        expect_equal(results, expected, rank)
        group.check()


def frozen_experts(rank: int) -> None:
    """The same gradients of tokens where those of the experts' weights are not wanted."""
    cases = [(SMALL, tokens_of(rank, 0), MOST_TOKENS)]
    if device().type == "cuda":
        cases.append((LARGE, LARGE_TOKENS // (rank + 1), LARGE_TOKENS))
    for sizes, tokens, most in cases:
        step = Step(5, tokens, sizes=sizes)
        step.weights = [w.detach() for w in step.weights]
        expected = step.run(group_of("nccl"))
        assert len(expected) == 3
        expect_equal(step.run(group_of("peer", tokens=most)), expected, (rank, sizes))


def many_choices(rank: int) -> None:
    """The same bits where a token has more rows on a rank than are copied at a time."""
    for seed, sizes in enumerate(MANY):
        step = Step(seed, 50 + rank, sizes=sizes)
        expect_equal(step.run(group_of("peer")), step.run(group_of("nccl")), (rank, sizes))


def repeated_choices(rank: int) -> None:
    """A token that names an expert twice has two rows there, which a capacity can have room for."""
    step = Step(6, 20 + rank)
    step.ids = torch.zeros_like(step.ids)
    expected = step.run(group_of("nccl"))
    enough = float(dist.get_world_size())
    expect_equal(step.run(group_of("peer", capacity=enough)), expected, rank)


def same_as_one_process(rank: int) -> None:
    """exact=True gives the bits of one process."""
    for seed in range(4):
        step = Step(seed, tokens_of(rank, seed), skew=seed == 1)
        expected = step.alone()
        expect_equal(step.run(group_of("peer", True)), expected, (rank, seed))
        close = step.run(group_of("peer"))
        for value, truth in zip(close, expected, strict=True):
            error = (value - truth).float().norm()
            assert error <= 1e-2 * truth.float().norm() + 1e-6, (rank, seed, error)


def two_layers(rank: int) -> None:
    """One layer's results do not lie in memory that the next layer overwrites."""
    first, second = Step(1, 20), Step(2, 20)
    group = group_of("peer")
    kept = first.run(group)
    copies = [t.clone() for t in kept]
    second.run(group)
    expect_equal(kept, copies, rank)


def another_group(rank: int) -> None:
    """A layer may use another group of its ranks, for few tokens."""
    kind = {"device": device(), "dtype": torch.bfloat16}
    layer, x = guild.MoE(64, 48, 8, 3, expert_group=group_of("peer"), **kind), torch.randn(9, 64)
    whole = layer(x.to(**kind))
    layer.expert_group = group_of("peer", tokens=4)
    torch.testing.assert_close(layer(x[:4].to(**kind)), whole[:4], rtol=2e-2, atol=2e-2)


def too_many_rows(rank: int) -> None:
    """More rows than fit: a result of NaN, then an error on every rank."""
    cases = [(SMALL, MOST_TOKENS)]
    if device().type == "cuda":
        cases.append((LARGE, LARGE_TOKENS))
    for sizes, tokens in cases:
        group = guild.ExpertParallel(engine="peer", capacity=0.2, max_tokens=tokens, timeout=60.0)
        step = Step(3, tokens, skew=True, sizes=sizes)
        rows = sum(int((ids >= 0).sum()) for ids in gathered(step.ids.cpu()))
        text = raised(RuntimeError, lambda g=group, s=step: nan_then_check(g, s))
        assert f"capacity: expected room for all {rows} rows of rank 0" in text, text
        assert text == raised(RuntimeError, lambda g=group, s=step: s.run(g))


def nan_then_check(group: guild.ExpertParallel, step: Step) -> None:
    """A forward whose result must be NaN, then the error that says what went wrong."""
    with torch.no_grad():
        out = group.routed_experts(step.x, step.ids, step.scores, *step.weights)
    used = (step.ids >= 0).any(1)
    assert out[used].isnan().all()
    group.check()


def too_many_tokens(rank: int) -> None:
    """Too many tokens on one rank are an error on all ranks that names them."""
    group = guild.ExpertParallel(engine="peer", max_tokens=16, timeout=60.0)
    step = Step(4, 16)
    step.run(group)
    dist.barrier()  # a rank that is still in this step would have the next one's error in it
    step.draw(4, 17 if rank == 1 else 3)

    def run_and_check() -> None:
        step.run(group)
        group.check()

    text = raised(ValueError, run_and_check)
    if rank == 1:
        assert text.startswith("x: expected at most 16 tokens"), text
    else:
        assert "tokens beyond max_tokens" in text and "17 on rank 1" in text, text


def other_capacities(rank: int) -> None:
    """A capacity that differs from another rank's is an error on all ranks."""
    capacity = 4.0 if rank else None
    group = guild.ExpertParallel(engine="peer", max_tokens=16, capacity=capacity)
    step = Step(4, 16)
    text = raised(ValueError, lambda: step.run(group))
    assert "got capacity None on rank 0, 4 on rank" in text, text


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}")


def replays(rank: int) -> None:
    """A step as one CUDA graph, with new tokens and routing in every replay."""
    if device().type != "cuda":
        return
    count = int(os.environ.get("GUILD_REPLAYS", "1000"))
    step, group = Step(5, 64), group_of("peer")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step.run(group)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    fixed = [step.x, step.ids, step.scores, step.dout]
    with torch.cuda.graph(graph, stream=side):
        results = step.run(group)
    other = Step(5, 64)
    other.weights = step.weights
    for number in range(count):
        other.draw(number, 64, skew=number % 5 == 4)
        with torch.no_grad():
            new = other.x, other.ids, other.scores, other.dout
            for to, values in zip(fixed, new, strict=True):
                to.copy_(values)
        graph.replay()
        if number % 25 in (0, 4):
            expect_equal(results, other.run(group_of("nccl")), (rank, number))
    group.check()


def beside_collectives(rank: int) -> None:
    """Steps give the same results while NCCL's kernels run on another stream."""
    if device().type != "cuda":
        return
    others, side, found = dist.new_group(), torch.cuda.Stream(), []
    small = torch.ones(4 << 20, device=device())
    large = torch.empty(small.numel() * dist.get_world_size(), device=device())
    step = Step(6, 64)
    expected = step.run(group_of("nccl"))
    torch.cuda.synchronize()
    dist.barrier()
    for number in range(200):
        with torch.cuda.stream(side):
            dist.all_gather_into_tensor(large, small, group=others)
        time.sleep(0.002 * (number % 7 == rank))
        found.append(step.run(group_of("peer")))
        with torch.cuda.stream(side):
            dist.reduce_scatter_tensor(small, large, group=others, op=dist.ReduceOp.AVG)
    for number, got in enumerate(found):
        expect_equal(got, expected, (rank, number))
    side.synchronize()
    group_of("peer").check()


def beside_sharded_blocks(rank: int) -> None:
    """FSDP2 gathers and reduces the other weights of blocks whose experts are on all ranks."""
    if device().type != "cuda":
        return
    sizes, mesh = (256, 128, 16, 4), init_device_mesh("cuda", (dist.get_world_size(),))
    losses = []
    for engine in ("nccl", "peer"):
        torch.manual_seed(1)
        group = guild.ExpertParallel(engine=engine, max_tokens=512, timeout=60.0)
        model = torch.nn.Sequential()
        for _ in range(4):
            experts = guild.MoE(*sizes, expert_group=group, dtype=torch.bfloat16)
            model += torch.nn.Sequential(torch.nn.Linear(256, 256, dtype=torch.bfloat16), experts)
        model.to(device())
        kept = {w for m in model[1::2] for w in (m.w_up, m.w_down)}
        for block in model:
            fully_shard(block, mesh=mesh, ignored_params=kept)
        fully_shard(model, mesh=mesh, ignored_params=kept)
        adam = torch.optim.AdamW(model.parameters(), foreach=False)
        draw = torch.Generator().manual_seed(rank)
        found = []
        for number in range(60):
            x = torch.randn(512 - 64 * rank, 256, generator=draw).to(device(), torch.bfloat16)
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
            found.append(loss.detach())
            if number % 7 == rank:
                time.sleep(0.002)
        losses.append(torch.stack(found).tolist())
    assert losses[0] == losses[1], losses


CHECKS = (
    same_as_process_group,
    divided_products,
    divided_replays,
    frozen_experts,
    many_choices,
    repeated_choices,
    same_as_one_process,
    two_layers,
    another_group,
    too_many_rows,
    too_many_tokens,
    other_capacities,
    replays,
    beside_collectives,
    beside_sharded_blocks,
)
