"""Checks of arguments at the public functions: each error names the argument, its value and what
was expected.

The compiled ops check again what they need for safety; a mistake gets its clearest message here.
Types that no argument of that name can have raise TypeError, the rest ValueError.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ON_CUDA = (torch.bfloat16, torch.float16)

MOST_EXPERTS = 4096  # guild::kMostExperts; also the limit for one token
MOST_ROUTED_ON_CUDA = 1024  # guild::cuda::kMostRouted


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def expect_tensor(name: str, value: object) -> None:
    """Raise unless it is a tensor with strides."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.is_nested or value.layout is not torch.strided:
        kind = "a nested one" if value.is_nested else f"one of layout {value.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {kind}")


def expect_dims(name: str, tensor: Tensor, *dims: int, what: str = "") -> None:
    """Raise unless it is a tensor of one of these numbers of dimensions."""
    expect_tensor(name, tensor)
    if tensor.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        raise ValueError(
            f"{name}: expected {wanted} dimensions{what and f' {what}'}, got shape "
            f"{tuple(tensor.shape)}"
        )


def expect_experts(name: str, tensor: Tensor, count: int, routed: bool, what: str) -> None:
    """Raise ValueError if a layer cannot have so many; routed: tokens are sorted by expert."""
    most = MOST_ROUTED_ON_CUDA if routed and tensor.is_cuda else MOST_EXPERTS
    if not 1 <= count <= most:
        where = " on a CUDA device" if most < MOST_EXPERTS else ""
        raise ValueError(
            f"{name}: expected 1 to {most} {what}{where}, got {count} in shape "
            f"{tuple(tensor.shape)}"
        )


def expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...], hint: str = "") -> None:
    """Raise unless it is a tensor of this shape."""
    expect_tensor(name, tensor)
    if tensor.shape != shape:
        raise ValueError(
            f"{name}: expected shape {shape}, got {tuple(tensor.shape)}{hint and f'; {hint}'}"
        )


def expect_operand(name: str, tensor: Tensor) -> None:
    """Raise unless the products support its dtype and device."""
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{name}: expected dtype bfloat16, float16, float32 or float64, got "
            f"{dtype_name(tensor.dtype)}"
        )
    if tensor.is_cuda and tensor.dtype not in _ON_CUDA:
        raise TypeError(
            f"{name}: expected bfloat16 or float16 on a CUDA device, got "
            f"{dtype_name(tensor.dtype)}; convert the tensors, or call under "
            'torch.autocast("cuda", dtype=torch.bfloat16)'
        )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast converts to on x's device; None without autocast."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def expect_like(name: str, tensor: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Raise unless dtype and device are those of x, which autocast may have converted."""
    if tensor.dtype is not x.dtype:
        cast = autocast_dtype(x)
        if tensor.dtype is cast:  # which leaves x alone: it is in float64
            name, tensor, x = x_name, x, tensor
        source = f"like {x_name}" if cast is None else "under autocast"
        raise TypeError(
            f"{name}: expected dtype {dtype_name(x.dtype)} {source}, got {dtype_name(tensor.dtype)}"
        )
    expect_device(name, tensor, x, x_name)


