"""Random calls of guild.route, guild.round_tokens and guild.balance_sums on the same logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import guild
from fuzz_compare import Truth
from fuzz_draw import Draw, Values, backward, score_dtype, total
from guild import Router
from oracle import routing
from oracle.autograd import gradients

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
ROUNDINGS = ("nearest", "up", "down", "stochastic", "balanced")
WEIGHING = ("renormalize", "scale", "sum_floor")  # Router's options for the chosen experts' weights
GROUPING = ("groups", "top_groups", "group_score")  # and those that choose groups
NOISE = 2e-6  # of float32 logits, relative to 1: choices may differ if keys are as close


def draw_router(draw: Draw, experts: int, top_k: int, rounding: bool) -> Router:
    """Options that fit E and K."""
    fitting = [
        (groups, top)
        for groups in range(2, min(experts, 32) + 1)
        for top in range(1, groups + 1)
        if experts % groups == 0 and experts // groups * top >= top_k
    ]
    groups, top_groups = draw.pick(*fitting) if fitting and draw.chance(0.5) else (1, 1)
    renormalize = draw.chance(0.6)
    return Router(
        score=draw.pick(*SCORES),
        renormalize=renormalize,
        group_score=draw.pick("top2_sum", "max"),
        sum_floor=draw.pick(0.0, 1e-12, draw.number(0.1, 2)) if renormalize else 0.0,
        scale=draw.pick(1.0, 1.0, 2.5, draw.number(0.1, 3), draw.number(-2, 0), 0.0),
        selection_bias=draw.chance(0.4),
        groups=groups,
        top_groups=top_groups,
        rounding=draw.pick(*ROUNDINGS) if rounding else None,
        tile=draw.pick(1, 2, 3, 4, 8, 16, 128) if rounding else 128,
    )


def options_of(router: Router, *names: str) -> dict[str, Any]:
    """A router's options of these names."""
    return {name: getattr(router, name) for name in names}


