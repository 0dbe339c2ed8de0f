"""Weights that come as one tensor per expert, read as one tensor without copying them.

Tensors of one storage that are evenly spaced are a strided view of that storage. Any others are a
view whose stride divides all of their distances, together with the position of each in units of
that stride (`Placed`). Tensors for which neither is possible are copied into one at each call, with
a warning; so are all inside torch.compile and under torch.func's transforms, where tensors have no
addresses, and under torch.jit.trace and make_fx, whose programs run with other tensors.
"""

from __future__ import annotations

import math
import sys
import warnings
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from guild._torch.autograd import even_list_of, expect_no_tangents, of_even_list
from guild._torch.checks import (
    dtype_name,
    expect_device,
    expect_own_elements,
    expect_shape,
    expect_tensor,
    has_memory,
)
from guild._torch.joining import stack
from guild._torch.operators import is_cast, ops
from guild._torch.versions import Held, Versions

Listed = Tensor | Sequence[Tensor]

_PLAIN = (Tensor, torch.nn.Parameter)  # neither fake tensors nor wrappers


class CopiedWeightsWarning(UserWarning):
    """A list of experts' weights or gradients cannot be used in place, and is copied.

    `warnings.simplefilter("error", guild.CopiedWeightsWarning)` makes it an error.
    """


def is_list(value: object, dims: int = 2) -> bool:
    """Whether it is a list of experts' tensors; dims: the dimensions of the first."""
    if not isinstance(value, list | tuple | torch.nn.ParameterList) or not len(value):
        return False
    first = value[0]
    return isinstance(first, Tensor) and first.dim() == dims


def is_pair(value: object, dims: int = 2) -> bool:
    """Whether it is a pair such as (gate, up), not one tensor or a list of experts' tensors."""
    return isinstance(value, list | tuple) and not is_list(value, dims)


class Placed(NamedTuple):
    """Experts' matrices as one tensor (E, rows, columns), and the positions of those of a list.

    Matrix e begins e strides of the first dimension after the tensor's start, or `at[e]` strides if
    `at` is given: only ops that are told so may then read the tensor, which keeps nothing alive.
    For a backward, `held` does.
    """

    tensor: Tensor
    at: array | None = None
    held: Held | None = None

    @property
    def mT(self) -> Placed:  # noqa: N802 - as torch's
        """Every matrix transposed."""
        return self._replace(tensor=of_even_list(self.tensor.mT, even_list_of(self.tensor)))


@torch.library.register_fake("guild::expert_view")
def _fake_view(first: Tensor, experts: int, stride: int) -> Tensor:
    return first.new_empty_strided((experts, *first.shape), (stride, *first.stride()))


@torch.library.register_fake("guild::expert_table")
def _fake_table(like: Tensor, indices: Tensor) -> Tensor:
    return like.new_empty(indices.shape, dtype=torch.int32)


def table_of(*placed: Placed | None) -> Tensor | None:
    """The ops' `experts_at`: int32, one row for each weight; None if no list needs one.

    Also None for lists of different lengths, which the checks of their shapes reject. Its attribute
    `held` is a tuple of each uneven list's `Held`, None for other weights; so a list lives as long
    as the table that says where its tensors are.
    """
    if all(p is None or p.at is None for p in placed):
        return None
    uneven = [p for p in placed if p is not None and p.at is not None]
    if len({len(p.at) for p in uneven}) > 1:
        return None
    values = array("i")
    for p in placed:
        values.extend(range(len(uneven[0].at)) if p is None or p.at is None else p.at)
    rows = torch.frombuffer(values, dtype=torch.int32).view(len(placed), -1)
    table = ops.expert_table(uneven[0].tensor, rows)
    table.held = tuple(None if p is None else p.held for p in placed)
    return table


def joined(name: str, value: Listed | Placed, dims: int = 2, attached: bool = True) -> Placed:
    """A list of experts' tensors as one tensor; anything else as it is.

    attached: gradients go to each tensor of the list.
    """
    if isinstance(value, Placed):
        return value
    if not is_list(value, dims):
        return Placed(value)
    tensors = list(value)
    _expect_alike(name, tensors)
    if forward_ad._current_level >= 0:
        expect_no_tangents(f"{name}: a list of tensors", tensors)
    recorded = torch.is_grad_enabled()
    wanted = attached and recorded and any(t.requires_grad for t in tensors)
    # Under torch.func, outer levels may differentiate what no gradient is wanted of here.
    if attached and recorded and not _have_addresses(tensors):
        return Placed(stack(tensors))
    found = _joined(name, tensors, recorded)
    if recorded and found.at is not None:
        found = found._replace(held=Held(name, tensors))
    if not wanted:
        return found
    attached_view = _Joined.apply(name, found, *tensors)
    return found._replace(tensor=of_even_list(attached_view, even_list_of(found.tensor)))


