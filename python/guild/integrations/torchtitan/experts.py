"""torchtitan's experts, with the same parameters, on Guild."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward

from guild import Activation, experts_mlp, routed_experts
from guild.integrations.dtensors import local_part


class GuildGroupedExperts(GroupedExperts):
    """SwiGLU experts of three weights, read in place."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The config of the experts that these replace."""

    def layer(self) -> dict[str, Any]:
        """This rank's weights, as Guild takes them, in their own dtype."""
        return {
            "w_up": (local_part(self.w1_EFD), local_part(self.w3_EFD)),
            "w_down": local_part(self.w2_EDF),
        }

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """(R, D) rows sorted by expert, through their experts.

        Rows past the sum of num_tokens_per_expert_E belong to no expert; their results are zero.
        """
        if _types_are_checked():
            return super().forward(x_RD, num_tokens_per_expert_E)
        return _sorted(self.layer(), x_RD, num_tokens_per_expert_E)


class GuildGptOssGroupedExperts(GptOssGroupedExperts):
    """The experts of gpt-oss: interleaved gate and up, clamped, with biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """The config of the experts that these replace."""

    def layer(self) -> dict[str, Any]:
        """This rank's weights, biases and activation, as Guild takes them."""
        weight = self.mlp1_weight_EGD
        b_down = local_part(self.mlp2_bias_ED)
        return {
            "w_up": local_part(weight),
            "w_down": local_part(self.mlp2_weight_EDF),
            "b_up": local_part(self.mlp1_bias_EG),
            # Ranks that share an expert sum their results, so each adds a part of the bias.
            "b_down": ScaleBiasForward.apply(b_down, _ranks_of(weight), b_down.dtype),
            "activation": Activation("silu", alpha=1.702, limit=self.swiglu_limit, up_offset=1.0),
            "order": "interleaved",
        }

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """(R, D) rows sorted by expert, through their experts; rows of no expert are zero."""
        if _types_are_checked():
            return super().forward(x_RD, num_tokens_per_expert_E)
        return _sorted(self.layer(), x_RD, num_tokens_per_expert_E)


class GuildRoutedExperts(RoutedExperts):
    """Dispatch, experts and combine as one op, where no other rank takes part."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """The config of the routed experts that these replace."""

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """(B, L, D) tokens through their experts, summed with their scores."""
        if _types_are_checked() or not self._is_local():
            return super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
        top_k = topk_scores_BLK.shape[-1]
        out = routed_experts(
            x_BLD.reshape(-1, x_BLD.shape[-1]).bfloat16(),
            topk_expert_ids_BLK.reshape(-1, top_k),
            topk_scores_BLK.reshape(-1, top_k),
            **_in_bfloat16(self.inner_experts.layer()),
        )
        return out.type_as(x_BLD).view(x_BLD.shape)

    def _is_local(self) -> bool:
        dispatcher = self.token_dispatcher
        return (
            type(dispatcher) in (LocalTokenDispatcher, AllToAllTokenDispatcher)
            and getattr(dispatcher, "ep_mesh", None) is None
            and hasattr(self.inner_experts, "layer")
        )


EXCHANGED = {
    GroupedExperts.Config: GuildGroupedExperts.Config,
    GptOssGroupedExperts.Config: GuildGptOssGroupedExperts.Config,
}


def _sorted(layer: dict[str, Any], x: Tensor, rows_per_expert: Tensor) -> Tensor:
    ends = torch.cumsum(rows_per_expert, dim=0, dtype=torch.int32)
    out = experts_mlp(x.bfloat16(), F.pad(ends, (1, 0)), **_in_bfloat16(layer))
    return out.type_as(x)


def _in_bfloat16(layer: dict[str, Any]) -> dict[str, Any]:
    """Cast to bfloat16, in which experts compute whatever their dtype is, as torchtitan's do."""

    def cast(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cast, value))
        return value.bfloat16() if isinstance(value, Tensor) else value

    return {name: cast(value) for name, value in layer.items()}


def _ranks_of(weight: Tensor) -> int:
    """How many ranks share an expert by tensor parallelism."""
    if get_spmd_backend() == "spmd_types":  # whose parameters are plain tensors in forward
        from torchtitan.distributed.spmd_types import spmd_mesh_size

        return spmd_mesh_size("tp")
    mesh = getattr(weight, "device_mesh", None)
    return mesh["tp"].size() if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else 1


def _types_are_checked() -> bool:
    """Whether torchtitan is tracking its placement types, which Guild's ops do not have."""
    return get_spmd_backend() == "spmd_types" and spmd.is_type_checking()
