"""From a parsed command line to the command, whose imports take seconds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial


def command_of(args: argparse.Namespace, bench_defaults: argparse.Namespace) -> Callable[[], int]:
    """Import the command that was typed; calling it returns its exit status.

    bench_defaults: what `guild bench` without any options is parsed to.
    """
    if args.command == "train":
        from guild.cli.train_command import run_train

        return partial(run_train, args)
    if args.command == "generate":
        from guild.cli.generate_command import run_generate

        return partial(run_generate, args)
    if args.command == "bench":
        from guild.cli.bench_command import run_bench

        return partial(run_bench, args, defaults=bench_defaults)
    from guild.cli.info import run_info

    return run_info
