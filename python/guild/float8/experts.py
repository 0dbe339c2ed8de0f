"""A layer of experts in FP8: quantised weights, and `guild.routed_experts` with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from guild._torch import float8_moe, float8_weights  # noqa: F401 - register the ops
from guild._torch.checks import dtype_name, expect_dims, expect_flag
from guild._torch.expert_lists import Listed
from guild._torch.float8_formats import SCALES
from guild._torch.float8_steps import QuantizedExperts
from guild._torch.gradient_targets import members, wanting
from guild._torch.layer_arguments import Halves, layer_arguments, local_ids
from guild._torch.operators import LayerFlags, ops, score_dtype
from guild.activations import Activation
from guild.expert_arguments import (
    expect_backward_options,
    expect_output,
    expect_routing,
    residual_of,
    sink_of,
    whole_of,
)
from guild.float8.settings import FP8, warn_where_slow
from guild.float8.sinks import Float8Experts
from guild.routed_call import RoutedArguments

_ALIGNED = 16  # bytes: what a row of codes begins at on a GPU
_MASTERS = 5  # arguments of a layer: weights and biases

_experts = ops.float8_experts.default
_moe = ops.float8_moe.default
_quantize = ops.float8_weights.default
_quantize_out = ops.float8_weights_out.default


class FP8Weights:
    """The experts' weights as codes, kept over several calls of `guild.routed_experts`.

    Micro-batches between two optimizer steps share them, passed as ``fp8=``.

    Parameters
    ----------
    fp8 : FP8
        How layers with these weights run.
    w_up, w_down, activation, order, transposed :
        As `guild.routed_experts` takes them; bfloat16, float16 or float32.

    Notes
    -----
    The codes are those of the weights at construction, or at the last call of `refresh`. A change
    of the weights is not noticed: version counters stand still in CUDA graphs and under FSDP.

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
        expect_flag("transposed", transposed)
        self.fp8, self._layout = fp8, (activation, order, transposed)
        self._take(w_up, w_down)
        # Codes outlive inference mode and may be saved for backward.
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                self.codes = self._made()
        else:
            self.codes = self._made()

    def _take(self, w_up: Listed | Halves, w_down: Listed) -> None:
        self._given = w_up, w_down
        with torch.no_grad():
            (w_up, w_down, *_), at = whole_of(w_up, w_down, None, None, None)
        expect_dims("w_down", w_down, 3, what="(experts, hidden, intermediate)")
        expect_quantisable(w_down)
        transposed = self._layout[2]
        narrow = torch.bfloat16 if w_down.dtype == torch.float32 else w_down.dtype
        sample = w_down.new_empty(0, w_down.shape[2 if transposed else 1], dtype=narrow)
        given = sample, w_up, w_down, None, None, *self._layout
        _, *layer, _ = layer_arguments(*given, x_name="w_down", masters=True)
        self._masters, self._flags, self._experts_at = layer[:3], LayerFlags(*layer[5:]), at

    def __getstate__(self) -> dict[str, Any]:
        """Without views of memory that is not all of these weights; `refresh` makes them again."""
        held = self.__dict__.copy()
        if self._experts_at is not None:
            held["_masters"] = held["_experts_at"] = None
        return held

    def _reads_given(self) -> bool:
        """Whether the given tensors are the masters; copies, casts and lists are not."""
        if self._masters is None:
            return False
        given = [*members(self._given[0]), self._given[1]]
        masters = [t for t in self._masters if t is not None]
        same = len(given) == len(masters) and all(any(g is m for m in masters) for g in given)
        return same and self._experts_at is None

    def _made(self) -> QuantizedExperts:
        return quantized_experts(*self._masters, self._flags, self._experts_at, self.fp8)

    def refresh(self) -> None:
        """Quantise the weights again, into the same memory, without a host wait.

        They are read from the tensors given at construction; lists that must be copied, and
        weights cast by autocast, are copied or cast anew.
        """
        if not self._reads_given():
            self._take(*self._given)
        self._write(*self._masters)

    def refresh_from(self, w_up: Tensor, w_down: Tensor) -> None:
        """`refresh` from other weights of the same kind, which later calls of it read, too."""
        self._given, self._masters = (w_up, w_down), [w_up, None, w_down]
        self.refresh()

    def expect_layout(self, flags: LayerFlags) -> None:
        """Raise ValueError unless a call describes the weights as they were described here."""
        mine = self._flags
        for name, said, found in (
            ("order", flags.interleaved and flags.gated, mine.interleaved and mine.gated),
            ("transposed", flags.transposed, mine.transposed),
        ):
            if said != found:
                words = ("concatenated", "interleaved") if name == "order" else (False, True)
                raise ValueError(
                    f"{name}: expected {words[found]!r} like the FP8Weights, got {words[said]!r}"
                )

    @torch.no_grad()
    def _write(self, w_up: Tensor, w_gate: Tensor | None, w_down: Tensor) -> None:
        layout = *self._flags.up_weight(), self._experts_at, SCALES.index(self.fp8.scales)
        _quantize_out(w_up, w_gate, w_down, *layout, *self.codes)


def quantized_experts(
    w_up: Tensor,
    w_gate: Tensor | None,
    w_down: Tensor,
    flags: LayerFlags,
    experts_at: Tensor | None,
    fp8: FP8,
) -> QuantizedExperts:
    """Codes, in both orders, of master weights given as the ops take them."""
    with torch.no_grad():
        layout = *flags.up_weight(), experts_at, SCALES.index(fp8.scales)
        made = _quantize(w_up, w_gate, w_down, *layout)
    return QuantizedExperts(*made)