def joined_halves(
    name: str, value: object, dims: int = 2, attached: bool = True
) -> Placed | tuple[Placed, ...]:
    """`joined` of a weight that may be a pair (gate, up), each a tensor or a list."""
    if not is_pair(value, dims) or len(value) != 2:
        return joined(name, value, dims, attached)
    names = (f"{name}[0] (gate)", f"{name}[1] (up)")
    return tuple(joined(n, half, dims, attached) for n, half in zip(names, value, strict=True))


class _Joined(torch.autograd.Function):
    """One tensor made of many before, and one gradient for each of them."""

    @staticmethod
    def forward(ctx, name, found, *tensors):
        ctx.versions = even_list_of(found.tensor) or Versions(name, tensors)
        return found.tensor

    @staticmethod
    def backward(ctx, gradient):
        ctx.versions.expect_unchanged()
        wanted = ctx.needs_input_grad[2:]
        parts = gradient.unbind(0)
        return None, None, *(part if w else None for part, w in zip(parts, wanted, strict=True))


@torch.no_grad()
def _joined(name: str, tensors: Sequence[Tensor], recorded: bool) -> Placed:
    if not _have_addresses(tensors):
        return Placed(stack(tensors))
    first = tensors[0]
    is_bias = first.dim() == 1  # a small fraction of a weight
    if is_bias and first.shape[0] > 1 and first.stride(0) != 1:  # of which ops read rows
        _expect_memory(name, tensors)
        return Placed(stack(tensors))
    view = view_of(tensors)
    if view is not None:
        # The view has the version counter of the first tensor alone; others may have their own.
        return Placed(of_even_list(view, Versions(name, tensors) if recorded else None))
    _expect_memory(name, tensors)
    if is_bias:
        return Placed(stack(tensors))
    found = None if is_cast(first) else placed(tensors)
    if found is None:
        say_copied(name)
        return Placed(stack(tensors))
    return found


def is_freed(tensor: Tensor) -> bool:
    """Whether its storage is empty, as FSDP leaves it, and not the tensor."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _expect_memory(name: str, tensors: Sequence[Tensor]) -> None:
    for e, tensor in enumerate(tensors):
        if is_freed(tensor):
            raise ValueError(
                f"{name}[{e}]: expected values in memory, got an empty storage (as of sharded "
                "parameters)"
            )


def say_copied(name: str) -> None:
    """Warn that a list costs a copy of itself."""
    warnings.warn(
        f"{name}: the experts' tensors cannot be used where they are, so each call copies them; "
        "make them views of one tensor, as guild.lay_evenly does once",
        CopiedWeightsWarning,
        stacklevel=depth_of_caller(),
    )


def depth_of_caller() -> int:
    """How many calls up the code is that belongs to neither Guild nor torch.

    Nor to contextlib, which enters the context managers of either.
    """
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("guild", "torch", "contextlib"):
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
    if step <= 0 or rest:  # kernels need a positive stride
        return None
    for e, t in enumerate(tensors):
        if t.data_ptr() != begin + e * step * size or t.stride() != strides:
            return None
        if t.dtype is not dtype or t.shape != shape:
            return None
    # What lies inside the first one's storage is that storage's memory, whatever else points there.
    last = first.storage_offset() + (len(tensors) - 1) * step
    last += sum((n - 1) * stride for n, stride in zip(first.shape, strides, strict=True))
    if first.numel() == 0 or (last + 1) * size > first.untyped_storage().nbytes():
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *strides))


_UNIT = 16  # bytes; on a GPU, addresses and distances are multiples of it
_MOST_STRIDE, _MOST_PLACES = 1 << 40, 1 << 31  # limits of a tensor map, and of int32


def placed(tensors: Sequence[Tensor], written: bool = False) -> Placed | None:
    """Tensors anywhere in memory as one; None if they differ, or no stride divides their distances.

    written: they are an op's outputs, which must not overlap; for inputs a GPU requires more.
    """
    first = tensors[0].detach()
    size, shape, strides, dtype = first.element_size(), first.shape, first.stride(), first.dtype
    if not first.numel() or any(
        t.stride() != strides or t.shape != shape or t.dtype is not dtype for t in tensors
    ):
        return None
    begins = [t.data_ptr() for t in tensors]
    lowest = min(begins)
    gaps = [begin - lowest for begin in begins]
    unit = _UNIT if first.is_cuda and not written else size
    if first.is_cuda and not written and not (lowest % _UNIT == 0 and _reads_in_place(first)):
        return None
    length = size * (1 + _last_element(first))
    if written and not _fit(first, sorted(gaps), length):
        return None
    step = math.gcd(*gaps) or -(-length // _UNIT) * _UNIT  # if all are the same tensor, any stride
    while step >= _MOST_STRIDE and step // 2 % unit == 0:
        step //= 2
    if step % unit or step >= _MOST_STRIDE or max(gaps) // step >= _MOST_PLACES:
        return None
    base = tensors[gaps.index(0)].detach()
    view = ops.expert_view(base, len(tensors), step // size)
    return Placed(view, array("i", [gap // step for gap in gaps]))


def _reads_in_place(matrix: Tensor) -> bool:
    """Whether its strides are ones that the GPU's products support."""
    rows, columns = matrix.stride()
    return 1 in (rows, columns) and max(rows, columns) * matrix.element_size() % _UNIT == 0


