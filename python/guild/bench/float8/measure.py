"""`guild bench --fp8`: layers in FP8 compared with 16 bits, and the quantisation of their weights.

On a GPU the same layer with PyTorch's FP8 products, one scale per row, is timed beside them.

All are checked first: 16 bits by the usual rule, FP8 by one of its own. Then forward, backward and
both together are timed in the same rounds, the quantisation of the weights and the steps of a layer
in rounds of their own. A layer's own times do not include that quantisation, which a training step
needs once, however many micro-batches it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import guild
from guild.bench.candidates import Layer, module_of
from guild.bench.failures import note_failure, noting
from guild.bench.float8.rowwise import RowwiseLayer, why_not
from guild.bench.float8.rowwise_passes import Passes, torch_passes, torchao_passes
from guild.bench.float8.steps import step_calls
from guild.bench.memory import saved_bytes, saved_tensors
from guild.bench.names import FP8_PASSES
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape
from guild.bench.problem import Problem, make_problems
from guild.bench.record import record_head
from guild.bench.reference import relative_errors, require_right
from guild.bench.timing import free_memory, interleaved, median_ratio, summary_of
from guild.train.failures import is_out_of_memory

RECIPES: dict[str, guild.FP8 | None] = {
    "bf16": None,
    "fp8, 16-bit dW": guild.FP8(scales="power_of_two", cached=True),
    "fp8": guild.FP8(wgrad="fp8", scales="power_of_two", cached=True),
    "fp8, H in fp8": guild.FP8(wgrad="fp8", scales="power_of_two", save="fp8", cached=True),
}
_FASTEST = "fp8"  # of them: what peers are compared with
_WEIGHTS = "weights", "quantised"  # among what is timed
MOST_ERROR = 0.15  # relative, of a result in FP8: 0.04 to 0.09 if nothing is wrong


def most_error(tokens: int) -> float:
    """MOST_ERROR for a number of tokens: of few, errors in the router's gradient do not average."""
    return MOST_ERROR * (1 + 4 / math.sqrt(tokens))


class Float8Layer(Layer):
    """Guild's layer by one of the recipes."""

    def __init__(
        self, name: str, problems: list[Problem], codes_of: Float8Layer | None = None
    ) -> None:
        """codes_of: a layer with the same weights and scales, whose codes are shared.

        Only those of input sets that it has run with.
        """
        self._fp8 = RECIPES[name]
        super().__init__(name, problems)
        for own, other in zip(self._modules, codes_of._modules if codes_of else (), strict=False):
            if other._fp8_weights.codes is not None:
                own._fp8_weights.share(other._fp8_weights, self._fp8)

    def module(self, problem: Problem) -> Callable[[Tensor], Tensor]:
        """As `Layer.module`."""
        return module_of(partial(guild.MoE, fp8=self._fp8), problem)

    def weights(self) -> guild.FP8Weights:
        """Those of the first input set, which its forward has made."""
        return self._modules[0]._fp8_weights.codes

    def owned(self) -> list[Tensor]:
        """Memory that a forward does not keep for backward: parameters and their codes."""
        module = self._modules[0]
        codes = module._fp8_weights.codes
        return [*module.parameters(), *(() if codes is None else codes.codes)]


def measure_float8(plan: BenchPlan, console: Console) -> dict[str, Any]:
    """Check and time every shape and routing of the plan.

    Returns
    -------
    dict
        The record: provenance, and a case for every shape and routing with `errors` and
        `saved_bytes` by recipe and its `figures`: by recipe and pass ("forward", "backward",
        "both") `ms` and `speedup` over 16 bits, and `with_weights`, the speed-up if every
        micro-batch is a step; `weights`, their quantisation; and `steps`, milliseconds by step. A
        layer with PyTorch's products goes by its peer's name, has its own `weights`, and `guild`:
        how many times as fast Guild's FP8 is, for `both` and `with_weights`.
    """
    cases, peers = [], _peers(plan, console)
    for name, shape in plan.shapes.items():
        # Compiled layers of the previous shape would keep its weights in memory.
        torch._dynamo.reset()
        for routing in plan.routings:
            with console.status(f"{name}, {routing} routing"):
                case = {"name": name, "shape": shape._asdict(), "routing": routing}
                case |= {"failures": {}, "errors": {}, "saved_bytes": {}, "figures": {"steps": {}}}
                with noting(case, "inputs", console, is_out_of_memory):
                    _measure_case(case, shape, plan, peers, console)
            cases.append(case)
            free_memory(plan.device)
    return {**record_head(plan), "mode": "fp8", "cases": cases}


def _measure_case(
    case: dict[str, Any],
    shape: Shape,
    plan: BenchPlan,
    peers: dict[str, Passes],
    console: Console,
) -> None:
    problems = make_problems(shape, case["routing"], plan.dtype, plan.device, plan.seed)
    layers = _checked(problems, plan, case, console, peers)
    parts = _quantising(layers)
    if "fp8" in layers:
        steps = step_calls(problems[0], layers["fp8"].weights())
        parts |= {("steps", step): call for step, call in steps.items()}
    amount = plan.rounds, plan.seconds, plan.device, plan.calls
    failed: dict[tuple[str, str], Exception] = {}
    times = interleaved(_passes(layers), *amount, failed) | interleaved(parts, *amount, failed)
    for (name, part), error in failed.items():
        note_failure(case, name if name in layers else f"{name}: {part}", error, console)
    lost = case["failures"].keys()
    case["figures"] = figures({key: t for key, t in times.items() if key[0] not in lost}, shape)


