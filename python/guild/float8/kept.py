"""The quantised weights of a module with FP8(cached=True), and when they are made again."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from guild.activations import Activation
from guild.float8.experts import FP8Weights
from guild.float8.settings import FP8


class _Seen:
    """The weights whose codes are kept, as eager code found them."""

    def __init__(self, *weights: Tensor) -> None:
        self._tensors = [_reference(w) for w in weights]
        self._memory = [w.detach() for w in weights]  # swaps give a tensor other memory
        counted = not any(w.is_inference() for w in weights)
        self.versions = [w._version for w in weights] if counted else []

    def are_tensors_of(self, other: _Seen) -> bool:
        """Whether both saw the same tensors, none of which has been given other memory since."""
        pairs = zip(self._tensors, other._tensors, strict=True)
        places = zip(self._memory, other._memory, strict=True)
        return all(mine() is theirs() for mine, theirs in pairs) and all(
            torch._C._is_alias_of(mine, theirs)
            and mine.storage_offset() == theirs.storage_offset()
            and mine.stride() == theirs.stride()
            for mine, theirs in places
        )

    def ids(self) -> set[int]:
        """What `id` gives for those that still exist."""
        return {id(tensor()) for tensor in self._tensors}


def _reference(weight: Tensor) -> Callable[[], Tensor | None]:
    """Returns the weight, which lives on unless it has a graph.

    torch.utils.swap_tensors refuses parameters that have weak references.
    """
    return (lambda: weight) if weight.grad_fn is None else weakref.ref(weight)


class KeptWeights:
    """Codes of w_up and w_down, of one module; `codes` is None before its first forward.

    They are made in the forward after `refresh`, since only there has FSDP gathered the weights.
    Eager forwards also make codes, in other memory, when they find other tensors than those that
    were quantised, or do not know which those were, as compiled code cannot note it; compiled ones
    do so when eager code made the codes. Versions reveal a forgotten refresh where torch counts
    them; it does not in CUDA graphs, in compiled code, nor for weights that FSDP gathers.
    """

    def __init__(self) -> None:
        self.codes: FP8Weights | None = None
        self._stale = True
        self._of_eager = False  # made by eager code, perhaps of tensors lent by functional_call
        self._layout: tuple = ()
        self._seen: _Seen | None = None  # None: quantised in compiled code
        self._in_graphs: list[FP8Weights] = []  # a CUDA graph may read them as long as it lives

    def share(self, other: KeptWeights, fp8: FP8) -> None:
        """Use the codes that another module of the same weights has, in the same memory."""
        if other.codes is None or other.codes.fp8.scales != fp8.scales:
            raise ValueError("other: expected codes of weights with the same kind of scales")
        self.codes, self._stale, self._layout = copy(other.codes), False, other._layout
        self._seen, self._of_eager = other._seen, other._of_eager
        self.codes.fp8 = fp8

    def refresh(self) -> None:
        """Make the next call of `of` quantise."""
        self._stale = True
        if torch.compiler.is_compiling() or self.codes is None:
            return
        if _is_of_inference(self.codes):
            self.codes = None  # compiled code, which cannot ask, may be about to train

    def let_go(self, *weights: Tensor | None) -> None:
        """Forget codes of other weights, or of weights in other memory, which would live on."""
        if self._seen is not None and (
            any(w is None for w in weights) or not self._seen.are_tensors_of(_Seen(*weights))
        ):
            self.codes = self._seen = None

    def of(
        self,
        fp8: FP8,
        w_up: Tensor,
        w_down: Tensor,
        activation: Activation,
        order: str,
        transposed: bool,
    ) -> FP8Weights:
        """The codes of these weights; after `refresh` in the memory of the previous ones."""
        found, compiling = self.codes, torch.compiler.is_compiling()
        seen = None if compiling else _Seen(w_up, w_down)
        layout = w_up.shape, w_down.shape, w_up.dtype, w_down.dtype, w_down.device
        layout += activation.gated, order, transposed
        fits = found is not None and found.fp8 == fp8 and layout == self._layout
        fits = fits and (compiling or not _is_of_inference(found))
        is_other = self._of_eager if compiling else self._is_other(seen)
        if not fits or (not self._stale and is_other):
            kept = w_up.detach(), w_down.detach()  # without the graph that may have made them
            found = FP8Weights(
                fp8, *kept, activation=activation, order=order, transposed=transposed
            )
            self.codes, self._layout, self._stale = found, layout, True
        elif self._stale:
            found.refresh_from(w_up.detach(), w_down.detach())
        elif seen is not None and seen.versions != self._seen.versions:
            raise RuntimeError(
                "fp8: expected refresh_fp8() between an update of the weights and the next forward "
                "with FP8(cached=True), got weights that were written since they were quantised"
            )
        if self._stale:
            self._stale, self._seen, self._of_eager = False, seen, not compiling
        if not compiling:
            _count_steps_for(self)
            if w_up.is_cuda and torch.cuda.is_current_stream_capturing():
                self._in_graphs.append(found)
        return found

    def _is_other(self, seen: _Seen) -> bool:
        """Whether eager code finds other tensors than those quantised, or does not know them."""
        return self._seen is None or not self._seen.are_tensors_of(seen)

    def has_seen(self) -> set[int]:
        """What `id` gives for the weights whose versions are compared."""
        return set() if self._seen is None else self._seen.ids()


def _is_of_inference(found: FP8Weights) -> bool:
    """Whether compiled code made the codes in inference mode, and this is outside of it."""
    return found.codes.up.is_inference() and not torch.is_inference_mode_enabled()


_used: weakref.WeakSet[KeptWeights] = weakref.WeakSet()  # in eager code
_using = threading.Lock()


def _count_steps_for(kept: KeptWeights) -> None:
    """Have the versions of the weights it has seen count the steps of fused optimizers, too."""
    _register_hook()
    with _using:
        _used.add(kept)


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Fused steps write weights without a change of their versions."""
    groups = [group["params"] for group in optimizer.param_groups if group.get("fused")]
    with _using:
        used = [*_used] if groups else []
    counted = set().union(*(kept.has_seen() for kept in used))
    written = [p for ps in groups for p in ps if p.grad is not None and id(p) in counted]
    if written:
        torch.autograd.graph.increment_version(written)


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
