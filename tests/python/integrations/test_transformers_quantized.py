"""Weights of tensor subclasses, as of torchao's quantisation: left to Transformers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

pytest.importorskip("transformers", reason="Transformers is not installed")

import guild.integrations.transformers as guild_transformers  # noqa: E402
from calls import FAMILIES, both, error, expect_same, inputs  # noqa: E402
from families import make_experts  # noqa: E402
from test_transformers_block_options import block_pair, random_tokens  # noqa: E402


class Halves(Tensor):
    """A weight kept as its half, which ATen's ops know and no others."""

    @staticmethod
    def __new__(cls, half: Tensor) -> Halves:
        return Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half: Tensor) -> None:
        self.half = half

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op.namespace != "aten":
            raise NotImplementedError(op)
        if op is torch.ops.aten.detach.default:
            return cls(args[0].half)
        args, kwargs = tree_map_only(cls, lambda t: t.half * 2, (args, kwargs or {}))
        return op(*args, **kwargs)


def halve(module: nn.Module) -> nn.Module:
    """The module with its own weights kept in that way."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(Halves(parameter.detach() / 2), requires_grad=False))
    return module


@pytest.mark.parametrize("name", ["guild", "grouped_mm"])
def test_experts(name: str) -> None:
    torch.manual_seed(0)
    experts, call = make_experts(FAMILIES[0]), inputs()
    experts.config._experts_implementation = "grouped_mm"
    expected = halve(experts)(*call)
    experts.config._experts_implementation = name
    words = "leaves MixtralExperts to Transformers: its weights are of class Halves"
    with guild_transformers.enabled(), pytest.warns(UserWarning, match=words):
        assert error(experts(*call), expected) < 1e-6


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "guild"])
@pytest.mark.parametrize("part", ["router", "experts"])
@pytest.mark.parametrize("name", ["Qwen3MoeConfig", "DeepseekV3Config", "Llama4TextConfig"])
def test_replaced_blocks(name: str, part: str, implementation: str) -> None:
    """With a warning for experts, which otherwise run in Guild's kernels."""
    own, ours = block_pair(name)
    x = random_tokens()
    for block in (own, ours):
        halve(getattr(block, part, None) or block.gate)
    expected = own(x)
    if hasattr(ours.experts, "config"):
        ours.experts.config._experts_implementation = implementation
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = ours(x)
    if name == "Llama4TextConfig":
        found, expected = found[0], expected[0]
    assert error(found, expected) < 1e-5
    assert ["of class Halves" in str(s.message) for s in said] == [True] * (part == "experts")


def test_parameters_of_derived_classes_are_read_in_place() -> None:
    class Named(nn.Parameter):
        """With no operations of its own."""

    experts, call = make_experts(FAMILIES[0]), inputs()
    experts.down_proj = Named(experts.down_proj.detach())
    assert type(experts.down_proj) is Named
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect_same(*both(experts, *call))
