"""Wrong calls: each is an error that names the argument, what it is and what was expected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import guild
from wrong_shapes import SHAPES, mlp, pair_down, pair_up, product, right, routed
from wrong_values import VALUES

WRONG = {**SHAPES, **VALUES}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_call(name: str, device: str) -> None:
    """One wrong call; a right one goes before it, so that the mistake is the only one."""
    call, exception, message = WRONG[name]
    r = right(device)
    for works in (routed, mlp, product, pair_up, pair_down):
        works(r)
    with pytest.raises(exception, match=message):
        call(r)


REQUIRED: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "routed_experts": (routed, ("x", "topk_ids", "topk_weights", "w_up", "w_down")),
    "experts_mlp": (mlp, ("x_sorted", "offsets", "w_up", "w_down")),
    "grouped_mm": (product, ("mat_a", "mat_b")),
    "grouped_mm_swiglu": (pair_up, ("x", "w_up", "offs")),
    "grouped_mm_downproj": (pair_down, ("swiglu_out", "w_down", "offs")),
    "route": (
        lambda r, **changed: guild.route(**{"logits": r.logits, "top_k": 2, **changed}),
        ("logits",),
    ),
    "round_tokens": (
        lambda r, **changed: guild.round_tokens(
            **{"logits": r.logits, "ids": r.ids.int(), "rounding": "stochastic", **changed}
        ),
        ("logits", "ids"),
    ),
    "balance_sums": (
        lambda r, **changed: guild.balance_sums(
            **{"logits": r.logits, "ids": r.ids.int(), **changed}
        ),
        ("logits", "ids"),
    ),
    "MoE": (
        lambda r, **changed: guild.MoE(
            32, 16, 4, 2, shared_experts=1, device=r.x.device, dtype=r.x.dtype
        )(**{"x": r.x, **changed}),
        ("x",),
    ),
}
OPTIONAL = {
    "routed_experts": ("b_up", "b_down", "token_offsets", "residual"),
    "experts_mlp": ("b_up", "b_down"),
    "grouped_mm": ("offs", "bias", "out"),
    "grouped_mm_swiglu": ("bias",),
    "grouped_mm_downproj": ("bias", "aux_biased_acc"),
    "route": ("selection_bias", "token_mask"),
    "round_tokens": ("seed",),
    "balance_sums": ("token_mask",),
    "MoE": ("token_mask",),
}


@pytest.mark.parametrize(
    "function, name, value",
    [
        (function, name, value)
        for function, (_, names) in REQUIRED.items()
        for value in (None, 1.5, [[1.0]])
        for name in (*names, *(OPTIONAL[function] if value is not None else ()))
        if not (name in ("w_up", "b_up") and isinstance(value, list))
    ],
)
def test_what_is_no_tensor(function: str, name: str, value: object, device: str) -> None:
    """None, a number or a list for a tensor: a TypeError that names the argument."""
    call, _ = REQUIRED[function]
    r = right(device)
    call(r)
    with pytest.raises(TypeError, match=f"^{name}: expected a"):
        call(r, **{name: value})


@pytest.mark.parametrize("function", list(REQUIRED))
def test_a_tensor_without_dimensions(function: str, device: str) -> None:
    """The error names it, or an argument whose shape it gives away."""
    call, names = REQUIRED[function]
    for name in (*names, *OPTIONAL[function]):
        given = right(device)
        like = getattr(given, name, torch.ones((), device=device))
        dtype = like.dtype if isinstance(like, torch.Tensor) else torch.float32
        with pytest.raises(
            (TypeError, ValueError), match=r"^[a-z_]+(\[\d\])?( \(\w+\))?: expected"
        ):
            call(given, **{name: torch.ones((), device=device, dtype=dtype)})


@pytest.mark.parametrize("function", list(REQUIRED))
def test_what_is_not_dense(function: str, device: str) -> None:
    """Sparse and nested tensors have no rows that a kernel could read."""
    call, names = REQUIRED[function]
    dense = torch.ones(2, 2, device=device)
    for name in (*names, *OPTIONAL[function]):
        for value, kind in (
            (dense.to_sparse(), "one of layout torch.sparse_coo"),
            (torch.nested.nested_tensor([dense, dense[:1]]), "a nested one"),
        ):
            with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor, got {kind}"):
                call(right(device), **{name: value})


@pytest.mark.parametrize("call", [routed, mlp])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("name", ["w_up", "b_up"])
def test_half_a_pair(name: str, half: int, call: Callable[..., object]) -> None:
    """The member of a (gate, up) pair that is not a tensor is named."""
    r = right("cpu")
    whole = r.up if name == "w_up" else r.b_up
    pair = list(whole.chunk(2, 1))
    given = {"w_up": pair} if name == "w_up" else {"b_up": pair}
    call(r, **given)
    pair[half] = None
    with pytest.raises(
        TypeError, match=rf"^{name}\[{half}\] \({('gate', 'up')[half]}\): expected a t"
    ):
        call(r, **given)


def test_halves_of_a_bias_that_do_not_fit() -> None:
    """They are checked before they are joined, which would promote one of them."""
    r = right("cpu")
    gate, up = r.b_up.chunk(2, 1)
    for half, error, message in (
        (up.to("meta"), ValueError, r"b_up\[1\] \(up\): expected a tensor on cpu like b_up\[0\]"),
        (up.long(), TypeError, r"b_up\[1\] \(up\): expected a floating dtype, got int64"),
        (up.half(), TypeError, r"b_up\[1\] \(up\): expected dtype .* like b_up\[0\] \(gate\)"),
    ):
        for call in (routed, mlp):
            with pytest.raises(error, match=f"^{message}"):
                call(r, b_up=(gate, half))


def zeros_of_experts(experts: int, top_k: int = 1) -> dict[str, Callable[[], object]]:
    """Calls with this many experts, and this many choices per token."""
    x, wide = torch.zeros(3, 4), torch.zeros(experts, 4, 4)
    w_up, ends = torch.zeros(experts, 8, 4), torch.zeros(experts, dtype=torch.int32)
    ids, logits = torch.zeros(3, top_k, dtype=torch.int32), torch.zeros(3, experts)
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    return {
        "topk_ids|w_down": lambda: guild.routed_experts(x, ids, torch.zeros(3, top_k), w_up, wide),
        "w_down": lambda: guild.experts_mlp(x, offsets, w_up, wide),
        "offs": lambda: guild.grouped_mm(x, wide, ends),
        "mat_a": lambda: guild.grouped_mm(wide, wide),
        "w_up": lambda: guild.grouped_mm_swiglu(x, wide, ends),
        "w_down of the pair": lambda: guild.grouped_mm_downproj(x, wide, ends),
        "logits|top_k": lambda: guild.route(logits, top_k),
        "logits|ids": lambda: guild.round_tokens(logits, ids),
        "logits|ids of a sum": lambda: guild.balance_sums(logits, ids),
        "experts|top_k": lambda: guild.MoE(4, 2, experts, top_k),
    }


@pytest.mark.parametrize("experts, top_k", [(0, 1), (4097, 1), (4, 0), (4, 4097)])
def test_how_many_experts(experts: int, top_k: int) -> None:
    """The limits of the guide, at every function; at them all works."""
    with_top_k = top_k != 1
    for name, call in zeros_of_experts(experts, top_k).items():
        if with_top_k and "|" not in name:
            continue
        names, limit = name.split(" ")[0], r"expected 1 to (4096|4\b)"
        with pytest.raises(ValueError, match=f"^({names}): {limit}"):
            call()
    for most in (1, 4096):
        for call in zeros_of_experts(most).values():
            call()


@pytest.mark.parametrize("shape", [(0, 2), (4, 0)])
def test_empty_weights(shape: tuple[int, int]) -> None:
    """Weights whose hidden or intermediate size is zero are refused."""
    hidden, inner = shape
    x, offsets = torch.zeros(3, hidden), torch.zeros(3, dtype=torch.int32)
    w_up, w_down = torch.zeros(2, 2 * inner, hidden), torch.zeros(2, hidden, inner)
    with pytest.raises(ValueError, match=r"^w_down: expected sizes of at least 1"):
        guild.experts_mlp(x, offsets, w_up, w_down)
    with pytest.raises(ValueError, match=r"^w_up: expected inputs and outputs"):
        guild.grouped_mm_swiglu(x, w_up.mT, offsets[1:])


def test_experts_that_a_gpu_cannot_route(gpu: str) -> None:
    logits = torch.zeros(3, 1025, device=gpu)
    with pytest.raises(ValueError, match=r"^logits: expected 1 to 1024 experts on a CUDA device"):
        guild.route(logits, 2)


def test_float32_on_a_gpu(gpu: str) -> None:
    """The error names the dtype, the supported ones, and autocast."""
    r = right(gpu)
    with pytest.raises(
        TypeError, match=r"x: expected bfloat16 or float16 on a CUDA device, got fl"
    ):
        routed(r, x=r.x.float())
    with pytest.raises(TypeError, match="autocast"):
        product(r, mat_a=r.x.double())


def test_ids_on_the_cpu(gpu: str) -> None:
    """The error for ids on the CPU beside a layer on a GPU, the most common mistake."""
    r = right(gpu)
    with pytest.raises(
        ValueError, match=r"topk_ids: expected a tensor on cuda:0 .* got one on cpu"
    ):
        routed(r, topk_ids=r.ids.cpu())


def test_odd_sizes_on_a_gpu(gpu: str) -> None:
    """Rows whose size is not a multiple of 16 bytes are refused."""
    moe = guild.MoE(20, 12, 4, 2, device=gpu, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="hidden: expected a multiple of 8 on CUDA, got 20"):
        moe(torch.zeros(3, 20, device=gpu, dtype=torch.bfloat16))


def test_num_sms() -> None:
    """The budget is a whole number, 0 or more, and stays as it was after a wrong call."""
    with pytest.raises(ValueError, match="count: expected at least 0, got -1"):
        guild.set_num_sms(-1)
    with pytest.raises(TypeError, match=r"count: expected an int, got float 1.5"):
        guild.set_num_sms(1.5)
    with pytest.raises(TypeError, match="shared: expected True or False, got 1"):
        guild.set_num_sms(8, shared=1)
    assert guild.num_sms() == 0
    guild.set_num_sms(116)
    assert guild.num_sms() == 116
    guild.set_num_sms(0)


NO_NUMBER = (torch.nn.Parameter(torch.tensor(1.0)), torch.tensor(1.0), "a", [1.0], True)
LOGITS, ROWS, ENDS = torch.zeros(3, 4), torch.zeros(3, 4), torch.tensor([1, 3], dtype=torch.int32)
IDS = torch.zeros(3, 1, dtype=torch.int32)
PAIR = ROWS, torch.zeros(2, 4, 4), ENDS
NUMBERS: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "route": (lambda **g: guild.route(LOGITS, 1, **g), ("scale", "sum_floor")),
    "round_tokens": (lambda **g: guild.round_tokens(LOGITS, IDS, **g), ("scale", "sum_floor")),
    "Router": (guild.Router, ("scale", "sum_floor")),
    "Activation": (guild.Activation, ("alpha", "limit", "up_offset")),
    "grouped_mm_swiglu": (
        lambda **g: guild.grouped_mm_swiglu(*PAIR, **g),
        ("swiglu_alpha", "swiglu_limit", "up_offset"),
    ),
    "grouped_mm_downproj": (
        lambda **g: guild.grouped_mm_downproj(*PAIR, **g),
        ("swiglu_alpha", "swiglu_limit", "up_offset"),
    ),
    "balance": (lambda **g: called_layer().balance(**g), ("rate",)),
}


def called_layer() -> guild.MoE:
    """A layer with a selection bias, after a forward."""
    layer = guild.MoE(4, 4, 4, 2, router="sigmoid")
    layer(ROWS)
    return layer


@pytest.mark.parametrize("function", list(NUMBERS))
def test_what_is_no_number(function: str) -> None:
    """A tensor, which would get no gradient, a word, a list, a flag, or an int past all floats."""
    call, names = NUMBERS[function]
    for name in names:
        call(**{name: 1})
        for value in NO_NUMBER:
            kind = type(value).__name__
            with pytest.raises(TypeError, match=f"^{name}: expected a number, got {kind}$"):
                call(**{name: value})
        with pytest.raises(ValueError, match=f"^{name}: expected a number in float64's range"):
            call(**{name: 10**400})


FLAGGED: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "route": (lambda **g: guild.route(LOGITS, 1, **g), ("renormalize",)),
    "round_tokens": (lambda **g: guild.round_tokens(LOGITS, IDS, **g), ("renormalize",)),
    "Router": (guild.Router, ("renormalize", "selection_bias")),
    "Activation": (guild.Activation, ("gated", "clamp_after")),
    "WeightGradients": (guild.WeightGradients, ("main_grad", "delayed")),
    "grouped_mm": (lambda **g: guild.grouped_mm(*PAIR, **g), ("accumulate",)),
    "routed_experts": (lambda **g: routed(right("cpu"), **g), ("transposed", "recompute")),
    "experts_mlp": (lambda **g: mlp(right("cpu"), **g), ("transposed", "recompute")),
    "MoE": (lambda **g: called_layer()(ROWS, **g), ("return_routing",)),
}


@pytest.mark.parametrize("function", list(FLAGGED))
def test_what_is_no_flag(function: str) -> None:
    """A word counts as true in Python; a tensor is none of a caller's yes and no."""
    call, names = FLAGGED[function]
    for name in names:
        call(**{name: False})
        for value in ("no", None, torch.zeros(4)):
            with pytest.raises(TypeError, match=f"^{name}: expected True or False, got "):
                call(**{name: value})


