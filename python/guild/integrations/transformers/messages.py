"""Messages to the user, each given once, in compiled models too."""

from __future__ import annotations

import functools
import warnings

import torch


@torch.compiler.assume_constant_result
def say_left(class_name: str, whom: str, why: str) -> None:
    """Say that these experts run without Guild."""
    _warn(f"Guild leaves {class_name} to {whom}: {why}.")


@torch.compiler.assume_constant_result
def say_unfused(class_name: str) -> None:
    """Say that these experts run on Guild's products, but with the model's own gate."""
    _warn(
        f"Guild does not know the activation of {class_name}: it runs in PyTorch, between two of "
        "Guild's grouped products."
    )


@torch.compiler.assume_constant_result
def say_summed(class_name: str, why: str) -> None:
    """Say that PEFT adds its low-rank terms to the weights of these experts."""
    _warn(f"Guild leaves the LoRA of {class_name} to PEFT, which adds it to the weights: {why}.")


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