def _fit(matrix: Tensor, gaps: list[int], length: int) -> bool:
    """Whether matrices like this one, each spanning `length` bytes, do not overlap."""
    apart = all(b - a >= length for a, b in zip(gaps, gaps[1:], strict=False))
    return apart and has_own_elements(matrix)


def has_own_elements(tensor: Tensor) -> bool:
    """Whether no two elements share memory, so that it can be written to."""
    try:
        expect_own_elements("", tensor)
    except ValueError:
        return False
    return True


def stacked(value: object, dims: int = 2) -> object:
    """A list of experts' tensors as one new tensor, also in a pair; anything else as it is."""
    if is_list(value, dims):
        return stack(value)
    return tuple(stacked(half, dims) for half in value) if is_pair(value, dims) else value


def touching(out: Tensor, name: str, value: object) -> dict[str, Tensor]:
    """The tensors of a list, a pair or one tensor that may share memory with `out`, by name."""
    if isinstance(value, Tensor):
        return {name: value}
    if is_pair(value):
        names = f"{name}[0] (gate)", f"{name}[1] (up)"
        halves = (touching(out, n, half) for n, half in zip(names, value, strict=True))
        return {n: t for found in halves for n, t in found.items()}
    if not _have_addresses([out, *value]):
        return {}
    length, most = (t.element_size() * (1 + _last_element(t)) for t in (value[0], out))
    begin = out.data_ptr()
    return {
        f"{name}[{e}]": t
        for e, t in enumerate(value)
        if t.data_ptr() < begin + most and begin < t.data_ptr() + length
    }


def _last_element(tensor: Tensor) -> int:
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((n - 1) * stride for n, stride in sides)


def _have_addresses(tensors: Sequence[Tensor]) -> bool:
    if (
        tensors[0].is_meta
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or _is_traced()
    ):
        return False
    if any(t.is_neg() or t._is_zerotensor() for t in tensors):  # numbers that memory does not hold
        return False
    return all(type(t) in _PLAIN for t in tensors) or has_memory(*tensors)


def _is_traced() -> bool:
    """Whether torch.jit.trace or make_fx records what is run, for tensors at other addresses."""
    make_fx = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return torch._C._is_tracing() or (make_fx is not None and make_fx.get_proxy_mode() is not None)


def _expect_alike(name: str, tensors: list[Tensor]) -> None:
    first = tensors[0]
    expect_tensor(f"{name}[0]", first)
    shape, dtype, device = first.shape, first.dtype, first.device
    for e, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
            expect_tensor(f"{name}[{e}]", tensor)
        if tensor.shape != shape:
            expect_shape(f"{name}[{e}]", tensor, tuple(shape), f"the shape of {name}[0]")
        if tensor.dtype is not dtype:
            raise TypeError(
                f"{name}[{e}]: expected dtype {dtype_name(dtype)} like {name}[0], got "
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
        its identity; its memory becomes a part of one contiguous tensor. Call this before anything
        that holds on to their memory, such as a distributed wrapper's buffers or a CUDA graph.

    Raises
    ------
    TypeError, ValueError
        If the tensors differ in shape, dtype or device; the message names the first that does.
    """
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        kind = type(tensors).__name__
        raise TypeError(f"tensors: expected a sequence of torch.Tensor, got {kind}")
    tensors = list(tensors)
    if not tensors:
        raise ValueError("tensors: expected one or more, got none")
    for e, tensor in enumerate(tensors):
        expect_tensor(f"tensors[{e}]", tensor)
    _expect_alike("tensors", tensors)
    buffer = stack([t.detach() for t in tensors])
    for tensor, part in zip(tensors, buffer, strict=True):
        tensor.data = part
