"""Which of Guild's activations a model's experts compute, found by running their gate.

The gate is called with float64 numbers at which its parameters can be read off

    gate(g, u) = act(min(g, limit)) * (clamp(u, -limit, limit) + up_offset)

and is identified only if values and gradients agree with `guild.Activation` on a whole grid. Names
of classes, functions or config entries are not used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from guild import Activation

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "up_proj_bias", "down_proj_bias")

_PLAIN = (bool, int, float, str, type(None))
_COMPARED = (*_PLAIN, np.generic, tuple)
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType, partial)
_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_KINDS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")
_SMALL = 0.125  # below any clamp in use
_LARGE = 1e6  # above any
_REMEMBERED = 16  # answers for one module
_EXACT, _SINGLE = 1e-12, 1e-6  # relative errors of gates computed in float64, and in float32

GateFunction = Callable[[Tensor], Tensor]


class Gate(NamedTuple):
    """The function between the two products."""

    activation: Activation
    order: str  # of gate and up in the up projection's outputs


# Keyed by what the answer depends on: a gate may change in training, or its limit may be set.
_known: WeakKeyDictionary[nn.Module, dict[tuple, Gate | None]] = WeakKeyDictionary()


def gate_of(experts: nn.Module) -> Gate | None:
    """The gate of experts that follow Transformers' interface; None if Guild has none like it."""
    of_module = _known.setdefault(experts, {})
    parts = _activations(experts)
    state = _functions(experts, parts), facts_of(experts, parts)
    if state not in of_module:
        # A new thread is free of the caller's state: autocast, inference mode, a default device,
        # tracing with fake tensors, torch.func's transforms.
        if len(of_module) >= _REMEMBERED:  # some number of the module changes all the time
            of_module.clear()
        with ThreadPoolExecutor(max_workers=1) as thread:
            of_module[state] = thread.submit(_recognise, experts).result()
    return of_module[state]


def gate_function(experts: nn.Module) -> GateFunction:
    """The module's own function between the two products."""
    if not _has_gate(experts):
        return experts.act_fn
    return getattr(experts, "_apply_gate", None) or partial(_gated, experts.act_fn)


def _has_gate(experts: nn.Module) -> bool:
    """Whether they have a gate; experts of classes without the interface, such as Llama 4's, do."""
    return getattr(experts, "has_gate", True)


