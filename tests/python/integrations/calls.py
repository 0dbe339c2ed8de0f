"""Calls of experts modules with either implementation, and how far their results differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import guild.integrations.transformers as guild_transformers
from families import EXPERTS, HIDDEN, Family

guild_transformers.register()

# One of each layout.
FAMILIES = [
    Family("mixtral", "MixtralExperts"),
    Family("gpt_oss", "GptOssExperts"),
    Family("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
    Family("nemotron_h", "NemotronHExperts"),
]
layouts = pytest.mark.parametrize("family", FAMILIES, ids=str)
not_fused = pytest.mark.filterwarnings("ignore:Guild does not know the activation")


def routing(tokens: int, top_k: int = 2, experts: int = EXPERTS) -> tuple[Tensor, Tensor]:
    """Distinct experts of each token, and weights that sum to one."""
    order = torch.rand(tokens, experts).argsort(-1)
    return order[:, :top_k], torch.rand(tokens, top_k).softmax(-1)


def results(
    name: str, experts: nn.Module, x: Tensor, ids: Tensor, scores: Tensor
) -> dict[str, Tensor]:
    """Output and all gradients with the implementation of that name."""
    experts.config._experts_implementation = name
    experts.zero_grad()
    x, scores = (t.detach().clone().requires_grad_() for t in (x, scores))
    out = experts(x, ids, scores)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
    (out * weight).sum().backward()
    trained = [(key, p) for key, p in experts.named_parameters() if p.grad is not None]
    gradients = {f"d {key}": parameter.grad.clone() for key, parameter in trained}
    return {"out": out.detach(), "d x": x.grad, "d scores": scores.grad, **gradients}


def both(*call: nn.Module | Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results of the model's own loop, and Guild's."""
    return results("eager", *call), results("guild", *call)


def error(a: Tensor, b: Tensor) -> float:
    """Relative error of a against b, over all elements."""
    assert a.shape == b.shape and a.dtype == b.dtype
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def inputs(tokens: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, HIDDEN), *routing(tokens)


def expect_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert error(ours[name], theirs[name]) < limit, name


def odd_gate(experts: nn.Module) -> nn.Module:
    """The same experts with a gate that Guild does not know."""
    odd = type("Odd" + type(experts).__name__, (type(experts),), {})
    if experts.has_gate:
        known = type(experts)._apply_gate
        odd._apply_gate = lambda self, pre: torch.sin(known(self, pre))
        odd.forward = loop_over_experts
    else:
        experts.act_fn = nn.Mish()
    experts.__class__ = odd
    return experts


def loop_over_experts(self: nn.Module, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """Transformers' loop over these experts, with any gate."""
    name = self.config._experts_implementation
    if name != "eager":
        return ALL_EXPERTS_FUNCTIONS[name](self, x, ids, scores)
    out = torch.zeros_like(x)
    for e in range(self.num_experts):
        token, k = torch.where(ids == e)
        w_up, w_down = self.gate_up_proj[e], self.down_proj[e]
        if not self.is_transposed:
            w_up, w_down = w_up.T, w_down.T
        pre = x[token] @ w_up
        pre = pre + self.gate_up_proj_bias[e] if self.has_bias else pre
        y = self._apply_gate(pre) @ w_down
        y = y + self.down_proj_bias[e] if self.has_bias else y
        out = out.index_add(0, token, y * scores[token, k, None])
    return out
