"""What `guild bench --decode` times: Guild, the same in torch, and candidates from files.

A file of candidates defines

    def decode_candidates(layers: list[DecodeLayer], part: str) -> dict[str, Callable]: ...

which is called for every case and gives functions by name, each from one of these layers (x, ids,
scores, w_up, w_down, router) to its output (tokens, hidden). `part` is "experts", which takes ids
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
from guild.train.plain_moe import plain_expert, plain_experts, plain_moe

Candidate = Callable[[DecodeLayer], Tensor]


def own_candidate(name: str, layers: list[DecodeLayer], part: str) -> Candidate:
    """ "guild" or "torch", for the experts alone or with the router."""
    if name == "torch":
        return _torch_experts if part == "experts" else _torch_layer
    if part == "experts":
        return _guild_experts
    sets = {id(layer.weights): layer.weights for layer in layers}
    modules = {key: module_of(guild.MoE, weights).eval() for key, weights in sets.items()}
    return lambda layer: modules[id(layer.weights)](layer.x)


def _guild_experts(layer: DecodeLayer) -> Tensor:
    return guild.routed_experts(layer.x, layer.ids, layer.scores, layer.w_up, layer.w_down)


def _torch_experts(layer: DecodeLayer) -> Tensor:
    return plain_experts(layer.x, layer.ids, layer.scores, layer.w_up, layer.w_down)[0]


def _torch_layer(layer: DecodeLayer) -> Tensor:
    weights = layer.router, layer.w_up, layer.w_down
    return plain_moe(layer.x, *weights, layer.ids.shape[1])[0]


def peer_of(file: Path) -> Callable[[list[DecodeLayer], str], dict[str, Candidate]]:
    """`decode_candidates` of a file.

    Raises
    ------
    ValueError
        If the file cannot be run, or has no such function.
    """
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"peer: expected a Python file, got {str(file)!r}")
    module: Any = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # as for a script, so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a foreign file raises
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
        y = plain_expert(x[token], layer.w_up[e].to(exact), layer.w_down[e].to(exact))
        out.index_add_(0, token, scores[token, choice, None] * y)
    return out
