"""`guild bench --memory`: what a layer keeps for backward and needs temporarily, in bytes.

X, the pre-activations H and the routing are kept: 2TH + 4TKI bytes in 16 bits and at most 24 bytes
per slot (as in SonicMoE, arXiv 2512.14080). Kept bytes are counted by autograd's hooks, each
storage once, weights left out; peaks come from torch's CUDA allocator, so the CPU has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from guild.bench.candidates import layer_module
from guild.bench.failures import noting
from guild.bench.names import BOUNDS
from guild.bench.plan import BenchPlan
from guild.bench.presets import Shape
from guild.bench.problem import Problem, make_problems
from guild.bench.record import record_head
from guild.bench.timing import free_memory
from guild.train.failures import is_out_of_memory

_LISTED = 16  # of the kept tensors in a record; plain PyTorch keeps several per expert
SLOT_BYTES = 24  # of routing: ids, scores, and the sorted indices both ways


def memory_formula(shape: Shape, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that a layer needs by design.

    Returns
    -------
    dict
        `saved`: X, H, routing; `forward`: what a forward pass in training allocates, H, A, Y, O,
        routing and the router's float32 logits; `backward`: dH, A', dX by row and dS, beside the
        gradients themselves.
    """
    t, h, i, e, k = shape
    slots, size = t * k, dtype.itemsize
    routing = SLOT_BYTES * slots
    kept = 2 * slots * i * size
    by_row = slots * (i + h) * size
    return {
        "saved": t * h * size + kept + routing,
        "forward": kept + by_row + t * h * size + routing + 4 * t * e,
        "backward": kept + by_row + 4 * slots,
    }


def saved_tensors(forward: Callable[[], object], known: Iterable[Tensor]) -> list[Tensor]:
    """What a forward pass keeps for backward: one tensor per storage, without those of `known`."""
    given = {t.untyped_storage().data_ptr() for t in known}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in given and tensor.numel():
            kept.setdefault(place, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()  # the graph is freed, but `kept` holds the tensors: no address is reused
    return list(kept.values())


def saved_bytes(kept: list[Tensor]) -> int:
    """Bytes of what `saved_tensors()` found."""
    return sum(t.untyped_storage().nbytes() for t in kept)


def measure_memory(plan: BenchPlan, console: Console) -> dict[str, Any]:
    """Measure every layer in the plan, but not the bound, which is no layer.

    Returns
    -------
    dict
        The record: provenance, and a case for every shape and routing with the formula and, by
        candidate, `saved_bytes`, `saved` (the largest) and on a GPU `forward_peak_bytes` and
        `backward_peak_bytes`.
    """
    cases = []
    for name, shape in plan.shapes.items():
        torch._dynamo.reset()
        for routing in plan.routings:
            with console.status(f"{name}, {routing} routing"):
                case = {"name": name, "shape": shape._asdict(), "routing": routing}
                case |= {"formula": memory_formula(shape, plan.dtype), "layers": {}, "failures": {}}
                with noting(case, "inputs", console, is_out_of_memory):
                    _measure_layers(case, shape, plan, console)
            cases.append(case)
            free_memory(plan.device)
    return {**record_head(plan), "mode": "memory", "cases": cases}


def _measure_layers(case: dict[str, Any], shape: Shape, plan: BenchPlan, console: Console) -> None:
    problem = make_problems(shape, case["routing"], plan.dtype, plan.device, plan.seed)[0]
    for candidate in (c for c in plan.candidates if c not in BOUNDS):
        with noting(case, candidate, console):
            case["layers"][candidate] = _measure(candidate, problem)
        free_memory(plan.device)


def _measure(candidate: str, problem: Problem) -> dict[str, Any]:
    module = layer_module(candidate, problem)
    _differentiate(module(problem.x), problem)  # compiles, and allocates cuBLAS's work buffers
    kept = saved_tensors(lambda: module(problem.x), module.parameters())
    kept.sort(key=lambda t: -t.untyped_storage().nbytes())
    found: dict[str, Any] = {
        "saved_bytes": saved_bytes(kept),
        "saved": [
            {
                "shape": list(t.shape),
                "dtype": str(t.dtype).removeprefix("torch."),
                "bytes": t.untyped_storage().nbytes(),
            }
            for t in kept[:_LISTED]
        ],
    }
    del kept
    if problem.x.is_cuda:
        found |= _peaks(module, problem)
    return found


def _differentiate(out: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, problem.leaves(), problem.out_gradient)


def _peaks(module: nn.Module, problem: Problem) -> dict[str, int]:
    """The most that each pass allocates at a time, beyond what was there at its start.

    The gradients that backward returns are not counted.
    """
    free_memory(problem.x.device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = module(problem.x)
    forward = torch.cuda.max_memory_allocated() - before
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = _differentiate(out, problem)
    backward = torch.cuda.max_memory_allocated() - before
    backward -= sum(g.untyped_storage().nbytes() for g in gradients)
    return {"forward_peak_bytes": forward, "backward_peak_bytes": backward}
