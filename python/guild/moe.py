"""The Mixture-of-Experts layer as a module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guild._checks import (
    FLOATS,
    dtype_name,
    expect_choice,
    expect_count,
    expect_shape,
    expect_tensor,
)
from guild._operators import autocast, ops
from guild.activations import Activation, as_activation
from guild.balancing import BalanceSums, balance_sums
from guild.experts import experts_mlp, routed_experts_and_offsets, routed_layer
from guild.rounding import round_tokens
from guild.routing import Router, route_logits, route_tokens
from guild.weight_gradients import WeightGradients

_router_logits = ops.router_logits.default
_BALANCE_OVER = (None, "batch", "sequence")


class MoE(nn.Module):
    """Router, experts and, if asked for, shared experts.

    Parameters
    ----------
    hidden, intermediate : int
        Width of the layer and of one expert. On a GPU multiples of 8.
    experts, top_k : int
        Experts of the layer and of a token.
    activation : Activation or str
        Between the projections; see `Activation` for the names.
    bias : bool
        Whether the experts' projections have biases.
    router : Router or str, optional
        How logits become ids and weights, or a name that `Router.named` knows; softmax,
        renormalised, unless said otherwise.
    shared_experts : int
        Experts that every token goes through, as one dense MLP of shared_experts * intermediate.
    balance_over : {None, "batch", "sequence"}
        Whether training forwards leave `balance_sums`, of all tokens or of each sequence (x's last
        dimension but one), for the losses below. Costs the float32 logits, kept for backward.
    device, dtype : optional
        Of the parameters, as in torch.nn.Linear. With device="meta" nothing is allocated: follow
        with `to_empty(device=...)` and `reset_parameters()`.
    recompute : bool
        Keep nothing of the experts but their input for backward; see `routed_experts`.
    weight_gradients : WeightGradients, optional
        Where the experts' weight gradients go, and when; the router's and the shared experts' are
        autograd's all the same.

    Attributes
    ----------
    router.weight : torch.nn.Parameter
        (experts, hidden).
    router.selection_bias : torch.Tensor
        float32 (experts,), a buffer; with Router(selection_bias=True).
    w_up, w_down : torch.nn.Parameter
        (experts, 2 * intermediate, hidden), gate above up, or (experts, intermediate, hidden)
        without a gate; (experts, hidden, intermediate).
    b_up, b_down : torch.nn.Parameter or None
        (experts, 2 * intermediate) or (experts, intermediate); (experts, hidden).
    shared.w_up, shared.w_down : torch.nn.Parameter
        (2 * shared_experts * intermediate, hidden), (hidden, shared_experts * intermediate).
    balance_sums : BalanceSums or None
        Of the last forward in training, with `balance_over`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        activation: Activation | str = "silu",
        bias: bool = False,
        router: Router | str | None = None,
        shared_experts: int = 0,
        balance_over: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: bool = False,
        weight_gradients: WeightGradients | None = None,
    ) -> None:
        super().__init__()
        expect_count("hidden", hidden, 1)
        expect_count("intermediate", intermediate, 1)
        expect_count("experts", experts, 1)
        expect_count("top_k", top_k, 1, experts)
        expect_count("shared_experts", shared_experts, 0)
        if isinstance(router, str):
            router = Router.named(router)
        if not isinstance(router, Router | None):
            raise TypeError(f"router: expected a guild.Router or a name, got {router!r}")
        (router or Router()).expect_sizes(experts, top_k)
        expect_choice("balance_over", balance_over, _BALANCE_OVER)
        if dtype is not None and dtype not in FLOATS:
            raise TypeError(f"dtype: expected a floating dtype, got {dtype_name(dtype)}")
        self.hidden, self.intermediate = hidden, intermediate
        self.experts, self.top_k = experts, top_k
        self.activation = as_activation(activation)
        self.routing = router or Router()
        self.recompute, self.weight_gradients = recompute, weight_gradients
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        width = self.activation.width(intermediate)
        self.router = nn.Linear(hidden, experts, bias=False, **make)
        if self.routing.selection_bias:
            bias_of_choice = torch.zeros(experts, device=device, dtype=torch.float32)
            self.router.register_buffer("selection_bias", bias_of_choice)
        self.w_up = nn.Parameter(torch.empty(experts, width, hidden, **make))
        self.w_down = nn.Parameter(torch.empty(experts, hidden, intermediate, **make))
        self.b_up = nn.Parameter(torch.empty(experts, width, **make)) if bias else None
        self.b_down = nn.Parameter(torch.empty(experts, hidden, **make)) if bias else None
        self.shared = None
        if shared_experts:
            self.shared = DenseMLP(hidden, shared_experts * intermediate, self.activation, **make)
        self.balance_over = balance_over
        self.balance_sums: BalanceSums | None = None
        self._offsets: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of variance 1 / inputs; zero biases."""
        for weight in (self.router.weight, self.w_up, self.w_down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        biases = (self.b_up, self.b_down, getattr(self.router, "selection_bias", None))
        for bias in biases:
            if bias is not None:
                nn.init.zeros_(bias)
        if self.shared is not None:
            self.shared.reset_parameters()

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """The layer's output.

        Parameters
        ----------
        x : torch.Tensor
            (..., hidden) in the parameters' dtype, or any under autocast.
        token_mask : torch.Tensor, optional
            bool (...), x's shape without the last dimension: False marks padding, which goes to no
            expert and counts nowhere. Its output is zero, or the shared experts'.

        Returns
        -------
        torch.Tensor
            Shape of x, in its dtype; the autocast dtype under autocast.

        Raises
        ------
        TypeError, ValueError
            If the shape, dtype or device of x or token_mask does not fit.
        """
        expect_tensor("x", x)
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ValueError(
                f"x: expected shape (..., {self.hidden}) (hidden), got {tuple(x.shape)}"
            )
        if token_mask is not None:
            expect_shape("token_mask", token_mask, tuple(x.shape[:-1]))
            token_mask = token_mask.reshape(-1)
        flat, weight = autocast(x.reshape(-1, self.hidden), self.router.weight)
        shared = None if self.shared is None else self.shared(flat)
        weights = self.w_up, self.w_down, self.b_up, self.b_down, self.activation
        if self._routes_in_one():
            bias = getattr(self.router, "selection_bias", None)
            router = self.top_k, self.routing, bias, token_mask
            later = self.recompute, self.weight_gradients
            out, offsets = routed_layer(flat, weight, *router, *weights, shared, *later)
        else:
            ids, scores, token_offsets = self._route(flat, weight, token_mask, x.shape[:-1])
            if self.routing.applied_to == "input":
                flat, scores = (flat * scores).to(flat.dtype), torch.ones_like(scores)
            out, offsets = routed_experts_and_offsets(
                flat,
                ids,
                scores,
                *weights,
                "concatenated",
                False,
                token_offsets,
                shared,
                self.recompute,
                self.weight_gradients,
            )
        if not torch.compiler.is_exporting():  # an exported graph keeps nothing
            self._offsets = offsets
        return out.view(x.shape)

    def _keeps_logits(self) -> bool:
        """Whether balancing or rounding needs the router's logits."""
        return self.training and (
            self.balance_over is not None or self.routing.rounding is not None
        )

    def _routes_in_one(self) -> bool:
        """Whether router and experts can be one op: nobody else needs what is between them."""
        return self.routing.applied_to == "output" and not self._keeps_logits()

    def _route(
        self, x: Tensor, weight: Tensor, token_mask: Tensor | None, shape: torch.Size
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids and scores of x, and token_offsets of lists; notes what balancing needs.

        shape: of the tokens.
        """
        bias = getattr(self.router, "selection_bias", None)
        router, over = self.routing, self.balance_over
        if not self._keeps_logits():
            return *route_tokens(x, weight, self.top_k, router, bias, token_mask), None
        logits = router_logits(x, weight)
        ids, scores = route_logits(logits, self.top_k, router, bias, token_mask)
        if over is not None:
            sequences = shape[:-1].numel() if over == "sequence" and x.shape[0] else 1
            sums = balance_sums(
                logits, ids, score=router.score, sequences=sequences, token_mask=token_mask
            )
            if not torch.compiler.is_exporting():
                self.balance_sums = sums
        if router.rounding is None:
            return ids, scores, None
        return round_tokens(
            logits,
            ids,
            rounding=router.rounding,
            tile=router.tile,
            score=router.score,
            renormalize=router.renormalize,
            scale=router.scale,
            sum_floor=router.sum_floor,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to the last forward, so that copies and pickles work after one."""
        return {**super().__getstate__(), "balance_sums": None}

    @property
    def load_balancing_loss(self) -> Tensor:
        """Of the last forward in training; `BalanceSums.load_balancing_loss`."""
        return self._kept_sums().load_balancing_loss()

    @property
    def z_loss(self) -> Tensor:
        """Of the last forward in training; `BalanceSums.z_loss`."""
        return self._kept_sums().z_loss()

    def _kept_sums(self) -> BalanceSums:
        if self.balance_sums is None:
            raise RuntimeError(
                'balance_over: expected MoE(balance_over="batch" or "sequence") and a forward in '
                f"training, got {self.balance_over!r} or none"
            )
        return self.balance_sums

    @property
    def expert_counts(self) -> Tensor | None:
        """int32 (experts,): rows of each expert in the last forward, on its device; None before."""
        return None if self._offsets is None else self._offsets.diff()

    @torch.no_grad()
    def balance(self, rate: float = 1e-3) -> None:
        """Move the selection bias against the load of the last forward, without a host wait.

        Experts with more rows than the mean lose `rate`, those with fewer gain it
        (arXiv:2408.15664). Call it once a step, after backward.

        Parameters
        ----------
        rate : float
            Step of the bias, in units of the router's p.

        Raises
        ------
        RuntimeError
            If the router has no selection bias, or there was no forward yet.
        """
        bias, counts = getattr(self.router, "selection_bias", None), self.expert_counts
        if bias is None:
            raise RuntimeError("router: expected Router(selection_bias=True), got one without")
        if counts is None:
            raise RuntimeError("balance: expected a forward before it, got none")
        load = counts.float()
        bias += rate * torch.sign(load.mean() - load)

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, experts={self.experts}, "
            f"top_k={self.top_k}, activation={self.activation}, bias={self.b_up is not None}"
        )


