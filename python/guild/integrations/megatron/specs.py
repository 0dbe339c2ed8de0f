"""Replaces the experts in Megatron-Core's specs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from guild.integrations.megatron.grouped_mlp import GroupedMLP

Spec = TypeVar("Spec")


def use_guild(spec: Spec) -> Spec:
    """A spec whose MoE layers have Guild's experts.

    Parameters
    ----------
    spec : ModuleSpec or submodules
        Of a block, of a layer, of an MoE layer, or `MoESubmodules`; it is not changed.

    Returns
    -------
    The same kind of spec. Layers without experts are shared with `spec`.

    Raises
    ------
    ValueError
        If there is no MoE layer in it.
    """
    found: list[MoESubmodules] = []
    exchanged = _exchanged(spec, found)
    if not found:
        raise ValueError(f"spec: expected one with an MoE layer, got {type(spec).__name__} without")
    return exchanged


def _exchanged(spec: Any, found: list[MoESubmodules]) -> Any:
    if isinstance(spec, MoESubmodules):
        found.append(spec)
        return dataclasses.replace(spec, experts=ModuleSpec(module=GroupedMLP))
    if isinstance(spec, functools.partial):  # as Megatron-Core 0.18 and later have them
        keywords = {name: _exchanged(value, found) for name, value in spec.keywords.items()}
        if all(keywords[name] is value for name, value in spec.keywords.items()):
            return spec
        return functools.partial(spec.func, *spec.args, **keywords)
    if isinstance(spec, list | tuple):
        return type(spec)(_exchanged(one, found) for one in spec)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    changes = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        exchanged = _exchanged(value, found)
        if exchanged is not value and field.init:
            changes[field.name] = exchanged
    return dataclasses.replace(spec, **changes) if changes else spec
