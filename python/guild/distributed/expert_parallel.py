"""A layer's experts on several ranks: each rank has some of the experts, and all of the router.

    1. the router chooses experts for this rank's tokens
    2. a token's row goes to each rank that has one of them, once
    3. every rank runs its own experts on the rows that came, and sums a row's results
    4. the sums go back; where the token is, they are added in the order of the ranks

Backward is the same with the gradients: those of the output as the tokens, those of the tokens as
the output. Expert weights get the gradient of all ranks' tokens.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from guild._torch.checks import (
    expect_choice,
    expect_count,
    expect_finite,
    expect_flag,
    expect_positive,
)
from guild._torch.expert_lists import Listed, stacked
from guild._torch.layer_arguments import Halves, layer_arguments
from guild._torch.operators import ops
from guild._torch.router_gradients import Weighing
from guild.activations import Activation
from guild.distributed.call_arguments import (
    expect_absent,
    expect_no_transform,
    expect_plain,
    expect_runnable,
    own_offsets,
    process_group_of,
    residual_rows,
    tensors_in,
)
from guild.distributed.facts import facts_of
from guild.distributed.filling import fill_part
from guild.distributed.own_experts import number_of
from guild.distributed.passage import Collect, Dispatch
from guild.distributed.peer_layer import PeerExperts
from guild.distributed.peer_traffic import PeerTraffic, plan_peer_traffic
from guild.distributed.peers import Peers, peers_of
from guild.distributed.ranks import ENGINES, Ranks
from guild.distributed.stepwise import StepwiseExperts
from guild.distributed.traffic import Traffic, plan_traffic
from guild.expert_arguments import expect_backward_options
from guild.experts import run_routed
from guild.lora import LoRA, LoRAHalves
from guild.routed_call import RoutedArguments, routed_call
from guild.routing import Router, route_tokens, token_arguments
from guild.weight_gradients import WeightGradients

TIMEOUT = 600.0  # seconds, as in torch's process groups with NCCL


class ExpertParallel:
    """A group of ranks that share layers' experts: `guild.MoE(..., expert_group=...)`.

    Of E experts rank r of R has r E / R to (r + 1) E / R - 1. Each rank keeps its own tokens, any
    number of them, even none; every rank must make the same calls in the same order.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or DeviceMesh, optional
        The ranks, on one node or several; a mesh of one dimension. Default: all ranks.
    exact : bool
        Give the bits that one process gives for all tokens, in rank order: outputs, gradients of
        tokens and scores, and expert weights' gradients. More bytes come back: a row for each of a
        token's experts, instead of one for each rank.
    timeout : float
        Seconds after which a rank that does not answer is an error on all others. On a GPU this
        holds where the host waits, in forward; elsewhere the process group's own limit does. With
        the peer engine it holds everywhere, and the next call raises the error.
    engine : {"auto", "peer", "nccl"}
        How rows travel. "nccl": through the process group's all_to_all_single, whatever the
        backend, over any number of nodes; the host waits once in forward. "peer": ranks of one
        host, 32 at most, read and write each other's memory, and the host waits only in a layer's
        first call. "auto": peer on GPUs that can, else nccl. Calls with `token_offsets`, as token
        rounding makes them, always take nccl.
    max_tokens : int, optional
        Peer engine: the most tokens of any rank in a call; default: that of the first call. More
        raise an error.
    capacity : float, optional
        Peer engine: a rank has room for capacity * max_tokens * top_k rows, that is, `capacity`
        times an even share. Where more come, the result is NaN on all ranks and the next call
        raises. Default: room for any routing, which is `size` times an even share. With more than
        two ranks, pre-activations are then kept only where no more than twice an even share comes,
        else backward computes them again, as with `recompute`; with lists of weights, LoRA,
        weight_gradients and exact=True always.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    RuntimeError
        If torch.distributed is not initialised.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        exact: bool = False,
        timeout: float = TIMEOUT,
        engine: str = "auto",
        max_tokens: int | None = None,
        capacity: float | None = None,
    ) -> None:
        expect_flag("exact", exact)
        expect_choice("engine", engine, ENGINES)
        if max_tokens is not None:
            expect_count("max_tokens", max_tokens, 1)
        if capacity is not None:
            expect_positive("capacity", capacity)
            expect_finite("capacity", capacity)
        expect_positive("timeout", timeout)
        expect_finite("timeout", timeout)
        self.exact, self._engine = exact, engine
        self._room = max_tokens, capacity
        self._peers: dict[torch.device, Peers | None] = {}  # None: the process group's engine
        self._ranks = Ranks(process_group_of(group), float(timeout), engine)
        self._layers = 0

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._ranks.size

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self._ranks.rank

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks as a process group."""
        return self._ranks.group

    def engine(self, device: torch.device | str) -> str:
        """How rows of tensors on `device` travel: "peer" or "nccl".

        All ranks must call it together, or run their first layer together.

        Raises
        ------
        ValueError
            If engine="peer" was asked for and the ranks cannot reach each other's memory.
        """
        return "nccl" if self._peers_on(torch.empty(0, device=device).device) is None else "peer"

    def check(self) -> None:
        """Wait for the GPU, and raise any error of the peer engine's calls so far.

        Raises
        ------
        ValueError, RuntimeError
            As a later call would.
        """
        for device, peers in self._peers.items():
            if peers is not None:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                peers.expect_no_failure()

    def _peers_on(self, device: torch.device) -> Peers | None:
        if device not in self._peers:
            how = self._engine, *self._room, self.exact
            self._peers[device] = peers_of(self._ranks, device, *how)
        return self._peers[device]

    def _plan(
        self,
        x: Tensor,
        ids: Tensor,
        scores: Tensor,
        token_offsets: Tensor | None,
        experts: int,
        facts: dict[str, int],
    ) -> tuple[Traffic | PeerTraffic, Tensor]:
        """Tell every rank what comes -> traffic, scores of this rank's experts."""
        peers = self._peers_on(x.device)
        if peers is not None and token_offsets is None:
            return plan_peer_traffic(peers, x, ids, scores, experts, facts)
        if peers is not None:
            peers.meet_first(facts)  # ranks without lists would be there
        return plan_traffic(self._ranks, ids, scores, token_offsets, experts, facts)

    def local_experts(self, experts: int) -> range:
        """The experts of this rank.

        Raises
        ------
        ValueError
            If the experts cannot be divided equally.
        """
        if experts % self.size:
            raise ValueError(
                f"experts: expected a multiple of {self.size} (ranks of expert_group), got "
                f"{experts}"
            )
        count = experts // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    @staticmethod
    def local_parts(*weights: Tensor | None) -> tuple[Tensor | None, ...]:
        """This rank's parts of weights that are DTensors; others as they are."""
        return tuple(w.to_local() if isinstance(w, DTensor) else w for w in weights)

    def fill_normal(self, weight: Tensor, std: float) -> None:
        """Initialise this rank's part of a layer's expert weights."""
        fill_part(weight, std, self.rank, self._ranks.everyone)

    def new_layer(self) -> int:
        """A number for a layer, by which ranks notice that they run different ones."""
        self._layers += 1
        return self._layers

    def routed_experts(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w_up: Listed | Halves,
        w_down: Listed,
        b_up: Listed | Halves | None = None,
        b_down: Listed | None = None,
        *,
        activation: Activation | str = "silu",
        order: str = "concatenated",
        transposed: bool = False,
        token_offsets: Tensor | None = None,
        residual: Tensor | None = None,
        recompute: bool = False,
        weight_gradients: WeightGradients | None = None,
        lora_up: LoRA | LoRAHalves | None = None,
        lora_down: LoRA | None = None,
        out: None = None,
        expert_map: None = None,
        fp8: None = None,
    ) -> Tensor:
        """`guild.routed_experts` of this rank's tokens, with experts on all ranks of the group.

        Parameters
        ----------
        x, topk_ids, topk_weights, token_offsets, residual
            This rank's, with ids of all E experts.
        w_up, w_down, b_up, b_down
            Of this rank's E / ranks experts. With exact=True lists are copied unless they are
            evenly spaced in memory.
        activation, order, transposed, recompute, weight_gradients, lora_up, lora_down
            As `guild.routed_experts` takes them, LoRA terms for this rank's experts;
            weight_gradients and LoRA not with exact=True.
        out, expert_map, fp8
            Not with experts on other ranks: results are new tensors, ids are of all experts, and
            products run in x's dtype.

        Returns
        -------
        torch.Tensor
            (tokens, hidden).

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, or differs between ranks where it must not.
        RuntimeError
            If a rank is gone or late.
        NotImplementedError
            Under torch.func's transforms and forward-mode AD.
        """
        expect_absent(out=out, expert_map=expert_map, fp8=fp8)
        given = RoutedArguments(
            x=x,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            w_up=w_up,
            w_down=w_down,
            b_up=b_up,
            b_down=b_down,
            activation=activation,
            order=order,
            transposed=transposed,
            token_offsets=token_offsets,
            residual=residual,
            recompute=recompute,
            weight_gradients=weight_gradients,
            lora_up=lora_up,
            lora_down=lora_down,
        )
        return self.routed_experts_and_offsets(given)[0]

    @torch.compiler.disable  # a graph break: only the host knows the number of rows
    def routed_experts_and_offsets(
        self, given: RoutedArguments, *, layer: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """`routed_experts`, and int32 (E + 1) offsets of this rank's rows by expert."""
        weight_gradients, token_offsets = given.weight_gradients, given.token_offsets
        experts = tensors_in(*given.parameters(), given.lora_up, given.lora_down)
        expect_no_transform(given.x, given.topk_weights, experts, given.residual)
        expect_plain(self.exact, weight_gradients, given.lora_up, given.lora_down)
        number = number_of(layer, experts, self._ranks)
        # Rows of other ranks' tokens come without a residual.
        local = given._replace(residual=None)
        call = routed_call(local)
        if self.exact and call.experts_at is not None:
            local = local._replace(
                w_up=stacked(given.w_up),
                w_down=stacked(given.w_down),
                b_up=stacked(given.b_up, 1),
                b_down=stacked(given.b_down, 1),
            )
            call = routed_call(local)
        expect_runnable(self.size, call, weight_gradients)
        residual, recompute = residual_rows(given.residual, call.x), given.recompute
        lists = token_offsets is not None
        tokens = call.x, (call.scores,), call.layer
        facts = facts_of(self.size, self.exact, *tokens, number, call.low, lists)
        slots = call.ids, call.scores, token_offsets, self.size * call.layer[2].shape[0]
        peers = None if lists else self._peers_on(call.x.device)
        plain = weight_gradients is None and call.low is None and call.experts_at is None
        if plain and peers is not None and not self.exact:
            keep = bool(facts["gradients"]) and not recompute
            return PeerExperts.apply(
                peers, facts, call.ids, slots[-1], keep, call.x, call.scores, residual, *call.layer
            )
        traffic, received = self._plan(call.x, *slots, facts)
        recompute = recompute or not traffic.keeps_all_rows
        with self._ranks.in_step("forward"):
            offsets = own_offsets(*slots)
            if self.exact:
                keep = bool(facts["gradients"]) and not recompute
                taken = traffic, received, token_offsets, keep, None
                rows = call.x, None, None, call.scores, residual
                return StepwiseExperts.apply(*taken, *rows, *call.layer), offsets
            rows, received = Dispatch.apply(call.x, call.scores, traffic, received)
            slots = {"ids": traffic.ids, "scores": received, "token_offsets": traffic.token_offsets}
            sums, _ = run_routed(call._replace(x=rows, **slots), recompute, weight_gradients)
            return Collect.apply(sums, residual, traffic), offsets

    @torch.compiler.disable
    def routed_layer(
        self,
        given: RoutedArguments,
        router_weight: Tensor,
        router_bias: Tensor | None,
        top_k: int,
        router: Router,
        selection_bias: Tensor | None,
        token_mask: Tensor | None,
        *,
        layer: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Router and experts; with exact=True x gets one gradient for both, as in one process."""
        product = router_weight, router_bias
        expect_no_transform(given.x, *product, *given.parameters(), given.residual)
        tokens = given.x, *product, top_k, router, selection_bias, token_mask
        if not self.exact:
            ids, scores = route_tokens(*tokens)
            given = given._replace(topk_ids=ids, topk_weights=scores)
            return self.routed_experts_and_offsets(given, layer=layer)
        number = number_of(layer, tensors_in(*given.parameters()), self._ranks)
        arguments = token_arguments(*tokens)
        x, *local, _ = layer_arguments(given.x, *given.parameters(), *given.layout(), routed=True)
        residual = residual_rows(given.residual, x)
        expect_backward_options(given.recompute, given.weight_gradients)
        expect_plain(self.exact, given.weight_gradients)
        with torch.no_grad():
            scores, ids, slopes = ops.route_tokens(*arguments)
        facts = facts_of(self.size, self.exact, x, product, local, number)
        experts = self.size * local[2].shape[0]
        traffic, received = self._plan(x, ids, scores, None, experts, facts)
        keep = bool(facts["gradients"]) and not given.recompute and traffic.keeps_all_rows
        weighing = Weighing.of(arguments[6:])
        routed = scores, ids, weighing.kept(slopes), weighing
        taken = traffic, received, None, keep, routed
        with self._ranks.in_step("forward"):
            out = StepwiseExperts.apply(*taken, x, *product, scores, residual, *local)
            return out, own_offsets(ids, scores, None, experts)

    def __repr__(self) -> str:
        return f"ExpertParallel(size={self.size}, rank={self.rank}, engine={self._engine!r})"

    def __deepcopy__(self, _: dict[int, Any]) -> ExpertParallel:
        """Itself: copies of a layer are on the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "expert_group: a layer with experts on other ranks cannot be pickled; save its "
            "state_dict()"
        )