def _peers(plan: BenchPlan, console: Console) -> dict[str, Passes]:
    """The quantisers for PyTorch's products, by candidate; prints what is missing."""
    reason = why_not(plan.device.type, plan.dtype)
    if reason is not None:
        console.print(f"without PyTorch's layers in FP8: {reason}")
        return {}
    found = {"torch rowwise": torch_passes()}
    torchao = torchao_passes()
    if torchao is None:
        console.print("without torchao's quantising kernels: torchao 0.18 is not installed")
        return found
    return {**found, "torchao rowwise": torchao}


def _checked(
    problems: list[Problem],
    plan: BenchPlan,
    case: dict[str, Any],
    console: Console,
    peers: dict[str, Passes],
) -> dict[str, Float8Layer | RowwiseLayer]:
    """The layers that run and are correct; notes errors and failures in the case."""
    layers: dict[str, Float8Layer | RowwiseLayer] = {}
    for name in (*RECIPES, *peers):
        with noting(case, name, console):
            if name in peers:
                layer = RowwiseLayer(name, problems, peers[name], layers.get(next(iter(peers))))
            else:
                layer = Float8Layer(name, problems, next(iter(list(layers.values())[1:]), None))
            errors, _ = relative_errors(problems[0], layer.results())
            case["errors"][name] = errors
            if RECIPES.get(name, peers) is None:
                require_right(errors, plan.dtype)
            elif not max(errors.values()) <= (most := most_error(problems[0].shape.tokens)):
                raise ArithmeticError(f"wrong: errors {errors}, expected at most {most:.3g}")
            case["saved_bytes"][name] = saved_bytes(saved_tensors(layer.forward, layer.owned()))
            layers[name] = layer
        free_memory(plan.device)
    return layers


def _passes(
    layers: dict[str, Float8Layer | RowwiseLayer],
) -> dict[tuple[str, str], Callable[[], object]]:
    """By candidate and pass."""
    return {
        (name, part): getattr(layer, part) for name, layer in layers.items() for part in FP8_PASSES
    }


def _quantising(
    layers: dict[str, Float8Layer | RowwiseLayer],
) -> dict[tuple[str, str], Callable[[], object]]:
    """The quantisation of weights, by candidate; Guild's recipes share one."""
    calls: dict[tuple[str, str], Callable[[], object]] = {
        ("weights", name): layer.quantise
        for name, layer in layers.items()
        if isinstance(layer, RowwiseLayer)
    }
    weights = next((layer.weights() for name, layer in layers.items() if RECIPES.get(name)), None)
    if weights is not None:
        calls[_WEIGHTS] = partial(_quantise, weights)
    return calls


def _quantise(weights: guild.FP8Weights) -> None:
    """Write the same codes again; backward may go on using them."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(weights.codes)):
        weights.refresh()


def figures(times: dict[tuple[str, str], list[float]], shape: Shape) -> dict[str, Any]:
    """Milliseconds of each round to medians, TFLOPS and speed-ups over 16 bits."""
    found: dict[str, Any] = {}
    forward, backward = shape.flops()
    flops = {"forward": forward, "backward": backward, "both": forward + backward}
    recipes = [name for name, part in times if part == "forward"]
    taken = {name: {part: times[name, part] for part in FP8_PASSES} for name in recipes}
    for name in recipes:
        rows: dict[str, Any] = {}
        for part in FP8_PASSES:
            rows[part] = {"ms": summary_of(taken[name][part]), "rounds_ms": taken[name][part]}
            rows[part]["tflops"] = flops[part] / rows[part]["ms"]["median"] / 1e9
            if name != "bf16" and "bf16" in taken:
                rows[part]["speedup"] = median_ratio(taken["bf16"][part], taken[name][part])
        each = _with_weights(times, taken, name)
        if each is not None and "bf16" in taken:
            rows["with_weights"] = median_ratio(taken["bf16"]["both"], each)
        if ("weights", name) in times:  # a peer
            own = times["weights", name]
            rows["weights"] = {"ms": summary_of(own), "rounds_ms": own}
            ours = _with_weights(times, taken, _FASTEST)
            if ours is not None:
                rows["guild"] = {
                    "both": median_ratio(taken[name]["both"], taken[_FASTEST]["both"]),
                    "with_weights": median_ratio(each, ours),
                }
        found[name] = rows
    weights = times.get(_WEIGHTS)
    if weights is not None:
        found["weights"] = {"ms": summary_of(weights), "rounds_ms": weights}
    found["steps"] = {
        step: summary_of(values) for (part, step), values in times.items() if part == "steps"
    }
    return found


def _with_weights(
    times: dict[tuple[str, str], list[float]], taken: dict[str, dict[str, list[float]]], name: str
) -> list[float] | None:
    """Both passes and the quantisation of weights; None where either was not timed."""
    weights = times.get(_WEIGHTS if name in RECIPES else ("weights", name))
    if name == "bf16" or name not in taken or weights is None:
        return None
    return _sums(taken[name]["both"], weights)


def _sums(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]
