"""The weights of one projection of all local experts, as Megatron-Core shards and saves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from guild.integrations.expert_parameters import ExpertParameters


class ExpertLinear(ExpertParameters):
    """`weight{i}` (out, in) and `bias{i}` (out,) of each local expert i, split over ranks.

    split: the dimension of a weight that tensor parallelism splits, 0 or 1. groups: the process
    groups, as Megatron-Core collects them.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        split: int,
        config: TransformerConfig,
        init_method: Callable,
        groups: Any,
    ) -> None:
        super().__init__()
        self.experts, self.split, self.groups = experts, split, groups
        whole = (outputs, inputs)
        ranks = groups.expt_tp.size()
        if whole[split] % ranks:
            raise ValueError(
                f"moe_ffn_hidden_size: expected a multiple of the {ranks} ranks that share an "
                f"expert, got {whole[split]} rows or columns"
            )
        local = tuple(n // ranks if d == split else n for d, n in enumerate(whole))
        on_cpu = config.use_cpu_initialization
        device = "cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device())
        if config.init_model_with_meta_device:
            device = "meta"
        place = {"device": device, "dtype": config.params_dtype}
        weights = self._register("weight", torch.empty(experts, *local, **place))
        biases = []
        if config.add_bias_linear:
            biases = self._register("bias", torch.zeros(experts, local[0], **place))
        for weight in weights:
            self._initialize(weight, whole, config, init_method)
        for parameter in (*weights, *biases):
            parameter.allreduce = config.expert_model_parallel_size <= 1
            parameter.skip_backward_post_hook = config.delay_wgrad_compute

    def _initialize(
        self,
        weight: nn.Parameter,
        whole: tuple[int, int],
        config: TransformerConfig,
        init_method: Callable,
    ) -> None:
        if not config.perform_initialization or weight.is_meta:
            set_tensor_model_parallel_attributes(weight, True, self.split, 1)
        elif config.use_cpu_initialization:
            _initialize_affine_weight_cpu(
                weight,
                *whole,
                weight.shape[self.split],
                self.split,
                init_method,
                params_dtype=config.params_dtype,
                rank=self.groups.expt_tp.rank(),
                world_size=self.groups.expt_tp.size(),
            )
        else:
            _initialize_affine_weight_gpu(weight, init_method, self.split, is_expert=True)

    @property
    def weights(self) -> list[nn.Parameter]:
        """One per expert."""
        return self._listed("weight")

    @property
    def biases(self) -> list[nn.Parameter] | None:
        """One per expert; None where there are none."""
        return self._listed("bias") or None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Every expert's tensors, under names without the experts' numbers."""
        metadata = metadata or {}
        alone = metadata.get("singleton_local_shards", False)
        first, count = self.groups.ep.rank() * self.experts, self.groups.ep.size() * self.experts
        axes = {"weight": self.split} | ({"bias": 0} if self.split == 0 else {})
        groups = {"tp_group": self.groups.expt_tp, "dp_cp_group": metadata["dp_cp_group"]}
        found = {}
        for i in range(self.experts):
            state = {kind: self._parameters.get(f"{kind}{i}") for kind in ("weight", "bias")}
            state = {kind: tensor for kind, tensor in state.items() if tensor is not None}
            state["_extra_state"] = None  # where Transformer Engine's layers look for FP8 state
            place = () if alone else ((len(sharded_offsets), first + i, count),)
            sharded = make_sharded_tensors_for_checkpoint(
                state, "", axes, (*sharded_offsets, *place), **groups
            )
            replace_prefix_for_sharding(sharded, "", f"{first + i}.{prefix}" if alone else prefix)
            for kind, tensor in sharded.items():
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
                number = "" if kind == "_extra_state" and i == 0 else i
                found[f"{prefix}{kind}{number}"] = tensor
        return found
