"""Activations between the two projections, by name or with their own parameters.

    a = act(gate) * (up + up_offset)          a = act(gate)        without a gate

The kernels compute them; the formulas here in plain torch are what the kernels are tested against,
and give the gradient of a `swiglu_out` that is used on its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from guild._torch.checks import (
    expect_choice,
    expect_flag,
    expect_float32,
    expect_floating,
    expect_positive,
    expect_tensor,
)
from guild._torch.joining import cat, stack

KINDS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")  # in the order of guild::Activation::Kind
ORDERS = ("concatenated", "interleaved")
# What ops take for no limit: a package of AOTInductor cannot hold infinity.
NO_LIMIT = torch.finfo(torch.float32).max


def expect_parameter(name: str, value: object) -> None:
    """Raise unless an activation can have it as its alpha, limit or up_offset, in every dtype."""
    if name.endswith("limit"):
        expect_positive(name, value)
        if value == math.inf:
            return
    expect_float32(name, value)


@dataclass(frozen=True)
class Activation:
    """What happens between up and down projection.

    Parameters
    ----------
    kind : {"silu", "gelu_tanh", "gelu", "relu", "relu2"}
        act(g): g * sigmoid(alpha * g), GELU in its tanh form, exact GELU, max(g, 0), max(g, 0)^2.
    gated : bool
        With a gate the up projection has 2I outputs, gate and up; without one it has I.
    alpha : float
        Slope inside SiLU's sigmoid, used by kind="silu" alone: in float32's normal range or 0.
    limit : float
        `gate` is clamped to at most this and, with a gate, `up` to [-limit, limit]; used by every
        kind. Gradients are zero there. Positive; infinite, the default: no clamp.
    up_offset : float
        Added to up after its clamp, used with a gate alone: in float32's normal range or 0.
    clamp_after : bool
        Clamp act(gate) instead of gate, for every kind; used with a finite limit alone.

    Notes
    -----
    `Activation.named` knows the usual ones by name, and every function that takes an activation
    takes such a name too: "silu" = "swiglu", "gelu" = "geglu", "gelu_tanh" = "geglu_tanh", "relu" =
    "reglu", "relu2", "quick_gelu" and "gpt_oss", all gated; and "silu_ungated", "gelu_ungated",
    "gelu_tanh_ungated", "relu_ungated", "relu2_ungated".

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """

    kind: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0
    clamp_after: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        expect_flag("gated", self.gated)
        for name in ("alpha", "limit", "up_offset"):
            expect_parameter(name, getattr(self, name))
        expect_flag("clamp_after", self.clamp_after)
        # As the ops take them; not a field, which dataclasses.asdict and the like would pass on.
        scalars = (
            KINDS.index(self.kind),
            self.gated,
            float(self.alpha),
            min(float(self.limit), NO_LIMIT),
            float(self.up_offset),
            self.clamp_after,
        )
        object.__setattr__(self, "scalars", scalars)

    @staticmethod
    def named(name: str) -> Activation:
        """The activation of that name.

        Parameters
        ----------
        name : str
            One of those in the notes of `Activation`.

        Returns
        -------
        Activation

        Raises
        ------
        ValueError
            If there is none.
        """
        return _preset("name", name)

    def width(self, intermediate: int) -> int:
        """Outputs of the up projection.

        Parameters
        ----------
        intermediate : int
            Inputs of the down projection.

        Returns
        -------
        int
            2 * intermediate with a gate, else intermediate.
        """
        return 2 * intermediate if self.gated else intermediate

    def __call__(self, h: torch.Tensor, order: str = "concatenated") -> torch.Tensor:
        """Apply to pre-activations in plain torch, in float32 (float64 in float64).

        Parameters
        ----------
        h : torch.Tensor
            (..., 2I), or (..., I) without a gate.
        order : {"concatenated", "interleaved"}
            Order of gate and up in h.

        Returns
        -------
        torch.Tensor
            (..., I) in h's dtype.
        """
        gate, up = self._halves(h, order)
        value = _value_and_slope(self, gate)[0]
        if up is not None:
            value = value * (up.clamp(-self.limit, self.limit) + self.up_offset)
        return value.to(h.dtype)

    def gradient(
        self, h: torch.Tensor, da: torch.Tensor, order: str = "concatenated"
    ) -> torch.Tensor:
        """The gradient of the pre-activations, given that of the result.

        Parameters
        ----------
        h : torch.Tensor
            (..., 2I), or (..., I) without a gate: the pre-activations.
        da : torch.Tensor
            (..., I): the gradient of the result.
        order : {"concatenated", "interleaved"}
            Order of gate and up in h and in the result.

        Returns
        -------
        torch.Tensor
            Shape and dtype of h.
        """
        gate, up = self._halves(h, order)
        da = da.to(gate.dtype)
        value, slope = _value_and_slope(self, gate)
        if up is None:
            return (da * slope).to(h.dtype)
        outside = (up > self.limit) | (up < -self.limit)  # NaN is not
        dgate = da * slope * (up.clamp(-self.limit, self.limit) + self.up_offset)
        pair = (dgate, (da * value).masked_fill(outside, 0))
        dh = torch.cat(pair, -1) if order == "concatenated" else torch.stack(pair, -1)
        return dh.reshape(h.shape).to(h.dtype)  # flatten() cannot be batched by is_grads_batched

    def _halves(self, h: torch.Tensor, order: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        expect_tensor("h", h)
        interleaved = is_interleaved(order)
        expect_floating("h", h)
        if self.gated and (h.dim() == 0 or h.shape[-1] % 2):
            raise ValueError(
                f"h: expected gate and up, an even number of columns, got shape {tuple(h.shape)}"
            )
        if h.dtype != torch.float64:
            h = h.float()
        if not self.gated:
            return h, None
        if interleaved:
            return h[..., 0::2], h[..., 1::2]
        gate, up = h.chunk(2, -1)
        return gate, up


def _value_and_slope(
    activation: Activation, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """act(clamped gate) and its slope with respect to the unclamped gate."""
    cut = gate > activation.limit
    if activation.clamp_after:
        value, slope = _unclamped(activation, gate)
        cut = value > activation.limit
        return value.clamp(max=activation.limit), slope.masked_fill(cut, 0)
    value, slope = _unclamped(activation, gate.clamp(max=activation.limit))
    return value, slope.masked_fill(cut, 0)


def _unclamped(activation: Activation, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """act(x) and act'(x), with their limits where x is infinite."""
    if activation.kind == "silu":
        s = torch.sigmoid(activation.alpha * x)
        x = _unless_zero(s, x)
        return x * s, s * (1 + activation.alpha * _unless_zero(1 - s, x) * (1 - s))
    near = x.clamp(-1e3, 1e3)  # what follows has reached its limits long before
    if activation.kind == "gelu_tanh":
        c, d = math.sqrt(2 / math.pi), 0.044715
        s = torch.sigmoid(2 * c * (near + d * near**3))  # (1 + tanh z) / 2 = sigmoid(2 z)
        steep = near * s * (1 - s) * 2 * c * (1 + 3 * d * near * near)
        return _unless_zero(s, x) * s, s + steep
    if activation.kind == "gelu":
        phi = 0.5 * (1 + torch.erf(near * math.sqrt(0.5)))
        steep = near * torch.exp(-0.5 * near * near) / math.sqrt(2 * math.pi)
        return _unless_zero(phi, x) * phi, phi + steep
    r = x.clamp(min=0)
    if activation.kind == "relu":
        return r, torch.where(x > 0, 1.0, r)  # r is 0 or NaN there
    return r * r, 2 * r


