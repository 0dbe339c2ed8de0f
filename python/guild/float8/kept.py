"""The quantised weights of a module with FP8(cached=True), and when they are made again."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn

from guild.activations import Activation
from guild.float8.experts import FP8Weights
from guild.float8.settings import FP8


class KeptWeights:
    """Codes of w_up and w_down, of one module; `codes` is None before its first forward.

    They are made in the forward after `refresh`, since only there has FSDP gathered the weights, or
    have other tensors become the weights. Versions reveal a forgotten refresh where torch counts
    them; it does not in CUDA graphs, in compiled code, nor for weights that FSDP gathers.
    """

    def __init__(self) -> None:
        self.codes: FP8Weights | None = None
        self._stale = True
        self._layout: tuple = ()
        self._tensors: tuple[int, ...] = ()
        self._versions: tuple[int, ...] = ()

    def share(self, other: KeptWeights, fp8: FP8) -> None:
        """Use the codes that another module of the same weights has, in the same memory."""
        if other.codes is None or other.codes.fp8.scales != fp8.scales:
            raise ValueError("other: expected codes of weights with the same kind of scales")
        self.codes, self._stale, self._layout = copy(other.codes), False, other._layout
        self._tensors, self._versions = other._tensors, other._versions
        self.codes.fp8 = fp8

    def refresh(self) -> None:
        """Make the next call of `of` quantise."""
        self._stale = True

    def of(
        self,
        fp8: FP8,
        w_up: Tensor,
        w_down: Tensor,
        activation: Activation,
        order: str,
        transposed: bool,
    ) -> FP8Weights:
        """The codes of these weights, in the memory of the previous ones if they fit there."""
        found, versions = self.codes, _versions(w_up, w_down)
        tensors = () if torch.compiler.is_compiling() else (id(w_up), id(w_down))
        layout = w_up.shape, w_down.shape, w_up.dtype, w_down.dtype, w_down.device
        layout += activation.gated, order, transposed
        if found is None or found.fp8 != fp8 or layout != self._layout:
            found = FP8Weights(
                fp8, w_up, w_down, activation=activation, order=order, transposed=transposed
            )
            self.codes, self._layout, self._stale = found, layout, True
        elif self._stale or _differ(tensors, self._tensors):
            found.refresh_from(w_up, w_down)
            self._stale = True
        elif _differ(versions, self._versions):
            raise RuntimeError(
                "fp8: expected refresh_fp8() between an update of the weights and the next forward "
                "with FP8(cached=True), got weights that were written since they were quantised"
            )
        if self._stale:
            self._stale, self._tensors, self._versions = False, tensors, versions
        return found


def _differ(some: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether both are known and differ."""
    return bool(some) and bool(others) and some != others


def _versions(*weights: Tensor) -> tuple[int, ...]:
    if torch.compiler.is_compiling() or any(w.is_inference() for w in weights):
        return ()
    return tuple(w._version for w in weights)


def refresh_fp8(model: nn.Module) -> None:
    """Make every `guild.MoE` in a model quantise its weights again in the next forward.

    For layers with FP8(cached=True), after each step of the optimizer and after anything else that
    writes weights. A captured CUDA graph of a forward quantises in each replay if this was called
    right before the captured forward, and otherwise in none. The next forward overwrites the codes
    that backward passes of earlier forwards read, so run these first.

    Parameters
    ----------
    model : torch.nn.Module
        Any module.

    Raises
    ------
    TypeError
        If it is not one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        kept = getattr(module, "_fp8_weights", None)
        if isinstance(kept, KeptWeights):
            kept.refresh()
