"""Guild: Mixture-of-Experts layers in the time the matrix products take.

Three levels, all differentiable, on CPU and CUDA tensors:

- `grouped_mm`, `grouped_mm_swiglu` + `grouped_mm_downproj`: grouped products on sorted rows
- `experts_mlp`: the expert MLP on sorted rows
- `route`, `routed_experts`, `MoE`: the whole layer

Names are loaded when first used, so that `guild info` can say what is missing where the compiled
library is.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guild.activations import Activation
    from guild.balancing import BalanceSums, balance_sums
    from guild.distributed.expert_parallel import ExpertParallel
    from guild.distributed.placement import distribute_experts
    from guild.experts import experts_mlp, routed_experts
    from guild.grouped import grouped_mm, grouped_mm_downproj, grouped_mm_swiglu
    from guild.layer_routing import Routing
    from guild.logits import router_logits
    from guild.moe import MoE
    from guild.rounding import round_tokens
    from guild.routing import Router, route
    from guild.sm_budget import num_sms, set_num_sms
    from guild.weight_gradients import WeightGradients

__version__ = "0.1.0"

_MODULE_OF = {
    "Activation": "activations",
    "BalanceSums": "balancing",
    "ExpertParallel": "distributed.expert_parallel",
    "MoE": "moe",
    "Router": "routing",
    "Routing": "layer_routing",
    "WeightGradients": "weight_gradients",
    "balance_sums": "balancing",
    "distribute_experts": "distributed.placement",
    "experts_mlp": "experts",
    "grouped_mm": "grouped",
    "grouped_mm_downproj": "grouped",
    "grouped_mm_swiglu": "grouped",
    "num_sms": "sm_budget",
    "round_tokens": "rounding",
    "route": "routing",
    "routed_experts": "experts",
    "router_logits": "logits",
    "set_num_sms": "sm_budget",
}

__all__ = [
    "Activation",
    "BalanceSums",
    "ExpertParallel",
    "MoE",
    "Router",
    "Routing",
    "WeightGradients",
    "balance_sums",
    "distribute_experts",
    "experts_mlp",
    "grouped_mm",
    "grouped_mm_downproj",
    "grouped_mm_swiglu",
    "num_sms",
    "round_tokens",
    "route",
    "routed_experts",
    "router_logits",
    "set_num_sms",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'guild' has no attribute {name!r}")
    value = getattr(import_module(f"guild.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