def _unless_zero(factor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x, but 0 where the factor that it will be multiplied by is 0: x may be infinite."""
    return x.masked_fill(factor == 0, 0)


PRESETS = {
    **{kind: Activation(kind) for kind in KINDS},
    "swiglu": Activation("silu"),
    "geglu": Activation("gelu"),
    "geglu_tanh": Activation("gelu_tanh"),
    "reglu": Activation("relu"),
    "quick_gelu": Activation("silu", alpha=1.702),
    "gpt_oss": Activation("silu", alpha=1.702, limit=7.0, up_offset=1.0),
    **{f"{kind}_ungated": Activation(kind, gated=False) for kind in KINDS},
}


def _preset(argument: str, name: object) -> Activation:
    """The activation that an argument names; ValueError if there is none."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"{argument}: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def as_activation(activation: Activation | str) -> Activation:
    """An `Activation` from itself or its name.

    Raises
    ------
    TypeError, ValueError
        If it is neither, or an unknown name.
    """
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, str):
        return _preset("activation", activation)
    raise TypeError(f"activation: expected a name or a guild.Activation, got {activation!r}")


def to_concatenated(columns: torch.Tensor) -> torch.Tensor:
    """Interleaved columns of gate and up, such as a bias (E, 2I), with all of gate first."""
    return cat((columns[:, 0::2], columns[:, 1::2]), 1)


def to_interleaved(columns: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_concatenated`."""
    return stack(columns.chunk(2, 1), 2).flatten(1)


def is_interleaved(order: str) -> bool:
    """Whether `order` says "interleaved".

    Raises
    ------
    ValueError
        If it is not one of the two orders.
    """
    expect_choice("order", order, ORDERS)
    return order == "interleaved"
