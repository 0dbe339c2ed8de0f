"""Activations are recognised by their values: each of Guild's is found, and nothing else is."""

from __future__ import annotations

import copy
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune

pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.activations import ACT2FN  # noqa: E402
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts  # noqa: E402

from guild import Activation  # noqa: E402
from guild.integrations.transformers.gate import _known, gate_of  # noqa: E402


class Gated(nn.Module):
    """The part of an experts module that a gate sees."""

    has_gate = True

    def __init__(self, function=None, act_fn=None, **numbers: float) -> None:
        super().__init__()
        self.function = function or (lambda self, h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])
        self.act_fn = act_fn
        for name, number in numbers.items():
            setattr(self, name, number)

    def _apply_gate(self, pre: Tensor) -> Tensor:
        return self.function(self, pre)


class Ungated(nn.Module):
    has_gate = False

    def __init__(self, act_fn) -> None:
        super().__init__()
        self.act_fn = act_fn


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Leaky(nn.Module):
    """A ReLU of a slope that need not be a float."""

    def __init__(self, slope: object) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, float(np.ravel(self.slope)[0]))


def with_act(self: Gated, pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return self.act_fn(gate) * up


@pytest.mark.parametrize("order", ["concatenated", "interleaved"])
@pytest.mark.parametrize(
    "activation",
    [
        *(Activation(kind) for kind in ("silu", "gelu_tanh", "gelu", "relu", "relu2")),
        Activation(alpha=1.702, limit=7.0, up_offset=1.0),
        Activation(limit=0.3),
        Activation(limit=16.0, clamp_after=True),
        Activation("gelu", limit=10.0),
        Activation("relu2", up_offset=-0.5),
        Activation(alpha=1.25, limit=3.1),
    ],
    ids=str,
)
def test_each_of_guilds_is_found(activation: Activation, order: str) -> None:
    def gate(_: Gated, pre: Tensor) -> Tensor:
        g, u = pre.chunk(2, -1) if order == "concatenated" else (pre[..., ::2], pre[..., 1::2])
        u = u.clamp(-activation.limit, activation.limit) + activation.up_offset
        g = g if activation.clamp_after else g.clamp(max=activation.limit)
        act = {
            "silu": lambda x: x * torch.sigmoid(activation.alpha * x),
            "gelu": F.gelu,
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "relu": F.relu,
            "relu2": lambda x: F.relu(x) ** 2,
        }[activation.kind]
        a = act(g).clamp(max=activation.limit) if activation.clamp_after else act(g)
        return a * u

    assert gate_of(Gated(gate)) == (activation, order)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu", Activation()),
        ("swish", Activation()),
        ("gelu", Activation("gelu")),
        ("gelu_pytorch_tanh", Activation("gelu_tanh")),
        ("gelu_new", Activation("gelu_tanh")),
        ("quick_gelu", Activation(alpha=1.702)),
        ("relu", Activation("relu")),
        ("relu2", Activation("relu2")),
        ("gelu_10", None),
        ("mish", None),
        ("relu6", None),
        ("hardswish", None),
        ("leaky_relu", None),
        ("sigmoid", None),
        ("tanh", None),
        ("linear", None),
        ("laplace", None),
        ("prelu", None),
        ("xielu", None),
    ],
)
def test_activations_of_transformers(name: str, activation: Activation | None) -> None:
    gated, ungated = gate_of(Gated(with_act, ACT2FN[name])), gate_of(Ungated(ACT2FN[name]))
    assert (gated and gated.activation) == activation
    if activation is None:
        assert ungated is None
    else:
        assert ungated.activation == Activation(activation.kind, False, activation.alpha)


def test_clamp_after_the_activation() -> None:
    config = SimpleNamespace(
        num_local_experts=2, hidden_size=4, moe_intermediate_size=4, hidden_act="silu"
    )
    experts = Step3p7Experts(config, swiglu_limit=16.0)
    experts.has_gate = True
    assert gate_of(experts).activation == Activation(limit=16.0, clamp_after=True)


