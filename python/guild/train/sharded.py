"""A learner whose weights, gradients and optimiser lie on all ranks, by FSDP2.

Blocks are gathered one at a time, in bfloat16 if asked for, and gradients are summed in float32.
With expert parallelism, experts are not gathered: the ranks of a group share them. A checkpoint
holds whole tensors, so that any number of ranks can continue from it, even one.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import guild
from guild.balancing import BalanceSums
from guild.distributed.placement import distribute_experts, expert_weights, shard_layers
from guild.train.corpus import Corpus
from guild.train.gathered import knows_fsdp
from guild.train.generation import Sampling, window_start
from guild.train.head import chunked_cross_entropy
from guild.train.learner import (
    Learner,
    busiest_over_mean,
    expect_whole,
    moe_factory,
    optimizer_options,
)
from guild.train.mapped import can_map
from guild.train.model import LanguageModel
from guild.train.peer_copies import use_copies
from guild.train.reduction import NarrowReduceScatter
from guild.train.settings import Settings
from guild.train.shard_adamw import ShardAdamW, local_norm
from guild.train.speed import speed_of
from guild.train.step_graph import StepQueue
from guild.train.world import expect_layout, mean_of_ranks, on_all_ranks, writes

_ATTENTION = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


class ShardedModel(LanguageModel):
    """The same model with a loss that keeps no logits and balances the load over all ranks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for block in self.blocks:
            block.returns_moe_input = False  # the loss is of the layers' own sums

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `LanguageModel.loss`, of this rank's tokens; imbalance 0 if nothing measures it."""
        hidden = self.hidden_states(tokens)[0].flatten(0, 1)
        sums = [getattr(block.moe, "balance_sums", None) for block in self.blocks]
        if not self.training or any(s is None for s in sums):
            loss = chunked_cross_entropy(hidden, self.embedding.weight, targets.flatten())
            return loss, torch.zeros_like(loss)
        of_layers = BalanceSums(*map(torch.cat, zip(*sums, strict=True)))  # each one sequence
        sum_of_ranks = dist.all_reduce(of_layers.counts, async_op=True)
        # Computed meanwhile, so that a rank that is ahead does not wait for the others.
        loss = chunked_cross_entropy(hidden, self.embedding.weight, targets.flatten())
        sum_of_ranks.wait()
        return loss, of_layers.load_balancing_loss()


