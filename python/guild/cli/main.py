"""The `guild` command: `train`, `generate`, `bench` and `info`.

Only what parsing needs is imported here; torch and matplotlib follow when a command runs, so that
`guild --help` answers at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from guild.cli.bench_options import add_bench
from guild.cli.commands import command_of
from guild.cli.failures import told
from guild.cli.parsing import Formatter, Parser, path
from guild.cli.streams import prepare_streams
from guild.train.interrupt import INTERRUPTED, Interruption
from guild.train.presets import PRESETS as TRAIN_PRESETS
from guild.train.settings import CHOICES, Settings

_SETTING_HELP = {
    "steps": "optimiser steps",
    "batch": "windows per step",
    "context": "bytes per window",
    "accumulate": "parts that a step's windows are divided into, processed one after another",
    "hidden": "width of the model",
    "layers": "blocks of attention and MoE",
    "heads": "attention heads",
    "experts": "experts per layer",
    "intermediate": "width of one expert",
    "top_k": "experts per token",
    "shared": "width of the shared experts, which every token goes through; 0: none",
    "vocabulary": "rows of the embedding; the text still consists of bytes",
    "lr": "peak learning rate of AdamW",
    "final_lr": "fraction of the peak left at the end",
    "warmup": "warm-up steps",
    "weight_decay": "weight decay of the matrices",
    "clip": "norm that the gradient is clipped to",
    "balance": "weight of the load-balancing loss",
    "router": "how logits become expert ids and weights",
    "round": "round each expert's tokens to whole tiles",
    "tile": "rows per tile",
    "capacity": "most rows per expert, relative to an even share; others are dropped; 0: no limit",
    "bias_rate": "step of the selection bias of routers that have one",
    "seed": "seed of initial weights, data order and sample",
}


def make_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    from guild import __version__

    parser = Parser(
        "guild", description="Mixture-of-Experts layers: train, generate, time, inspect."
    )
    parser.add_argument("--version", action="version", version=f"guild {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_generate(commands)
    add_bench(commands)
    commands.add_parser(
        "info", help="show what was built and what this machine can run", formatter_class=Formatter
    )
    return parser


def _add_train(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser(
        "train",
        help="train a small MoE language model on the standard library's sources",
        description="Train a byte-level MoE transformer on the Python standard library's own "
        "sources. Ctrl-C or SIGTERM writes a checkpoint; --resume continues from it. A run "
        "already in --out is moved aside.",
        formatter_class=Formatter,
        argument_default=argparse.SUPPRESS,  # --resume must know what was typed
    )
    add = train.add_argument
    add("--out", type=path, metavar="DIR", help="folder for the results (runs/train)")
    add(
        "--resume",
        action="store_true",
        help="continue from the checkpoint in --out; with --steps, up to a later step",
    )
    add(
        "--compare",
        action="store_true",
        help="train the same model with a plain PyTorch layer alongside, step by step",
    )
    add(
        "--fp8",
        action="store_true",
        help="train the model in FP8 and in bfloat16 alongside, step by step",
    )
    add("--moe", choices=("guild", "plain", "fp8"), help="layer to train (guild)")
    add("--device", metavar="NAME", help="auto, cpu, cuda or cuda:<index> (auto)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="auto is float32 on the CPU and bfloat16 autocast on a GPU and in FP8",
    )
    add("--corpus", type=path, metavar="DIR", help="train on the .py files in this folder")
    add("--check-every", type=int, metavar="N", help="steps between validations (100)")
    add("--threads", type=int, metavar="N", help="CPU threads (one per core)")
    add("--no-cuda-graph", action="store_true", help="on a GPU, launch each kernel by itself")
    add("--no-checkpoint", action="store_true", help="write no checkpoint")
    _add_ranks(train)
    sizes = train.add_argument_group("sizes and schedule")
    presets = tuple(TRAIN_PRESETS)
    sizes.add_argument("--preset", choices=presets, help="those of a known model")
    for name, value in Settings().as_dict().items():
        sizes.add_argument(
            "--" + name.replace("_", "-"),
            type=type(value),
            choices=CHOICES.get(name),
            metavar={int: "N", float: "X"}.get(type(value)),
            help=f"{_SETTING_HELP[name]} ({value})",
        )


def _add_ranks(train: argparse.ArgumentParser) -> None:
    """Options for torchrun's processes: torchrun --nproc-per-node 2 -m guild train --fsdp."""
    add = train.add_argument_group("several GPUs, started by torchrun").add_argument
    add("--fsdp", action="store_true", help="train on all ranks, sharded by FSDP2")
    add("--expert-parallel", type=int, metavar="N", help="N ranks share the experts (1)")
    add(
        "--keep-gathered",
        action="store_true",
        help="keep weights gathered from forward to backward: faster, more memory",
    )


def _add_generate(commands: argparse._SubParsersAction) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a text with a model that guild train wrote",
        description="Continue a text with the checkpoint of a training run, byte by byte, with a "
        "key-value cache and, on a GPU, one CUDA graph per byte. The text goes to standard output, "
        "the speed to standard error.",
        formatter_class=Formatter,
    )
    add = generate.add_argument
    add("run", type=path, metavar="RUN", help="folder that guild train wrote, say runs/train")
    add("--prompt", metavar="TEXT", help="text to continue (guild train's own prompt)")
    add("--tokens", type=int, default=320, metavar="N", help="bytes to write (320)")
    add(
        "--temperature",
        type=float,
        default=0.6,
        metavar="X",
        help="sampling temperature; 0 takes the most likely byte (0.6)",
    )
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="N",
        help="sample from the N most likely bytes; 0 from all (0)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampling (0)")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:<index> (auto)")
    add("--threads", type=int, metavar="N", help="CPU threads (one per core)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the process's own.

    Returns
    -------
    int
        Exit status: 0; 1 after a run that failed, such as a benchmark's check; 2 for what could not
        be started or written: a wrong argument, a bad checkpoint, a full disk; 130 after Ctrl-C
        or SIGTERM.
    """
    prepare_streams()
    parser = make_parser()
    args = parser.parse_args(arguments)
    # Read when torch loads OpenMP: how long a waiting thread spins before it sleeps. With the
    # default of 300,000 turns a training step takes five times as long when other programs need the
    # cores; with 1,000 it loses nothing on idle ones.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    with Interruption() as interruption:
        try:
            run = command_of(args, bench_defaults=parser.parse_args(["bench"]))
            interruption.imported()
            status = run()
        except (Exception, KeyboardInterrupt) as error:
            # An import that is interrupted may raise anything.
            status = told(args.command, KeyboardInterrupt() if interruption.came else error)
            if status is None:
                raise
        if status == INTERRUPTED and arguments is None:
            interruption.end_quietly()
        return status
