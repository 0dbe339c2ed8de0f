"""The tensors that weight gradients are written to: `.grad` or `main_grad` of a parameter, or of
each in a list of one parameter per expert.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from guild._torch.checks import expect_no_overlap, expect_tensor, is_negated
from guild._torch.expert_lists import (
    Listed,
    Placed,
    has_own_elements,
    placed,
    say_copied,
    view_of,
)
from guild._torch.main_grad import main_grad_of


def members(parameter: Listed | None) -> list[Tensor]:
    """The tensors of a parameter: all of a list's; none for None."""
    if parameter is None:
        return []
    return [parameter] if isinstance(parameter, Tensor) else list(parameter)


def wanting(parameters: Iterable[Listed | None]) -> list[Tensor]:
    """All tensors among them that want a gradient."""
    return [t for p in parameters for t in members(p) if t.requires_grad]


def decided(parameters: Iterable[Listed | None]) -> tuple[Listed | None, ...]:
    """The same parameters, in which those that want no gradient now will not want one later.

    Autograd decides in forward, too; a `requires_grad` set between forward and backward is not
    meant for this backward.
    """

    def one(tensor: Tensor) -> Tensor:
        return tensor if tensor.requires_grad else tensor.detach()

    return tuple(_of_each(one, p) for p in parameters)


def unwanted(parameter: Listed | None) -> Listed | None:
    """The same parameter, wanting no gradient."""
    return _of_each(Tensor.detach, parameter)


def _of_each(call: Callable[[Tensor], Tensor], parameter: Listed | None) -> Listed | None:
    if parameter is None:
        return None
    return call(parameter) if isinstance(parameter, Tensor) else [call(t) for t in parameter]


@contextmanager
def still_wanting(tensors: Iterable[Tensor]) -> Iterator[None]:
    """As if tensors that wanted a gradient in backward had not been frozen since."""
    frozen = [t for t in tensors if not t.requires_grad]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def distinct(parameter: Listed | None, seen: set[int]) -> dict[str, Tensor]:
    """A parameter's tensors that want a gradient and are not in `seen`, by their name's suffix."""
    alone, found = isinstance(parameter, Tensor), {}
    for e, tensor in enumerate(members(parameter)):
        if tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            found["" if alone else f"[{e}]"] = tensor
    return found


