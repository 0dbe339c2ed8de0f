"""The options of `guild bench`."""

from __future__ import annotations

import argparse

from guild.bench.names import ACTIVATIONS
from guild.bench.presets import CPU_SHAPES, MORE_PRESETS, NAMED, PRESETS
from guild.cli.parsing import Formatter, path


def add_bench(commands: argparse._SubParsersAction) -> None:
    """Add the command to the others."""
    bench = commands.add_parser(
        "bench",
        help="time the layer against the cuBLAS bound and PyTorch",
        description="Check, then time forward and backward of Guild's layer, of the bare balanced "
        "matrix products (the bound) and of PyTorch, in interleaved rounds.",
        formatter_class=Formatter,
    )
    _add_modes(bench)
    _add_what(bench)
    _add_form(bench)
    how = bench.add_argument_group("how it is timed")
    how.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (5)")
    how.add_argument(
        "--seconds",
        type=float,
        metavar="X",
        help="least time per candidate, pass and round (0.5 on a GPU, 0.2 on the CPU; with "
        "--steps, --rounding and --fp8 0.2 and 0.05, with --sweep and --decode 0.1 and 0.02)",
    )
    how.add_argument("--calls", type=int, metavar="N", help="calls per round, instead of --seconds")
    how.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the random inputs (0)"
    )
    results = bench.add_argument_group("results")
    results.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="write the measurements to this folder as JSON; for layers and --decode also a plot",
    )
    results.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _add_modes(bench: argparse.ArgumentParser) -> None:
    """Options that measure something other than whole layers."""
    group = bench.add_argument_group("instead of timing whole layers")
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        "--steps",
        action="store_true",
        help="time every step of the layer alone, against its floor (FLOPs or bytes at the rates "
        "of the same run), cuBLAS's product and QuACK's recorded one; default routing: balanced",
    )
    mode.add_argument(
        "--memory",
        action="store_true",
        help="measure what the layers keep for backward and, on a GPU, the peak of each pass, "
        "compared with the formula",
    )
    mode.add_argument(
        "--rounding",
        action="store_true",
        help="time routing alone and the layer's forward and backward with top-k, with token "
        "rounding to the nearest tile and with dropping",
    )
    mode.add_argument(
        "--fp8",
        action="store_true",
        help="time the layer in FP8 against 16 bits, and the quantisation of its weights; default "
        "routing: random",
    )
    mode.add_argument(
        "--decode",
        action="store_true",
        help="time the layer without gradients on few tokens, in CUDA graphs over several sets of "
        "weights, against its floor: the bytes of the experts hit at the same run's read rate",
    )
    mode.add_argument(
        "--sweep",
        type=int,
        metavar="N",
        help="time N random shapes against the bound; default routing: random",
    )
    mode.add_argument(
        "--report",
        type=path,
        metavar="FILE",
        help="print a recorded benchmark's tables in Markdown; with --out also draw its plot",
    )
    _add_decode(group)
    group.add_argument(
        "--quack",
        action="store_true",
        help="with --steps: time the installed QuACK's products instead of using recorded figures",
    )


def _add_decode(group: argparse._ArgumentGroup) -> None:
    """Options of --decode only."""
    group.add_argument(
        "--tokens",
        metavar="A,B",
        help="with --decode: tokens per call (1 to 4096 on a GPU, 1,4,16 on the CPU; for --thiek "
        "its T)",
    )
    group.add_argument(
        "--parts",
        metavar="A,B",
        help="with --decode: any of experts (ids and weights given) and layer (with the router); "
        "default: both",
    )
    group.add_argument(
        "--peer",
        type=path,
        action="append",
        default=[],
        metavar="FILE",
        help="with --decode: a Python file whose decode_candidates(layers, part) returns more "
        "candidates by name; may be repeated",
    )


def _add_what(bench: argparse.ArgumentParser) -> None:
    """Shapes, routings and candidates."""
    add = bench.add_argument_group("what is timed").add_argument
    add(
        "--preset",
        action="append",
        default=[],
        choices=[*NAMED, "all"],
        metavar="NAME",
        help=f"{', '.join(PRESETS)}, all; more by name: {', '.join(MORE_PRESETS)}; for the CPU: "
        f"{', '.join(CPU_SHAPES)}; may be repeated (default: all on a GPU, these two on the CPU)",
    )
    add(
        "--thiek",
        action="append",
        default=[],
        metavar="T,H,I,E,K",
        help="a shape of your own: tokens, hidden (a multiple of 8, at least experts), "
        "intermediate, experts, top_k",
    )
    add(
        "--device",
        default="auto",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:<index> (auto)",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="auto is bfloat16 on a GPU and float32 on the CPU",
    )
    add(
        "--routing",
        metavar="A,B",
        help="how rows spread over experts: any of balanced, random, zipf, or all (layers: random "
        "and balanced, --steps: balanced, otherwise random); several are timed in the same rounds "
        "and compared per row with balanced; with --decode any of random, zipf, hot (one expert "
        "for every token), same (the same experts for all tokens)",
    )
    add(
        "--candidates",
        metavar="A,B",
        help="any of guild, bound; floor, compiled, eager (GPU); plain (CPU); with --decode guild, "
        "torch; default: all that the device has",
    )
    add(
        "--num-sms",
        type=int,
        metavar="N",
        help="also time Guild on N of the GPU's multiprocessors",
    )
    add(
        "--sonicmoe",
        action="store_true",
        help="also time the layer of the installed SonicMoE",
    )


def _add_form(bench: argparse.ArgumentParser) -> None:
    """A layer's options besides its sizes."""
    group = bench.add_argument_group(
        "options of the layers, as guild.MoE takes them",
        "gpt-oss: --activation gpt_oss --bias --order interleaved --transposed",
    )
    add = group.add_argument
    add("--activation", choices=ACTIVATIONS, default=ACTIVATIONS[0], help="(silu, that is SwiGLU)")
    add("--bias", action="store_true", help="experts with biases; also with --steps")
    add(
        "--order",
        choices=("concatenated", "interleaved"),
        default="concatenated",
        help="of gate and up in the weights (concatenated)",
    )
    add("--transposed", action="store_true", help="weights stored by inputs, not by outputs")
