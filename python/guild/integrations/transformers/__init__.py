"""Guild under the MoE models of Hugging Face Transformers 5.

    import guild.integrations.transformers as guild_transformers

    guild_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="guild")

or, for a script that does not choose an experts implementation, `enable()` before it runs. In a
model that was given to `replace_moe_blocks` the routers run on Guild, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

try:
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
except ImportError as error:
    raise ImportError(
        "guild.integrations.transformers needs transformers 5.17 or later and its experts "
        f"interfaces: {error}"
    ) from error

from guild.integrations.transformers.blocks import replace_moe_blocks, restore_moe_blocks
from guild.integrations.transformers.experts import adopt_peft, experts_forward
from guild.integrations.transformers.quantized import fp8_experts_forward

NAME = "guild"
DEFAULT = "grouped_mm"  # what a model uses that does not choose

__all__ = [
    "disable",
    "enable",
    "enabled",
    "experts_forward",
    "register",
    "replace_moe_blocks",
    "restore_moe_blocks",
]

# The default before enable(): what was registered, and what was set in ALL_EXPERTS_FUNCTIONS alone.
_displaced: list[tuple[Callable, Callable | None]] = []


def register() -> None:
    """Register `experts_implementation="guild"` with Transformers.

    It can then be given to `from_pretrained`, `from_config` and `set_experts_implementation`, for
    every model whose experts follow the interface. Calling it again has no effect.
    """
    ExpertsInterface.register(NAME, experts_forward)
    FP8ExpertsInterface.register(NAME, fp8_experts_forward)
    adopt_peft()


def enable() -> None:
    """Put Guild in the place of `grouped_mm`, the default, until `disable()`.

    Scripts and configs need no change, and existing models switch at their next call. Calling it
    again has no effect. `generate()` replaces the default by `batched_mm` while it decodes on a
    GPU; models with `experts_implementation="guild"` stay with Guild.
    """
    register()
    if not _displaced:
        alone = _taken_away()
        _displaced.append((ALL_EXPERTS_FUNCTIONS[DEFAULT], alone))
        ExpertsInterface.register(DEFAULT, experts_forward)


def _taken_away() -> Callable | None:
    """What was set in ALL_EXPERTS_FUNCTIONS alone, where it hides what is registered."""
    first = ALL_EXPERTS_FUNCTIONS[DEFAULT]
    try:
        del ALL_EXPERTS_FUNCTIONS[DEFAULT]
    except KeyError:
        return None
    return first


def disable() -> None:
    """Undo `enable()`. `experts_implementation="guild"` stays registered."""
    if _displaced:
        registered, alone = _displaced.pop()
        if alone is not None and ALL_EXPERTS_FUNCTIONS[DEFAULT] is experts_forward:
            ALL_EXPERTS_FUNCTIONS[DEFAULT] = alone
        ExpertsInterface.register(DEFAULT, registered)


@contextmanager
def enabled() -> Iterator[None]:
    """`enable()` for a with block, which restores the previous state at its end."""
    was_enabled = bool(_displaced)
    enable()
    try:
        yield
    finally:
        if not was_enabled:
            disable()
