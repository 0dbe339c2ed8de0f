"""What a benchmark's layer is besides its sizes: activation, biases, how its weights are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guild.train.plain_moe import PlainMoE, plain_expert


def _gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


# By their names in `names.ACTIVATIONS`.
_ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "gpt_oss": _gpt_oss,
}


@dataclass(frozen=True)
class LayerForm:
    """Options of a layer, as `guild.MoE` takes them.

    Attributes
    ----------
    activation : str
        One of `names.ACTIVATIONS`.
    bias : bool
        Whether the experts' projections have biases.
    order : str
        "concatenated" or "interleaved": gate and up in w_up and b_up.
    transposed : bool
        Whether weights are (experts, inputs, outputs) in place of (experts, outputs, inputs).
    """

    activation: str = "silu"
    bias: bool = False
    order: str = "concatenated"
    transposed: bool = False

    def options(self) -> dict[str, Any]:
        """The arguments of `guild.MoE`."""
        return asdict(self)

    def activate(self, h: Tensor) -> Tensor:
        """Pre-activations (..., 2I) to (..., I), in plain torch."""
        halves = h.chunk(2, -1) if self.order == "concatenated" else (h[..., ::2], h[..., 1::2])
        return _ACTIVATIONS[self.activation](*halves)

    def by_output(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """Weights as (..., outputs, inputs)."""
        return tuple(w.mT if self.transposed else w for w in weights)

    def expert(self, rows: Tensor, w_up: Tensor, w_down: Tensor, *biases: Tensor) -> Tensor:
        """One expert in plain torch: rows (rows, hidden) to the same shape, weights as stored."""
        return plain_expert(rows, *self.by_output(w_up, w_down), *biases, activate=self.activate)

    def weights(
        self, hidden: int, intermediate: int, experts: int, make: Callable[..., Tensor]
    ) -> dict[str, nn.Parameter]:
        """The experts' parameters by the names of `guild.MoE`; make(experts, ...) their values."""
        up, down = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
        sizes = {"w_up": up, "w_down": down}
        if self.transposed:
            sizes = {name: (e, inputs, outputs) for name, (e, outputs, inputs) in sizes.items()}
        if self.bias:
            sizes |= {"b_up": up[:2], "b_down": down[:2]}
        return {name: nn.Parameter(make(*size)) for name, size in sizes.items()}


def form_words(record: dict[str, Any]) -> str:
    """What differs from the default in a record's layers, each with a comma before it."""
    given, usual = record.get("form", {}), LayerForm().options()
    found = [k if v is True else str(v) for k, v in given.items() if v != usual[k]]
    return "".join(f", {word}" for word in found)


class PlainForm(PlainMoE):
    """The plain PyTorch layer of a form.

    Parameters
    ----------
    *sizes : int
        As `PlainMoE` takes them.
    compiled : bool
        As `PlainMoE` takes it.
    **options
        Those of a `LayerForm`.
    """

    def __init__(self, *sizes: int, compiled: bool = False, **options: Any) -> None:
        super().__init__(*sizes, compiled=compiled)
        self._form = LayerForm(**options)
        made = self._form.weights(*sizes[:3], make=torch.empty)
        for name in ("w_up", "w_down", "b_up", "b_down"):
            self.register_parameter(name, made.get(name))

    def forward(self, x: Tensor) -> Tensor:
        """x (tokens, hidden) -> (tokens, hidden)."""
        form = self._form
        weights = self.router.weight, *form.by_output(self.w_up, self.w_down)
        biases = self.b_up, self.b_down
        out, self.expert_counts = self._layer(x, *weights, self.top_k, *biases, form.activate)
        return out
