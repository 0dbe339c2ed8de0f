"""What a benchmark is to do: the command line's arguments, checked, with defaults filled in."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from guild.bench import sonicmoe
from guild.bench.form import LayerForm
from guild.bench.names import (
    CPU_CANDIDATES,
    DECODE_CANDIDATES,
    GPU_CANDIDATES,
    LIMITED,
    PARTS,
    SONICMOE,
)
from guild.bench.presets import CPU_SHAPES, DECODE_PRESETS, NAMED, PRESETS, Shape, parse_shape
from guild.bench.problem import DECODE_ROUTINGS, ROUTINGS, expect_room, expect_routable
from guild.bench.sweep import CPU_RANGES, GPU_RANGES, random_shapes
from guild.options import excludes, needs
from guild.provenance import pick_device

DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096)
_CPU_TOKENS = (1, 4, 16)
_MOST_TOKENS = 65536  # with --decode
_MOST_SEED = 2**62
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class BenchPlan:
    """What is timed and how.

    Attributes
    ----------
    shapes : dict
        Shapes by name.
    routings, candidates : tuple of str
        Names from `problem.ROUTINGS` and of `candidates`.
    device, dtype : torch.device, torch.dtype
        Where the layers compute, and in which dtype.
    rounds : int
        Interleaved rounds.
    seconds : float
        Least time of one candidate's pass in a round.
    calls : int or None
        Calls in a round, instead of `seconds`.
    seed : int
        Of the inputs.
    num_sms : int or None
        Multiprocessors of the candidate "guild_sms".
    tokens : tuple of int
        At decode; empty: see `decode_tokens`.
    parts : tuple of str
        At decode, names from `names.PARTS`.
    peers : tuple of Path
        At decode, files of candidates.
    form : LayerForm
        The layers' other options; of the modes that have only sizes, the default.
    """

    shapes: dict[str, Shape]
    routings: tuple[str, ...]
    candidates: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    rounds: int = 5
    seconds: float = 0.5
    calls: int | None = None
    seed: int = 0
    num_sms: int | None = None
    tokens: tuple[int, ...] = ()
    parts: tuple[str, ...] = PARTS
    peers: tuple[Path, ...] = ()
    form: LayerForm = LayerForm()


def plan_bench(args: argparse.Namespace) -> BenchPlan:
    """Check the arguments and fill in what depends on the device.

    Raises
    ------
    ValueError
        The message names the argument, its value and what was expected.
    """
    device = pick_device(args.device)
    on_gpu = device.type == "cuda"
    _require_mode(args)
    for name in ("rounds", "calls", "num_sms", "sweep"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if not 0 <= args.seed <= _MOST_SEED:
        raise ValueError(f"seed: expected 0 to {_MOST_SEED}, got {args.seed}")
    seconds = _seconds(args, on_gpu) if args.seconds is None else args.seconds
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"seconds: expected a positive number, got {seconds}")
    name = "bfloat16" if on_gpu or args.fp8 else "float32"
    dtype = _DTYPES[name if args.dtype == "auto" else args.dtype]
    if args.fp8 and dtype == torch.float32:
        raise ValueError("dtype: expected bfloat16 or float16 with --fp8, got float32")
    shapes = _shapes(args, on_gpu) if args.sweep is None else _sweep(args, device, dtype)
    for shape in shapes.values():  # before the first one is measured
        expect_routable(shape)
        if not on_gpu and not args.decode:
            expect_room(shape, dtype)
    return BenchPlan(
        shapes=shapes,
        routings=_routings(args),
        candidates=_candidates(args, device),
        device=device,
        dtype=dtype,
        rounds=args.rounds,
        seconds=seconds,
        calls=args.calls,
        seed=args.seed,
        num_sms=args.num_sms,
        tokens=_tokens(args),
        parts=PARTS if args.parts is None else _names("parts", args.parts, PARTS),
        peers=tuple(args.peer),
        form=LayerForm(args.activation, args.bias, args.order, args.transposed),
    )


def decode_tokens(plan: BenchPlan, name: str) -> tuple[int, ...]:
    """The numbers of tokens of a shape at decode: the plan's, a preset's usual ones, or its own."""
    if plan.tokens:
        return plan.tokens
    usual = DECODE_TOKENS if plan.device.type == "cuda" else _CPU_TOKENS
    return usual if name in NAMED else (plan.shapes[name].tokens,)


def _names(option: str, text: str, known: tuple[str, ...], more: str = "") -> tuple[str, ...]:
    """The distinct names in "a,b"; more: what the message says after the known ones."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: expected any of {', '.join(known)}{more}, got {name!r}")
    return names


