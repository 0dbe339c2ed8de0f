"""What a `guild.MoE` has beside its parameters, through moves, loads and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from guild.balancing import BalanceSums
from guild.float8.kept import KeptWeights
from guild.layer_routing import is_exporting
from guild.moe_fast_path import PREPARED


def expect_not_exporting(name: str, instead: str) -> None:
    """Raise RuntimeError while torch.export traces: a program would have it of an earlier call."""
    if is_exporting():
        raise RuntimeError(
            f"{name}: expected to be read outside torch.export, whose programs keep nothing of a "
            f"forward; return {instead}"
        )


class LayerState(nn.Module):
    """A module with the results of its last forward, and with codes of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self._balance_sums: BalanceSums | None = None
        self._offsets: Tensor | None = None  # of each expert's rows in the last forward
        self._passed_on: Tensor | None = None  # their copy in a pickle, whose memory may be shared
        self._fp8_weights = KeptWeights()

    @property
    def balance_sums(self) -> BalanceSums | None:
        """Sums over the tokens of the last forward in training, with a graph."""
        expect_not_exporting("balance_sums", "guild.balance_sums of the logits (return_routing)")
        return self._balance_sums

    def refresh_fp8(self) -> None:
        """Make the next forward quantise the weights again: see `guild.refresh_fp8`."""
        self._fp8_weights.refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Called by to(), to_empty() and the like; forgets a last forward on another device."""
        super()._apply(fn, recurse)
        self._fp8_weights.let_go(self.w_up, self.w_down)
        if self._offsets is not None and self._offsets.device != self.w_down.device:
            self._offsets = self._balance_sums = None
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh_fp8()

    def __getstate__(self) -> dict[str, Any]:
        """Without the state of the last forward, so that copies and pickles work after one."""
        kept = self._offsets is not None and not isinstance(self._offsets, FakeTensor)
        offsets = self._offsets.clone() if kept else None  # a view of a buffer
        last = {"_balance_sums": None, "_offsets": offsets, "_passed_on": None, PREPARED: None}
        state = {**super().__getstate__(), **last, "_fp8_weights": KeptWeights()}
        self._passed_on = offsets
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another layer to the ranks that share its experts."""
        super().__setstate__(state)
        if self.expert_group is not None:
            self._number = self.expert_group.new_layer()