def _gated(act: GateFunction, pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return act(gate) * up


def facts_of(experts: nn.Module, parts: list[nn.Module] | None = None) -> tuple:
    """Plain attributes and hooks that the gate may depend on. torch.compile traces this."""
    facts: list[object] = []
    parts = _activations(experts) if parts is None else parts
    for module in (experts, *parts):
        for name, value in _attributes(module):
            if isinstance(value, _COMPARED):
                facts.append((name, _fact(value)))
    for part in parts:
        facts += _hooks(part)
    return tuple(facts)


def _attributes(module: nn.Module) -> list[tuple[str, object]]:
    """What the module and its classes define, besides what every module has."""
    named = list(module.__dict__.items())
    for kind in type(module).__mro__:
        if kind is not nn.Module and kind is not object:
            named += kind.__dict__.items()
    return [(name, value) for name, value in named if name not in _OF_ANY_MODULE]


def _fact(value: object) -> object:
    """A plain value, or a tuple of them, for comparison; None for anything else.

    A float is taken as a string, since torch.compile takes one that changes for a variable.
    """
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return tuple([_fact(part) for part in value])
    return repr(value) if isinstance(value, np.generic) else None


def has_numpy_numbers(experts: nn.Module) -> bool:
    """Whether an attribute is one, or a tuple of some: torch.compile takes these for variables."""
    values = [v for m in (experts, *_activations(experts)) for _, v in _attributes(m)]
    parts = itertools.chain(*(v if isinstance(v, tuple) else (v,) for v in values))
    return any(isinstance(part, np.generic) for part in parts)


def _hooks(part: nn.Module) -> list[int]:
    """The ids of all hooks on a module."""
    forward = *part._forward_hooks, *part._forward_pre_hooks
    return [*forward, *part._backward_hooks, *part._backward_pre_hooks]


def _functions(experts: nn.Module, parts: list[nn.Module]) -> tuple:
    """The functions and modules that compute the gate."""
    used = [getattr(experts, "_apply_gate", None), getattr(experts, "act_fn", None), *parts]
    for part in parts:
        used += [value for _, value in _attributes(part) if isinstance(value, _FUNCTIONS)]
    return tuple([_without(experts, value) for value in used])


class _Same(NamedTuple):
    """An object that equals nothing but itself."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _without(experts: nn.Module, value: object) -> object:
    """A function for comparison; methods of the experts are taken without what they belong to."""
    function = getattr(value, "__func__", None)
    if function is None:
        return _Same(value)
    owner = value.__self__
    return function if owner is experts else (function, _Same(owner))


def _activations(experts: nn.Module) -> list[nn.Module]:
    """The modules within the experts, which their activation consists of."""
    found: list[nn.Module] = []
    for name, child in experts._modules.items():
        if child is not None and name != "parametrizations":
            found += child.modules() if child._modules else (child,)  # quicker for one module
    return found


def _recognise(experts: nn.Module) -> Gate | None:
    if _has_other_tensors(experts):  # training them may change what the gate computes
        return None
    if any(map(_hooks, _activations(experts))):  # they are to see what the model computes
        return None
    function = gate_function(experts)
    orders = ("concatenated", "interleaved") if _has_gate(experts) else ("concatenated",)
    gates = [
        Gate(activation, order)
        for order in orders
        for digits in (5, 12)  # for a float32 gate with round parameters, and for other gates
        for activation in _candidates(function, order, _has_gate(experts), digits)
    ]
    for tolerance in (_EXACT, _SINGLE):
        for gate in gates:
            if _agree(function, *gate, tolerance):
                return gate
    return None


def _has_other_tensors(experts: nn.Module) -> bool:
    """Whether there are tensors besides weights and biases, as in a learned activation."""
    own = (*WEIGHTS, *BIASES)
    pruned = [f"{name}_{part}" for name in own for part in ("orig", "mask")]
    known = {*own, *pruned, "parametrizations"}
    tensors = itertools.chain(experts.named_parameters(), experts.named_buffers())
    names = [name.split(".")[0] for name, _ in tensors]
    for module in (experts, *_activations(experts)):
        names += [n for n, value in _attributes(module) if isinstance(value, Tensor | np.ndarray)]
    return any(name not in known for name in names)


def _candidates(
    function: GateFunction, order: str, gated: bool, digits: int
) -> Iterator[Activation]:
    """Activations with the parameters read off at a few points, rounded to so many digits."""

    def at(gate: float, up: float) -> float:
        pair = torch.tensor([[gate, up]] if gated else [[gate]], dtype=torch.float64)
        return _call(function, pair)

    def act(gate: float) -> float:
        return (at(gate, _SMALL) - at(gate, 0.0)) / _SMALL if gated else at(gate, 0.0)

    limit, up_offset = math.inf, 0.0
    unit = act(1.0)
    if not math.isfinite(unit) or unit == 0:
        return
    if gated:
        up_offset = _rounded(at(1.0, 0.0) / unit, digits)
        top = at(1.0, _LARGE) / unit - up_offset
        limit = _rounded(top, digits) if 0 < top < _LARGE / 2 else math.inf
    part = act(_SMALL) / _SMALL  # sigmoid(alpha * _SMALL) if it is SiLU
    if not (math.isfinite(up_offset) and math.isfinite(part)):
        return
    for kind in _KINDS:
        alpha = 1.0
        if kind == "silu":
            if not 0 < part < 1:
                continue
            alpha = _rounded(math.log(part / (1 - part)) / _SMALL, digits)
        for clamp_after in (False, True) if math.isfinite(limit) else (False,):
            yield Activation(kind, gated, alpha, limit, up_offset, clamp_after)


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _call(function: GateFunction, pair: Tensor) -> float:
    try:
        out = function(pair)
    except Exception:  # foreign code, called with arguments it may not expect
        return math.nan
    return out.item() if isinstance(out, Tensor) and out.numel() == 1 else math.nan


def _agree(function: GateFunction, activation: Activation, order: str, tolerance: float) -> bool:
    """Whether values and gradients are those of the activation on a grid of gates and ups."""
    points = _grid(activation.limit)
    gate, up = points[:, None].expand(-1, len(points)), points.expand(len(points), -1)
    size = (1 + gate.abs()) * (1 + up.abs())
    if activation.gated:
        pre, sizes = _paired(gate, up, order), _paired(size, size, order)
    else:
        pre = points[:, None].clone()
        size = sizes = 1 + pre.abs()
    given = pre.clone().requires_grad_()
    try:
        out = function(given)
        if out.shape != activation(pre, order).shape:
            return False
        weight = torch.linspace(0.5, 1.5, out.numel(), dtype=pre.dtype).view_as(out)
        (gradient,) = torch.autograd.grad(out, given, weight)
    except Exception:  # as in _call
        return False
    expected = activation.gradient(pre, weight, order)
    return _close(out, activation(pre, order), size, tolerance) and _close(
        gradient, expected, sizes, tolerance
    )


def _paired(gate: Tensor, up: Tensor, order: str) -> Tensor:
    """Rows in the layout that the up projection returns."""
    if order == "concatenated":
        return torch.cat((gate, up), 1)
    return torch.stack((gate, up), 2).flatten(1)


def _close(found: Tensor, expected: Tensor, size: Tensor, tolerance: float) -> bool:
    """Whether they are equal up to rounding, for numbers of that size."""
    scale = torch.maximum(size, expected.abs())
    return bool(((found - expected).abs() <= tolerance * scale).all())


def _grid(limit: float) -> Tensor:
    """Numbers of all magnitudes, and on both sides of the clamp."""
    points = [torch.linspace(-12.0, 12.0, 48, dtype=torch.float64)]
    ends = torch.tensor([60.0, 1e3, 1e5], dtype=torch.float64)
    points += [ends, -ends]
    if math.isfinite(limit):
        near = torch.tensor([0.5, 0.999, 1.001, 2.0], dtype=torch.float64) * limit
        points += [near, -near]
    return torch.cat(points)
