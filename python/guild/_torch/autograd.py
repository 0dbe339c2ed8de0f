"""Gives compiled ops their gradients, and an error wherever a derivative would be silently wrong.

Every op has a kernel under torch's Autograd key. Without one, torch leaves the tangents of
forward-mode AD and whole terms of second derivatives out of its results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from guild._torch import flops
from guild._torch.operators import ops
from guild._torch.versions import Versions

library = torch.library.Library("guild", "FRAGMENT")


def rows_of(matrix: Tensor) -> Tensor:
    """A matrix as the kernels read it; `sum().backward()` passes an expanded scalar."""
    return matrix if matrix.is_contiguous() else matrix.contiguous()


def expect_one_backward(
    dout: Tensor | None,
    writer: str = "weight_gradients",
    way_out: str = "leave weight_gradients out",
) -> None:
    """Raise in a backward that `writer`, which writes gradients itself, does not support.

    That is one with a graph, of a batch of gradients or in compiled autograd.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{writer}: expected backward without create_graph=True, because the gradients that "
            f"it writes have no graph; {way_out}"
        )
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        raise NotImplementedError(
            f"{writer}: expected backward without compiled autograd, which would overwrite the "
            f"gradients that it writes; {way_out}"
        )
    if torch.compiler.is_compiling() or dout is None:
        return
    if torch._C._functorch.is_legacy_batchedtensor(dout):
        raise NotImplementedError(
            f"{writer}: expected backward of one gradient, without is_grads_batched=True, because "
            f"there is one place to write to; {way_out}"
        )


def below_autograd(function: Callable) -> Callable:
    """Decorate a function that autograd does not look into, such as an autograd.Function's own.

    Ops then bypass the kernels that this module gives them, which are in Python and take longer
    than many an op takes to start.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return function(*args, **kwargs)

    return call


def without_lists(ctx: Any, experts_at: Tensor | None, *weights: Tensor | None) -> tuple:
    """An op's weights for save_for_backward; `with_lists` undoes this.

    The view of an unevenly spaced list is not among them: a hook on saved tensors could move it
    away from the tensors that experts_at refers to. ctx keeps such views itself.
    """
    ctx.experts_at, ctx.held = experts_at, getattr(experts_at, "held", None)
    if ctx.held is None:
        return weights
    pairs = list(zip(weights, ctx.held, strict=True))
    ctx.lists = [w if held is not None else None for w, held in pairs]
    return tuple(w if held is None else None for w, held in pairs)


def with_lists(ctx: Any, *saved: Tensor | None) -> tuple:
    """The op's weights, from what `without_lists` returned.

    Raises
    ------
    RuntimeError
        If a tensor of a list has changed since.
    """
    if ctx.held is None:
        return saved
    for held in ctx.held:
        if held is not None:
            held.expect_unchanged()
    return tuple(s if w is None else w for s, w in zip(saved, ctx.lists, strict=True))


def even_list_of(tensor: object) -> Versions | None:
    """The versions of the tensors that an evenly spaced list's view is made of; None for others."""
    return getattr(tensor, "even_list", None) if isinstance(tensor, Tensor) else None


def of_even_list(view: Tensor, versions: Versions | None) -> Tensor:
    """The view with the versions that `even_list_of` returns."""
    if versions is not None:
        view.even_list = versions
    return view


def watch_even_lists(ctx: Any, *arguments: object) -> None:
    """Remember the lists among an op's arguments; see `expect_even_lists_unchanged`."""
    ctx.even_lists = [found for a in arguments if (found := even_list_of(a)) is not None]


def expect_even_lists_unchanged(ctx: Any) -> None:
    """Raise RuntimeError if a tensor of these lists was written to since."""
    for versions in ctx.even_lists:
        versions.expect_unchanged()


def register(name: str, backward: Callable, setup: Callable) -> None:
    """Give an op its gradient, as torch.library.register_autograd does.

    torch's walks the op's schema in Python at every call, 60 us for the 17 arguments of a layer:
    more than the op itself takes to start.
    """

    def with_keyset(ctx: Any, *grads: Tensor | None) -> tuple:
        expect_even_lists_unchanged(ctx)
        return None, *backward(ctx, *grads)

    _register(name, setup, with_keyset)
    flops.count(name)


