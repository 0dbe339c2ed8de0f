"""What a `guild.MoE` has beside its parameters, through moves, loads and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from guild.float8.kept import KeptWeights
from guild.moe_fast_path import PREPARED


class LayerState(nn.Module):
    """A module with the results of its last forward, and with codes of its weights.

    Attributes
    ----------
    balance_sums : BalanceSums or None
        Of the last forward in training, with a graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.balance_sums = None
        self._offsets: Tensor | None = None  # of each expert's rows in the last forward
        self._passed_on: Tensor | None = None  # their copy in a pickle, whose memory may be shared
        self._fp8_weights = KeptWeights()

    def refresh_fp8(self) -> None:
        """Make the next forward quantise the weights again: see `guild.refresh_fp8`."""
        self._fp8_weights.refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Called by to(), to_empty() and the like; forgets a last forward on another device."""
        super()._apply(fn, recurse)
        self._fp8_weights.let_go(self.w_up, self.w_down)
        if self._offsets is not None and self._offsets.device != self.w_down.device:
            self._offsets = self.balance_sums = None
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh_fp8()

    def __getstate__(self) -> dict[str, Any]:
        """Without the state of the last forward, so that copies and pickles work after one."""
        offsets = None if self._offsets is None else self._offsets.clone()  # a view of a buffer
        last = {"balance_sums": None, "_offsets": offsets, "_passed_on": None, PREPARED: None}
        state = {**super().__getstate__(), **last, "_fp8_weights": KeptWeights()}
        self._passed_on = offsets
        return state
