"""A layer of experts in FP8: quantised weights, and `guild.routed_experts` with them."""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch import float8_layer  # noqa: F401 - registers the ops
from guild._torch.checks import expect_dims, expect_tensor
from guild._torch.expert_lists import Listed, say_copied, stacked
from guild._torch.float8_steps import QuantizedExperts
from guild._torch.layer_arguments import Halves, layer_arguments, local_ids
from guild._torch.operators import LayerFlags, ops, score_dtype
from guild.activations import Activation
from guild.expert_arguments import (
    expect_later,
    expect_output,
    expect_routing,
    residual_of,
    whole_of,
)
from guild.float8.formats import SCALES
from guild.float8.settings import FP8

_ALIGNED = 16  # bytes: what a row of codes begins at on a GPU

_experts = ops.float8_experts.default
_quantize = ops.float8_weights.default
_quantize_out = ops.float8_weights_out.default


class FP8Weights:
    """The experts' weights as codes, kept over several calls of `guild.routed_experts`.

    They are what micro-batches between two steps of an optimizer share, as ``fp8=``.

    Parameters
    ----------
    fp8 : FP8
        How layers with these weights run.
    w_up, w_down, activation, order, transposed :
        As `guild.routed_experts` takes them; bfloat16, float16 or float32.

    Notes
    -----
    The codes are those of the weights when `refresh` was last called, or at the beginning. Nothing
    notices a change of the weights: version counters stand still in CUDA graphs and under FSDP.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """

    def __init__(
        self,
        fp8: FP8,
        w_up: Listed | Halves,
        w_down: Listed,
        *,
        activation: Activation | str = "silu",
        order: str = "concatenated",
        transposed: bool = False,
    ) -> None:
        if not isinstance(fp8, FP8):
            raise TypeError(f"fp8: expected guild.FP8, got {type(fp8).__name__} {fp8!r}")
        expect_tensor("w_down", w_down)
        expect_dims("w_down", w_down, 3, what="(experts, hidden, intermediate)")
        sample = w_down.new_empty(0, w_down.shape[2 if transposed else 1])
        _, *layer, _ = layer_arguments(
            sample, w_up, w_down, None, None, activation, order, transposed, masters=True
        )
        self.fp8 = fp8
        self._masters, self._flags = layer[:3], LayerFlags(*layer[5:])
        self.codes = quantized_experts(*self._masters, self._flags, fp8)

    def refresh(self) -> None:
        """Quantise the weights again, into the same memory, without a host wait."""
        self._write(*self._masters)

    def refresh_from(self, w_up: Tensor, w_down: Tensor) -> None:
        """The same of other weights like them, which later calls of `refresh` read, too."""
        self._masters = [w_up, None, w_down]
        self.refresh()

    @torch.no_grad()
    def _write(self, w_up: Tensor, w_gate: Tensor | None, w_down: Tensor) -> None:
        layout = *self._flags.up_weight, SCALES.index(self.fp8.scales)
        _quantize_out(w_up, w_gate, w_down, *layout, *self.codes)


def quantized_experts(
    w_up: Tensor, w_gate: Tensor | None, w_down: Tensor, flags: LayerFlags, fp8: FP8
) -> QuantizedExperts:
    """Masters, as the ops take them, as codes in both orders."""
    with torch.no_grad():
        made = _quantize(w_up, w_gate, w_down, *flags.up_weight, SCALES.index(fp8.scales))
    return QuantizedExperts(*made)


def expect_alone(**others: object) -> None:
    """Raise NotImplementedError naming an option that does not go together with fp8."""
    for name, value in others.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None with fp8, got {value!r}")


def expect_aligned(x: Tensor, intermediate: int) -> None:
    """Raise ValueError unless rows of codes begin where the GPU's products can read them."""
    for name, size in (("hidden", x.shape[1]), ("intermediate", intermediate)):
        if x.is_cuda and size % _ALIGNED:
            raise ValueError(
                f"{name}: expected a multiple of {_ALIGNED} with fp8 on CUDA, got {size}"
            )


def routed_experts_in_fp8(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Listed | Halves,
    w_down: Listed,
    b_up: Listed | Halves | None,
    b_down: Listed | None,
    activation: Activation | str,
    order: str,
    transposed: bool,
    token_offsets: Tensor | None,
    residual: Tensor | None,
    recompute: bool,
    expert_map: Tensor | None,
    fp8: FP8 | FP8Weights,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`guild.experts.routed_experts_and_offsets` in FP8."""
    if not isinstance(fp8, FP8 | FP8Weights):
        raise TypeError(
            f"fp8: expected guild.FP8 or guild.FP8Weights, got {type(fp8).__name__} {fp8!r}"
        )
    expect_dims("x", x, 2, what="(tokens, hidden)")
    expect_later(recompute, None)
    expect_routing(x, topk_ids, topk_weights, token_offsets)
    topk_ids = local_ids(topk_ids, expert_map)
    whole = _whole(w_up, w_down, b_up, b_down)
    x, *layer, gradient = layer_arguments(
        x, *whole, activation, order, transposed, routed=True, masters=True
    )
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"x: expected bfloat16 or float16 with fp8, got {x.dtype}; float32 weights may stay"
        )
    flags = LayerFlags(*layer[5:])
    weights, settings = layer[:3], fp8 if isinstance(fp8, FP8) else fp8.fp8
    expect_aligned(x, weights[2].shape[1 if transposed else 2])
    codes = (
        quantized_experts(*weights, flags, fp8)
        if isinstance(fp8, FP8)
        else _expect_codes(fp8.codes, weights[2], flags, x)
    )
    residual = residual_of(residual, x)
    scores = topk_weights.to(score_dtype(x.dtype)).contiguous()
    wanted = torch.is_grad_enabled() and (gradient or scores.requires_grad)
    slots = topk_ids.contiguous(), scores, token_offsets
    if out is not None:
        operands = {"topk_ids": topk_ids, "topk_weights": scores, "residual": residual}
        expect_output(out, wanted, x, layer, **operands)
    made, _, _, offsets, *_ = _experts(
        x,
        *slots,
        residual,
        *layer[:5],
        *codes,
        *flags,
        *settings.recipe(),
        wanted and not recompute,
    )
    return made if out is None else out.copy_(made), offsets


def _whole(*given: Listed | Halves | None) -> tuple:
    """The same with each list of experts' tensors as one tensor."""
    whole, experts_at = whole_of(*given, None)
    if experts_at is None:
        return whole
    say_copied("w_up, w_down")
    w_up, w_down, *_ = given
    return stacked(w_up), stacked(w_down), *whole[2:]


def _expect_codes(
    codes: QuantizedExperts, w_down: Tensor, flags: LayerFlags, x: Tensor
) -> QuantizedExperts:
    """Raise ValueError unless they are of weights like these."""
    experts, hidden, size = w_down.mT.shape if flags.transposed else w_down.shape
    halves = 2 if flags.gated else 1
    if codes.down.shape != (experts, hidden, size) or codes.up_scales.shape[1] != halves:
        found = tuple(codes.down.shape)
        raise ValueError(
            f"fp8: expected FP8Weights of w_down {(experts, hidden, size)} and {halves} halves of "
            f"w_up, got {found} and {codes.up_scales.shape[1]}"
        )
    if codes.down.device != x.device:
        raise ValueError(
            f"fp8: expected FP8Weights on {x.device} as x is, got some on {codes.down.device}"
        )
    return codes
