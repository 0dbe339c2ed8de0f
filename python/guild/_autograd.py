"""Gives compiled ops their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from guild._operators import ops

library = torch.library.Library("guild", "FRAGMENT")


def rows_of(matrix: Tensor) -> Tensor:
    """A matrix as the kernels read it; `sum().backward()` gives an expanded scalar."""
    return matrix if matrix.is_contiguous() else matrix.contiguous()


def register(name: str, backward: Callable, setup: Callable) -> None:
    """Give an op its gradient, as torch.library.register_autograd does.

    That one walks the op's schema in Python at every call, 60 us for the 17 arguments of a layer:
    more than the op itself takes to start.
    """
    op = getattr(ops, name).default

    def below(keyset: Any, args: tuple) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        output = below(keyset, args)
        setup(ctx, args, output)
        return output

    function = type(
        f"{name}_gradient",
        (torch.autograd.Function,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(lambda ctx, *grads: (None, *backward(ctx, *grads))),
        },
    )

    def kernel(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return function.apply(keyset, *args)
        return below(keyset, args)

    library.impl(name, kernel, "Autograd", with_keyset=True)
