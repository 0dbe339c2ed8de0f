"""The function that Transformers calls in place of an experts module's own forward."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    grouped_mm_experts_forward,
    use_experts_implementation,
)

from guild import Activation, routed_experts
from guild.integrations.dtensors import local_part
from guild.integrations.transformers.gate import (
    facts_of,
    gate_function,
    gate_of,
    has_numpy_numbers,
)
from guild.integrations.transformers.messages import class_name, say_left, say_unfused
from guild.integrations.transformers.peft import adopt, lora_of, summed
from guild.integrations.transformers.unfused import unfused_experts

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ON_CUDA = (torch.bfloat16, torch.float16)
MOST_EXPERTS = {"cpu": 4096, "cuda": 1024}
# Whether torch.compile treats a fact about a module, here its gate, as a constant when told to.
COMPILES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def experts_forward(
    self: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """All experts of a Transformers model's layer, on Guild's kernels.

    Parameters
    ----------
    self : torch.nn.Module
        Experts of a class with `use_experts_implementation`. Their weights are read in place.
    hidden_states : torch.Tensor
        (tokens T, hidden H).
    top_k_index : torch.Tensor
        (T, K) int32 or int64. Ids outside the module's own experts, which expert parallelism gives
        to slots of other ranks, are skipped.
    top_k_weights : torch.Tensor
        (T, K), any floating dtype.
    residual : torch.Tensor, optional
        (T, H): added to the result, before rounding if one op of Guild's computes it.

    Returns
    -------
    torch.Tensor
        (T, H) in hidden_states' dtype.

    Notes
    -----
    If Guild does not support the device, the dtype or the sizes of the call, this runs
    Transformers' `grouped_mm`, or the model's own loop if that does not either. A warning says so
    once. Inside torch.compile with torch before 2.13 it is `grouped_mm`, too.
    """
    adopt_peft()
    w_up, w_down, b_up, b_down = weights_of(self)
    own = left_to(self, hidden_states, w_up, w_down)
    if own is not None:
        ids = top_k_index.long()  # the model's own loop requires int64
        with summed(self):
            return _plus(own(self, hidden_states, ids, top_k_weights), residual)

    x = hidden_states.contiguous()
    if not has_autocast(x):  # under autocast the products cast their operands themselves
        x, b_up, b_down = (None if t is None else t.to(w_up.dtype) for t in (x, b_up, b_down))
    layer = (x, top_k_index, top_k_weights, w_up, w_down, b_up, b_down)
    gate, lora = known_gate(self), lora_of(self)
    if gate is None:
        say_unfused(class_name(self))
        out = unfused_experts(*layer, gate_function(self), self.is_transposed, **lora)
        return _plus(out.to(hidden_states.dtype), residual)
    activation, order = gate
    inside = residual is not None and residual.dtype == x.dtype and not has_autocast(x)
    out = routed_experts(
        *layer,
        activation=activation,
        order=order,
        transposed=self.is_transposed,
        residual=residual if inside else None,
        **lora,
    ).to(hidden_states.dtype)
    return out if inside else _plus(out, residual)


def adopt_peft() -> None:
    """Take over PEFT's LoRA where experts run on Guild; does nothing until PEFT is imported."""
    if not torch.compiler.is_compiling():
        adopt(_runs_on_guild)


def _runs_on_guild(experts: nn.Module) -> bool:
    """Whether the forward of these experts is `experts_forward`, or calls it."""
    if hasattr(type(experts), "guild_original") and "forward" not in vars(experts):
        return True  # experts of a replaced block
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return hasattr(experts, "has_gate") and ALL_EXPERTS_FUNCTIONS.get(name) is experts_forward


def weights_of(experts: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """This rank's w_up, w_down, b_up, b_down; None for biases that the experts do not have."""
    prefix = "gate_up_proj" if experts.has_gate else "up_proj"
    w_up, w_down = local_part(getattr(experts, prefix)), local_part(experts.down_proj)
    if not experts.has_bias:
        return w_up, w_down, None, None
    return (
        w_up,
        w_down,
        local_part(getattr(experts, f"{prefix}_bias")),
        local_part(experts.down_proj_bias),
    )


def left_to(experts: nn.Module, x: Tensor, w_up: Tensor, w_down: Tensor) -> Callable | None:
    """The forward that computes these experts if Guild cannot, after a warning; None if it can."""
    if torch.compiler.is_compiling() and not COMPILES:
        return grouped_mm_experts_forward
    name = class_name(experts)
    foreign = of_other_classes(w_up, w_down)
    if foreign:
        say_left(name, "Transformers", foreign)
        return _without_guild(experts)
    reason = _unknown_features(experts) or why_not(x, w_up, w_down)
    if reason and _grouped_mm_takes(w_up, w_down):
        say_left(name, "Transformers' grouped_mm", reason)
        return grouped_mm_experts_forward
    reason = reason or misaligned(x, w_up, w_down)
    if reason:
        say_left(name, "the model's own loop", reason)
        return type(experts).forward.__wrapped__
    return None


def _without_guild(experts: nn.Module) -> Callable:
    """The forward that the experts' config names, or `grouped_mm` if that is Guild's."""
    own = ALL_EXPERTS_FUNCTIONS.get(experts.config._experts_implementation)
    if own is None:
        return type(experts).forward.__wrapped__
    return grouped_mm_experts_forward if own is experts_forward else own


def _grouped_mm_takes(w_up: Tensor, w_down: Tensor) -> bool:
    """Whether Transformers' grouped_mm computes with such weights."""
    dtype = w_up.dtype
    if torch.compiler.is_compiling() and dtype != torch.bfloat16:
        return True  # by a loop of its own
    rows_end = all(n * dtype.itemsize % 16 == 0 for n in w_down.shape[1:])  # those of activations
    return dtype != torch.float64 and rows_end and _begin_at_16_bytes(dtype, w_up, w_down)


def _plus(out: Tensor, residual: Tensor | None) -> Tensor:
    return out if residual is None else out + residual


def has_autocast(x: Tensor) -> bool:
    """Whether autocast changes the dtype of products with x."""
    return x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)