@pytest.mark.parametrize("call", [routed, mlp])
@pytest.mark.parametrize("value", [True, "later"])
def test_what_is_no_sink(call: Callable[..., object], value: object) -> None:
    """The error comes whether or not a gradient is wanted."""
    with torch.no_grad(), pytest.raises(TypeError, match=r"^weight_gradients: expected guild\.W"):
        call(right("cpu"), weight_gradients=value)


def test_steps_that_are_no_numbers() -> None:
    """A selection bias of NaN would choose the same experts ever after."""
    layer = called_layer()
    for rate in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^rate: expected a finite number, got {rate}"):
            layer.balance(rate)
    assert not layer.router.selection_bias.any()


def test_pre_activations_in_plain_torch() -> None:
    """An h without gate and up, or of an integer dtype, is refused."""
    silu = guild.Activation("silu")
    for h, error, message in (
        (torch.ones(2, 4, dtype=torch.int64), TypeError, "h: expected a floating dtype, got int64"),
        (torch.ones(2, 5), ValueError, r"h: expected gate and up, .* got shape \(2, 5\)"),
        (torch.ones(()), ValueError, r"h: expected gate and up, .* got shape \(\)"),
        ([1.0], TypeError, "h: expected a torch.Tensor, got list"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            silu(h)
        with pytest.raises(error, match=f"^{message}"):
            silu.gradient(h, h)
    for order in ("mixed", np.array(["interleaved", "mixed"]), None):
        with pytest.raises(ValueError, match=r"^order: expected 'concatenated' or 'interleaved'"):
            silu(torch.ones(2, 4), order)
    with pytest.raises(ValueError, match=r"^name: expected one of"):
        guild.Activation.named(["silu"])
    with pytest.raises(ValueError, match=r"^name: expected 'softmax', .*, got 'mixtral'"):
        guild.Router.named("mixtral")


def test_out_dtype_by_name() -> None:
    with pytest.raises(TypeError, match=r"^out_dtype: expected a torch\.dtype, got str 'float32'"):
        guild.grouped_mm(*PAIR, out_dtype="float32")
