"""Whether a block computes what Guild's would: a tiny copy of it is run both ways and compared.

What a class computes changes between versions of Transformers and with its config. Its name and
attributes only suggest what to try.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from guild.integrations.transformers.block_families import BlockFamily, first_of
from guild.integrations.transformers.messages import silence

_HIDDEN, _INTERMEDIATE, _TOKENS = 16, 8, 24
_TOLERANCE, _NOISE = 1e-5, 1e-6  # routers compute in float32
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def difference(family: BlockFamily, block: nn.Module, replace: Callable[[nn.Module], None]) -> str:
    """How results of blocks of this class differ from Guild's; empty if they do not.

    replace: turns a block into Guild's, in place.
    """
    # A new thread is free of the caller's state: autocast, inference mode, a default device.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_difference, family, block, replace).result()


def _difference(family: BlockFamily, block: nn.Module, replace: Callable[[nn.Module], None]) -> str:
    try:
        with torch.random.fork_rng(devices=[]), silence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _seed(0)
            theirs = _tiny(family, block)
            ours = copy.deepcopy(theirs)
            replace(ours)
            x = torch.randn(2, _TOKENS // 2, _HIDDEN, dtype=torch.float64)
            expected, found = _results(theirs, x), _results(ours, x)
    except Exception as error:  # the class may be constructed or called in another way
        return f"a tiny block of its class could not be tried ({type(error).__name__}: {error})"
    if expected.keys() != found.keys():
        return "its class returns or trains something else"
    # Some are zero up to rounding: a router's gradient where one expert gets all the weight.
    noise = _NOISE * max(value.norm().item() for value in expected.values())
    for name, value in expected.items():
        if not _close(found[name], value, noise):
            return f"its class computes another {name}"
    return ""


def _seed(seed: int) -> None:
    """Seed the CPU alone: torch.manual_seed() would also reseed every GPU, for good."""
    torch.default_generator.manual_seed(seed)


def _tiny(family: BlockFamily, block: nn.Module) -> nn.Module:
    """A small block with the options of this one, random, in float64 on the CPU."""
    config = copy.deepcopy(_config_of(block))
    router = first_of(family.classes()["router"], block) or getattr(block, family.router_name)
    groups = getattr(router, "num_group", 1)
    of_group = max(2, -(-2 * router.top_k // getattr(router, "topk_group", 1)))
    sizes = dict.fromkeys(_WIDTHS, _INTERMEDIATE) | dict.fromkeys(_COUNTS, groups * of_group)
    for name, size in (sizes | {"hidden_size": _HIDDEN}).items():
        if hasattr(config, name):
            setattr(config, name, size)
    config._experts_implementation = "eager"
    tiny = type(block)(config).double()
    getattr(tiny, family.router_name).top_k = router.top_k  # perhaps no longer the config's
    if any(parameter.is_meta for parameter in tiny.parameters()):
        raise RuntimeError(
            "new parameters are made on the meta device, as inside accelerate's "
            "init_empty_weights(); replace blocks after it"
        )
    for tensor in (*tiny.parameters(), *tiny.buffers()):
        nn.init.normal_(tensor, std=0.5)
    return tiny


def _config_of(block: nn.Module) -> object:
    for module in block.modules():
        if hasattr(module, "config"):
            return module.config
    raise AttributeError("no part of it has a config")


def _results(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What the block computes in training and in evaluation, which may differ."""
    return {
        f"{name} in {mode}": value
        for mode in ("training", "evaluation")
        for name, value in _step(block.train(mode == "training"), x).items()
    }


def _step(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs by their place, what the block leaves in its input, and all gradients."""
    _seed(1)  # for Mixtral's noise
    block.zero_grad()
    x = x.clone().requires_grad_()
    given = x * 1  # some blocks change their input in place, which a leaf does not allow
    out = block(given)
    outs = out if isinstance(out, tuple) else (out,)
    results = {f"output {i}": o for i, o in enumerate(outs)} | {"value of its input": given}
    weights = {name: torch.linspace(-1, 1, o.numel()).view_as(o) for name, o in results.items()}
    sum((o * weights[name]).sum() for name, o in results.items()).backward()
    gradients = {f"gradient of {n}": p.grad for n, p in block.named_parameters()}
    results |= {"gradient of its input": x.grad, **gradients}
    return {name: value.detach() for name, value in results.items() if value is not None}


def _close(found: Tensor, expected: Tensor, noise: float) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool((found - expected).norm() <= _TOLERANCE * expected.norm() + noise)
