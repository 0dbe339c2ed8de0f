"""Standard output and error in whatever encoding they have."""

from __future__ import annotations

import io
import sys


def escape_what_cannot_be_encoded() -> None:
    r"""Write characters that a stream's encoding lacks, such as a table's lines, as \x..

    In a locale without UTF-8 the first of them would otherwise end the command.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it may be closed, or replaced
            stream.reconfigure(errors="backslashreplace")
