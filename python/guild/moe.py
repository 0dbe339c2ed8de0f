"""The Mixture-of-Experts layer as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guild._torch.checks import (
    MOST_EXPERTS,
    expect_choice,
    expect_count,
    expect_device,
    expect_device_option,
    expect_flags,
    expect_float_dtype,
    expect_floating,
    expect_shape,
)
from guild.activations import Activation, as_activation, is_interleaved
from guild.balancing import expected_sums, move_selection_bias
from guild.float8.settings import FP8, expect_fp8
from guild.layer_experts import (
    expect_reachable,
    expect_shareable,
    expert_parameters,
    fill_weight,
    layer_fp8,
    local_parts,
    run_experts,
    run_layer,
    shown_options,
)
from guild.layer_routing import (
    BALANCE_OVER,
    Routing,
    as_router,
    choices,
    expect_call,
    is_exporting,
    is_router_plain,
    is_transformed,
    layer_tokens,
    output_rows,
    router_operands,
    shaped_like,
)
from guild.layer_state import LayerState, expect_not_exporting
from guild.logits import RouterLinear, expected_selection_bias, has_plain_call
from guild.moe_fast_path import quick_output
from guild.routing import Router
from guild.shared_experts import SharedExperts, shared_rows, shared_width
from guild.weight_gradients import WeightGradients, expect_sink

if TYPE_CHECKING:
    from guild.distributed.expert_parallel import ExpertParallel


class MoE(LayerState):
    """Router, experts and, if asked for, shared experts.

    Parameters
    ----------
    hidden, intermediate : int
        Width of the layer and of one expert; multiples of 8 on a GPU, of 16 with fp8.
    experts, top_k : int
        Number of experts, and how many of them each token goes to.
    activation : Activation or str
        Applied between the two projections; see `Activation` for the names.
    bias : bool
        Whether the experts' projections have biases.
    router : Router or str, optional
        Or a name that `Router.named` knows. Default: softmax, renormalised.
    shared_experts : int
        Experts that every token goes through, as a dense MLP shared_experts * intermediate wide.
    balance_over : {None, "batch", "sequence"}
        Whether a forward in training computes `balance_sums`, over all tokens or per sequence (x's
        last dimension but one). Keeps the float32 logits for backward.
    device, dtype : optional
        Of the parameters, as in torch.nn.Linear. With device="meta" nothing is allocated: call
        `to_empty(device=...)` and `reset_parameters()` afterwards.
    order : {"concatenated", "interleaved"}
        Order of gate and up in `w_up`, `b_up` and `shared.w_up`; see `routed_experts`.
    transposed : bool
        `w_up` is (experts, hidden, 2 * intermediate), `w_down` (experts, intermediate, hidden).
    router_bias : bool
        Whether the router's logits have a bias (gpt-oss).
    shared_intermediate : int, optional
        Width of that MLP, instead of `shared_experts`: give only one of the two.
    shared_gate : bool
        Multiply the shared experts' output by one sigmoid per token (Qwen2-MoE, Qwen3-Next).
    recompute : bool
        Keep only the experts' input for backward; see `routed_experts`.
    weight_gradients : WeightGradients, optional
        Where and when the experts' weight gradients are written; all others go through autograd.
    expert_group : ExpertParallel, optional
        Ranks that share the experts: each holds experts / ranks of them in `w_up`, `w_down`, `b_up`
        and `b_down`, and all of the router and the shared experts.
    fp8 : FP8, optional
        Run the experts' products in FP8. The weights are quantised in each forward unless
        `fp8.cached`; router and shared experts do not use FP8. Not with expert_group.

    Attributes
    ----------
    router : torch.nn.Module
        A torch.nn.Linear that returns float32 logits. It may have hooks, parametrisations or a
        bias, or be replaced or wrapped by another module, (tokens, hidden) -> (tokens, experts); it
        is then called, as with `return_routing` and, in training, `balance_over` or rounding.
    router.weight, router.bias : torch.nn.Parameter
        (experts, hidden); (experts,) with `router_bias`.
    router.selection_bias : torch.Tensor
        float32 (experts,), a buffer; with Router(selection_bias=True). Conversions leave it alone.
    w_up, w_down : torch.nn.Parameter
        (experts, 2 * intermediate, hidden), gate first unless `order` says otherwise, or
        (experts, intermediate, hidden) without a gate; (experts, hidden, intermediate).
    b_up, b_down : torch.nn.Parameter or None
        (experts, 2 * intermediate) or (experts, intermediate); (experts, hidden).
    shared.w_up, shared.w_down : torch.nn.Parameter
        (2 * W, hidden) or, without a gate, (W, hidden); (hidden, W). `transposed` does not apply.
        W = shared_experts * intermediate or shared_intermediate.
    shared.gate.weight : torch.nn.Parameter
        (1, hidden), with `shared_gate`.
    balance_sums : BalanceSums or None
        From the last forward in training, with `balance_over`.

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
        order: str = "concatenated",
        transposed: bool = False,
        router_bias: bool = False,
        shared_intermediate: int | None = None,
        shared_gate: bool = False,
        recompute: bool = False,
        weight_gradients: WeightGradients | None = None,
        expert_group: ExpertParallel | None = None,
        fp8: FP8 | None = None,
    ) -> None:
        super().__init__()
        expect_count("hidden", hidden, 1)
        expect_count("intermediate", intermediate, 1)
        expect_count("experts", experts, 1, MOST_EXPERTS)
        expect_count("top_k", top_k, 1, experts)
        shared = shared_width(shared_experts, intermediate, shared_intermediate, shared_gate)
        router = as_router(router, experts, top_k)
        expect_choice("balance_over", balance_over, BALANCE_OVER)
        is_interleaved(order)  # raises unless it is one of the two orders
        expect_flags(bias=bias, transposed=transposed, router_bias=router_bias, recompute=recompute)
        if weight_gradients is not None:
            expect_sink(weight_gradients)
        expect_float_dtype("dtype", dtype)
        expect_device_option("device", device)
        self.hidden, self.intermediate = hidden, intermediate
        self.experts, self.top_k = experts, top_k
        self.activation, self.routing = as_activation(activation), router
        self.order, self.transposed = order, transposed
        self.recompute, self.weight_gradients = recompute, weight_gradients
        expect_fp8(fp8)
        self.fp8 = fp8
        self.share_experts(expert_group)
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        choice = self.routing.selection_bias
        self.router: nn.Module = RouterLinear(hidden, experts, router_bias, choice, **make)
        self.w_up, self.w_down, self.b_up, self.b_down = expert_parameters(self, bias, make)
        self.shared = None
        if shared:
            self.shared = SharedExperts(hidden, shared, self.activation, order, shared_gate, **make)
        self.balance_over = balance_over
        self.reset_parameters()

    def share_experts(self, expert_group: ExpertParallel | None) -> None:
        """Run over the ranks of a group from now on, with the weights of this rank's experts.

        expert_group: None for this rank alone. The caller has replaced the parameters to match.
        Raises TypeError, ValueError or NotImplementedError if the ranks cannot share the experts.
        """
        expect_shareable(expert_group, self.experts, self.fp8)
        self.expert_group = expert_group
        self._number = 0 if expert_group is None else expert_group.new_layer()

    def reset_parameters(self) -> None:
        """Draw weights from a normal distribution of variance 1 / inputs; zero the biases."""
        fill_weight(self.w_up, self.hidden**-0.5, self.expert_group)
        fill_weight(self.w_down, self.intermediate**-0.5, self.expert_group)
        for bias in (self.b_up, self.b_down):
            if bias is not None:
                nn.init.zeros_(bias)
        self.refresh_fp8()
        for module in (self.router, self.shared):
            if hasattr(module, "reset_parameters"):  # a user's router may have none
                module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        *,
        return_routing: bool = False,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Routing]:
        """The layer's output.

        Parameters
        ----------
        x : torch.Tensor
            (..., hidden) in the parameters' dtype, or any but float64 under autocast.
        token_mask : torch.Tensor, optional
            bool (...), x's shape without the last dimension: False marks padding, which goes to no
            expert, is not counted and may hold any values, NaN too. Its output and its gradient are
            zero, whatever the gradient of the output is there.
        return_routing : bool
            Return (out, `Routing`). The float32 logits then take memory.
        out : torch.Tensor, optional
            Tensor to write the result to and return: x's shape, the result's dtype, contiguous; see
            `routed_experts`. Not with experts on other ranks.

        Returns
        -------
        torch.Tensor or (torch.Tensor, Routing)
            Shape of x, in its dtype; the autocast dtype under autocast. With return_routing,
            followed by the routing.

        Raises
        ------
        TypeError, ValueError
            If the shape, dtype or device of x, token_mask or out does not fit, or a router of your
            own returns something other than logits.
        RuntimeError
            With FP8(cached=True), if `guild.refresh_fp8` was forgotten after weights changed.
        """
        if token_mask is None and out is None and return_routing is False:
            found = quick_output(self, x)
            if found is not None:
                out, self.__dict__["_offsets"] = found  # Module.__setattr__ is slow
                return out
        expect_call(self, return_routing)
        weights = local_parts(self.expert_group, self.w_up, self.w_down, self.b_up, self.b_down)
        flat, token_mask = layer_tokens(x, token_mask, self.hidden, weights[0])
        into = None if out is None else output_rows(out, x, self)
        shared = shared_rows(self.shared, flat, token_mask)
        expect_reachable(self.expert_group, into, self.fp8)
        fp8 = layer_fp8(self)
        apart = self.fp8 is not None and not (self.weight_gradients is into is None)
        if self._routes_in_one() and not return_routing and not apart:
            flat, *router = router_operands(flat, self.router, self.experts)
            rows, offsets = run_layer(
                self, weights, flat, *router, self._selection_bias(), token_mask, shared, into, fp8
            )
            self._keep_offsets(offsets)
            return shaped_like(rows, x) if out is None else out
        logits = None
        if return_routing or self._keeps_logits() or not is_router_plain(self):
            logits = self._logits(flat)
        ids, scores, token_offsets = self._route(flat, logits, token_mask, x.shape[:-1])
        rows, offsets = run_experts(
            self, weights, flat, ids, scores, token_offsets, shared, into, fp8
        )
        self._keep_offsets(offsets)
        out = shaped_like(rows, x) if out is None else out
        if not return_routing:
            return out
        if token_offsets is None:
            ids, scores = (t.view(*x.shape[:-1], self.top_k) for t in (ids, scores))
        if token_mask is not None:  # zero at padding, and so are gradients that come in there
            logits = logits.masked_fill(~token_mask[:, None], 0)
        return out, Routing(ids, scores, logits.view(*x.shape[:-1], self.experts), token_offsets)

    def _keeps_logits(self) -> bool:
        """Whether balancing or rounding needs the router's logits."""
        return self.training and not (self.balance_over is self.routing.rounding is None)

    def _routes_in_one(self) -> bool:
        """Whether router and experts can be one op: nothing else needs the routing in between."""
        return self._uses_only_the_choice() and is_router_plain(self)

    def _uses_only_the_choice(self) -> bool:
        """Whether nothing but ids and scores of the experts' outputs is made of the logits."""
        return self.routing.applied_to == "output" and not self._keeps_logits()

    def _logits(self, x: Tensor) -> Tensor:
        """The router called on x."""
        # Its own errors would name `weight`; but a hook may have yet to supply that, or convert x.
        if type(self.router) is RouterLinear and has_plain_call(self.router):
            router_operands(x, self.router, self.experts)
        logits = self.router(x)
        expect_shape("router: logits", logits, (x.shape[0], self.experts), "(tokens, experts)")
        expect_floating("router: logits", logits)
        expect_device("router: logits", logits, x)
        return logits

    def _selection_bias(self) -> Tensor | None:
        if not self.routing.selection_bias:
            return None
        return expected_selection_bias(self.router, self.experts, self.w_up)

    def _route(
        self, x: Tensor, logits: Tensor | None, token_mask: Tensor | None, shape: torch.Size
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return choices(self, x, logits, self._selection_bias(), token_mask, shape)

    def _keep_offsets(self, offsets: Tensor) -> None:
        if not is_exporting():  # an exported graph keeps nothing
            self._offsets = None if is_transformed() else offsets

    @property
    def load_balancing_loss(self) -> Tensor:
        """`BalanceSums.load_balancing_loss` of the last forward in training.

        Raises
        ------
        AttributeError
            Without `balance_over`, or before a forward in training mode.
        """
        return expected_sums(self).load_balancing_loss()

    @property
    def z_loss(self) -> Tensor:
        """`BalanceSums.z_loss` of the last forward in training.

        Raises
        ------
        AttributeError
            Without `balance_over`, or before a forward in training mode.
        """
        return expected_sums(self).z_loss()

    def __getattr__(self, name: str) -> Any:
        if name in ("load_balancing_loss", "z_loss") and self._balance_sums is None:
            expected_sums(self)  # raises with a message that torch.nn.Module's would hide
        return super().__getattr__(name)

    @property
    def expert_counts(self) -> Tensor | None:
        """int32 (experts,), on the layer's device: rows of each expert in the last forward.

        With an expert_group: rows of this rank's tokens, for the experts of all ranks. None before
        the first forward, and after one inside torch.func.grad or vmap.
        """
        expect_not_exporting("expert_counts", "the counts of return_routing's ids")
        return None if self._offsets is None else self._offsets.diff()

    @torch.no_grad()
    def balance(
        self,
        rate: float = 1e-3,
        group: dist.ProcessGroup | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """Move the selection bias against the experts' load, without host waits.

        Experts with more rows than the mean lose `rate`, those with fewer gain it
        (arXiv:2408.15664). Call it once per step, after backward, on every rank of the group: the
        load is summed over them on the device, so that their biases stay equal.

        Parameters
        ----------
        rate : float
            Step of the bias, in units of the router's p.
        group : torch.distributed.ProcessGroup, optional
            The ranks that have this layer, under pipeline parallelism for instance. Default: all.
        counts : torch.Tensor, optional
            int32 or int64 (experts,): the load; after several forwards, the sum of their
            `expert_counts`. Default: those of the last forward.

        Raises
        ------
        RuntimeError, TypeError, ValueError
            If there is no selection bias or no load, or an argument is not as described.
        """
        if not self.routing.selection_bias:
            raise RuntimeError("router: expected Router(selection_bias=True), got one without")
        counts = self.expert_counts if counts is None else counts
        if counts is None:
            raise RuntimeError("balance: expected a forward pass first, got none")
        move_selection_bias(self._selection_bias(), counts, rate, group)

    def extra_repr(self) -> str:
        """The sizes, and options that are not the default, for print(module)."""
        return ", ".join(f"{name}={value}" for name, value in shown_options(self).items())