@pytest.mark.parametrize("alpha", [1.0, 1.702])
@pytest.mark.parametrize("limit", [7.0, math.inf])
def test_gate_in_float32(alpha: float, limit: float) -> None:
    """Whatever dtype the gate is called with, and whether or not it returns to that dtype."""

    def gate(self: Gated, pre: Tensor) -> Tensor:
        g, u = pre.float().chunk(2, -1)
        g = g.clamp(max=limit)
        return (g * torch.sigmoid(alpha * g) * (u.clamp(-limit, limit) + 1)).to(self.dtype)

    for dtype in (torch.float32, torch.float64):
        gated = Gated(gate, dtype=dtype)
        assert gate_of(gated).activation == Activation(alpha=alpha, limit=limit, up_offset=1.0)


NOT_GUILDS = {
    "up is clamped on one side": lambda _, h: (
        F.silu(h[:, : _half(h)].clamp(max=7)) * h[:, _half(h) :].clamp(max=7)
    ),
    "two limits": lambda _, h: (
        F.silu(h[:, : _half(h)].clamp(max=5)) * h[:, _half(h) :].clamp(-7, 7)
    ),
    "gate and up change places": lambda _, h: F.silu(h[:, _half(h) :]) * h[:, : _half(h)],
    "a scale": lambda _, h: 1.01 * F.silu(h[:, : _half(h)]) * h[:, _half(h) :],
    "a norm over the row": lambda _, h: F.normalize(
        F.silu(h[:, : _half(h)]) * h[:, _half(h) :], dim=-1
    ),
    "another result for large values": lambda _, h: torch.where(
        h[:, : _half(h)] > 50, 0.0, F.silu(h[:, : _half(h)]) * h[:, _half(h) :]
    ),
    "no gradient to the gate": lambda _, h: F.silu(h[:, : _half(h)].detach()) * h[:, _half(h) :],
    "noise": lambda _, h: F.silu(h[:, : _half(h)]) * h[:, _half(h) :] * (1 + torch.rand(len(h), 1)),
    "an error": lambda _, h: h.no_such_method(),
    "zeros": lambda _, h: h[:, : _half(h)] * 0,
}


def _half(pre: Tensor) -> int:
    return pre.shape[-1] // 2


@pytest.mark.parametrize("case", NOT_GUILDS)
def test_nothing_else_is_found(case: str) -> None:
    assert gate_of(Gated(NOT_GUILDS[case])) is None


@pytest.mark.parametrize("start", [torch.ones(()), torch.ones(3)[:, None], torch.zeros(())])
def test_learned_activation_is_not_taken_for_what_it_starts_as(start: Tensor) -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(start)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x) + 0 * self.slope.sum()

    assert gate_of(Gated(with_act, Learned())) is None
    buffered = Gated()
    assert gate_of(buffered) is not None
    buffered = Gated()
    buffered.register_buffer("slope", start)
    assert gate_of(buffered) is None


def test_changes_are_noticed() -> None:
    def limited(self: Gated, pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, -1)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    gated = Gated(limited, limit=7.0)
    other = copy.deepcopy(gated)
    assert gate_of(gated).activation == Activation(limit=7.0)
    gated.limit = 5.0
    assert gate_of(gated).activation == Activation(limit=5.0)
    assert gate_of(other).activation == Activation(limit=7.0)
    swapped = Gated(with_act, nn.SiLU())
    assert gate_of(swapped).activation == Activation()
    swapped.act_fn = nn.ReLU()
    assert gate_of(swapped).activation == Activation("relu")


