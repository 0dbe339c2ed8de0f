"""Checks of arguments at the public functions: each error names the argument, its value and what
was expected.

The compiled ops check again what they need for safety; here is where a mistake gets its clearest
message. Types that no argument of that name can have raise TypeError, the rest ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ON_CUDA = (torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch." in front."""
    return str(dtype).removeprefix("torch.")


def expect_tensor(name: str, value: object) -> None:
    """Raise unless it is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def expect_dims(name: str, tensor: Tensor, *dims: int, what: str = "") -> None:
    """Raise unless it is a tensor of one of these numbers of dimensions."""
    expect_tensor(name, tensor)
    if tensor.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        raise ValueError(
            f"{name}: expected {wanted} dimensions{what and f' {what}'}, got shape "
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
    """Raise unless dtype and device are ones that the products work in."""
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


def expect_like(name: str, tensor: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Raise unless dtype and device are those of x."""
    if tensor.dtype is not x.dtype:
        raise TypeError(
            f"{name}: expected dtype {dtype_name(x.dtype)} as {x_name} has, got "
            f"{dtype_name(tensor.dtype)}"
        )
    expect_device(name, tensor, x, x_name)


def expect_device(name: str, tensor: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Raise unless the device is that of x."""
    if tensor.device != x.device:
        raise ValueError(
            f"{name}: expected a tensor on {x.device} as {x_name} is, got one on {tensor.device}"
        )


def expect_rows(name: str, tensor: Tensor) -> None:
    """Raise unless the columns of (rows, width) are contiguous and the rows do not overlap."""
    row, column = tensor.stride()
    rows, width = tensor.shape
    if (width > 1 and rows > 0 and column != 1) or (rows > 1 and row < width):
        raise ValueError(
            f"{name}: expected rows with contiguous columns (strides (n, 1), n >= {width}), got "
            f"strides {tensor.stride()}; call {name}.contiguous()"
        )


def expect_logits(logits: Tensor) -> None:
    """Raise unless it is a (tokens, experts) matrix of a floating dtype."""
    expect_dims("logits", logits, 2, what="(tokens, experts)")
    if not logits.is_floating_point():
        raise TypeError(f"logits: expected a floating dtype, got {dtype_name(logits.dtype)}")


def expect_choices_of(logits: Tensor, ids: Tensor) -> None:
    """Raise unless ids (tokens, top_k) are what `guild.route` chose from the logits."""
    expect_dims("ids", ids, 2, what="(tokens, top_k)")
    expect_shape("ids", ids, (logits.shape[0], ids.shape[1]))
    expect_indices("ids", ids, logits, torch.int32, x_name="logits")


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
    if value not in choices:
        head = ", ".join(map(repr, choices[:-1]))
        raise ValueError(f"{name}: expected {head} or {choices[-1]!r}, got {value!r}")


def expect_count(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise unless it is an int in range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")
