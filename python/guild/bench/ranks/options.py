"""The command line of `guild.bench.parallel`, checked before the ranks meet."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from guild.bench.presets import PRESETS, Shape, parse_shape
from guild.bench.problem import ROUTINGS, expect_routable
from guild.bench.ranks.dispatchers import DISPATCHERS
from guild.bench.ranks.symmetric import TORCH
from guild.bench.results import make_folder
from guild.options import excludes, needs
from guild.provenance import pick_device

_TOKENS = 8192  # per rank
_PRESETS = ("dsv3", "gptoss", "qwen30b")
_ENGINES = ("both", "auto", "peer", "nccl", TORCH)
_DTYPES = ("bfloat16", "float16", "float32")


class RanksParser(argparse.ArgumentParser):
    """Reports what is wrong once, not from every process that torchrun has started."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; only the first rank says why."""
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        sys.exit(2)


def make_parser(description: str) -> RanksParser:
    """The grammar."""
    parser = RanksParser(prog="python -m guild.bench.parallel", description=description)
    add = parser.add_argument
    add("--preset", action="append", default=[], choices=PRESETS, help=", ".join(_PRESETS))
    add("--thiek", action="append", default=[], metavar="T,H,I,E,K", help="T: tokens per rank")
    add(
        "--tokens", type=int, nargs="+", default=[_TOKENS], help=f"per rank, of presets ({_TOKENS})"
    )
    add("--routing", default="random", choices=ROUTINGS, help="of every rank's tokens (random)")
    add("--engine", default="both", choices=_ENGINES, help="both: nccl, and peer where it can run")
    add(
        "--beside",
        action="append",
        default=[],
        choices=(*DISPATCHERS, "all"),
        help="others to time in the same rounds",
    )
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of tokens and weights (bfloat16)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="a GPU for each rank (cuda)")
    add("--rounds", type=int, default=7, help="interleaved rounds (7)")
    add("--seconds", type=float, default=0.3, help="least time per call in a round (0.3)")
    add("--seed", type=int, default=0, help="of the random inputs (0)")
    add("--cuda-graph", action="store_true", help="replay CUDA graphs; with --engine peer")
    add("--inference", action="store_true", help="forwards without gradients, as in decoding")
    add("--max-tokens", type=int, metavar="N", help="of peer's memory; default: a shape's")
    add("--capacity", type=float, help="of peer, as ExpertParallel takes it; default: any routing")
    add("--out", type=Path, metavar="DIR", help="write parallel.json there")
    return parser


def shapes_of(args: argparse.Namespace) -> dict[str, Shape]:
    """What is timed, by name; tokens are those of a rank.

    Raises
    ------
    ValueError
        For a shape that is none, or that the ranks cannot share.
    """
    names = args.preset or ([] if args.thiek else _PRESETS)
    shapes = {
        f"{name} {tokens}" if len(args.tokens) > 1 else name: PRESETS[name]._replace(tokens=tokens)
        for name in names
        for tokens in args.tokens
    }
    shapes |= {text: parse_shape(text) for text in args.thiek}
    most = max(shape.tokens for shape in shapes.values())
    if args.max_tokens is not None and args.max_tokens < most:
        raise ValueError(f"max_tokens: expected at least {most}, got {args.max_tokens}")
    ranks = int(os.environ["WORLD_SIZE"])
    for name, shape in shapes.items():
        expect_routable(shape)
        if shape.experts % ranks:
            raise ValueError(
                f"{name}: expected a multiple of {ranks} experts (ranks), got {shape.experts}"
            )
        if shape.experts // ranks < shape.top_k:  # the layer alone has a rank's experts
            raise ValueError(
                f"{name}: expected at least top_k = {shape.top_k} experts a rank, got "
                f"{shape.experts // ranks}"
            )
    return shapes


def device_of(args: argparse.Namespace) -> torch.device:
    """This rank's device.

    Raises
    ------
    ValueError
        If there is none, or it does not compute in the dtype.
    """
    if args.device == "cpu":
        return torch.device("cpu")
    if args.dtype == "float32":
        raise ValueError("dtype: expected bfloat16 or float16 on a GPU, got float32")
    return pick_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")


def beside_of(args: argparse.Namespace) -> list[str]:
    """The other libraries that are timed."""
    if args.beside and args.engine == TORCH:
        raise excludes("beside", f"--engine {TORCH}, which needs a run of its own")
    return list(DISPATCHERS) if "all" in args.beside else list(dict.fromkeys(args.beside))


def expect_valid(args: argparse.Namespace) -> None:
    """Raise ValueError for numbers out of range, a missing torchrun and an unwritable folder."""
    least = {"tokens": (1, min(args.tokens)), "rounds": (1, args.rounds), "seed": (0, args.seed)}
    for name, (bound, value) in least.items():
        if value < bound:
            raise ValueError(f"{name}: expected at least {bound}, got {value}")
    for name in ("seconds", "capacity"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}: expected a positive number, got {value}")
    for name in ("capacity", "max_tokens"):
        if getattr(args, name) is not None and args.engine not in ("auto", "peer", "both"):
            raise excludes(name, f"--engine {args.engine}")
    if args.cuda_graph and args.engine != "peer":
        raise needs("cuda_graph", "--engine peer")
    if args.cuda_graph and args.beside:
        raise excludes("cuda_graph", "--beside")
    if args.cuda_graph and args.device == "cpu":
        raise excludes("cuda_graph", "--device cpu")
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise ValueError(
            "expected to be started by torchrun, as in torchrun --nproc-per-node 2 -m "
            "guild.bench.parallel"
        )
    if args.out is not None and os.environ["RANK"] == "0":
        make_folder(args.out)