def spread(name: str, suffix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under their full names; as one tensor if evenly spaced."""
    if len(tensors) > 1 and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors.values()):
        whole = view_of(list(tensors.values()))
        if whole is not None:
            return {f"{name}{suffix}": whole}
    return {f"{name}{own}{suffix}": t for own, t in tensors.items()}


# ---- targets ------------------------------------------------------------------------------------

_lock = threading.RLock()


def grad_of(name: str, parameter: Tensor) -> Tensor | None:
    """`.grad`, which is to be added to if there is one; TypeError or ValueError if it cannot be."""
    grad = parameter.grad
    if grad is None or (grad.layout is torch.strided and grad.is_contiguous()):
        return grad
    expect_tensor(f"{name}.grad", grad)
    expect_no_overlap(f"{name}.grad", grad)
    return grad


def grad_dtype_of(parameter: Tensor) -> torch.dtype:
    """The dtype of the `.grad` to be made: torch's `grad_dtype`, where there is one."""
    if torch.compiler.is_compiling():
        return parameter.dtype
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def expect_targets(name: str, parameter: Listed | None, main_grad: bool) -> None:
    """Raise TypeError or ValueError unless gradients can be written where they should go."""
    listed = parameter is not None and not isinstance(parameter, Tensor)
    for e, tensor in enumerate(members(parameter)):
        if not tensor.requires_grad:
            continue
        own = f"{name}[{e}]" if listed else name
        if not tensor.is_leaf:
            raise ValueError(
                f"{own}: expected a parameter (a leaf tensor) with weight_gradients, got the "
                "result of an operation"
            )
        if not main_grad:
            grad_of(own, tensor)
        elif not hasattr(tensor, "get_main_grad"):  # which may allocate
            main_grad_of(own, tensor)


def one_thread_writes() -> AbstractContextManager:
    """Held while gradients are written, as several threads may run backward at the same time."""
    return nullcontext() if torch.compiler.is_compiling() else _lock


@contextmanager
def targets(
    main_grad: bool,
    dtype: torch.dtype,
    *named: tuple[str, Listed | None],
    later: list[Callable[[], None]] | None = None,
    begun: bool = False,
    alike: bool = False,
) -> Iterator[tuple[list[Placed | None], bool]]:
    """Tensors for one op to write to, None where nothing is wanted, and whether it adds to them.

    The op writes dtype, its operands', or float32. Gradients of another dtype, as autocast brings
    about, biases' whose columns have strides, negated views, and those of a list that cannot be
    written in place go to a temporary, whose parts are moved to their places at the end. After an
    error `.grad` is None again where it was before.

    later: takes the calls that move the parts, instead; it is empty if the op writes in place.
    begun: another op has written part of these gradients, which are not to be overwritten.
    alike: they all get one dtype.
    """
    if not wanting(parameter for _, parameter in named):
        yield [None] * len(named), False
        return
    with one_thread_writes(), _opened(main_grad, dtype, named, later, begun, alike) as found:
        yield found


@contextmanager
def _opened(
    main_grad: bool,
    dtype: torch.dtype,
    named: Sequence[tuple[str, Listed | None]],
    later: list[Callable[[], None]] | None,
    begun: bool,
    alike: bool,
) -> Iterator[tuple[list[Placed | None], bool]]:
    """`targets` of parameters of which one wants a gradient."""
    wanted = [(n, p, [t for t in members(p) if t.requires_grad]) for n, p in named]
    target_of = main_grad_of if main_grad else grad_of
    existing = {id(t): target_of(name, t) for name, _, ts in wanted for t in ts}
    overwriting = main_grad and not begun
    fresh = {
        id(t)
        for _, _, ts in wanted
        for t in ts
        if existing[id(t)] is None or (overwriting and getattr(t, "overwrite_main_grad", False))
    }
    add = len(fresh) < len(existing)
    without = [t for _, _, ts in wanted for t in ts if existing[id(t)] is None]
    kinds = dtype, torch.float32
    if alike:
        kinds = _one_kind([p for _, p, ts in wanted if ts], existing, kinds)
    try:
        opened, puts = [], []
        for name, parameter, ts in wanted:
            if not ts:
                opened.append(None)
                continue
            open_ = _whole if isinstance(parameter, Tensor) else _listed
            target, parts = open_(name, parameter, existing, fresh, add, kinds)
            opened.append(target)
            puts += _puts(parts, main_grad, fresh)
        if later is not None:
            later += puts
        yield opened, add
        for put in puts if later is None else ():
            put()
    except BaseException:
        for t in without:
            t.grad = None
        raise


def _one_kind(
    parameters: Sequence[Listed], existing: dict, kinds: tuple[torch.dtype, ...]
) -> tuple[torch.dtype, ...]:
    """The dtype that all of the parameters' gradients can be written in."""
    found = {_kind_of(t, existing) for p in parameters for t in members(p) if t.requires_grad}
    apart = any(isinstance(p, Tensor) and not _is_writable(p, existing) for p in parameters)
    return (*found,) if len(found) == 1 and found <= {*kinds} and not apart else (_widest(kinds),)


def _widest(kinds: tuple[torch.dtype, ...]) -> torch.dtype:
    return max(kinds, key=lambda kind: kind.itemsize)


def _kind_of(t: Tensor, existing: dict) -> torch.dtype:
    target = existing[id(t)]
    return grad_dtype_of(t) if target is None else target.dtype


def _is_writable(t: Tensor, existing: dict) -> bool:
    """Whether an op can write where the gradient of t is, or is to be."""
    one = t if existing[id(t)] is None else existing[id(t)]
    return not is_negated(one) and _has_plain_rows(one)


def _whole(
    name: str,
    t: Tensor,
    existing: dict,
    fresh: set[int],
    add: bool,
    kinds: tuple[torch.dtype, ...],
) -> tuple[Placed, list[tuple[Tensor, Tensor]]]:
    """The target of a parameter, and where it is still to be moved."""
    target, kind = existing[id(t)], _kind_of(t, existing)
    if kind not in kinds or not _is_writable(t, existing):
        part = (torch.zeros if add else torch.empty)(t.shape, dtype=_widest(kinds), device=t.device)
        return Placed(part), [(t, part)]
    if target is None:
        target = t.grad = (torch.zeros_like if add else torch.empty_like)(t, dtype=kind)
    elif add and id(t) in fresh:
        target.zero_()
    return Placed(target), []


def _listed(
    name: str,
    tensors: Sequence[Tensor],
    existing: dict,
    fresh: set[int],
    add: bool,
    kinds: tuple[torch.dtype, ...],
) -> tuple[Placed, list[tuple[Tensor, Tensor]]]:
    """The target of a list, and which of its parts are still to be moved where."""
    shape = (len(tensors), *tensors[0].shape)
    new = torch.zeros if add else torch.empty
    device = tensors[0].device
    there = [existing[id(t)] for t in tensors if existing.get(id(t)) is not None]
    dtypes = [t.dtype for t in there] or [grad_dtype_of(t) for t in tensors]
    dtype, alike = dtypes[0], all(d in kinds for d in dtypes)
    once = len({id(t) for t in tensors}) == len(tensors) and all(t.requires_grad for t in tensors)
    if alike and once and (there or len({*dtypes}) == 1):
        if not there:
            target = new(shape, dtype=dtype, device=device)
            for t, part in zip(tensors, target, strict=True):
                t.grad = part
            return Placed(target), []
        found = _in_place(tensors, existing, fresh, add)
        if found is not None:
            return found, []
    if there and len(shape) > 2:  # for a bias a copy costs next to nothing
        say_copied(f"{name}'s gradients")
    found = {_kind_of(t, existing) for t in tensors if t.requires_grad}
    kind = found.pop() if len(found) == 1 and found <= {*kinds} else _widest(kinds)
    target = new(shape, dtype=kind, device=device)
    wanted = [(t, part) for t, part in zip(tensors, target, strict=True) if t.requires_grad]
    return Placed(target), wanted


def _in_place(
    tensors: Sequence[Tensor], existing: dict, fresh: set[int], add: bool
) -> Placed | None:
    """The gradients of a list as one tensor; None if no view describes them."""
    for t in tensors:
        if existing[id(t)] is None:  # as some others have one, which are added to
            existing[id(t)] = t.grad = torch.zeros_like(t, dtype=grad_dtype_of(t))
            fresh.discard(id(t))
    there = [existing[id(t)] for t in tensors]
    if not all(type(t) is Tensor and not is_negated(t) for t in there):
        return None
    view = view_of(there)
    if view is not None and has_own_elements(view) and _has_plain_rows(view):
        found = Placed(view)
    elif there[0].dim() == 2:
        found = placed(there, written=True)
    else:
        found = None
    if found is not None:
        torch.autograd.graph.increment_version(there)
        for t, own in zip(tensors, there, strict=True):
            if add and id(t) in fresh:
                own.zero_()
    return found


def _has_plain_rows(tensor: Tensor) -> bool:
    """Whether an op can write it: a bias's gradient (E, width) by rows, a weight's in any order."""
    return tensor.dim() != 2 or tensor.shape[1] < 2 or tensor.stride(1) == 1


def _puts(
    parts: list[tuple[Tensor, Tensor]], main_grad: bool, fresh: set[int]
) -> Iterator[Callable[[], None]]:
    """The calls that move parts of a temporary to their places."""
    for tensor, part in parts:
        yield partial(_put, tensor, part, main_grad, id(tensor) in fresh)
        fresh.discard(id(tensor))  # if a tensor is listed twice, its second part is added


@torch.no_grad()
def _put(tensor: Tensor, part: Tensor, main_grad: bool, fresh: bool) -> None:
    there = tensor.main_grad if main_grad else tensor.grad
    if there is None:
        tensor.grad = part.to(grad_dtype_of(tensor))
    elif main_grad and fresh:
        there.copy_(part)
    else:
        there.add_(part)


# ---- pairs --------------------------------------------------------------------------------------


def in_one_dtype(
    w_up: Listed, w_gate: Listed | None, up: Placed | None, gate: Placed | None
) -> list[tuple[Placed | None, Placed | None]]:
    """Targets (up, gate) for calls of the op that writes both of a pair, in one dtype.

    One call, or two if the targets' dtypes differ. What nobody wants is written to a temporary.
    """
    if w_gate is None or (up is None and gate is None):
        return [(up, gate)]
    if up is None or gate is None:
        return [(up or _unwanted(w_up, gate), gate or _unwanted(w_gate, up))]
    if up.tensor.dtype == gate.tensor.dtype:
        return [(up, gate)]
    return [(up, _unwanted(w_gate, up)), (_unwanted(w_up, gate), gate)]


def _unwanted(parameter: Listed, other: Placed) -> Placed:
    """A tensor for the gradient of a parameter, in the dtype of the pair's other one."""
    dtype = other.tensor.dtype
    if isinstance(parameter, Tensor):
        return Placed(torch.empty_like(parameter, dtype=dtype))
    return Placed(parameter[0].new_empty((len(parameter), *parameter[0].shape), dtype=dtype))