def _other_features(decorator: Callable) -> dict[str, object]:
    """What a class can declare of its experts that is not known here, with the default values.

    Later versions of Transformers add some: 5.23 a norm behind each expert.
    """
    known = ("experts_class", "experts_interface", "has_gate", "has_bias", "is_transposed")
    parameters = inspect.signature(decorator).parameters.items()
    return {
        name: parameter.default
        for name, parameter in parameters
        if name not in (*known, "is_concatenated")  # the gate itself reveals that one
    }


_OTHER_FEATURES = _other_features(use_experts_implementation)


def _unknown_features(experts: nn.Module) -> str:
    """What these experts do besides projections, biases and a gate; empty if nothing."""
    for name, usual in _OTHER_FEATURES.items():
        if getattr(experts, name, usual) != usual:
            return f"it does not know {name}"
    return ""


def of_other_classes(*weights: Tensor) -> str:
    """What keeps Guild from reading these weights' memory; empty if nothing does."""
    classes = [type(w).__name__ for w in weights if not is_plain(w)]
    return f"its weights are of class {classes[0]}" if classes else ""


def is_plain(weight: Tensor) -> bool:
    """Whether its memory holds its values, as that of a quantised tensor does not."""
    kind, parameter = type(weight), nn.Parameter
    return kind in (Tensor, parameter, FakeTensor, FunctionalTensor) or (
        issubclass(kind, parameter)
        and kind.__torch_dispatch__ is parameter.__torch_dispatch__
        and kind.__torch_function__ is parameter.__torch_function__
    )


def why_not(x: Tensor, w_up: Tensor, w_down: Tensor) -> str:
    """Why Guild cannot compute these experts; empty if it can."""
    device = x.device.type
    if device not in MOST_EXPERTS:
        return f"it has no kernels for {device} tensors"
    if w_up.dtype not in _FLOATS or w_down.dtype != w_up.dtype:
        return f"it has no kernels for weights in {w_up.dtype} and {w_down.dtype}"
    if w_down.shape[0] > MOST_EXPERTS[device]:
        return f"it takes at most {MOST_EXPERTS[device]} experts on a {device} device"
    if device == "cpu":
        return ""
    dtype = _dtype(x, w_up)
    if dtype not in _ON_CUDA:
        return f"on a CUDA device it computes in bfloat16 and float16, not in {dtype}"
    return missing_kernels(x.device.index)


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that the products are computed in."""
    return torch.get_autocast_dtype(x.device.type) if has_autocast(x) else weight.dtype


def misaligned(x: Tensor, w_up: Tensor, w_down: Tensor) -> str:
    """What keeps the kernels from reading these weights in place; empty if nothing does."""
    if _takes_any_rows(x.device.type) or _begin_at_16_bytes(_dtype(x, w_up), w_up, w_down):
        return ""
    return "it needs rows of weights that begin at multiples of 16 bytes"


def _takes_any_rows(device: str) -> bool:
    return device == "cpu"


def _begin_at_16_bytes(dtype: torch.dtype, *weights: Tensor) -> bool:
    """Whether all rows do, in this dtype."""
    steps = [n for w in weights for n in (*w.stride()[:-1], w.storage_offset())]
    return all(w.stride(-1) == 1 for w in weights) and not any(
        step * dtype.itemsize % 16 for step in steps
    )


@torch.compiler.assume_constant_result
def missing_kernels(device: int) -> str:
    """Why the CUDA kernels cannot run on this device; empty if they can."""
    return _asked_once(device)


@functools.cache
def _asked_once(device: int) -> str:
    with torch.cuda.device(device):
        reason = torch.ops.guild.cuda_reason()
    return reason and f"of this GPU: {reason}"


def known_gate(experts: nn.Module) -> tuple[Activation, str] | None:
    """The activation that the experts compute, and the order of gate and up; None if not known."""
    if not torch.compiler.is_compiling():
        gate = gate_of(experts)
        return None if gate is None else (gate.activation, gate.order)
    numbers = _gate_in_numbers(experts, facts_of(experts))
    if numbers is None:
        return None
    # The result is dropped, but compiled code is now guarded by all that the function reads.
    gate_function(experts)(torch.zeros(1, 2, dtype=torch.float64, device="cpu"))
    return Activation(*numbers[1:]), numbers[0]


@torch.compiler.assume_constant_result
def _gate_in_numbers(experts: nn.Module, facts: tuple) -> tuple | None:
    """`gate_of` as plain numbers, which is all that a compiled function can treat as constants.

    facts: as torch.compile saw them; it turns a float that changes into a variable otherwise.
    """
    gate = None if has_numpy_numbers(experts) else gate_of(experts)
    return None if gate is None else (gate.order, *dataclasses.astuple(gate.activation)[:6])