@dataclass(frozen=True)
class RoutingCase:
    """Logits of some kind, passed to all three functions."""

    seed: int
    tokens: int
    experts: int
    top_k: int
    router: Router
    kind: str  # of logits
    mask: float | None  # share of real tokens
    poison: float | None  # what padding's logits hold
    sequences: int
    bias_size: float
    wants: tuple[str, ...]
    twice: bool

    @staticmethod
    def drawn(draw: Draw) -> RoutingCase:
        experts = draw.pick(draw.experts(), draw.experts(), 96, 256)
        top_k = draw.top_k(experts)
        tokens = draw.tokens()
        sequences = draw.between(1, 4) if tokens >= 4 else 1
        mask = draw.pick(None, 0.8, 0.3, 0.0)
        return RoutingCase(
            seed=draw.seed(),
            tokens=tokens // sequences * sequences,
            experts=experts,
            top_k=top_k,
            router=draw_router(draw, experts, top_k, True),
            kind=draw.pick(
                "normal", "normal", "wide", "extreme", "huge", "tied", "equal", "one_hot"
            ),
            mask=mask,
            poison=None if mask is None else draw.pick(None, torch.nan, torch.inf, -torch.inf),
            sequences=sequences,
            bias_size=draw.pick(0.1, 3.0),
            wants=("logits",) if draw.chance(0.9) else (),
            twice=draw.chance(0.3),
        )

    def values(self, dtype: torch.dtype) -> dict[str, Tensor]:
        dtype = score_dtype(dtype)
        values, shape = Values(self.seed, dtype), (self.tokens, self.experts)
        most = 500.0 if dtype == torch.float64 else 60.0  # where a sigmoid is still above zero
        normal = values.normal(*shape)
        logits = {
            "normal": lambda: normal,
            "wide": lambda: (normal * 20).clamp(-most, most),
            "extreme": lambda: normal.sign() * (most if self.router.score != "softmax" else 1e4),
            "huge": lambda: normal * (20 if self.router.score != "softmax" else 1e15),
            "tied": lambda: normal.round(),
            "equal": lambda: torch.full(shape, 0.75, dtype=torch.float64),
            "one_hot": lambda: most * (normal > 1.5).double(),
        }[self.kind]()
        real = torch.ones(self.tokens, dtype=torch.bool)
        if self.mask is not None:
            real = values.uniform(self.tokens) < self.mask
            if self.poison is not None:
                logits = logits.masked_fill(~real[:, None], self.poison)
        return {
            "logits": logits.to(dtype).double(),
            "real": real,
            "bias": values.normal(self.experts, scale=self.bias_size, dtype=torch.float32),
            "dscores": values.normal(self.tokens, self.top_k),
            "dlists": values.normal(self.tokens * self.experts),
            "dshares": values.normal(self.sequences, self.experts),
            "dsquares": values.normal(self.sequences, scale=0.01),
        }

    def run(self, given: dict[str, Tensor], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        dtype, router = score_dtype(dtype), self.router
        logits = given["logits"].to(dtype).to(device)
        leaves = [logits.clone().requires_grad_(bool(self.wants)) for _ in range(3)]
        mask = None if self.mask is None else given["real"].to(device)
        score, weighing = router.score, options_of(router, "score", *WEIGHING)
        bias = given["bias"].float().to(device) if router.selection_bias else None
        choice = {"selection_bias": bias, "token_mask": mask, **options_of(router, *GROUPING)}
        ids, scores = guild.route(leaves[0], self.top_k, **weighing, **choice)
        rounding = {"rounding": router.rounding, "tile": router.tile, "seed": self.seed}
        list_ids, list_scores, offsets = guild.round_tokens(leaves[1], ids, **weighing, **rounding)
        sums = guild.balance_sums(
            leaves[2], ids, score=score, sequences=self.sequences, token_mask=mask
        )
        losses = sums.load_balancing_loss(), sums.z_loss()

        def gradient(name: str) -> Tensor:
            return given[name].to(dtype).to(device)

        dlists = gradient("dlists")[: len(list_scores)]
        one = torch.ones((), dtype=dtype, device=device)
        backward([(scores, gradient("dscores"))])
        backward([(list_scores, dlists)])
        parts = [(sums.shares, gradient("dshares")), (sums.squares, gradient("dsquares"))]
        backward([*parts, (losses[0], one), (losses[1], one / 1024)])
        results = {
            "ids": ids,
            "scores": scores,
            "list_ids": list_ids,
            "list_scores": list_scores,
            "offsets": offsets,
            "counts": sums.counts,
            "shares": sums.shares,
            "squares": sums.squares,
            "tokens": sums.tokens,
            "load_balancing_loss": losses[0],
            "z_loss": losses[1],
        }
        names = ("dlogits_of_scores", "dlogits_of_lists", "dlogits_of_sums")
        found = {n: t.grad for n, t in zip(names, leaves, strict=True) if t.grad is not None}
        return {n: t.detach() for n, t in (results | found).items()}

    def truth(self, given: dict[str, Tensor], got: dict[str, Tensor]) -> Truth:
        """Guild's ids, if they are the best; the rest computed from them."""
        real = torch.nonzero(given["real"]).flatten()
        exact = given["logits"][real].requires_grad_(bool(self.wants))
        got = {name: t.cpu() for name, t in got.items()}
        narrow = got["scores"].dtype != torch.float64
        ids = self.checked_ids(exact.detach(), got["ids"], given, NOISE if narrow else 1e-13)
        members = self.checked_lists(exact.detach(), ids, got, 1e-5 if narrow else 1e-12)
        scores = routing.weights_of(self.router, exact, ids).flatten()
        places = torch.nonzero(members, as_tuple=True)
        lists = routing.weigh(self.router, exact, *places)
        sequence = real // max(self.tokens // self.sequences, 1)
        sums = routing.balance(self.router.score, exact, ids, sequence, self.sequences)
        losses = sums.load_balancing_loss(), sums.z_loss()

        def padded(rows: Tensor, fill: float = 0) -> Tensor:
            shape = (self.tokens, *rows.shape[1:])
            return rows.new_full(shape, fill).index_copy(0, real, rows)

        slots = len(got["list_ids"])
        values = {
            "ids": padded(ids.double(), -1),
            "scores": padded(scores.view(-1, self.top_k)),
            "list_ids": torch.cat((places[1], places[1].new_full((slots - len(lists),), -1))),
            "list_scores": torch.cat((lists, lists.new_zeros(slots - len(lists)))),
            "offsets": torch.cat((torch.zeros(1), padded(members.sum(1)).cumsum(0))),
            **vars(sums),
            "load_balancing_loss": losses[0],
            "z_loss": losses[1],
        }
        truth = Truth({name: t.detach().double() for name, t in values.items()})
        if self.wants:
            self.add_gradients(truth, exact, padded, given, scores, lists, sums)
        return truth

    def add_gradients(self, truth, exact, padded, given, scores, lists, sums) -> None:
        """Gradients of the scores, of the lists' scores and of the sums with both losses."""
        dscores = given["dscores"][given["real"]].flatten()
        dlists = given["dlists"][: len(lists)]
        pairs = [(sums.shares, given["dshares"]), (sums.squares, given["dsquares"])]
        one = torch.ones(())
        pairs += [(sums.load_balancing_loss(), one), (sums.z_loss(), one / 1024)]
        parts = {
            "dlogits_of_scores": (scores * dscores).sum(),
            "dlogits_of_lists": (lists * dlists).sum(),
            "dlogits_of_sums": total(pairs),
        }
        before = {  # terms cancel each other where weights are divided by their sum
            "dlogits_of_scores": float((scores * dscores).detach().norm()),
            "dlogits_of_lists": float((lists * dlists).detach().norm()),
            "dlogits_of_sums": float(given["dshares"].norm()),
        }
        for name, part in parts.items():
            truth.values[name] = padded(gradients(part, {"": exact})[""])
            truth.zeros[name] = ~given["real"][:, None]
            truth.scales[name] = before[name]

    def checked_ids(
        self, logits: Tensor, ids: Tensor, given: dict[str, Tensor], slack: float
    ) -> Tensor:
        """int64 (real tokens, K): distinct, and by the oracle's keys the best, up to slack."""
        padding = ids[~given["real"]]
        require((padding == -1).all(), "ids: expected -1 for padding")
        ids = ids[given["real"]].long()
        require(((ids >= 0) & (ids < self.experts)).all(), "ids: expected experts")
        require((ids.sort(1).values.diff() > 0).all(), "ids: expected different experts")
        router = self.router
        bias = given["bias"] if router.selection_bias else None
        key, margin = routing.choice_keys(router, logits, bias)
        best, _ = routing.choose(key, self.top_k)
        short = key.gather(1, best) - key.gather(1, ids)
        clear = margin > slack
        require((short[clear] <= slack).all(), "ids: expected the best")
        if bias is None and router.groups == 1:  # then ties go to the smaller id
            require(torch.equal(ids, best), "ids: expected the best, ties to the smaller id")
        return ids

    def checked_lists(
        self, logits: Tensor, ids: Tensor, got: dict[str, Tensor], slack: float
    ) -> Tensor:
        """bool (real tokens, E) of lists whose counts and members are as promised."""
        used = int(got["offsets"][-1])
        owner = torch.arange(self.tokens).repeat_interleave(got["offsets"].diff().long())
        members = torch.zeros(self.tokens, self.experts, dtype=torch.bool)
        members[owner, got["list_ids"][:used].long()] = True
        require(int(members.sum()) == used, "list_ids: expected no expert twice in a list")
        real = (got["ids"] >= 0).all(1)
        require(not members[~real].any(), "list_ids: expected none for padding")
        members = members[real]
        chosen = torch.zeros_like(members).scatter_(1, ids, True)
        counts, before = members.sum(0), chosen.sum(0)
        options = self.router.rounding, self.router.tile, len(members)
        least, most = routing.rounded_counts(before, *options)
        require(((counts == least) | (counts == most)).all(), "list_ids: expected whole tiles")
        unlimited = (most - least).remainder(self.router.tile).eq(0).all()
        if self.router.rounding == "balanced" and unlimited:
            drift = (counts.cumsum(0) - before.cumsum(0)).abs().max()
            require(2 * drift <= self.router.tile, "list_ids: expected balanced counts")
        key = routing.log_probabilities(self.router.score, logits)
        expected, _ = routing.round_to(chosen, key, counts)
        for e in torch.nonzero((expected != members).any(0)).flatten().tolist():
            extra = members[:, e] & ~expected[:, e]
            missing = expected[:, e] & ~members[:, e]
            gap = key[missing, e].max() - key[extra, e].min()
            require(gap <= slack * max(1.0, float(key[:, e].abs().max())), "list_ids: best kept")
        return members


def require(condition: Any, message: str) -> None:
    """Raise AssertionError with the message unless it holds."""
    if not condition:
        raise AssertionError(message)