class DenseMLP(nn.Module):
    """The shared experts: one MLP that every token goes through.

    Parameters
    ----------
    hidden, intermediate : int
        Its widths.
    activation : Activation
        Between the projections.
    device, dtype : optional
        Of the parameters.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: Activation,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        width = activation.width(intermediate)
        self.w_up = nn.Parameter(torch.empty(width, hidden, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(hidden, intermediate, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of variance 1 / inputs."""
        for weight in (self.w_up, self.w_down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x (tokens, hidden) -> the same shape: one expert that gets every row."""
        ends = torch.arange(2, device=x.device, dtype=torch.int32) * x.shape[0]
        return experts_mlp(x, ends, self.w_up[None], self.w_down[None], activation=self.activation)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Logits x weight^T in float32 (float64 in float64), whatever the operands' dtype.

    Parameters
    ----------
    x, weight : torch.Tensor
        (tokens, hidden) and (experts, hidden).

    Returns
    -------
    torch.Tensor
        (tokens, experts): products of 16-bit operands are summed and returned in float32.

    Raises
    ------
    TypeError
        If the dtypes differ.
    """
    if x.dtype != weight.dtype:
        raise TypeError(
            f"x: expected dtype {dtype_name(weight.dtype)} as router.weight has, got "
            f"{dtype_name(x.dtype)}"
        )
    if x.dtype in (torch.float32, torch.float64):
        return F.linear(x, weight)
    return _router_logits(x, weight)