def expect_quantisable(w_down: Tensor) -> None:
    """Raise TypeError unless weights of this dtype can be masters."""
    if w_down.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            "w_down: expected bfloat16, float16 or float32 with fp8, got "
            f"{dtype_name(w_down.dtype)}"
        )


def expect_alone(**others: object) -> None:
    """Raise NotImplementedError naming an option that cannot be combined with fp8 or codes."""
    for name, value in others.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: expected None with fp8 or quantised weights, got {type(value).__name__}"
            )


def expect_rows_of_codes(x: Tensor, intermediate: int) -> None:
    """Raise unless x has 16 bits, and rows of codes begin where the GPU's products read them."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"x: expected bfloat16 or float16 with fp8, got {dtype_name(x.dtype)}; of the layer "
            "only weights may be float32"
        )
    for name, size in (("hidden", x.shape[1]), ("intermediate", intermediate)):
        if x.is_cuda and size % _ALIGNED:
            raise ValueError(
                f"{name}: expected a multiple of {_ALIGNED} with fp8 on CUDA, got {size}"
            )


def routed_experts_in_fp8(given: RoutedArguments) -> tuple[Tensor, Tensor]:
    """`guild.experts.routed_experts_and_offsets` in FP8."""
    out, token_offsets, parameters = given.out, given.token_offsets, given.parameters()
    _expect_settings(given.fp8)
    expect_dims("x", given.x, 2, what="(tokens, hidden)")
    expect_backward_options(given.recompute, given.weight_gradients)
    expect_routing(given.x, given.topk_ids, given.topk_weights, token_offsets)
    ids = local_ids(given.topk_ids, given.expert_map).contiguous()
    whole, experts_at = whole_of(*parameters, given.weight_gradients)
    x, *layer, gradient = layer_arguments(
        given.x, *whole, *given.layout(), routed=True, masters=True
    )
    codes, flags, fp8 = _codes_of(x, layer, experts_at, ids.numel(), given.fp8)
    residual = residual_of(given.residual, x)
    scores = given.topk_weights.to(score_dtype(x.dtype)).contiguous()
    wanted = gradient or scores.requires_grad
    wanted, sink = sink_of(wanted, given.weight_gradients, parameters, given.order)
    if out is not None:
        operands = {"topk_ids": ids, "topk_weights": scores, "residual": residual}
        lists = None if experts_at is None else parameters
        expect_output(out, wanted, x, layer, lists=lists, **operands)
    masters, keep = layer[:_MASTERS], not given.recompute
    if sink is not None:
        return Float8Experts.apply(
            sink.gradients,
            sink.parameters,
            keep,
            flags,
            fp8.recipe(),
            experts_at,
            x,
            scores,
            (ids, token_offsets, codes),
            residual,
            *masters,
            *sink.reached,
        )
    settings = *codes, *flags, *fp8.recipe(), wanted and keep, experts_at
    made, _, _, _, _, offsets, *_ = _experts(
        x, ids, scores, token_offsets, residual, *masters, *settings
    )
    return made if out is None else out.copy_(made), offsets


def routed_layer_in_fp8(tokens: tuple, given: RoutedArguments) -> tuple[Tensor, Tensor]:
    """`guild.experts.routed_layer` in FP8; tokens: arguments of the op route_tokens."""
    x, weight, bias, *router = tokens
    x, *layer, gradient = layer_arguments(
        x, *given.parameters(), *given.layout(), routed=True, masters=True
    )
    codes, flags, fp8 = _codes_of(x, layer, None, router[2] * x.shape[0], given.fp8)
    wanted = torch.is_grad_enabled() and (gradient or bool(wanting((weight, bias))))
    keep = wanted and not given.recompute
    settings = *codes, *flags, *fp8.recipe()._replace(reads_x=True), keep
    residual = residual_of(given.residual, x)
    made = _moe(x, weight, bias, *router, residual, *layer[:_MASTERS], *settings)
    return made[0], made[3]


def _codes_of(
    x: Tensor, layer: list, experts_at: Tensor | None, rows: int, fp8: FP8 | FP8Weights
) -> tuple[QuantizedExperts, LayerFlags, FP8]:
    """The weights' codes, made now or before; layer: as `layer_arguments` returns it."""
    flags, w_down = LayerFlags(*layer[_MASTERS:]), layer[2]
    size = w_down.shape[1 if flags.transposed else 2]
    expect_rows_of_codes(x, size)
    warn_where_slow(x, size, rows, w_down.shape[0])
    if isinstance(fp8, FP8Weights):
        fp8.expect_layout(flags)
        return _expect_codes(fp8.codes, w_down, flags, x), flags, fp8.fp8
    return quantized_experts(*layer[:3], flags, experts_at, fp8), flags, fp8


def _expect_settings(fp8: object) -> None:
    if not isinstance(fp8, FP8 | FP8Weights):
        raise TypeError(
            f"fp8: expected guild.FP8 or guild.FP8Weights, got {type(fp8).__name__} {fp8!r}"
        )
    if isinstance(fp8, FP8) and fp8.cached:
        raise ValueError(
            "fp8: expected FP8 without cached in a call of routed_experts, which keeps nothing; "
            "pass guild.FP8Weights"
        )


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
            f"fp8: expected FP8Weights on {x.device} like x, got weights on {codes.down.device}"
        )
    return codes
