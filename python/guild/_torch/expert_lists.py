"""Weights that come as one tensor per expert, read as one tensor without copying them.

Tensors of one storage with one distance between neighbours are a strided view of that storage. Any
others are copied into one tensor at each call, with a warning; so are all inside torch.compile and
under torch.func's transforms, where tensors have no addresses.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from guild._torch.checks import (
    dtype_name,
    expect_device,
    expect_shape,
    expect_tensor,
    has_memory,
)

Listed = Tensor | Sequence[Tensor]

_PLAIN = (Tensor, torch.nn.Parameter)  # no fake ones, no wrappers


class CopiedWeightsWarning(UserWarning):
    """Tensors of a list of experts' weights or gradients do not lie evenly, and are copied.

    `warnings.simplefilter("error", guild.CopiedWeightsWarning)` makes it an error.
    """


def is_list(value: object, dims: int = 2) -> bool:
    """Whether it is a list of experts' tensors with so many dimensions each: the first has."""
    if not isinstance(value, list | tuple | torch.nn.ParameterList) or not len(value):
        return False
    first = value[0]
    return isinstance(first, Tensor) and first.dim() == dims


def is_pair(value: object, dims: int = 2) -> bool:
    """Whether it is a (gate, up) or so, rather than one tensor or a list of experts' tensors."""
    return isinstance(value, list | tuple) and not is_list(value, dims)