def _tokens(args: argparse.Namespace) -> tuple[int, ...]:
    """Numbers of tokens at decode; none if not given."""
    if args.tokens is None:
        return ()
    try:
        tokens = tuple(dict.fromkeys(int(part) for part in args.tokens.split(",")))
    except ValueError:
        raise ValueError(f"tokens: expected whole numbers A,B, got {args.tokens!r}") from None
    for count in tokens:
        if not 1 <= count <= _MOST_TOKENS:
            raise ValueError(f"tokens: expected 1 to {_MOST_TOKENS}, got {count}")
    return tokens


def _require_mode(args: argparse.Namespace) -> None:
    """Raise for options that do not apply to the mode."""
    if args.quack and not args.steps:
        raise needs("quack", "--steps")
    for name in ("tokens", "parts", "peer"):
        if getattr(args, name) not in (None, []) and not args.decode:
            raise needs(name, "--decode")
    modes = ("steps", "memory", "rounding", "decode", "fp8")
    mode = next((name for name in modes if getattr(args, name)), None)
    if args.sweep is not None and (args.preset or args.thiek):
        raise excludes("sweep", "--preset or --thiek")
    chooses = args.memory or args.decode
    for name in ("num_sms",) if chooses else ("num_sms", "candidates"):
        if getattr(args, name) is not None and mode:
            raise excludes(name, f"--{mode}")
    stems = [file.stem for file in args.peer]
    for stem in stems:
        if stems.count(stem) > 1:  # candidates are known by it
            raise ValueError(f"peer: expected files of different names, got {stem!r} twice")
        if stem in DECODE_CANDIDATES:
            raise ValueError(f"peer: expected a file of another name than {stem!r}, a candidate's")
    for name in ("rounds", "seconds", "calls"):  # nothing is timed
        default = BenchPlan.rounds if name == "rounds" else None
        if args.memory and getattr(args, name) != default:
            raise excludes(name, "--memory")
    if args.seconds is not None and args.calls is not None:
        raise excludes("seconds", "--calls")
    if args.sonicmoe and mode:
        raise excludes("sonicmoe", f"--{mode}")
    for name, default in LayerForm().options().items():
        if getattr(args, name) == default:
            continue
        if args.sonicmoe:
            raise excludes(name, "--sonicmoe")
        if mode not in (None, "decode") and (name, mode) != ("bias", "steps"):
            raise excludes(name, f"--{mode}")


def _seconds(args: argparse.Namespace, on_gpu: bool) -> float:
    """Least time of one call's part of a round, unless something else is asked for."""
    if args.steps or args.rounding or args.fp8:
        return 0.2 if on_gpu else 0.05
    if args.sweep is not None or args.decode:
        return 0.1 if on_gpu else 0.02
    return 0.5 if on_gpu else 0.2


def _candidates(args: argparse.Namespace, device: torch.device) -> tuple[str, ...]:
    known = GPU_CANDIDATES if device.type == "cuda" else CPU_CANDIDATES
    if args.decode:
        known = DECODE_CANDIDATES
    if args.candidates is not None:
        names = _names("candidates", args.candidates, known, f" on {device}")
    else:
        names = known if args.sweep is None else ("guild", "bound")
    if args.sonicmoe:
        if device.type != "cuda" or not sonicmoe.importable():
            raise ValueError("sonicmoe: expected a GPU and the package sonicmoe")
        names = (*names, SONICMOE)
    if args.num_sms is None:
        return names
    if device.type != "cuda":
        raise ValueError(f"num_sms: expected a GPU to limit, got the device {device}")
    return (*names, LIMITED)


def _routings(args: argparse.Namespace) -> tuple[str, ...]:
    known = DECODE_ROUTINGS if args.decode else ROUTINGS
    modes = args.steps, args.memory, args.rounding, args.decode, args.fp8
    alone = any(modes) or args.sweep is not None
    usual = "balanced" if args.steps else "random" if alone else "random,balanced"
    text = usual if args.routing is None else args.routing
    return known if text == "all" else _names("routing", text, known, ", or all")


def _sweep(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Shape]:
    """Random shapes that fit in half of the GPU's memory, or in an eighth of the machine's."""
    if device.type == "cuda":
        limit, ranges = torch.cuda.get_device_properties(device).total_memory // 2, GPU_RANGES
    else:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
        ranges = CPU_RANGES
    return random_shapes(args.sweep, args.seed, ranges, dtype.itemsize, limit)


def _shapes(args: argparse.Namespace, on_gpu: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    everything = DECODE_PRESETS if args.decode else PRESETS
    for name in args.preset:
        named = everything if name == "all" else {name: NAMED[name]}
        shapes.update(named)
    for text in args.thiek:
        shapes[text] = parse_shape(text)
    return shapes or (everything if on_gpu else CPU_SHAPES)