def register_without_gradient(*names: str) -> None:
    """Make these ops' results raise when they are differentiated.

    Ops that write into their arguments raise at once if one of those wants a gradient. They also
    bump the version of what they write to, so that autograd notices if it was saved before.
    """
    for name in names:
        written = _written(name)
        _register(name, _save_nothing, _refusal(name), _refusal(name) if written else None)
        if written:
            _count_writes(name, written)
        flops.count(name)


def _register(name: str, setup: Callable, backward: Callable, refuse: Callable | None = None):
    """The kernel under the Autograd key; refuse: called instead if gradients are wanted.

    It records one level's graph, as torch's own kernels do: outer transforms of torch.func have
    been dispatched when it runs, and inner ones follow. torch.autograd.Function.apply would start
    over.
    """
    op = getattr(ops, name).default

    def below(keyset: Any, args: tuple) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        with ExitStack() as modes:
            if torch._C._are_functorch_transforms_active():  # off for this level; on for the next
                modes.enter_context(torch.enable_grad())
                modes.enter_context(forward_ad._set_fwd_grad_enabled(True))
            output = below(keyset, args)
        setup(ctx, args, output)
        watch_even_lists(ctx, *args)
        return output

    key = torch.autograd.Function._compiled_autograd_key  # compiled autograd asks every node
    methods = {"forward": forward, "backward": backward, "_compiled_autograd_key": key}
    methods = {name: staticmethod(method) for name, method in methods.items()}
    function = type(f"{name}_gradient", (_SingleLevelFunction,), methods)

    def kernel(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            expect_no_tangents(f"guild::{name}", args)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return below(keyset, args)
        if refuse is not None:
            refuse()
        if not torch._C._are_functorch_transforms_active():
            return function.apply(keyset, *args)
        with enable_single_level_autograd_function():
            return function.apply(keyset, *args)

    library.impl(name, kernel, "Autograd", with_keyset=True)


def _save_nothing(ctx: Any, inputs: tuple, output: Any) -> None:
    """For ops whose backward raises."""


def _refusal(name: str) -> Callable:
    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(
            f"guild::{name} has no derivative: of Guild's functions, only router_logits, "
            "grouped_mm and the fused pair can be differentiated twice (create_graph=True, nested "
            "torch.func transforms)"
        )

    return refuse


def wants_gradient(tensor: Tensor) -> bool:
    """Whether it requires one at any level of torch.func's transforms, or outside of them.

    Its own `requires_grad` only tells of the innermost level.
    """
    while not tensor.requires_grad:
        compiling = torch.compiler.is_compiling()
        if compiling or not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


def expect_no_tangents(name: str, args: Iterable[Any]) -> None:
    """Raise NotImplementedError if an argument is a tensor with a tangent."""
    for value in args:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, "
                "torch.autograd.forward_ad); use reverse mode (torch.func.vjp, jacrev, backward)"
            )


def _written(name: str) -> list[int]:
    """Positions of the arguments that an op writes to."""
    arguments = getattr(ops, name).default._schema.arguments
    return [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]


def _count_writes(name: str, written: list[int]) -> None:
    op = getattr(ops, name).default

    def kernel(keyset: Any, *args: Any) -> Any:
        targets = [args[i] for i in written if i < len(args) and args[i] is not None]
        torch.autograd.graph.increment_version(targets)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


# ---- second derivatives -------------------------------------------------------------------------


def tied(value: Tensor, *sources: Tensor | None) -> Tensor:
    """Attach value to `sources`, for an op without a derivative that depends on but lacks them.

    Autograd follows the paths to the inputs that it was asked for. Without a path from the op's
    result to each source it would silently leave out the op's error, and the term.
    """
    if torch.is_grad_enabled():
        for source in sources:
            if source is not None:
                value = ops.tie(value, source)
    return value


def _copy(value: Tensor, source: Tensor) -> Tensor:
    return value.clone()


library.define("tie(Tensor value, Tensor source) -> Tensor")
for _key in ("CPU", "CUDA"):
    library.impl("tie", _copy, _key)
torch.library.register_fake("guild::tie", lib=library)(_copy)
register_without_gradient("tie")
