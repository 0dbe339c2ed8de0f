"""The experts of a layer that every token goes through, whatever the router says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from guild._torch.checks import (
    expect_count,
    expect_dims,
    expect_flag,
    expect_like,
    expect_shape,
    has_plain_rows,
)
from guild._torch.operators import autocast
from guild.activations import Activation, as_activation
from guild.experts import experts_mlp
from guild.initial_values import fill_normal_
from guild.logits import LogitLinear, has_plain_call
from guild.routed_experts_fast_path import quick_shared

_NARROW = frozenset((torch.bfloat16, torch.float16))


class SharedExperts(nn.Module):
    """One MLP for every token: shared(x) = act(x W1^T) W2^T.

    With a gate, sigmoid(x g^T) shared(x): one factor per token, as in Qwen2-MoE.

    Parameters
    ----------
    hidden, intermediate : int
        Its widths.
    activation : Activation
        Between the projections.
    order : {"concatenated", "interleaved"}
        Of gate and up in `w_up`.
    gate : bool
        Whether there is a `gate`, with weights (1, hidden).
    device, dtype : optional
        Of the parameters.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: Activation,
        order: str = "concatenated",
        gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.activation, self.order = activation, order
        width = activation.width(intermediate)
        self.w_up = nn.Parameter(torch.empty(width, hidden, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(hidden, intermediate, device=device, dtype=dtype))
        self.gate = LogitLinear(hidden, 1, False, device, dtype) if gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights from a normal distribution of variance 1 / inputs."""
        for weight in (self.w_up, self.w_down):
            fill_normal_(weight, weight.shape[-1] ** -0.5)
        if self.gate is not None:
            self.gate.reset_parameters()

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        """w_up and w_down, bypassing the slow __getattr__; None for one that is not a parameter.

        torch.nn.utils.prune and the like make plain attributes of them.
        """
        return self._parameters.get("w_up"), self._parameters.get("w_down")

    def scale(self, x: Tensor) -> Tensor | None:
        """The factor of each token's results, (tokens, 1); None without a gate.

        Raises TypeError or ValueError unless the gate, which may be a user's module, returns one
        logit per token.
        """
        if self.gate is None:
            return None
        # Its own errors would name `weight`; but a hook may have yet to supply that, or convert x.
        if type(self.gate) is LogitLinear and has_plain_call(self.gate):
            expect_shape("shared.gate.weight", self.gate.weight, (1, x.shape[-1]), "(1, hidden)")
            expect_like("shared.gate.weight", *reversed(autocast(x, self.gate.weight)))
        logits = self.gate(x)
        expect_shape("shared.gate: logits", logits, (x.shape[0], 1), "(tokens, 1)")
        return torch.sigmoid(logits)

    def gate_weight(self, x: Tensor) -> Tensor | None:
        """The gate's weight if, on a GPU, the scale is sigmoid(x weight^T) and nothing else.

        guild::infer_layer computes that itself. On the CPU its bits would differ from those of
        torch.sigmoid.
        """
        gate = self._modules.get("gate")  # bypasses __getattr__, which is slow
        if type(gate) is not LogitLinear or not x.is_cuda or x.dtype not in _NARROW:
            return None
        weight = gate._parameters.get("weight")
        plain = type(weight) is nn.Parameter and gate._parameters.get("bias", gate) is None
        return weight if plain and has_plain_call(gate) else None

    def is_plain(self, layer: nn.Module) -> bool:
        """Whether a call is only the MLP and its scale, with a layer's activation and order."""
        return (
            type(self) is SharedExperts  # a parametrisation creates a subclass
            and (self.activation == layer.activation) is True  # arrays compare to arrays
            and (self.order == layer.order) is True
            and all(type(weight) is nn.Parameter for weight in self.weights())
            and has_plain_call(self)
        )

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        return f"hidden={self.hidden}, intermediate={self.intermediate}"

    def forward(self, x: Tensor) -> Tensor:
        """x (tokens, hidden) -> the same shape: one expert that gets every row."""
        if x.dim() == 2 and not has_plain_rows(x):
            x = x.contiguous()
        out = quick_shared(x, self.w_up, self.w_down, self.activation, self.order)
        if out is None:
            self._expect_weights(x)
            ends = torch.arange(2, device=x.device, dtype=torch.int32) * x.shape[0]
            weights = self.w_up[None], self.w_down[None]
            out = experts_mlp(x, ends, *weights, activation=self.activation, order=self.order)
        scale = self.scale(x)
        return out if scale is None else (scale * out).to(out.dtype)

    def _expect_weights(self, x: Tensor) -> None:
        """Raise unless the weights, which may be replaced, fit each other and x."""
        expect_dims("shared.w_down", self.w_down, 2, what="(hidden, W)")
        hidden, inner = x.shape[-1], self.w_down.shape[1]
        expect_shape("shared.w_down", self.w_down, (hidden, inner), "(hidden, W)")
        width = as_activation(self.activation).width(inner)
        expect_shape("shared.w_up", self.w_up, (width, hidden), f"W is {inner} in shared.w_down")
        x, *weights = autocast(x, self.w_up, self.w_down)
        for name, weight in zip(("shared.w_up", "shared.w_down"), weights, strict=True):
            expect_like(name, weight, x)


def shared_rows(
    shared: nn.Module | None, x: Tensor, token_mask: Tensor | None = None
) -> Tensor | None:
    """The shared experts' output for x (tokens, hidden), zero at padding; None without them.

    Raises TypeError or ValueError unless the module, which may be the user's, returns such rows.
    """
    if shared is None:
        return None
    rows = shared(x)
    expect_shape("shared: output", rows, tuple(x.shape), "(tokens, hidden)")
    _, rows = autocast(x, rows)
    expect_like("shared: output", rows, x)
    if not has_plain_rows(rows):
        rows = rows.contiguous()
    # This zeroes the gradient of the output at padding, too.
    return rows if token_mask is None else rows.masked_fill(~token_mask[:, None], 0)


def shared_width(
    shared_experts: int, intermediate: int, shared_intermediate: int | None, shared_gate: bool
) -> int:
    """Width of the shared experts' MLP, 0 where there are none; checked."""
    expect_count("shared_experts", shared_experts, 0)
    width = shared_experts * intermediate
    if shared_intermediate is not None:
        expect_count("shared_intermediate", shared_intermediate, 1)
        if shared_experts:
            raise ValueError(
                "shared_intermediate: expected None with shared_experts, whose total width it "
                f"would set, got {shared_intermediate}"
            )
        width = shared_intermediate
    expect_flag("shared_gate", shared_gate)
    if shared_gate and not width:
        raise ValueError(
            "shared_gate: expected False without shared_experts or shared_intermediate, got True"
        )
    return width
