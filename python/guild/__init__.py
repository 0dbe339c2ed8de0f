"""Guild: Mixture-of-Experts layers in the time the matrix products take.

Three levels, all differentiable, on CPU and CUDA tensors:

- `grouped_mm`, `grouped_mm_swiglu` + `grouped_mm_downproj`: grouped products on sorted rows
- `experts_mlp`: the expert MLP on sorted rows
- `route`, `routed_experts`, `MoE`: the whole layer

Names are imported on first use, so that `guild info` can run, and say what is missing, where the
compiled library is not there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guild._torch.expert_lists import CopiedWeightsWarning as CopiedWeightsWarning
    from guild._torch.expert_lists import lay_evenly as lay_evenly
    from guild.activations import Activation as Activation
    from guild.balancing import BalanceSums as BalanceSums
    from guild.balancing import balance_sums as balance_sums
    from guild.distributed.expert_parallel import ExpertParallel as ExpertParallel
    from guild.distributed.placement import distribute_experts as distribute_experts
    from guild.experts import experts_mlp as experts_mlp
    from guild.experts import routed_experts as routed_experts
    from guild.float8 import FP8 as FP8
    from guild.float8 import FP8Weights as FP8Weights
    from guild.float8 import Quantized as Quantized
    from guild.float8 import SlowFP8Warning as SlowFP8Warning
    from guild.float8 import quantize as quantize
    from guild.float8 import quantize_weights as quantize_weights
    from guild.float8 import refresh_fp8 as refresh_fp8
    from guild.float8 import scaled_grouped_mm as scaled_grouped_mm
    from guild.grouped import grouped_mm as grouped_mm
    from guild.grouped import grouped_mm_downproj as grouped_mm_downproj
    from guild.grouped import grouped_mm_swiglu as grouped_mm_swiglu
    from guild.layer_routing import Routing as Routing
    from guild.logits import router_logits as router_logits
    from guild.lora import LoRA as LoRA
    from guild.moe import MoE as MoE
    from guild.rounding import round_tokens as round_tokens
    from guild.routing import Router as Router
    from guild.routing import route as route
    from guild.sm_budget import num_sms as num_sms
    from guild.sm_budget import set_num_sms as set_num_sms
    from guild.weight_gradients import WeightGradients as WeightGradients

__version__ = "0.1.0"

_NAMES = {  # as above, for the import when a name is first used
    "_torch.expert_lists": ("CopiedWeightsWarning", "lay_evenly"),
    "activations": ("Activation",),
    "balancing": ("BalanceSums", "balance_sums"),
    "distributed.expert_parallel": ("ExpertParallel",),
    "distributed.placement": ("distribute_experts",),
    "experts": ("experts_mlp", "routed_experts"),
    "float8": (
        "FP8",
        "FP8Weights",
        "Quantized",
        "SlowFP8Warning",
        "quantize",
        "quantize_weights",
        "refresh_fp8",
        "scaled_grouped_mm",
    ),
    "grouped": ("grouped_mm", "grouped_mm_downproj", "grouped_mm_swiglu"),
    "layer_routing": ("Routing",),
    "logits": ("router_logits",),
    "lora": ("LoRA",),
    "moe": ("MoE",),
    "rounding": ("round_tokens",),
    "routing": ("Router", "route"),
    "sm_budget": ("num_sms", "set_num_sms"),
    "weight_gradients": ("WeightGradients",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in ("distributed", "float8"):  # packages with more names than those here
        return import_module(f"guild.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'guild' has no attribute {name!r}")
    value = getattr(import_module(f"guild.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
