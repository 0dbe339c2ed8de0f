"""Fake kernels say what ops return, strides included, in layers of uneven lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from guild import LoRA
from listed_layers import CALLS, EXPERTS, HIDDEN, INNER, apart, backwards, whole_layer


class FakeTwins(TorchDispatchMode):
    """Compares what Guild's ops return with what their fake kernels say."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = op(*args, **(kwargs or {}))
        if op.namespace == "guild":
            self.ops.add(op.__name__)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs or {}))
                twins = op(*fake[0], **fake[1])
            for got, twin in zip(tree_leaves(made), tree_leaves(twins), strict=True):
                if isinstance(got, torch.Tensor):
                    about = got.shape, got.stride() if got.numel() else (), got.dtype
                    said = twin.shape, twin.stride() if got.numel() else (), twin.dtype
                    assert said == about, op
        return made


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["plain", "lora", "recompute"])
def test_fakes_of_uneven_lists(call: Callable, how: str) -> None:
    """A weight's gradient lies as its list's views do not: one matrix after the other."""
    layer = whole_layer("cpu")
    for made in (apart, backwards):
        for transposed in (False, True):
            lists = {n: made(t.mT if transposed and t.dim() == 3 else t) for n, t in layer.items()}
            more: dict[str, Any] = {"transposed": transposed}
            if how == "lora":
                more["lora_down"] = LoRA(
                    torch.randn(EXPERTS, 2, INNER).double(),
                    torch.randn(EXPERTS, HIDDEN, 2).double(),
                    1.0,
                )
            elif how == "recompute":
                more["recompute"] = True
            with FakeTwins() as twins:
                call(lists, "cpu", **more)[1].square().sum().backward()
            assert any("backward" in op for op in twins.ops)
