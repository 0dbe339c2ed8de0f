"""The experts of a Megatron-Core MoE layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from guild import WeightGradients, routed_experts
from guild.integrations.expert_parameters import ends_of
from guild.integrations.megatron.activation import activation_of
from guild.integrations.megatron.expert_linear import ExpertLinear


class GroupedMLP(MegatronModule):
    """Local experts on rows that a token dispatcher has permuted; replaces TEGroupedMLP.

    Both projections, activation, biases and the router's probabilities are one op, and backward is
    another. Parameters are `linear_fc1.weight{i}` and `linear_fc2.weight{i}`, and distributed
    checkpoints have the names and shapes of SequentialMLP's and TEGroupedMLP's.

    Parameters
    ----------
    num_local_experts : int
        Number of experts on this rank.
    config : TransformerConfig
        With `gradient_accumulation_fusion`, weight gradients are added to `main_grad`; with
        `delay_wgrad_compute` they are computed by `backward_dw()`.
    submodules
        Not used: the projections are Guild's.
    pg_collection : ProcessGroupCollection
        Its ep, expt_tp and expt_dp are used.
    name : str, optional
        Not used; Megatron-Core 0.18 and later pass it.

    Raises
    ------
    ValueError
        If the config asks for something that Guild's experts do not support; the message names it.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: Any = None,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        _expect_supported(config, pg_collection)
        self.num_local_experts, self.activation = num_local_experts, activation_of(config)
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
        inner = config.moe_ffn_hidden_size
        shared = {"config": config, "groups": pg_collection}
        self.linear_fc1 = ExpertLinear(
            num_local_experts,
            hidden,
            self.activation.width(inner),
            split=0,
            init_method=config.init_method,
            **shared,
        )
        self.linear_fc2 = ExpertLinear(
            num_local_experts,
            inner,
            hidden,
            split=1,
            init_method=config.output_layer_init_method,
            **shared,
        )
        self._hooks: list[Callable] = []
        self._sink = None
        if config.gradient_accumulation_fusion or config.delay_wgrad_compute:
            self._sink = WeightGradients(
                main_grad=config.gradient_accumulation_fusion, delayed=config.delay_wgrad_compute
            )

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Run each row through its expert and multiply by its probability.

        Parameters
        ----------
        permuted_local_hidden_states : torch.Tensor
            (rows, hidden), sorted by local expert.
        tokens_per_expert : torch.Tensor
            Integer (num_local_experts,), on any device; the host does not wait for one on the GPU.
        permuted_probs : torch.Tensor
            (rows,): the probability of each row.

        Returns
        -------
        torch.Tensor, None
            (rows, hidden) with the biases added; rows past the last expert's are zero.
        """
        x, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x = (probs[:, None] * x).to(x.dtype)
            probs = torch.ones_like(probs)
        row = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        ends = ends_of(tokens_per_expert, x)
        ids = torch.searchsorted(ends, row, right=True, out_int32=True)
        out = routed_experts(
            x,
            ids[:, None],
            probs[:, None],
            self.linear_fc1.weights,
            self.linear_fc2.weights,
            self.linear_fc1.biases,
            self.linear_fc2.biases,
            activation=self.activation,
            weight_gradients=self._sink,
        )
        return out, None

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of the backward passes since the last call."""
        if self._sink is not None and self._sink.delayed:
            self._sink.compute()
            for hook in self._hooks:
                hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable) -> None:
        """Register a hook that `backward_dw` calls at its end, for DistributedDataParallel."""
        self._hooks.append(hook)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Local experts by their global numbers, interchangeable with SequentialMLP's."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        alone = metadata.get("singleton_local_shards", False)
        first = self.ep_group.rank() * self.num_local_experts
        count = self.ep_group.size() * self.num_local_experts
        found = {}
        for name in ("linear_fc1", "linear_fc2"):
            linear = getattr(self, name)
            sharded = linear.sharded_state_dict(f"{name}.", sharded_offsets, metadata)
            if name == "linear_fc1" and self.activation.gated:
                for kind, i in itertools.product(("weight", "bias"), range(self.num_local_experts)):
                    place = () if alone else ((len(sharded_offsets), first + i, count),)
                    if tensor := sharded.get(key := f"{name}.{kind}{i}"):
                        sharded[key] = apply_swiglu_sharded_factory(
                            tensor, (*sharded_offsets, *place), alone
                        )
            replace_prefix_for_sharding(sharded, "", f"{prefix}experts.")
            found |= {f"{prefix}{key}": tensor for key, tensor in sharded.items()}
        return found


def _expect_supported(config: TransformerConfig, groups: Any) -> None:
    for name in ("fp8", "fp4"):
        if asked := getattr(config, name, None):
            raise ValueError(f"{name}: expected None with Guild's experts, got {asked!r}")
    block = getattr(config, "moe_mlp_glu_interleave_size", None)
    if block is not None and config.gated_linear_unit:
        raise ValueError(
            "moe_mlp_glu_interleave_size: expected None with Guild's experts, whose rows of gate "
            f"and up are not in blocks, got {block!r}"
        )
    if config.add_bias_linear and groups.expt_tp.size() > 1:
        raise ValueError(
            "add_bias_linear: expected False where ranks share an expert (expert tensor "
            "parallelism), got True"
        )
    if getattr(config, "fine_grained_activation_offloading", False):
        offloaded = {"expert_fc1", "moe_act"} & set(config.offload_modules)
        if offloaded:
            raise ValueError(
                "offload_modules: expected neither expert_fc1 nor moe_act with Guild's experts, "
                f"got {', '.join(sorted(offloaded))}"
            )