CHANGES = {
    "number": (nn.LeakyReLU(0.0), lambda act: setattr(act, "negative_slope", 0.5), None),
    "number of NumPy's": (
        Leaky(np.float32(0)),
        lambda act: setattr(act, "slope", np.float32(0.5)),
        None,
    ),
    "tuple": (Leaky((0.0,)), lambda act: setattr(act, "slope", (0.5,)), None),
    "string": (nn.GELU(), lambda act: setattr(act, "approximate", "tanh"), "gelu_tanh"),
    "function": (ACT2FN["gelu"], lambda act: setattr(act, "act", F.relu), "relu"),
    "partial": (
        Called(partial(F.gelu)),
        lambda act: setattr(act, "function", partial(F.gelu, approximate="tanh")),
        "gelu_tanh",
    ),
    "part": (nn.Sequential(nn.SiLU()), lambda act: act.__setitem__(0, nn.ReLU()), "relu"),
    "hook": (nn.SiLU(), lambda act: act.register_forward_hook(lambda *args: args[2] * 2), None),
    "hook before": (
        nn.SiLU(),
        lambda act: act.register_forward_pre_hook(lambda act, args: (args[0] * 2,)),
        None,
    ),
    "hook on gradients": (
        nn.SiLU(),
        lambda act: act.register_full_backward_hook(lambda act, g, _: (g[0] * 2,)),
        None,
    ),
    "hook that only watches": (
        nn.SiLU(),
        lambda act: act.register_forward_hook(lambda *args: None),
        None,
    ),
    "mode": (nn.Sequential(nn.SiLU(), nn.Dropout()).eval(), lambda act: act.train(), None),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", ["act_fn", "act"])
def test_changes_within_the_activation_are_noticed(what: str, name: str) -> None:
    def gate(self: Gated, pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, -1)
        return getattr(self, name)(gate) * up

    act, change, kind = CHANGES[what]
    gated = Gated(gate, **{name: copy.deepcopy(act)})
    assert gate_of(gated) is not None
    change(getattr(gated, name))
    found = gate_of(gated)
    assert (found and found.activation) == (kind and Activation(kind))


def test_methods_of_other_objects_are_told_apart() -> None:
    """Two objects of one class have the same functions; what these read is theirs."""

    class Swish:
        __hash__ = None  # as a dataclass has it

        def __init__(self, alpha: float) -> None:
            self.alpha = alpha

        def __call__(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.alpha * x)

        def method(self, x: Tensor) -> Tensor:
            return self(x)

    experts = Ungated(None)
    for alpha in (1.0, 1.5, 1.0, 2.0):
        experts.act_fn = Swish(alpha).method
        assert gate_of(experts).activation.alpha == alpha
        experts.act_fn = Swish(alpha)
        assert gate_of(experts).activation.alpha == alpha


def test_changes_of_a_class_are_noticed() -> None:
    class Sloped(nn.Module):
        slope = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(x, self.slope)

    gated = Gated(with_act, Sloped())
    assert gate_of(gated).activation == Activation("relu")
    Sloped.slope = 0.5
    assert gate_of(gated) is None
    Sloped.forward = lambda self, x: F.silu(x)
    assert gate_of(gated).activation == Activation()


@pytest.mark.parametrize("limit", [torch.tensor(7.0), np.array(7.0)], ids=["torch", "numpy"])
@pytest.mark.parametrize("where", ["experts", "activation"])
def test_arrays_are_never_taken_for_numbers(where: str, limit: object) -> None:
    """They may be changed in place."""
    gated = Gated(with_act, nn.SiLU())
    assert gate_of(gated) is not None
    other = Gated(with_act, nn.SiLU())
    (other if where == "experts" else other.act_fn).limit = limit
    assert gate_of(other) is None


MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "fake tensors": FakeTensorMode,
}


@pytest.mark.parametrize("mode", MODES)
def test_it_is_found_in_any_mode(mode: str) -> None:
    with MODES[mode]():
        assert gate_of(Gated()).activation == Activation()


def test_it_is_found_under_transforms() -> None:
    def loss(x: Tensor) -> Tensor:
        assert gate_of(Gated()).activation == Activation()
        return x.sum()

    torch.func.grad(loss)(torch.ones(3))


def test_pruned_weights_and_restless_numbers() -> None:
    """Neither hides an activation; answers for numbers of the past are not kept for ever."""
    gated = Gated()
    gated.gate_up_proj = nn.Parameter(torch.ones(2, 3))
    prune.identity(gated, "gate_up_proj")
    assert gate_of(gated).activation == Activation()
    for step in range(40):
        gated.step = float(step)
        assert gate_of(gated).activation == Activation()
    assert len(_known[gated]) <= 16
