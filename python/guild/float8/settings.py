"""How a layer of experts runs in FP8: `guild.FP8`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from guild._torch.checks import expect_choice, expect_flag
from guild._torch.expert_lists import depth_of_caller
from guild._torch.float8_formats import LEAST_ROWS, LEAST_WIDTH, SCALES
from guild._torch.float8_steps import Recipe

_warned: list[str] = []
_GRADIENTS = ("e4m3", "e5m2")
_SAVED = ("bf16", "fp8")
_WGRADS = ("bf16", "fp8")


@dataclass(frozen=True)
class FP8:
    """How a layer's products run in FP8, with the experts' weights as masters of 16 or 32 bits.

    Tokens, activations and their gradients have a scale for every 128 columns of a row, weights for
    every 128 x 128 elements, with gate and up separate. Sums are float32; the layer's input, its
    output and its gradients have the same dtypes as without FP8.

    Parameters
    ----------
    wgrad : {"bf16", "fp8"}
        What the weight gradients' products read: 16-bit values (of x's dtype), or codes.
    gradients : {"e4m3", "e5m2"}
        Format of the output's and the pre-activations' gradients; all else is E4M3.
    scales : {"exact", "power_of_two"}
        How a block's scale is chosen, for weights as for rows. "exact": the block's largest
        absolute value over the largest value of the format. "power_of_two": the smallest power of
        two that is not below that quotient.
    save : {"bf16", "fp8"}
        How the pre-activations are kept for backward: as they are, in x's dtype, or as codes, which
        take half the memory and some of dX's and dW's precision.
    cached : bool
        Of a `guild.MoE`: quantise its weights only in the forward that follows `guild.refresh_fp8`,
        which is to be called after each step of the optimizer.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """

    wgrad: str = "bf16"
    gradients: str = "e4m3"
    scales: str = "exact"
    save: str = "bf16"
    cached: bool = False

    def __post_init__(self) -> None:
        expect_choice("wgrad", self.wgrad, _WGRADS)
        expect_choice("gradients", self.gradients, _GRADIENTS)
        expect_choice("scales", self.scales, SCALES)
        expect_choice("save", self.save, _SAVED)
        expect_flag("cached", self.cached)

    def recipe(self) -> Recipe:
        """These settings as the ops take them."""
        return Recipe(
            _GRADIENTS.index(self.gradients),
            SCALES.index(self.scales),
            self.save == "fp8",
            self.wgrad == "fp8",
            False,
        )


class SlowFP8Warning(UserWarning):
    """A layer has sizes at which FP8 takes about as long as 16 bits, or longer."""


def warn_where_slow(x: Tensor, intermediate: int, rows: int, experts: int) -> None:
    """Warn once, on a GPU, where products are too small for FP8 to pay off."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return
    if intermediate < LEAST_WIDTH:
        _warn(f"experts of width {intermediate}; expected {LEAST_WIDTH} or more")
    elif rows < LEAST_ROWS * experts:
        _warn(f"{rows} rows for {experts} experts; expected {LEAST_ROWS} or more each")


def _warn(what: str) -> None:
    if not _warned:
        _warned.append(what)
        message = f"fp8: hardly faster than 16 bits, or slower, with {what}"
        warnings.warn(message, SlowFP8Warning, stacklevel=depth_of_caller())


def expect_fp8(fp8: object) -> None:
    """Raise TypeError unless it is an FP8 or None."""
    if not isinstance(fp8, FP8 | None):
        raise TypeError(f"fp8: expected guild.FP8, got {type(fp8).__name__} {fp8!r}")
