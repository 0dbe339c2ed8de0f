"""What the commands print on, for output that nobody may read to the end."""

from __future__ import annotations

import sys

from rich.console import Console

from guild.cli.streams import drop_output


class CommandConsole(Console):
    """Drops the rest where the reader has gone, as after `| head`, and says so in one line.

    rich's own would end the process.
    """

    def on_broken_pipe(self) -> None:
        """What is printed later, by other means too, goes nowhere."""
        drop_output(self.file)
        self.quiet = True
        print("guild: nobody reads the output any more; going on without it", file=sys.stderr)
