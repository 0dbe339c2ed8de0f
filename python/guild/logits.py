"""The router's product, x and W of 16 bits to logits of 32, as a function and as modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from guild._torch import gradients  # noqa: F401 - registers the gradients
from guild._torch.checks import (
    FLOATS,
    dtype_name,
    expect_device,
    expect_dims,
    expect_experts,
    expect_floating,
    expect_like,
    expect_shape,
    expect_tensor,
)
from guild._torch.operators import autocast, ops, score_dtype
from guild.initial_values import fill_normal_

_router_logits = ops.router_logits.default


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Logits x weight^T + bias in float32 (float64 in float64), whatever the operands' dtype.

    16-bit operands are multiplied as they are, and summed and returned in float32.
    torch.nn.functional.linear would round their logits to 16 bits, which changes the order of
    experts whose logits are close. On a GPU no float32 copy of x is made. With 16-bit operands a
    token's logits have the same bits whatever the other tokens are; on a GPU this holds for up to
    1,024 experts and a hidden size that is a multiple of 8.

    Parameters
    ----------
    x : torch.Tensor
        (..., hidden): bfloat16, float16, float32 or float64.
    weight : torch.Tensor
        (experts, hidden) with 1 to 4,096 experts, in x's dtype.
    bias : torch.Tensor, optional
        (experts,), any floating dtype.

    Returns
    -------
    torch.Tensor
        (..., experts), float32 or float64. Under autocast x and weight are cast, but not the
        logits.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.

    Notes
    -----
    Gradients flow to x, weight and bias, each in its own dtype; the gradient of the logits is
    rounded to x's dtype before it is multiplied.
    """
    expect_tensor("x", x)
    expect_dims("weight", weight, 2, what="(experts, hidden)")
    experts, hidden = weight.shape
    expect_experts("weight", weight, experts, False, "experts")
    if x.dim() == 0 or x.shape[-1] != hidden:
        raise ValueError(
            f"x: expected shape (..., {hidden}) (hidden) to match weight, got {tuple(x.shape)}"
        )
    expect_device("weight", weight, x)
    if bias is not None:
        expect_shape("bias", bias, (experts,))
        expect_device("bias", bias, x)
        expect_floating("bias", bias)
    if x.dtype not in FLOATS:
        raise TypeError(
            f"x: expected dtype bfloat16, float16, float32 or float64, got {dtype_name(x.dtype)}"
        )
    x, weight = autocast(x, weight)
    expect_like("x", x, weight, "weight")
    bias = addable(bias, x)
    if x.dtype in (torch.float32, torch.float64):
        logits = F.linear(x, weight)
        return logits if bias is None else logits + bias
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]  # a trace would keep a size as constant
    return _router_logits(rows, weight, bias).view(*x.shape[:-1], experts)


def addable(bias: Tensor | None, x: Tensor) -> Tensor | None:
    """The bias as the product takes it: contiguous, in x's dtype or in that of x's logits."""
    if bias is None:
        return None
    wide = score_dtype(x.dtype)
    return (bias if bias.dtype in (x.dtype, wide) else bias.to(wide)).contiguous()


def has_plain_call(module: nn.Module) -> bool:
    """Whether calling a module runs its class's forward alone: no hooks, no other forward."""
    return (
        "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and not _has_any_global_hook()
    )


class LogitLinear(nn.Linear):
    """torch.nn.Linear with the output of `router_logits`, and weights of variance 1 / inputs."""

    def reset_parameters(self) -> None:
        """Draw weights from a normal distribution of variance 1 / inputs; zero the bias."""
        fill_normal_(self.weight, self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features), float32 or float64."""
        return router_logits(x, self.weight, self.bias)


class RouterLinear(LogitLinear):
    """The router of a `guild.MoE`: hidden states to logits, and the selection bias.

    A torch.nn.Linear for whatever expects one (LoRA, hooks, parametrisations). As long as calling
    this module would compute nothing but the logits (`is_plain`), the layer does that itself, in
    one op with the experts; otherwise it calls the module.

    Parameters
    ----------
    hidden, experts : int
        Inputs and outputs.
    bias : bool
        Whether the logits have a bias, a parameter.
    selection_bias : bool
        Whether there is a buffer `selection_bias`, (experts,): added to p for the choice alone.
    device, dtype : optional
        Of the parameters. The selection bias is float32, and stays so when the module is
        converted: `MoE.balance` moves it by steps that vanish in 16 bits.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        bias: bool = False,
        selection_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, experts, bias, device, dtype)
        if selection_bias:
            zeros = torch.zeros(experts, device=device, dtype=torch.float32)
            self.register_buffer("selection_bias", zeros)

    def reset_parameters(self) -> None:
        """Draw weights from a normal distribution of variance 1 / inputs; zero the biases."""
        super().reset_parameters()
        if "selection_bias" in self._buffers:
            nn.init.zeros_(self.selection_bias)

    def is_plain(self) -> bool:
        """Whether a call is x weight^T + bias and nothing else: no hook or other forward."""
        return (
            type(self) is RouterLinear  # a parametrisation creates a subclass
            and "bias" in self._parameters  # not when pruned
            and has_plain_call(self)
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RouterLinear:
        """Called by to(), half() and the like: the selection bias changes its device alone."""
        bias = self._buffers.get("selection_bias")

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if tensor is bias and result.dtype != bias.dtype:
                return bias.to(result.device)
            return result

        return super()._apply(moved, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        keep_float32(self)  # load_state_dict(..., assign=True) takes the checkpoint's dtype


def keep_float32(module: nn.Module) -> Tensor | None:
    """The module's selection bias, float32 again if something has converted it; None without."""
    bias = getattr(module, "selection_bias", None)
    if not isinstance(bias, Tensor):  # a user's module may use the name for something else
        return None
    if bias.dtype != torch.float32:
        outlives_mode = not torch.compiler.is_compiling()
        with torch.inference_mode(False) if outlives_mode else contextlib.nullcontext():
            module.selection_bias = bias = bias.float()
    return bias


def selection_bias_of(router: nn.Module) -> Tensor | None:
    """The selection bias of a router or of what it wraps, as LoRA does; None without."""
    for module in router.modules():
        bias = keep_float32(module)
        if bias is not None:
            return bias
    return None


def expected_selection_bias(router: nn.Module, experts: int, w_up: Tensor) -> Tensor:
    """The selection bias of a layer's router, on the device of w_up.

    Raises ValueError if there is none, or it does not fit.
    """
    bias = selection_bias_of(router)
    if bias is None:
        raise ValueError(
            "router.selection_bias: expected a buffer (experts,), as Router(selection_bias=True) "
            f"asks for, got a {type(router).__name__} without one"
        )
    expect_shape("router.selection_bias", bias, (experts,), "(experts,) of the layer")
    expect_device("router.selection_bias", bias, w_up, "w_up")
    return bias
