"""What replaced blocks and routers compute: the model's own layer, in fewer passes over memory.

Parts with hooks, adapters or another forward are called as modules; the others run inside the
block's ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guild import routed_experts
from guild.experts import routed_layer
from guild.integrations.transformers.block_families import BlockFamily, Chosen, lacks_experts
from guild.integrations.transformers.experts import (
    COMPILES,
    MOST_EXPERTS,
    experts_forward,
    has_autocast,
    is_plain,
    known_gate,
    left_to,
    misaligned,
    missing_kernels,
    of_other_classes,
    weights_of,
    why_not,
)
from guild.integrations.transformers.messages import say_left
from guild.logits import has_plain_call
from guild.routed_call import RoutedArguments

Forward = Callable[..., Tensor | tuple[Tensor, ...]]


def is_untouched(module: nn.Module, own: type[nn.Module]) -> bool:
    """Whether a call would run the forward of that class and nothing else."""
    return type(module) is own and has_plain_call(module)


def router_forward(family: BlockFamily, original: type[nn.Module]) -> Forward:
    """The router's forward when called by itself: logits, scores and ids as the model's own."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Chosen:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if not _routes(family, self, x):
            return original.forward(self, hidden_states)
        logits, scores, ids = family.choose(self, x)
        return logits, scores, ids.long()

    return forward


