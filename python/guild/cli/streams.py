"""Standard output and error in whatever encoding they have."""

from __future__ import annotations

import io
import sys


def escape_what_cannot_be_encoded() -> None:
    r"""Have characters that a stream's encoding lacks, such as lines of tables, come as \x..

    A locale without UTF-8 would otherwise end a command where it prints the first of them.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # none where it is closed, or another in its place
            stream.reconfigure(errors="backslashreplace")
