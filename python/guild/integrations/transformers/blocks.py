"""Whole MoE blocks of a Transformers model on Guild: the router as well as the experts.

A replaced block, its router and its experts stay the same modules, with their parameters, names and
hooks; only their class becomes one derived from their own, with another forward.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from guild.integrations.transformers.block_families import (
    FAMILIES,
    PARTS,
    BlockFamily,
    family_of,
    first_of,
    lacks_experts,
)
from guild.integrations.transformers.block_forwards import (
    block_forward,
    llama4_forward,
    router_forward,
)
from guild.integrations.transformers.block_trial import difference
from guild.integrations.transformers.experts import experts_forward
from guild.integrations.transformers.messages import say_left

_PREFIX = "Guild"


def replace_moe_blocks(model: nn.Module) -> list[str]:
    """Run the whole MoE blocks of a model on Guild, until `restore_moe_blocks`.

    Supported are those of Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, OLMoE, DeepSeek-V3, GLM4-MoE,
    gpt-oss, Llama 4 and of models that route as these do. Parameters keep their names and values:
    checkpoints load and save as before. Routers compute in the model's own precision, and their
    logits are available as before.

    Parameters
    ----------
    model : torch.nn.Module
        A model of Transformers, or anything that holds its blocks. Changed in place.

    Returns
    -------
    list of str
        The names of the blocks that were replaced, as in `model.named_modules()`; without those
        that an earlier call replaced.

    Raises
    ------
    TypeError
        If model is not a torch.nn.Module.

    Notes
    -----
    A block is replaced if its class is one of those above and computes what Guild's block does: a
    tiny copy of it is run first and compared, gradients included. Other blocks of experts are left
    alone; a warning says so once.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    tried: dict[type[nn.Module], str] = {}
    replaced = []
    for name, block in list(model.named_modules()):
        family = family_of(block)
        if family is None:
            if _holds_experts(block):
                say_left(type(block).__name__, "the model", "it does not know blocks of this class")
            continue
        if type(block) not in tried:
            tried[type(block)] = _why_not(family, block)
        reason = tried[type(block)] or _changed(family, block)
        if reason:
            say_left(type(block).__name__, "the model", reason)
        else:
            _replace(family, block)
            replaced.append(name)
    return replaced


def restore_moe_blocks(model: nn.Module) -> list[str]:
    """Give the blocks of a model their own forward back.

    Parameters
    ----------
    model : torch.nn.Module
        The model that was given to `replace_moe_blocks`.

    Returns
    -------
    list of str
        The names of the blocks that were restored.

    Raises
    ------
    TypeError
        If model is not a torch.nn.Module.
    ValueError
        If something has changed the class of a replaced module since; nothing is restored then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    changed = {n: m for n, m in model.named_modules() if hasattr(type(m), "guild_original")}
    for name, module in changed.items():
        if "guild_original" not in vars(type(module)):
            raise ValueError(
                f"model: expected the classes that replace_moe_blocks left, got a {name} of class "
                f"{type(module).__name__}"
            )
    restored = []
    for name, module in changed.items():
        own, original = type(module), type(module).guild_original
        for attribute, value in vars(module).copy().items():
            if getattr(value, "__func__", None) is own.forward:  # kept by accelerate's hooks
                setattr(module, attribute, original.forward.__get__(module))
        module.__class__ = original
        if family_of(module) is not None:
            restored.append(name)
    return restored


@functools.cache
def replacement(family: BlockFamily, part: str) -> type[nn.Module]:
    """The class that replaces one of the family's: "block", "router" or "experts"."""
    original = family.classes()[part]
    if part == "router":
        forward = router_forward(family, original)
    elif part == "experts":
        forward = _experts_method(original)
    elif family.model == "llama4":
        forward = llama4_forward(family, original)
    else:
        forward = block_forward(
            family, replacement(family, "router"), replacement(family, "experts")
        )
    members = {
        "__module__": __name__,
        "__doc__": f"{original.__name__} on Guild.",
        "guild_original": original,
        "forward": forward,
    }
    return type(_PREFIX + original.__name__, (original,), members)


def __getattr__(name: str) -> Any:
    """Pickles of replaced modules name their classes here."""
    for family in FAMILIES:
        for part in PARTS:
            if name == _PREFIX + getattr(family, part):
                return replacement(family, part)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _experts_method(original: type[nn.Module]) -> Any:
    def forward(
        self: nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    forward.__wrapped__ = inspect.unwrap(original.forward)  # the loop, for what Guild cannot do
    return forward


def _parts(family: BlockFamily) -> tuple[str, ...]:
    """The parts that are replaced: Llama 4's block does the work of its parts."""
    return ("block",) if family.model == "llama4" else PARTS


def _replace(family: BlockFamily, block: nn.Module) -> None:
    classes = {family.classes()[part]: part for part in _parts(family)}
    for module in block.modules():  # adapters may stand between a block and its parts
        if type(module) in classes:
            module.__class__ = replacement(family, classes[type(module)])


def _why_not(family: BlockFamily, block: nn.Module) -> str:
    """Why blocks of this class are not replaced; empty if they can be."""
    return difference(family, block, functools.partial(_replace, family))


def _changed(family: BlockFamily, block: nn.Module) -> str:
    """What keeps this block from being replaced; empty if nothing does."""
    if "forward" in vars(block):
        return "its forward is not that of its class"
    classes = [type(m) for m in block.modules()]
    missing = [c.__name__ for p, c in family.classes().items() if p != "block" and c not in classes]
    if missing:
        return f"it has no {missing[0]}"
    if lacks_experts(first_of(family.classes()["router"], block)):
        return "a token's best groups have fewer experts than it chooses"
    return ""


def _holds_experts(block: nn.Module) -> bool:
    """Whether it has experts of its own, not those of a module that it wraps."""
    is_replaced = hasattr(type(block), "guild_original")
    return not is_replaced and block._modules.get("experts") is not None
