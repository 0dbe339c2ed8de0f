"""Calls every op with arguments that do not fit each other, in memory that is guarded at its ends.

Each tensor ends, or begins, at an inaccessible page: any read or write out of bounds ends the
process at once. The last call is on the last line of the output:

    python tests/python/layer/memory_checks.py 40       of each op the right call and 39 wrong ones
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from float8_calls import FLOAT8_CALLS, Operands
from guild._torch.gradients import ops
from test_opcheck import CALLS, Inputs

_PAGE = mmap.PAGESIZE
_NO_ACCESS, _READ_WRITE, _PRIVATE_ANONYMOUS = 0, 3, 0x22
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8)
_INTS = (-1, 0, 1, 2, 3, 5, 7, 16, 64, 127, 4096, 2**31, -(2**40), 2**62)

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t


class Guarded:
    """Copies of tensors, with the same strides, between inaccessible pages."""

    def __init__(self) -> None:
        self._mapped: list[tuple[int, int]] = []

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *error: object) -> None:
        for place in self._mapped:
            _libc.munmap(*place)

    def copy(self, tensor: Tensor, at_end: bool) -> Tensor:
        """at_end: of its pages; otherwise it lies at their beginning."""
        if not tensor.numel():
            return tensor
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        size = (1 + sum((n - 1) * step for n, step in steps)) * tensor.element_size()
        whole = -(-size // _PAGE) * _PAGE
        first = _libc.mmap(None, whole + 2 * _PAGE, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        self._mapped.append((first, whole + 2 * _PAGE))
        for page in (first, first + _PAGE + whole):
            _libc.mprotect(page, _PAGE, _NO_ACCESS)
        begin = first + _PAGE + (whole - size if at_end else 0)
        ctypes.memmove(begin, tensor.data_ptr(), size)
        room = torch.frombuffer((ctypes.c_uint8 * size).from_address(begin), dtype=torch.uint8)
        return room.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def spoilt(value: object, draw: random.Random) -> object:
    """An argument of another shape, layout, type or size."""
    if isinstance(value, Tensor):
        return _spoilt_tensor(value, draw)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(_INTS)
    if isinstance(value, float):
        return draw.choice((float("nan"), float("inf"), -1.0, 0.0))
    if value is None:
        return draw.choice((torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32)))
    return value


def _spoilt_tensor(t: Tensor, draw: random.Random) -> Tensor:
    if not t.dim() or not t.numel():
        return t.new_zeros(2)
    d = draw.randrange(t.dim())
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: t.to(draw.choice(_DTYPES)),
        lambda: t.narrow(d, 0, draw.randrange(t.shape[d] + 1)).contiguous(),
        lambda: t.narrow(d, 0, t.shape[d] // 2),
        lambda: torch.cat((t, t), d),
        lambda: t.narrow(d, 0, 1).expand(t.shape),
        lambda: t.transpose(0, d),
        lambda: t.repeat_interleave(2, d).unflatten(d, (-1, 2)).select(d + 1, 0),
        lambda: t.select(d, 0),
        lambda: t[None],
        lambda: t.new_empty(0),
    )
    return draw.choice(ways)()


def right_calls() -> Iterator[tuple[str, tuple]]:
    """Names, of which the first word is the op's, and arguments."""
    for calls, made in ((CALLS, Inputs("cpu")), (FLOAT8_CALLS, Operands("cpu"))):
        for name, arguments in calls.items():
            yield name, arguments(made)


@torch.no_grad()
def main(count: int) -> None:
    """The right call and count - 1 wrong ones of each."""
    torch.set_num_threads(1)
    for name, right in right_calls():
        op = getattr(ops, name.split()[0])
        for seed in range(count):
            draw, arguments = random.Random(f"{name} {seed}"), list(right)
            for _ in range(draw.choice((1, 1, 2)) if seed else 0):
                place = draw.randrange(len(arguments))
                arguments[place] = spoilt(arguments[place], draw)
            print(name, seed, flush=True)
            with Guarded() as memory:
                given = [
                    memory.copy(a.detach(), draw.random() < 0.6) if isinstance(a, Tensor) else a
                    for a in arguments
                ]
                try:
                    op(*given)
                except Exception:
                    if seed == 0:
                        raise
                del given


if __name__ == "__main__":
    main(int(sys.argv[1]))
