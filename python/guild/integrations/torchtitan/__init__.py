"""Guild under the MoE layers of torchtitan, as overrides that its configs name.

    --override.imports guild.integrations.torchtitan.fused_grouped_experts

replaces the experts' products, behind any token dispatcher; `fused_routed_experts` instead replaces
dispatch, experts and combine where one rank has all experts. Parameters, their names, initial
values, sharding and checkpoints stay torchtitan's.
"""

from __future__ import annotations

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
except ImportError as error:
    raise ImportError(
        f"guild.integrations.torchtitan needs torchtitan 0.3 or later: {error}"
    ) from error

from guild.integrations.torchtitan.experts import EXCHANGED, GuildRoutedExperts

__all__ = ["fused_grouped_experts", "fused_routed_experts"]


@override(target=GroupedExperts.Config, description="Experts on Guild's fused kernels.")
def fused_grouped_experts(cfg: GroupedExperts.Config) -> GroupedExperts.Config:
    """The config of the same experts on Guild.

    Experts of a class that Guild does not know, quantised ones for example, are not replaced.
    """
    target = EXCHANGED.get(type(cfg))
    return cfg if target is None else derive(cfg, target)


@override(target=RoutedExperts.Config, description="Dispatch, experts and combine on Guild.")
def fused_routed_experts(cfg: RoutedExperts.Config) -> RoutedExperts.Config:
    """The config of the same routed experts on Guild.

    With expert parallelism, or a dispatcher other than torchtitan's local and all-to-all ones, the
    dispatcher stays and only the experts run on Guild.
    """
    if type(cfg) is not RoutedExperts.Config:
        return cfg
    inner = fused_grouped_experts(cfg.inner_experts)
    return derive(cfg, GuildRoutedExperts.Config, inner_experts=inner)
