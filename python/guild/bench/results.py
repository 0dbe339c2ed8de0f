"""Files of results: a folder that is tried before the measurement, files that appear whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """What a JSON file holds.

    Raises
    ------
    ValueError
        If the file cannot be read or is no JSON.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"expected a JSON file, got {str(file)!r} ({error})") from None


def make_folder(out: Path) -> None:
    """Make the folder, and check now, not after the measurement, that it takes files.

    Raises
    ------
    ValueError
        If it does not.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"out: expected a folder, got the file {str(out)!r}") from None
    except OSError as error:
        raise ValueError(
            f"out: expected a folder to write in, got {str(out)!r} ({error.strerror})"
        ) from None


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to, which replaces `file` at the end; a failure leaves `file` alone.

    Raises
    ------
    ValueError
        If it cannot be written.
    """
    unfinished = file.with_name(f"{file.stem}.unfinished{file.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, file)
    except OSError as error:
        raise ValueError(f"out: {str(file)!r} cannot be written ({error.strerror})") from None
    finally:
        unfinished.unlink(missing_ok=True)
