"""LoRA on experts: low-rank terms beside the weights, never added to them.

    y = x W_e^T + scale (x A_e^T) B_e^T

The paper is arXiv:2106.09685; the layout of A and B is that of PEFT's `target_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from guild._torch.alignment import missing
from guild._torch.checks import (
    expect_device,
    expect_dims,
    expect_finite,
    expect_floating,
    expect_shape,
)
from guild._torch.low_rank import LowRank
from guild._torch.operators import LayerFlags


@dataclass(frozen=True, eq=False)
class LoRA:
    """A low-rank term of one projection of all experts: scale * B_e A_e beside each W_e.

    Parameters
    ----------
    a : torch.Tensor
        (E, r, inputs), or (E r, inputs) as PEFT stores it: row e r + j is row j of expert e. Any
        floating dtype, which its gradient has too; it is used in that of the layer.
    b : torch.Tensor
        (E, outputs, r), or (outputs, r E) as PEFT stores it: column j E + e is column j of expert
        e. Outputs are ordered as in the weight. As many dimensions as `a`.
    scale : float
        lora_alpha / r, or lora_alpha / sqrt(r) of rank-stabilised LoRA.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, tensor in (("a", self.a), ("b", self.b)):
            expect_dims(name, tensor, 2, 3)
            expect_floating(name, tensor)
        expect_dims("b", self.b, self.a.dim(), what="like a")
        expect_finite("scale", self.scale)

    def operands(
        self, name: str, experts: int, outputs: int, inputs: int, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A (E, r, inputs) and scale B (E, outputs, r) in x's dtype, checked under `name`.

        Differentiable. B is copied: as PEFT stores it no dimension of an expert's matrix is
        contiguous, and the scale is multiplied in before the only rounding. On a GPU the rank is
        padded with zeros where its rows would not begin at multiples of 16 bytes.

        Parameters
        ----------
        name : str
            The argument's name, for errors.
        experts, outputs, inputs : int
            Sizes of the weight.
        x : torch.Tensor
            The layer's input, whose dtype and device count.

        Returns
        -------
        torch.Tensor, torch.Tensor
            A and scale B.

        Raises
        ------
        ValueError
            If a or b does not fit.
        """
        a, b = self.a, self.b
        for part, tensor in (("a", a), ("b", b)):
            expect_device(f"{name}.{part}", tensor, x)
        if a.dim() == 2:
            rank = a.shape[0] // experts  # torch.compile has no divmod of sizes
            if a.shape[0] % experts or not rank:
                raise ValueError(
                    f"{name}.a: expected (experts * r, inputs) with {experts} experts, got shape "
                    f"{tuple(a.shape)}"
                )
            expect_shape(f"{name}.a", a, (experts * rank, inputs))
            expect_shape(f"{name}.b", b, (outputs, rank * experts), "(outputs, r * experts)")
            a = a.unflatten(0, (experts, rank))
            b = b.unflatten(1, (rank, experts)).permute(2, 0, 1)
        else:
            rank = a.shape[1]
            if not rank:
                raise ValueError(f"{name}.a: expected a rank of at least 1, got {tuple(a.shape)}")
            expect_shape(f"{name}.a", a, (experts, rank, inputs))
            expect_shape(f"{name}.b", b, (experts, outputs, rank), "(experts, outputs, r)")
        if self.scale != 1:
            wider = b.dtype if b.dtype.itemsize > 1 else x.dtype  # 8 bits are never promoted
            b = b.to(torch.promote_types(wider, x.dtype)) * float(self.scale)
        a, b = a.to(x.dtype), b.to(x.dtype)
        more = missing(rank, x)
        if more:
            a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
        return a.contiguous(), b.contiguous()


LoRAHalves = tuple[LoRA | None, LoRA | None]  # gate, up
_HALVES = "lora_up[0] (gate)", "lora_up[1] (up)"


def factors_of(
    lora_up: LoRA | LoRAHalves | None, lora_down: LoRA | None
) -> Iterator[tuple[str, Tensor]]:
    """The factors of a call's low-rank terms as the caller gave them, by name."""
    terms = {"lora_down": lora_down}
    if isinstance(lora_up, tuple | list):
        terms |= dict(zip(_HALVES, lora_up, strict=True))
    else:
        terms["lora_up"] = lora_up
    for name, term in terms.items():
        if term is not None:
            yield f"{name}.a", term.a
            yield f"{name}.b", term.b


def low_rank(
    lora_up: LoRA | LoRAHalves | None,
    lora_down: LoRA | None,
    x: Tensor,
    w_down: Tensor,
    flags: LayerFlags,
    apart: bool,
) -> LowRank:
    """The operands of a layer's low-rank terms, checked; apart: gate and up are two weights."""
    experts, hidden, intermediate = w_down.shape
    if flags.transposed:
        hidden, intermediate = intermediate, hidden
    width = 2 * intermediate if flags.gated else intermediate
    a_up = b_up = a_down = b_down = None
    if apart and lora_up is not None:
        a_up, b_up = _joined(lora_up, experts, intermediate, hidden, x)
    elif lora_up is not None:
        _expect_lora("lora_up", lora_up)
        a_up, b_up = lora_up.operands("lora_up", experts, width, hidden, x)
    if lora_down is not None:
        _expect_lora("lora_down", lora_down)
        a_down, b_down = lora_down.operands("lora_down", experts, hidden, intermediate, x)
    return LowRank(a_up, b_up, a_down, b_down)


def _joined(
    halves: LoRAHalves, experts: int, intermediate: int, hidden: int, x: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The terms of gate and up as one: their ranks side by side, zeros across."""
    if not isinstance(halves, tuple | list) or len(halves) != 2:
        got = (
            f"{len(halves)} of them" if isinstance(halves, tuple | list) else type(halves).__name__
        )
        raise ValueError(f"lora_up: expected a pair (gate, up) like w_up, got {got}")
    found = []
    for name, lora in zip(_HALVES, halves, strict=True):
        if lora is not None:
            _expect_lora(name, lora)
            found.append(lora.operands(name, experts, intermediate, hidden, x))
    if not found:
        return None, None
    if len(found) == 1:
        ((a, b),) = found
        above = 0 if halves[0] is not None else intermediate
        return a, F.pad(b, (0, 0, above, intermediate - above))
    (a_gate, b_gate), (a_up, b_up) = found
    b_gate, b_up = F.pad(b_gate, (0, a_up.shape[1])), F.pad(b_up, (a_gate.shape[1], 0))
    return torch.cat((a_gate, a_up), 1), torch.cat((b_gate, b_up), 1)


def _expect_lora(name: str, lora: object) -> None:
    if not isinstance(lora, LoRA):
        raise TypeError(f"{name}: expected a guild.LoRA, got {type(lora).__name__}")
