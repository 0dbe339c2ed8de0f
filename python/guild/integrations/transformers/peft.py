"""PEFT's LoRA on experts (`target_parameters`): its factors as low-rank terms.

PEFT's `ParamWrapper` replaces W by the sum W + scale B A while its module runs. That makes a matrix
of the weight's size in forward, another as the sum's gradient, and two products of them. Here the
wrappers around experts that run on Guild hand over their factors instead. Every other wrapper, such
as one around experts that Guild leaves to Transformers, works as in PEFT.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from guild import LoRA
from guild.integrations.transformers.gate import WEIGHTS
from guild.integrations.transformers.messages import class_name, say_summed

_TERMS = "_guild_lora"  # attribute of experts while their wrappers run
_LAYER = "peft.tuners.lora.layer"


@dataclass
class Term:
    """What a wrapper would add to a weight."""

    lora: LoRA
    summed: Callable[[], Any]  # PEFT's own method, a context manager
    used: bool = False


def adopt(runs_on_guild: Callable[[nn.Module], bool]) -> None:
    """Make PEFT's wrappers of experts hand over their factors, once PEFT is imported.

    runs_on_guild: whether these experts' forward is Guild's. Calling it again has no effect.
    """
    wrapper = getattr(sys.modules.get(_LAYER), "ParamWrapper", None)
    own = getattr(wrapper, "_activate_lora", None)
    if own is None or hasattr(own, "guild_original"):
        return

    @functools.wraps(own)
    @contextmanager
    def activate(self: nn.Module, active_adapters: list[str]) -> Iterator[None]:
        experts = self.get_base_layer()
        names = [a for a in active_adapters if a in self.lora_A]
        if not names or self.parameter_name not in WEIGHTS or not runs_on_guild(experts):
            with own(self, active_adapters):
                yield
            return
        reason = _why_summed(self)
        if reason:
            name = class_name(experts)  # with a sum already in place, the class is another
            say_summed(name.removeprefix("Parametrized"), reason)
            with own(self, active_adapters):
                yield
            return
        term = Term(_lora(self, experts, names), lambda: own(self, active_adapters))
        before = terms_of(experts)
        setattr(experts, _TERMS, {**before, self.parameter_name: term})
        try:
            yield
            if not term.used:
                raise RuntimeError(
                    f"{type(experts).__name__}: expected its forward to be Guild's, which takes "
                    "the LoRA of PEFT, got another, which has left it out"
                )
        finally:
            setattr(experts, _TERMS, before)

    activate.guild_original = own
    wrapper._activate_lora = activate


def terms_of(experts: nn.Module) -> dict[str, Term]:
    """The low-rank terms of these experts' weights, by the weights' names."""
    return getattr(experts, _TERMS, {})


def lora_of(experts: nn.Module) -> dict[str, LoRA]:
    """Those terms as arguments of `guild.routed_experts`."""
    terms = terms_of(experts)
    arguments = {}
    for name, term in terms.items():
        term.used = True
        arguments["lora_down" if name == "down_proj" else "lora_up"] = term.lora
    return arguments


@contextmanager
def summed(experts: nn.Module) -> Iterator[None]:
    """Gives the terms back to PEFT, for a forward that is not Guild's."""
    terms = terms_of(experts)
    if not terms:
        yield
        return
    with ExitStack() as stack:
        for term in terms.values():
            term.used = True
            stack.enter_context(term.summed())
        yield


def _why_summed(wrapper: nn.Module) -> str:
    """Why a wrapper's factors stay with PEFT; empty if they do not."""
    weight = wrapper.get_param()
    if hasattr(weight, "to_local"):
        return "its weights are a DTensor"
    if weight.dim() != 3 or wrapper.num_experts == 1:
        return "PEFT takes its weight for that of one expert"
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return f"its weights are in {weight.dtype}"
    return ""


def _lora(wrapper: nn.Module, experts: nn.Module, names: list[str]) -> LoRA:
    """The adapters' factors, those of several adapters side by side."""
    terms = [_by_expert(wrapper, experts, name) for name in names]
    if len(terms) == 1:
        return LoRA(*terms[0], wrapper.scaling[names[0]])
    scaled = [b * wrapper.scaling[name] for name, (_, b) in zip(names, terms, strict=True)]
    with torch.autocast(scaled[0].device.type, enabled=False):  # its cat refuses other 16-bit types
        return LoRA(torch.cat([a for a, _ in terms], 1), torch.cat(scaled, 2))


def _by_expert(wrapper: nn.Module, experts: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """An adapter's A (E, r, inputs) and B (E, outputs, r), as views."""
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    a = a.unflatten(0, (wrapper.num_experts, -1))
    b = b.unflatten(1, (-1, wrapper.num_experts)).permute(2, 0, 1)
    # Earlier versions of PEFT assume that every weight is (E, inputs, outputs).
    if getattr(wrapper, "_did_swap_in_out_features", False) == experts.is_transposed:
        a, b = b.mT, a.mT
    return a, b
