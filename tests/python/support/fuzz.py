"""Random layers: each by Guild and by an oracle in plain torch, compared by the numerics rule.

On the CPU in float64, to the last digits; on a GPU in bf16 and fp16, measured by the CPU backend's
error in the same dtype; in FP8 measured by the error of the recipe in plain torch. Every case
follows from its seed:

    python tests/python/support/fuzz.py --count 2000                 the long form
    python tests/python/support/fuzz.py --first 17 --count 1         case 17 again
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from typing import Any

import torch

import guild
from fuzz_compare import compare, compare_recipe, compare_rounded, same_bits
from fuzz_draw import Backward, Draw, score_dtype
from fuzz_experts import RoutedCase, SortedCase
from fuzz_lora import LowRankTerms
from fuzz_moe import MoECase
from fuzz_products import PairCase, ProductCase
from fuzz_quantised import QuantisedCase
from fuzz_routing import RoutingCase
from fuzz_weights import Weights
from oracle.float8 import Recipe

KINDS = {
    RoutedCase: 29,  # of 100
    MoECase: 29,
    SortedCase: 15,
    RoutingCase: 9,
    ProductCase: 8,
    PairCase: 7,
    QuantisedCase: 3,
}
SIXTEEN = (torch.bfloat16, torch.float16)
_NAMES = {kind.__name__: kind for kind in (*KINDS, Backward, LowRankTerms, Weights)}
_NAMES |= {
    "Activation": guild.Activation,
    "Router": guild.Router,
    "FP8": guild.FP8,
    "inf": math.inf,
    "nan": math.nan,
}


def drawn(seed: int, device: str) -> Any:
    """The case of a seed; on a GPU with sizes that it supports."""
    draw = Draw(seed, aligned=device == "cuda")
    kinds = [kind for kind, share in KINDS.items() for _ in range(share)]
    return draw.pick(*kinds).drawn(draw)


def from_repr(text: str) -> Any:
    """The case that was printed."""
    return eval(text, {"__builtins__": {}}, _NAMES)


def failures_of(case: Any, device: str, dtype: torch.dtype = torch.float64) -> list[str]:
    """What is wrong with a case, one line each; an exception is a failure too."""
    try:
        values = case.values(dtype)
        got = case.run(values, device, dtype)
        truth = case.truth(values, got)
        if getattr(case, "fp8", None) is not None:
            recipe = case.truth(values, got, Recipe(case.fp8, dtype))
            failures = compare_recipe(got, truth, recipe)
            if failures:
                narrow = replace(case, fp8=None).run(values, "cpu", dtype)
                failures = compare_recipe(got, truth, recipe, narrow)
        elif dtype in SIXTEEN:
            rounded = case.run(values, "cpu", dtype)
            stored = score_dtype(dtype) if isinstance(case, RoutingCase) else dtype
            failures = compare_rounded(got, truth, rounded, case.truth(values, rounded), stored)
        else:
            failures = compare(got, truth)
        if case.twice:
            failures += same_bits(got, case.run(values, device, dtype))
        return failures
    except Exception as error:
        if torch.cuda.is_available() and "CUDA error" in str(error):
            raise  # the process cannot go on
        return [f"{type(error).__name__}: {error}"]


def failures_of_seed(seed: int, device: str) -> list[str]:
    """The same for a seed's case, in its dtype, with what is needed to reproduce it."""
    case = drawn(seed, device)
    narrow = device == "cuda" or getattr(case, "fp8", None) is not None
    dtype = SIXTEEN[seed % 2] if narrow else torch.float64
    failures = failures_of(case, device, dtype)
    again = f"python tests/python/support/fuzz.py --first {seed} --count 1 --device {device}"
    return [again, f"{dtype}, {case!r}", *failures] if failures else []


def main(arguments: list[str] | None = None) -> None:
    """Try cases, print those that fail, and fail if any does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, failed = time.monotonic(), []
    for seed in range(options.first, options.first + options.count):
        if lines := failures_of_seed(seed, options.device):
            failed.append(seed)
            print(*lines, sep="\n    ", flush=True)
    print(
        f"{len(failed)} of {options.count} cases failed, {time.monotonic() - began:.0f} s: {failed}"
    )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
