"""A module that holds one parameter per expert, named as Transformer Engine's GroupedLinear does.

`weight0` .. are registered from the last expert to the first. Trainers that lay all parameters out
in one buffer, such as Megatron-Core, fill it from the last parameter to the first. So the experts
lie there in ascending order, which is the order that Guild reads in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from guild import lay_evenly


class ExpertParameters(nn.Module):
    """Parameters `weight{i}` and `bias{i}`, each kind in one storage."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, int] = {}
        self.register_load_state_dict_pre_hook(_without_extra_state)

    def _register(self, name: str, whole: Tensor) -> list[nn.Parameter]:
        """Parameters name0, name1, .. over the parts of a tensor, in the order of the experts."""
        parts = [nn.Parameter(part) for part in whole]
        self._counts[name] = len(parts)
        for i in reversed(range(len(parts))):
            self.register_parameter(f"{name}{i}", parts[i])
        return parts

    def _listed(self, name: str) -> list[Tensor]:
        """The current name0, name1, ..; empty if the module was made without.

        Mostly parameters; what pruning, a parametrisation or a replica has in their place is found
        under the same names.
        """
        names = [f"{name}{i}" for i in range(self._counts.get(name, 0))]
        own = self._parameters
        return [own[n] if n in own else getattr(self, n) for n in names]

    def _apply(self, fn: Callable, recurse: bool = True) -> ExpertParameters:
        """As torch's, for `.to()` and the like; lays what has moved out evenly again."""
        before = _places(self.parameters(recurse=False))
        super()._apply(fn, recurse)
        if _places(self.parameters(recurse=False)) != before:
            self._lay_evenly()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called on a copy, whose parameters were copied one by one."""
        super().__setstate__(state)
        self._lay_evenly()

    def _lay_evenly(self) -> None:
        for kind in ("weight", "bias"):
            tensors = self._listed(kind)
            if tensors and all(isinstance(t, nn.Parameter) and not t.is_meta for t in tensors):
                lay_evenly(tensors)


def _without_extra_state(_: nn.Module, state_dict: dict, prefix: str, *__: Any) -> None:
    """Leave out the FP8 state that Transformer Engine saves under `_extra_state`."""
    for key in [key for key in state_dict if key.startswith(f"{prefix}_extra_state")]:
        del state_dict[key]


def _places(parameters: Iterable[Tensor]) -> list[int]:
    return [0 if p.is_meta else p.data_ptr() for p in parameters]


def ends_of(rows_per_expert: Tensor | list[int], like: Tensor) -> Tensor:
    """Where each expert's rows end: int32 on the device of `like`, without waiting for it."""
    counts = torch.as_tensor(rows_per_expert).to(like.device, non_blocking=True)
    return counts.cumsum(0, dtype=torch.int32)