def block_forward(
    family: BlockFamily, router_class: type[nn.Module], experts_class: type[nn.Module]
) -> Forward:
    """The forward of a block whose experts follow the interface; the classes are its parts'."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        _add_noise(self, hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        given = x if family.flattens else hidden_states
        router, experts = getattr(self, family.router_name), self.experts
        fused = is_untouched(experts, experts_class)
        routes = is_untouched(router, router_class) and _routes(family, router, x)
        # In the model's order, for modules that draw random numbers.
        first = _output_of(getattr(self, "shared_expert", None), given)
        chosen = None if routes else router(given)
        shared = _shared_output(self, given, first)
        out = _in_one(family, router, experts, x, shared) if fused and routes else None
        scores = None
        if out is None:
            _, scores, ids = family.choose(router, x) if chosen is None else chosen
            if fused:
                out = experts_forward(experts, x, ids, scores, shared)
            else:
                out = experts(x, ids.long(), scores)
                out = out if shared is None else out + shared
        out = out.view(hidden_states.shape)
        return (out, scores) if family.returns_scores else out

    return forward


def llama4_forward(family: BlockFamily, original: type[nn.Module]) -> Forward:
    """The forward of Llama 4's block, whose scores multiply what goes into the experts.

    The model's own computes all experts for all tokens, with zeros where an expert was not chosen.
    It runs where the router or the experts have hooks, adapters or another forward.
    """
    classes = family.classes()

    def forward(self: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        router, experts = self.router, self.experts
        untouched = is_untouched(router, classes["router"])
        activation = _llama4_activation(experts, classes["experts"], x) if untouched else None
        if activation is None or not _routes(family, router, x):
            return original.forward(self, hidden_states)
        logits, scores, ids = family.choose(router, x)
        top_k = ids.shape[1]
        rows = (x[:, None] * scores[..., None]).view(-1, x.shape[1]).to(experts.down_proj.dtype)
        shared = self.shared_expert(x)
        inside = top_k == 1 and shared.dtype == rows.dtype and not has_autocast(x)
        out = routed_experts(
            rows,
            ids.view(-1, 1),
            torch.ones_like(scores).view(-1, 1),
            experts.gate_up_proj,
            experts.down_proj,
            activation=activation,
            transposed=True,
            residual=shared if inside else None,
        )
        if not inside:
            routed = out.view(-1, top_k, x.shape[1]).sum(1)  # in float32 under autocast on a GPU
            out = (shared + routed).to(shared.dtype)
        return out, logits

    return forward


def _routes(family: BlockFamily, router: nn.Module, x: Tensor) -> bool:
    """Whether Guild routes these tokens as the model would."""
    device = x.device.type
    if lacks_experts(router) or device not in MOST_EXPERTS:
        return False
    if router.weight.shape[0] > MOST_EXPERTS[device]:
        return False
    if hasattr(router.weight, "to_local"):  # a DTensor
        return False
    # One op reads the weight, and autocast rounds logits that should be float32.
    if family.in_one and (not is_plain(router.weight) or has_autocast(x)):
        return False
    if torch.compiler.is_compiling() and not COMPILES:
        return False
    return device == "cpu" or (x.dtype != torch.float64 and not missing_kernels(x.device.index))


def _in_one(
    family: BlockFamily, router: nn.Module, experts: nn.Module, x: Tensor, shared: Tensor | None
) -> Tensor | None:
    """Router and experts as one op; None where that would not compute what the model does."""
    if family.in_one is None or x.dtype == torch.float64:
        return None
    weights = w_up, w_down, b_up, b_down = weights_of(experts)
    dtypes = {t.dtype for t in (x, router.weight, shared, *weights) if t is not None}
    if len(dtypes) > 1 or w_down.shape[0] != router.weight.shape[0]:
        return None
    if misaligned(x, router.weight, w_down) or left_to(experts, x, w_up, w_down) is not None:
        return None
    gate = known_gate(experts)
    if gate is None:
        return None
    activation, order = gate
    given = RoutedArguments(
        x=x.contiguous(),
        topk_ids=None,
        topk_weights=None,
        w_up=w_up,
        w_down=w_down,
        b_up=b_up,
        b_down=b_down,
        activation=activation,
        order=order,
        transposed=experts.is_transposed,
        residual=shared,
    )
    options = router.top_k, family.in_one(router), router.e_score_correction_bias, None
    return routed_layer(given, router.weight, None, *options)[0]


def _output_of(module: nn.Module | None, x: Tensor) -> Tensor | None:
    return None if module is None else module(x)


def _shared_output(block: nn.Module, x: Tensor, first: Tensor | None) -> Tensor | None:
    """The output (T, hidden) of the experts that every token goes through; None without them.

    first: that of the module `shared_expert`, which blocks call before the router.
    """
    out = _output_of(getattr(block, "shared_experts", None), x) if first is None else first
    if out is None:
        return None
    gate = getattr(block, "shared_expert_gate", None)
    if gate is not None:
        out = F.sigmoid(gate(x)) * out
    if getattr(out, "shape", None) != x.shape:  # the model's addition broadcasts it
        out = torch.zeros_like(x) + out
    return out.reshape(-1, out.shape[-1]).contiguous()


def _add_noise(block: nn.Module, x: Tensor) -> None:
    """Mixtral's jitter, in place as in the model, and with the same random numbers.

    MiniMax adds this tensor to the block's output.
    """
    noise = getattr(block, "jitter_noise", 0.0)
    if block.training and noise > 0:
        x *= torch.empty_like(x).uniform_(1.0 - noise, 1.0 + noise)


def _llama4_activation(experts: nn.Module, own: type[nn.Module], x: Tensor) -> str | None:
    """The activation between these experts' products; None if Guild does not compute it."""
    if torch.compiler.is_compiling() and not COMPILES:
        return None
    if not is_untouched(experts, own) or hasattr(experts.gate_up_proj, "to_local"):
        return None
    w_up, w_down = experts.gate_up_proj, experts.down_proj
    reason = of_other_classes(w_up, w_down) or why_not(x, w_up, w_down)
    reason = reason or misaligned(x, w_up, w_down)
    if reason:
        say_left(type(experts).__name__, "the model", reason)
        return None
    gate = known_gate(experts)
    if gate is None or gate[1] != "concatenated":
        reason = "it does not know its activation, or there are hooks on it"
        say_left(type(experts).__name__, "the model", reason)
        return None
    return gate[0]