class ShardedLearner(Learner):
    """A `Learner` on all ranks of the default process group.

    Parameters
    ----------
    name, settings, device, dtype
        As `Learner` takes them; a step's batch is that of all ranks together. bfloat16: products in
        it, weights and sums in float32.
    expert_parallel : int
        Ranks that share the experts; 1: experts are gathered like everything else.
    keep_gathered : bool
        Keep all blocks gathered from forward to backward, not only the last ones: no second gather,
        but more memory.
    graphs : bool
        As `Learner` takes it. With experts on several ranks only with engine "peer" and without
        rounding: otherwise the host waits for counts.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
        expert_parallel: int = 1,
        keep_gathered: bool = False,
        graphs: bool = True,
    ) -> None:
        self.name, self.settings, self.device, self.dtype = name, settings, device, dtype
        self.ranks = dist.get_world_size()
        expect_layout(name, settings, self.ranks, expert_parallel)
        self.model = self._made()
        mesh = init_device_mesh(device.type, (self.ranks,))
        sharded: dict[str, Any] = {"reshard_after_forward": True}
        if dtype != torch.float32:
            sharded["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32
            )
        experts = self._experts = None
        if expert_parallel > 1:
            shape, names = (self.ranks // expert_parallel, expert_parallel), ("data", "experts")
            experts = init_device_mesh(device.type, shape, mesh_dim_names=names)
            most = settings.batch // self.ranks * settings.context  # of a validation
            self._experts = distribute_experts(self.model, experts["experts"], max_tokens=most)
            graphs &= self._experts.engine(device) == "peer" and settings.round == "none"
        self.steps = StepQueue(self._compute, device, graphs, on_all_ranks)
        blocks = list(self.model.blocks)
        # With experts on other ranks each block has a graph of its own, as its layer has a number.
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 2 * len(blocks))
        kept: dict[str, Any] = sharded | {"reshard_after_forward": False}
        copies = dtype != torch.float32 and experts is None and knows_fsdp() and can_map(device)
        last = 1 if copies else _kept(len(blocks), self.ranks)
        resharded = 0 if keep_gathered else len(blocks) - last
        for i, block in enumerate(blocks):
            how = sharded if i < resharded else kept
            if device.type == "cuda":
                # Only the forward, so that FSDP2's hooks stay outside the compiled code.
                block.forward = torch.compile(block.forward, dynamic=False)
            theirs = expert_weights(block) if experts is not None else None
            fully_shard(block, mesh=mesh, ignored_params=theirs, **how)
            if experts is not None:
                shard_layers(block, mesh, experts["data"], **how)
        fully_shard(self.model, mesh=mesh, **kept)
        self.weights, self.sums, modules = None, None, [*blocks, self.model]  # first two: copies
        if copies:
            where = dist.group.WORLD, dtype, device
            self.weights, self.sums = use_copies(modules, *where)
        elif dtype != torch.float32 and experts is None:
            self._send_narrow(modules)
        self._prefetch(blocks)
        if device.type == "cuda" and self.ranks > 1:
            guild.set_num_sms(0, shared=True)  # with the collectives that run beside the products
        parts = {} if self.weights is None else self.weights.parts
        groups, options = optimizer_options(self.model, settings)
        self.optimizer = ShardAdamW(groups, _own_parameters(modules), parts, **options)
        self.optimizer.begin()

    def _prefetch(self, blocks: list[FSDPModule]) -> None:
        """Gather each block while the one before it computes, forward and backward."""
        register_fsdp_forward_method(self.model, "loss")
        self.model.set_modules_to_forward_prefetch(blocks[:1])
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 2])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - 1) : i])

    def _send_narrow(self, modules: list[FSDPModule]) -> None:
        """Make gradients travel in the products' dtype, as backward computes them."""
        # Sums of several parts are float32; bfloat16 would lose precision.
        dtype = self.dtype if self.settings.accumulate == 1 else torch.float32
        for module in modules:
            module.set_custom_reduce_scatter(NarrowReduceScatter(dtype))

    def _made(self) -> ShardedModel:
        """The whole model with its initial values, the same on every rank."""
        s = self.settings
        factory = moe_factory(self.name, torch.device("cpu"), s, bool(s.balance))
        sizes = s.hidden, s.layers, s.heads, s.intermediate, s.experts, s.top_k
        with self.device:
            model = ShardedModel(*sizes, factory, s.vocabulary)
        if self.device.type == "cpu":
            model.initialise(s.seed)
            return model
        # On the GPU: seconds, where a CPU takes minutes. Not the values that `initialise` draws.
        draw = torch.Generator(self.device).manual_seed(s.seed)
        with torch.no_grad():
            for name, weight in sorted(model.named_parameters()):
                if weight.dim() == 1:
                    weight.fill_(1.0)
                else:
                    weight.normal_(std=model.std_of(name, weight), generator=draw)
        return model

    def autocast(self) -> contextlib.AbstractContextManager:
        """No autocast: FSDP2 casts the weights. On a GPU cuDNN's attention, fastest on Hopper."""
        if self.device.type != "cuda" or self.dtype == torch.float32:
            return contextlib.nullcontext()
        kinds = [getattr(SDPBackend, name) for name in _ATTENTION]
        return sdpa_kernel(kinds, set_priority=True)

    def _before_part(self, last: bool) -> None:
        """Across hosts gradients travel once per step; copies move them with every part.

        FSDP2 adds up parts in float32 before they travel, whole on every rank; after that, in each
        rank's own part.
        """
        if self.settings.accumulate > 1 and self.weights is None:
            self.model.set_requires_gradient_sync(last)

    def round(self, corpus: Corpus, first: int, count: int) -> list[dict[str, Any]]:
        """As `Learner.round`, with the speed of a GPU in each row."""
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection stalls all ranks, each at another time
        try:
            rows = super().round(corpus, first, count)
        finally:
            if was_enabled:
                gc.enable()
        speed = speed_of(self.settings, rows[0]["seconds"], self.ranks, self.device)
        if "memory_gib" in speed:  # torch's own count does not include mapped memory
            mapped = [own.mapped_bytes for own in (self.weights, self.sums) if own is not None]
            speed["memory_gib"] += sum(mapped) / 2**30
        return [row | speed for row in rows]

    def _compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        s = self.settings
        loss, imbalance, counts = self._gradients(inputs, targets)
        # Every part of a gradient is on exactly one rank.
        own = torch.stack((self._own_norm() ** 2, loss / self.ranks, imbalance / self.ranks))
        of_ranks = torch.cat((own, counts.flatten().float()))
        dist.all_reduce(of_ranks)
        norm, of_all = of_ranks[0].sqrt(), of_ranks[3:].view(counts.shape)
        # Clipped where they are read: gradients are divided by this number.
        self.optimizer.grad_scale = ((norm + 1e-6) / s.clip).clamp(min=1)
        with contextlib.nullcontext() if self.weights is None else self.weights.replaced():
            self.optimizer.step()
        self.optimizer.zero_grad()  # before the next forward, which takes the most memory
        self.model.move_selection_biases(s.bias_rate, counts)
        load = busiest_over_mean(of_all)
        rows = of_all.sum(1).mean() / (s.tokens_per_step * s.top_k)
        return torch.cat((of_ranks[1:3], torch.stack((norm, rows)), load))

    def _wait(self) -> None:
        """As `Learner`'s; NCCL ends a process whose ranks do not arrive.

        Its watchdog does not see what a CUDA graph runs, but a collective that follows one.
        """
        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index])
        super()._wait()
        if self._experts is not None:
            self._experts.check()

    def _own_norm(self) -> Tensor:
        """Norm of the gradients on this rank."""
        if self.sums is not None:
            norm = self.sums.norm()
            if self.settings.accumulate == 1:
                return norm  # otherwise it is that of the parts, not of their sum
        return local_norm(self.model.parameters())

    def _has_finite_weights(self) -> bool:
        own = (weight.to_local() for weight in self.model.parameters())
        return on_all_ranks(self._are_finite(own))

    @torch.no_grad()
    def validate(self, corpus: Corpus, windows: int) -> float:
        """As `Learner.validate`; every rank has its part of each batch."""
        batch = self.settings.batch
        windows = math.ceil(windows / batch) * batch
        inputs, targets = corpus.held_out_windows(windows, self.settings.context)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        with self.autocast():
            for pair in zip(inputs.split(batch), targets.split(batch), strict=True):
                total += self.model.loss(*self._windows(*pair))[0]
        self._end_evaluation()
        return (mean_of_ranks(total) / (windows // batch)).item()

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int) -> bytes:
        """What the model writes after the prompt, as `generate` does; the same on every rank.

        Each byte is a forward of the whole context, so that FSDP2's hooks see a forward.
        """
        s, text = self.settings, bytearray(prompt)
        sampling = Sampling(seed=s.seed)
        self.model.eval()
        for noise in sampling.noise(count):
            seen = text[window_start(len(text), s.context) :]
            window = torch.tensor([[*seen, *bytes(s.context - len(seen))]], device=self.device)
            logits = self.model(window)[0, len(seen) - 1].float().cpu()
            text.append(int(sampling.choose(logits, noise)))
        self._end_evaluation()
        return bytes(text[len(prompt) :])

    def _end_evaluation(self) -> None:
        """Release the weights that are kept for a backward: a graph's step gathers them again."""
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _windows(self, *tensors: Tensor) -> list[Tensor]:
        return self._to_device(*(t.chunk(self.ranks)[dist.get_rank()] for t in tensors))

    def state(self) -> dict[str, Any]:
        """As `Learner.state`: whole tensors on the CPU of the rank that writes; all ranks help."""
        optimizer = self._optimizer_state()
        moments = {i: _whole(held) for i, held in optimizer["state"].items()}
        return {
            "model": _whole(self.model.state_dict()),
            "optimizer": {"state": moments, "param_groups": optimizer["param_groups"]},
        }

    def load(self, state: dict[str, Any]) -> None:
        """As `Learner.load`, from a run on any number of ranks."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        own = [names[id(p)] for g in self.optimizer.param_groups for p in g["params"]]
        try:
            saved = state["optimizer"]
            moments = {own[i]: held for i, held in saved["state"].items()}
            groups = [g | {"params": [own[i] for i in g["params"]]} for g in saved["param_groups"]]
            expect_whole(self.model, state["model"], moments)
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict={"state": moments, "param_groups": groups},
                options=StateDictOptions(full_state_dict=True),
            )
            if self.weights is not None:
                self.weights.refresh()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            raise ValueError(
                f"resume: the checkpoint's weights and optimiser do not fit this {self.name} "
                "model; another version of Guild may have written it"
            ) from None


def _own_parameters(modules: list[FSDPModule]) -> list[list[torch.nn.Parameter]]:
    """For each module, the parameters that no earlier module has."""
    seen: set[torch.nn.Parameter] = set()
    found = []
    for module in modules:
        found.append([p for p in module.parameters() if p not in seen])
        seen.update(found[-1])
    return found


def _kept(blocks: int, ranks: int) -> int:
    """How many of the last blocks, which backward needs first, stay gathered where NCCL gathers.

    They take a tenth of the memory of a rank's weights, gradients and moments: for P weights
    16 P / ranks bytes, compared with 2 P gathered in 16 bits.
    """
    return min(blocks, max(1, int(0.8 * blocks / ranks)))


def _whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of all ranks put together, on the CPU of the rank that writes."""
    found = {}
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    for name, value in tensors.items():
        if isinstance(value, DTensor):
            before, log.disabled = log.disabled, True  # it warns of two gathers in place of one
            value = value.full_tensor()
            log.disabled = before
        if isinstance(value, Tensor):
            value = value.cpu() if writes() else None
        found[name] = value
    return found