def expect_device(name: str, tensor: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Raise unless the device is that of x."""
    if tensor.device != x.device:
        raise ValueError(
            f"{name}: expected a tensor on {x.device} like {x_name}, got one on {tensor.device}"
        )


def expect_rows(name: str, tensor: Tensor, *, written: bool = False) -> None:
    """Raise unless the columns of (rows, width) are contiguous and the rows do not overlap."""
    if not has_plain_rows(tensor):
        raise ValueError(
            f"{name}: expected rows with contiguous columns (strides (n, 1), n >= "
            f"{tensor.shape[1]}), got strides {tensor.stride()}"
            + ("" if written else f"; call {name}.contiguous()")
        )


def has_plain_rows(tensor: Tensor) -> bool:
    """Whether the columns of (rows, width) are contiguous and the rows do not overlap."""
    row, column = tensor.stride()
    rows, width = tensor.shape
    # Strides come first: a compiler may not know the number of rows.
    return not ((width > 1 and column != 1 and rows > 0) or (row < width and rows > 1))


def is_negated(tensor: Tensor) -> bool:
    """Whether memory holds the negatives of its elements; compiled code does not know."""
    return not torch.compiler.is_compiling() and tensor.is_neg()


def expect_not_negated(name: str, tensor: Tensor) -> None:
    """Raise ValueError if memory holds the negatives of its elements."""
    if is_negated(tensor):
        raise ValueError(
            f"{name}: expected a tensor whose memory holds its elements, got a view of their "
            "negatives (Tensor.is_neg())"
        )


def expect_own_elements(name: str, tensor: Tensor) -> None:
    """Raise unless no two elements of a tensor that is written to share memory."""
    expect_not_negated(name, tensor)
    expect_no_overlap(name, tensor)


def expect_no_overlap(name: str, tensor: Tensor) -> None:
    """Raise if two elements share memory."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if tensor.numel() and size > 1 and stride < span:
            raise ValueError(
                f"{name}: expected elements that do not overlap, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        span += (size - 1) * stride


def expect_apart(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise if a tensor that is written to shares memory with another."""
    if share_memory(tensor, other):
        raise ValueError(
            f"{name}: expected memory not shared with other arguments, got memory shared with "
            f"{other_name}"
        )


def expect_out_apart(out: Tensor, others: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if an output shares memory with one of the named tensors, where they have memory."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    expect_tensor("out", out)
    for name, tensor in others:
        expect_apart("out", out, name, tensor)


def expect_all_apart(written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Raise if a tensor that is written to shares memory with another one of either kind."""
    named = {**read, **written}
    places = [(*ends_of(t), name) for name, t in named.items() if t.numel() and has_memory(t)]
    places.sort()
    for i, (_, end, name) in enumerate(places):
        for start, _, other in places[i + 1 :]:
            if start >= end:
                break
            first, second = (name, other) if name in written else (other, name)
            if first in written:
                expect_apart(first, named[first], second, named[second])


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether any byte belongs to both."""
    if not (a.numel() and b.numel() and a.device == b.device and has_memory(a, b)):
        return False
    (first, end), (other_first, other_end) = ends_of(a), ends_of(b)
    if max(first, other_first) >= min(end, other_end):
        return False
    # With i an index of a and j one of b, a common byte has sum(stride_a i) - sum(stride_b j) =
    # other_first - first. For equal strides only i - j matters.
    ranges: dict[int, list[int]] = {}
    for tensor, side in ((a, 1), (b, 0)):
        for size, stride in _byte_steps(tensor):
            if stride:
                ranges.setdefault(stride, [0, 0])[side] += (size - 1) * (1 if side else -1)
    steps = [(stride, *ranges[stride]) for stride in sorted(ranges, reverse=True)]
    return _has_solution(steps, other_first - first)


def _has_solution(steps: list[tuple[int, int, int]], total: int) -> bool:
    """Whether total is a sum of stride * n, least <= n <= most; steps: (stride, least, most)."""
    if not steps:
        return total == 0
    (stride, least, most), *rest = steps
    lowest = sum(s * low for s, low, _ in rest)
    highest = sum(s * high for s, _, high in rest)
    least = max(least, -((highest - total) // stride))
    most = min(most, (total - lowest) // stride)
    return any(_has_solution(rest, total - stride * n) for n in range(least, most + 1))


def has_memory(*tensors: Tensor) -> bool:
    """Whether all have memory: meta and fake tensors and wrappers around other tensors do not."""
    return not any(
        t.is_meta
        or isinstance(t, FakeTensor)
        or is_traceable_wrapper_subclass(t)
        or torch._C._functorch.is_functorch_wrapped_tensor(t)
        for t in tensors
    )


def _byte_steps(t: Tensor) -> list[tuple[int, int]]:
    """(size, stride in bytes) of every dimension, and of the bytes within an element."""
    width = t.element_size()
    steps = [(n, stride * width) for n, stride in zip(t.shape, t.stride(), strict=True)]
    return [*steps, (width, 1)]


def ends_of(t: Tensor) -> tuple[int, int]:
    """The address of the first byte, and the one after the last."""
    first = t.data_ptr()
    return first, first + 1 + sum((size - 1) * stride for size, stride in _byte_steps(t))


def expect_free(out: Tensor, operands: dict[str, Tensor | None]) -> None:
    """Raise unless out can be written to: it shares memory with no operand and has no gradient."""
    given = {name: t for name, t in operands.items() if t is not None}
    if torch.is_grad_enabled():
        for name, tensor in {**given, "out": out}.items():
            if tensor.requires_grad:
                raise ValueError(
                    f"out: expected None since {name} requires a gradient (or call under "
                    "torch.no_grad())"
                )
    if torch.compiler.is_compiling():  # tensors have no memory yet
        return
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "out: expected None under torch.func's transforms, which do not see writes to it"
        )
    expect_own_elements("out", out)
    expect_out_apart(out, given.items())


def expect_floating(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless its dtype is a floating one."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {dtype_name(tensor.dtype)}")


def expect_logits(logits: Tensor) -> None:
    """Raise unless it is a (tokens, experts) matrix of a floating dtype."""
    expect_dims("logits", logits, 2, what="(tokens, experts)")
    expect_floating("logits", logits)
    expect_experts("logits", logits, logits.shape[1], True, "experts")


def expect_choices_of(logits: Tensor, ids: Tensor) -> None:
    """Raise unless ids (tokens, top_k) are what `guild.route` chose from the logits."""
    expect_dims("ids", ids, 2, what="(tokens, top_k)")
    expect_shape("ids", ids, (logits.shape[0], ids.shape[1]))
    expect_indices("ids", ids, logits, torch.int32, x_name="logits")
    if not 1 <= ids.shape[1] <= logits.shape[1]:
        raise ValueError(
            f"ids: expected 1 to {logits.shape[1]} choices per token, got shape {tuple(ids.shape)}"
        )


def expect_indices(
    name: str, tensor: Tensor, x: Tensor, *dtypes: torch.dtype, x_name: str = "x"
) -> None:
    """Raise unless it has one of these integer dtypes, on x's device."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(map(dtype_name, dtypes))
        raise TypeError(f"{name}: expected dtype {wanted}, got {dtype_name(tensor.dtype)}")
    expect_device(name, tensor, x, x_name)


def expect_offsets(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raise unless it is a contiguous int32 vector on x's device."""
    expect_dims(name, tensor, 1)
    expect_indices(name, tensor, x, torch.int32)
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got strides {tensor.stride()}; call "
            f"{name}.contiguous()"
        )


def expect_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless it is one of these words."""
    if (value is not None and not isinstance(value, str)) or value not in choices:
        head = ", ".join(map(repr, choices[:-1]))
        raise ValueError(f"{name}: expected {head} or {choices[-1]!r}, got {value!r}")


def expect_number(name: str, value: object) -> None:
    """Raise unless it is a number and not a tensor, which would get no gradient."""
    if isinstance(value, float):  # the usual case, before slower checks
        return
    if isinstance(value, bool | Tensor) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name}: expected a number in float64's range, got a larger int")


def expect_finite(name: str, value: object) -> None:
    """Raise unless it is a finite number."""
    expect_number(name, value)
    if not -math.inf < value < math.inf:  # isfinite cannot be traced
        raise ValueError(f"{name}: expected a finite number, got {value}")


def expect_float32(name: str, value: object) -> None:
    """Raise unless it is 0 or a normal number of float32, in which routers compute."""
    expect_number(name, value)
    size = abs(float(value))  # a NumPy scalar would compare as its own type
    if size != 0 and not 2.0**-126 <= size < 2.0**128:  # NaN fails, too
        raise ValueError(f"{name}: expected 0 or a number in float32's normal range, got {value}")


def expect_positive(name: str, value: object) -> None:
    """Raise unless it is a positive number or infinite."""
    expect_number(name, value)
    if not value > 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")


def expect_flag(name: str, value: object) -> None:
    """Raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def expect_flags(**values: object) -> None:
    """`expect_flag` for each."""
    for name, value in values.items():
        expect_flag(name, value)


def expect_dtype(name: str, value: object) -> None:
    """Raise TypeError unless it is None or a torch.dtype."""
    if not isinstance(value, torch.dtype | None):
        raise TypeError(f"{name}: expected a torch.dtype, got {type(value).__name__} {value!r}")


def expect_float_dtype(name: str, value: object) -> None:
    """Raise TypeError unless it is None or a dtype that layers work in."""
    expect_dtype(name, value)
    if value is not None and value not in FLOATS:
        raise TypeError(f"{name}: expected a floating dtype, got {dtype_name(value)}")


def expect_device_option(name: str, value: object) -> None:
    """Raise unless it is None or says which device to make tensors on."""
    kind = type(value)
    if kind not in (torch.device, str, int, type(None)):
        raise TypeError(f"{name}: expected a torch.device, str or int, got {kind.__name__} {value}")
    try:
        torch.device(value if kind is str else "cpu")
    except RuntimeError:
        raise ValueError(f"{name}: expected one such as 'cuda:0', got {value!r}") from None


def expect_count(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise unless it is an int in range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")
