"""Weight gradients that go where the caller says, when the caller says.

By default backward writes dW in the weights' dtype and autograd adds it to `.grad`. Training loops
that sum micro-batches in float32 (`main_grad`), or that fill pipeline bubbles with dW, pass a
`WeightGradients` instead: backward then ends with dX, and dW is a step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from guild._torch.checks import expect_all_apart, expect_flags
from guild._torch.expert_lists import Listed, is_freed
from guild._torch.gradient_targets import (
    distinct,
    expect_targets,
    members,
    one_thread_writes,
    spread,
    still_wanting,
    targets,
    wanting,
)
from guild._torch.main_grad import follows_contract, meaningless_gradients

_NAMES = ("w_up", "w_up[0] (gate)", "w_down", "b_up", "b_down")
# Places and names of gradients that one op writes, each to its own target.
_WRITTEN_TOGETHER = ((1, "w_up[0] (gate)", 0, "w_up[1] (up)"), (3, "b_up", 4, "b_down"))

# A step returns those that are left of it, if it is done in several.
_Step = Callable[[], "Sequence[_Step] | None"]

# The tensors that want a gradient, a check, and the steps that are left.
_Pass = tuple[list[Tensor], Callable[[], None], list[_Step]]

_REMEMBERED = 1024  # sets of tensors, one per layer, that were found to share no memory


class WeightGradients:
    """Where a layer's weight gradients go, and when they are computed.

    Parameters
    ----------
    main_grad : bool
        Add them to each parameter's `main_grad`, which the caller allocates: of the parameter's
        shape, in float32 or the parameter's dtype, sharing no memory with another. `.grad` is left
        alone. Otherwise they are written to `.grad`, or added to it.
    delayed : bool
        Compute them in `compute` instead of in backward. Until then each backward pass keeps the
        layer's input, the gradients of its output and pre-activations, and the activations: with a
        gate and in 16 bits, 4 T H + 6 R I bytes for T tokens with R = T top_k rows, and
        4 R H + 6 R I for R sorted rows (H: hidden, I: intermediate). Those that are the caller's
        tensors, such as the input and the gradient of the output, must not be overwritten before:
        `compute` raises RuntimeError if one was. `discard` drops what a step that is skipped has
        left.

    Notes
    -----
    Gradients do not pass through autograd. What that means for hooks, threads, copies of a layer,
    DistributedDataParallel, FSDP2 and torch.compile is in docs/guide.md, under "What backward
    keeps, and where weight gradients go"; the contract of Megatron-Core and Transformer Engine for
    `main_grad`, which parameters with an attribute `grad_added_to_main_grad` follow, is in
    docs/integrations/megatron.md. Gradients have no graph either: backward with create_graph=True,
    torch.func's transforms and compiled autograd raise NotImplementedError.

    They are summed in the order of the backward passes, with the same bits in every run, except
    that passes in several threads write in any order.

    Where weights are lists of one tensor per expert, the `main_grad` or `.grad` of each tensor is
    written in place wherever it lies. If some tensors of a list want no gradient, or one is listed
    twice, they are written through a temporary of the whole list's size, with a
    `CopiedWeightsWarning`.

    As with autograd, a parameter that is frozen in forward, or by the time of backward, gets no
    gradient; a later change of `requires_grad` has no effect on what is pending.

    Every backward through the layer writes them, even that of torch.autograd.grad(out, x), which
    otherwise leaves parameters alone.

    Raises
    ------
    TypeError
        If an argument is not as described; the message names it.
    """

    def __init__(self, *, main_grad: bool = False, delayed: bool = False) -> None:
        expect_flags(main_grad=main_grad, delayed=delayed)
        self.main_grad, self.delayed = main_grad, delayed
        self._pending: list[_Pass] = []
        self._apart: set[tuple[Any, ...]] = set()

    def __repr__(self) -> str:
        return f"WeightGradients(main_grad={self.main_grad}, delayed={self.delayed})"

    def __getstate__(self) -> dict[str, Any]:
        """Without what is pending: its gradients belong to the original's parameters alone."""
        return {**self.__dict__, "_pending": [], "_apart": set()}

    @property
    def pending(self) -> int:
        """Number of backward passes whose weight gradients have yet to be computed."""
        return len(self._pending)

    def compute(self) -> None:
        """Compute what is pending, in the order of the backward passes.

        Raises
        ------
        RuntimeError
            If a tensor that a gradient is computed from was overwritten since backward; the message
            names it. That backward pass and later ones stay pending, until `discard`.
        ValueError
            If a gradient can no longer be written where it should go. The same passes stay pending.

        Notes
        -----
        After any other error, such as torch.OutOfMemoryError, the pass stays pending, too; what it
        has written is not written again.
        """
        with one_thread_writes():
            while self._pending:
                wanted, check, steps = self._pending[0]
                _expect_memory(wanted)
                with still_wanting(wanted):
                    check()
                    _run(steps)
                self._pending.pop(0)

    def discard(self) -> None:
        """Drop all pending backward passes, and the tensors they keep, without computing them.

        For a step that is skipped or was interrupted. Of a pass in which `compute` raised an error,
        gradients that it has written stay.
        """
        with one_thread_writes():
            self._pending.clear()

    def take(
        self,
        parameters: Sequence[Listed | None],
        check: Callable[[], None],
        steps: Sequence[_Step],
    ) -> None:
        """Run steps that write the parameters' gradients: now or, after a check, in `compute`.

        Each step writes other gradients, and none if it raises an error; it may return the steps
        that are to follow it. Which parameters want a gradient is decided now, and by `decided`
        before.
        """
        if self.delayed:
            self._pending.append((wanting(parameters), check, list(steps)))
            return
        with one_thread_writes():
            self.compute()
            _run(list(steps))

    def expect_targets(self, parameters: tuple[Listed | None, ...]) -> None:
        """Raise ValueError unless gradients can be written where they should go."""
        for i, first, j, second in _WRITTEN_TOGETHER:
            others = {id(t) for t in wanting([parameters[i]])}
            if any(id(t) in others for t in wanting([parameters[j]])):
                raise ValueError(
                    f"{second}: expected another parameter than {first} with weight_gradients, got "
                    "the same: one gradient would overwrite the other"
                )
        others = {id(t) for t in wanting(parameters[:2])} if self.main_grad else ()
        for t in wanting([parameters[2]]):
            if id(t) in others and getattr(t, "overwrite_main_grad", False):
                raise ValueError(
                    "w_down: expected another parameter than w_up where overwrite_main_grad is "
                    "true, got the same: one gradient would overwrite the other"
                )
        for name, parameter in zip(_NAMES, parameters, strict=True):
            expect_targets(name, parameter, self.main_grad)
        self.expect_no_averaging(parameters)
        if not torch.compiler.is_compiling():  # tensors have no memory yet
            self._expect_apart(parameters)

    def expect_no_averaging(self, parameters: Sequence[Listed | None]) -> None:
        """Raise ValueError if torch's DistributedDataParallel is about to average these gradients.

        It averages what autograd has for a parameter at the end of its backward: nothing that goes
        to `main_grad` or is computed later.
        """
        if not (self.main_grad or self.delayed):
            return
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is None or not ddp.require_backward_grad_sync:
            return
        averaged = {id(p) for p in ddp._module_parameters}
        if any(id(t) in averaged for p in parameters for t in wanting([p])):
            raise ValueError(
                "weight_gradients: expected None, or neither main_grad nor delayed, under "
                "DistributedDataParallel, which would not average such gradients; call the layer "
                "in no_sync() and average them yourself"
            )

    def _expect_apart(self, parameters: tuple[Listed | None, ...]) -> None:
        """Raise ValueError if a gradient shares memory with another, or with a parameter.

        Sets that share none are remembered: comparing takes as long as starting a few kernels.
        """
        where = "main_grad" if self.main_grad else "grad"
        written, read, seen = {}, {}, set()
        for name, parameter in zip(_NAMES, parameters, strict=True):
            wanted = distinct(parameter, seen)  # one parameter may be both w_up and w_down
            gradients = {n: getattr(t, where, None) for n, t in wanted.items()}
            gradients = {n: g for n, g in gradients.items() if g is not None}
            read |= spread(name, "", wanted)
            written |= spread(name, f".{where}", gradients)
        if not written:
            return
        tensors = (*read.values(), *written.values())
        places = None
        if all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors):  # others may lack memory
            places = tuple((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors)
            if places in self._apart:
                return
        expect_all_apart(written, read)
        if places is not None:
            if len(self._apart) >= _REMEMBERED:
                self._apart.clear()
            self._apart.add(places)

    def reached_by_autograd(self, parameters: tuple[Listed | None, ...]) -> list[Tensor]:
        """The parameters that autograd must reach although their gradients bypass it.

        All tensors of lists, which the ops see as one tensor without a gradient, and parameters
        whose hooks are relied on.
        """
        listed = [t for p in parameters if not isinstance(p, Tensor) for t in members(p)]
        alone = [p for p in parameters if isinstance(p, Tensor) and follows_contract(p)]
        return listed + (alone if self.main_grad else [])

    def _targets(
        self,
        dtype: torch.dtype,
        first: int,
        *parameters: Listed | None,
        later: list[_Step] | None = None,
        begun: bool = False,
        alike: bool = False,
    ):
        """`targets` of consecutive parameters, named from the first one's place."""
        named = zip(_NAMES[first : first + len(parameters)], parameters, strict=True)
        return targets(self.main_grad, dtype, *named, later=later, begun=begun, alike=alike)

    def gradients_without_meaning(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """What autograd hands to parameters whose own gradients bypass it, mostly None."""
        return meaningless_gradients(parameters) if self.main_grad else [None] * len(parameters)


def _run(steps: list[_Step]) -> None:
    """Run steps in order, keeping those yet to be done: after an error, another call goes on."""
    while steps:
        steps[:1] = steps[0]() or ()


def _expect_memory(parameters: Sequence[Tensor]) -> None:
    """Raise ValueError for a parameter whose memory FSDP2's fully_shard has freed.

    It has reduced gradients by then, so that one written now would reach no optimizer.
    """
    for p in parameters:
        if is_freed(p):
            raise ValueError(
                "weight_gradients: expected no `delayed` where FSDP2 shards the parameters, got a "
                f"parameter of shape {tuple(p.shape)} that it has sharded again since backward"
            )


def expect_sink(weight_gradients: object) -> None:
    """Raise TypeError unless it is a WeightGradients."""
    if not isinstance(weight_gradients, WeightGradients):
        raise TypeError(
            "weight_gradients: expected guild.WeightGradients, got "
            f"{type(weight_gradients).__name__} {weight_gradients!r}"
        )


class Sink(NamedTuple):
    """What a layer's backward needs to know of a WeightGradients."""

    gradients: WeightGradients
    parameters: tuple[Listed | None, ...]  # as `expect_targets` takes them
    reached: list[Tensor]  # by autograd: see `reached_by_autograd`
