"""What `guild bench --decode` times: Guild, the same in torch, and candidates from files.

A file of candidates defines

    def decode_candidates(layers: list[DecodeLayer], part: str) -> dict[str, Callable]: ...

which is called for every case and gives functions by name, each from one of these layers (x, ids,
scores, w_up, w_down, router) to its output (tokens, hidden). Where a layer has other options than
the default, its `form` has them, and its `weights` the biases. `part` is "experts", which takes ids
and scores as given, or "layer", which computes them with the router's weights. The functions are
captured in CUDA graphs; those that cannot be are timed without.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import guild
from guild.bench.candidates import module_of
from guild.bench.decode.layers import DecodeLayer
from guild.bench.form import PlainForm
from guild.train.plain_moe import plain_experts

Candidate = Callable[[DecodeLayer], Tensor]


def own_candidate(name: str, layers: list[DecodeLayer], part: str) -> Candidate:
    """ "guild" or "torch", for the experts alone or with the router."""
    if part == "experts":
        return _torch_experts if name == "torch" else _guild_experts
    make = PlainForm if name == "torch" else guild.MoE
    sets = {id(layer.weights): layer.weights for layer in layers}
    modules = {key: module_of(make, weights).eval() for key, weights in sets.items()}
    return lambda layer: modules[id(layer.weights)](layer.x)


def _guild_experts(layer: DecodeLayer) -> Tensor:
    options = layer.form.options()
    del options["bias"]
    routed = layer.x, layer.ids, layer.scores
    return guild.routed_experts(*routed, **layer.weights.experts(), **options)


def _torch_experts(layer: DecodeLayer) -> Tensor:
    weights, form = layer.weights, layer.form
    experts = *form.by_output(weights.w_up, weights.w_down), weights.b_up, weights.b_down
    return plain_experts(layer.x, layer.ids, layer.scores, *experts, form.activate)[0]


def peer_of(file: Path) -> Callable[[list[DecodeLayer], str], dict[str, Candidate]]:
    """`decode_candidates` of a file.

    Raises
    ------
    ValueError
        If the file cannot be run, or has no such function.
    """
    spec = importlib.util.spec_from_file_location(f"guild_peer_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"peer: expected a Python file, got {str(file)!r}")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their modules up
    sys.path.insert(0, str(file.parent))  # as for a script, so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a foreign file raises
        raise ValueError(f"peer: {str(file)!r} cannot be run ({error!r})") from None
    if not callable(getattr(module, "decode_candidates", None)):
        raise ValueError(f"peer: expected a function decode_candidates in {str(file)!r}")
    return module.decode_candidates


def expected_output(layer: DecodeLayer) -> Tensor:
    """The layer's output in high precision: float64 on the CPU, float32 on a GPU."""
    exact = torch.float64 if layer.x.device.type == "cpu" else torch.float32
    x, scores = layer.x.to(exact), layer.scores.to(exact)
    out = torch.zeros_like(x)
    for e in layer.ids.unique().tolist():
        token, choice = (layer.ids == e).nonzero(as_tuple=True)
        mine = (weight[e].to(exact) for weight in layer.weights.experts().values())
        y = layer.form.expert(x[token], *mine)
        out.index_add_(0, token, scores[token, choice, None] * y)
    return out
