"""Messages to the user, each given once, in compiled models too."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

_silent: ContextVar[bool] = ContextVar("_silent", default=False)


@contextmanager
def silence() -> Iterator[None]:
    """Messages in here are dropped, and given when there is cause for them again."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def class_name(module: nn.Module) -> str:
    """The name of a module's class, or of the model's own where `replace_moe_blocks` changed it."""
    kind = type(module)
    return getattr(kind, "guild_original", kind).__name__


@torch.compiler.assume_constant_result
def say_left(class_name: str, whom: str, why: str) -> None:
    """Say that these experts run without Guild."""
    _say(f"Guild leaves {class_name} to {whom}: {why}.")


@torch.compiler.assume_constant_result
def say_unfused(class_name: str) -> None:
    """Say that these experts run on Guild's products, but with the model's own gate."""
    _say(
        f"Guild does not know the activation of {class_name}, or there are hooks on it: it runs in "
        "PyTorch, between two of Guild's grouped products."
    )


@torch.compiler.assume_constant_result
def say_summed(class_name: str, why: str) -> None:
    """Say that PEFT adds its low-rank terms to the weights of these experts."""
    _say(f"Guild leaves the LoRA of {class_name} to PEFT, which adds it to the weights: {why}.")


def _say(message: str) -> None:
    if not _silent.get():
        _warn(message)


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)