def joined(name: str, value: Listed, dims: int = 2, attached: bool = True) -> Tensor:
    """A list of experts' tensors as one; anything else as it is.

    attached: gradients go to each tensor of the list.
    """
    if not is_list(value, dims):
        return value
    tensors = list(value)
    _expect_alike(name, tensors)
    if not (attached and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        with torch.no_grad():
            return _joined(name, tensors)
    if not _have_addresses(tensors):
        return torch.stack(tensors)
    return _Joined.apply(name, *tensors)


def joined_halves(name: str, value: object, dims: int = 2, attached: bool = True) -> object:
    """`joined` of a weight that may be a pair (gate, up), each a tensor or a list."""
    if not is_pair(value, dims) or len(value) != 2:
        return joined(name, value, dims, attached)
    names = (f"{name}[0] (gate)", f"{name}[1] (up)")
    return tuple(joined(n, half, dims, attached) for n, half in zip(names, value, strict=True))


def lie_backwards(*values: object) -> bool:
    """Whether all are lists, or pairs of lists, that are read in place from the last to the first.

    Buffers that are filled from the last parameter to the first leave them so.
    """
    lists = []
    for value in values:
        halves = value if isinstance(value, list | tuple) and len(value) == 2 else ()
        if is_list(value) or is_list(value, 1):
            lists.append(value)
        elif halves and all(is_list(half) or is_list(half, 1) for half in halves):
            lists += halves
        elif value is not None:
            return False
    return bool(lists) and all(
        len(ts) > 1
        and _have_addresses(ts)
        and ts[0].data_ptr() > ts[1].data_ptr()
        and view_of(list(ts)[::-1]) is not None
        for ts in lists
    )


def reversed_lists(value: object) -> object:
    """The last expert first; None is None."""
    if value is None or is_list(value) or is_list(value, 1):
        return value and list(value)[::-1]
    return tuple(list(half)[::-1] for half in value)


class Versions:
    """How often each of a list of tensors was written to: as saving them, but quick for many."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._name, self._tensors = name, tensors
        self._versions = [t._version for t in tensors]

    def expect_unchanged(self) -> None:
        """Raise RuntimeError if one was written to since."""
        if [t._version for t in self._tensors] != self._versions:
            raise RuntimeError(
                f"{self._name}: one of the experts' tensors needed for gradient computation has "
                "been modified by an inplace operation"
            )


class _Joined(torch.autograd.Function):
    """One tensor of many, and one gradient for each of them."""

    @staticmethod
    def forward(ctx, name, *tensors):
        ctx.versions = Versions(name, tensors)
        return _joined(name, tensors)

    @staticmethod
    def backward(ctx, gradient):
        ctx.versions.expect_unchanged()
        wanted = ctx.needs_input_grad[1:]
        parts = gradient.unbind(0)
        return None, *(part if w else None for part, w in zip(parts, wanted, strict=True))


def _joined(name: str, tensors: Sequence[Tensor]) -> Tensor:
    if not _have_addresses(tensors):
        return torch.stack(tuple(tensors))
    view = view_of(tensors)
    if view is None:
        say_copied(name)
        return torch.stack(tuple(tensors))
    return view


def say_copied(name: str) -> None:
    """Warn that a list costs a copy of itself."""
    warnings.warn(
        f"{name}: the experts' tensors do not follow each other at one distance in one storage, so "
        "each call copies them into one tensor; make them views of one, as "
        "guild.lay_evenly does once",
        CopiedWeightsWarning,
        stacklevel=_depth_of_caller(),
    )


def _depth_of_caller() -> int:
    """How many calls up the code is that is neither Guild's nor torch's."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("guild", "torch"):
            return depth
        depth, frame = depth + 1, frame.f_back
    return depth


def view_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors as one tensor over their memory; None where they differ or no strides describe it."""
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first[None]
    size, strides = first.element_size(), first.stride()
    begin, shape, dtype = first.data_ptr(), first.shape, first.dtype
    step, rest = divmod(tensors[1].data_ptr() - begin, size)
    if step <= 0 or rest:  # kernels want a distance
        return None
    for e, t in enumerate(tensors):
        if t.data_ptr() != begin + e * step * size or t.stride() != strides:
            return None
        if t.dtype is not dtype or t.shape != shape:
            return None
    # What lies inside the first one's storage is that storage's memory, whoever else points to it.
    last = first.storage_offset() + (len(tensors) - 1) * step
    last += sum((n - 1) * stride for n, stride in zip(first.shape, strides, strict=True))
    if first.numel() == 0 or (last + 1) * size > first.untyped_storage().nbytes():
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *strides))


def _have_addresses(tensors: Sequence[Tensor]) -> bool:
    if (
        tensors[0].is_meta
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    return all(type(t) in _PLAIN for t in tensors) or has_memory(*tensors)


def _expect_alike(name: str, tensors: list[Tensor]) -> None:
    first = tensors[0]
    shape, dtype, device = first.shape, first.dtype, first.device
    for e, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            expect_tensor(f"{name}[{e}]", tensor)
        if tensor.shape != shape:
            expect_shape(f"{name}[{e}]", tensor, tuple(shape), f"as {name}[0] has")
        if tensor.dtype is not dtype:
            raise TypeError(
                f"{name}[{e}]: expected dtype {dtype_name(dtype)} as {name}[0] has, got "
                f"{dtype_name(tensor.dtype)}"
            )
        if tensor.device != device:
            expect_device(f"{name}[{e}]", tensor, first, f"{name}[0]")


@torch.no_grad()
def lay_evenly(tensors: Sequence[Tensor]) -> None:
    """Move tensors into one storage, one after the other, so that Guild reads a list in place.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        One per expert, of one shape, dtype and device: parameters, say. Each keeps its values and
        its identity; its memory becomes a part of one contiguous tensor. Call it before anything
        that holds on to their memory: a distributed wrapper's buffers, a captured CUDA graph.

    Raises
    ------
    TypeError, ValueError
        If the tensors differ in shape, dtype or device; the message names the first that does.
    """
    tensors = list(tensors)
    if not tensors:
        raise ValueError("tensors: expected one or more, got none")
    for e, tensor in enumerate(tensors):
        expect_tensor(f"tensors[{e}]", tensor)
    _expect_alike("tensors", tensors)
    buffer = torch.stack([t.detach() for t in tensors])
    for tensor, part in zip(tensors, buffer, strict=True):
        tensor.data = part
