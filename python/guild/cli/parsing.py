"""What all commands' parsers are made of."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class Formatter(argparse.HelpFormatter):
    """Help a hundred columns wide."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)


class Parser(argparse.ArgumentParser):
    """Reports an unknown option with its own usage, also that of a subcommand; once a node."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; only one of a node's processes says why."""
        if is_another_of_node():
            sys.exit(2)
        super().error(message)


def is_another_of_node() -> bool:
    """Whether this process is not the first that torchrun has started here, all of them alike."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


def path(text: str) -> Path:
    """A path of the command line; "", from an unset variable, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    return Path(text)
