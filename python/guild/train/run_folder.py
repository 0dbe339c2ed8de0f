"""The folder that a training run leaves behind: metrics, checkpoint, summary and plot.

A file appears by renaming a finished one, so a run that dies while writing, or finds the disk full,
keeps the previous file. metrics.jsonl, which grows in place, may be ahead of the checkpoint;
resuming cuts it back. Only one run at a time uses the folder: it holds a lock on run.lock to its
end.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from guild.train.learner import LAYERS
from guild.train.settings import Settings

_FORMAT = 1
_DTYPES = ("torch.float32", "torch.bfloat16")
_STATE = {"step": int, "settings": dict, "dtype": str, "corpus": str, "learners": dict}


class RunFolder:
    """Reads and writes the files of one run.

    Parameters
    ----------
    path : Path
        The folder; `claimed` makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.summary = self.path / "summary.json"
        self.plot = self.path / "loss.png"
        self.sample = self.path / "sample.txt"
        self.lock = self.path / "run.lock"

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Make the folder if there is none, and keep other runs out of it.

        Raises
        ------
        ValueError
            When no folder can be made at the path, or another run has it.
        OSError
            When nothing can be written there.
        """
        made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(
                f"out: expected a folder or a path where one can be made, got {str(self.path)!r}"
            ) from None
        except OSError as error:
            raise ValueError(
                f"out: no folder can be made at {str(self.path)!r} ({error.strerror})"
            ) from None
        lock = self._take_lock()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # left behind, neither does harm
                if _is_at(self.lock, lock):  # not if the folder was deleted and made again
                    self.lock.unlink()
                if made and not any(self.path.iterdir()):
                    self.path.rmdir()
            lock.close()

    def _take_lock(self) -> IO[bytes]:
        while True:
            lock = self.lock.open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                raise ValueError(
                    f"out: another run is writing to {str(self.path)!r}; wait for its end or "
                    "choose another folder"
                ) from None
            except OSError:  # a file system without locks, such as some clusters' Lustre
                return lock
            if _is_at(self.lock, lock):
                return lock
            lock.close()  # its run ended and removed it after it was opened here

    def start(self) -> Path | None:
        """Make room for a new run in the folder.

        Returns
        -------
        Path or None
            Where the previous run was moved: a new folder beside this one, with the first free
            number after its name.

        Raises
        ------
        ValueError
            When the run in it cannot be moved.
        OSError
            When nothing can be written there.
        """
        moved = self._move_aside()
        self.append([])  # better to find out now that no file can be written
        return moved

    def _move_aside(self) -> Path | None:
        files = (self.metrics, self.checkpoint, self.summary, self.plot, self.sample)
        old = [file for file in files if file.exists()]
        if all(file.stat().st_size == 0 for file in old):  # it ended before its first step
            return None
        here = self.path.resolve()  # "." has a name, too
        beside = (here.with_name(f"{here.name}.{n}") for n in itertools.count(1))
        aside = next(folder for folder in beside if not os.path.lexists(folder))
        try:
            aside.mkdir()
            for file in old:
                os.rename(file, aside / file.name)
        except OSError as error:  # such as a folder that is a disk of its own
            for file in old:
                if (aside / file.name).exists():
                    os.rename(aside / file.name, file)
            with contextlib.suppress(OSError):
                aside.rmdir()
            raise ValueError(
                f"out: {str(self.path)!r} holds a run, which cannot be moved to {str(aside)!r} "
                f"({error.strerror}); continue it with --resume or choose another folder"
            ) from None
        return aside if self.path.is_absolute() else Path(os.path.relpath(aside))

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add rows to metrics.jsonl."""
        try:
            with self.metrics.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:  # that of a full disk does not name the file
            raise OSError(error.errno, error.strerror, str(self.metrics)) from error

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl, without a last line that was cut off.

        Raises
        ------
        ValueError
            If a line is not a row of a run, or does not go on where the one before ended.
        """
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        rows: list[dict[str, Any]] = []
        layers = None
        last: dict[str, int] = {}  # step of each layer
        for number, line in enumerate(whole, 1):
            rows.append(self._row(number, line, layers, last))
            layers = len(rows[-1].get("load", ())) or layers
            if "loss" in rows[-1]:
                last[rows[-1]["moe"]] = rows[-1]["step"]
        return rows

    def _row(
        self, number: int, line: bytes, layers: int | None, last: dict[str, int]
    ) -> dict[str, Any]:
        """One line; layers: the length of `load` in the rows before, last: their last steps."""
        try:
            row = json.loads(line)
        except (RecursionError, ValueError):
            row = None
        wrong = _wrong_in(row)
        if wrong is None and layers and len(row.get("load", ())) not in (0, layers):
            wrong = f"load: expected a list of length {layers} as before, got {row['load']!r}"
        if wrong is None and "loss" in row and last.get(row["moe"]) not in (None, row["step"] - 1):
            wrong = f"step: expected {last[row['moe']] + 1} as the next, got {row['step']}"
        if wrong is not None:
            raise ValueError(
                f"resume: line {number} of {str(self.metrics)!r} is not a row of a training run"
                f"{wrong and f': {wrong}'}"
            )
        return row

    def cut_after(self, step: int, layers: Collection[str]) -> None:
        """Drop the rows that are newer than `step`.

        Raises
        ------
        ValueError
            If the file has no row of the step itself for one of these layers, or rows of others.
        """
        kept = [row for row in self.rows() if row["step"] <= step]
        there = {row["moe"] for row in kept if row["step"] == step and "loss" in row}
        if missing := set(layers) - there:
            raise ValueError(
                f"resume: {str(self.metrics)!r} has no row of {' and '.join(sorted(missing))} for "
                f"step {step}, at which the checkpoint was written"
            )
        if others := {row["moe"] for row in kept} - set(layers):
            raise ValueError(
                f"resume: {str(self.metrics)!r} has rows of {' and '.join(sorted(others))}, which "
                "the checkpoint does not hold"
            )
        with self.replacing(self.metrics) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in kept)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Write checkpoint.pt in one piece.

        Raises
        ------
        OSError
            When it cannot be written; the one before is still there.
        """
        with self.replacing(self.checkpoint) as file:
            torch.save({"format": _FORMAT, **state}, file)

    def load_checkpoint(self, option: str = "resume") -> dict[str, Any]:
        """The last checkpoint, its tensors on the CPU.

        Parameters
        ----------
        option : str
            The option that asks for it, for errors: "resume", or "run" of commands that only read.

        Raises
        ------
        ValueError
            When there is none, when the file is not one, when another version of Guild wrote it, or
            when it holds a step or setting that no run has.
        OSError
            When it cannot be read.
        """
        name = repr(str(self.checkpoint))
        advice = "; start without --resume" if option == "resume" else ""
        if not self.checkpoint.exists():
            raise ValueError(f"{option}: no checkpoint.pt in {str(self.path)!r}{advice}")
        if self.checkpoint.stat().st_size == 0:
            raise ValueError(f"{option}: {name} is empty{advice}")
        with self.checkpoint.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that are not torch's
            try:
                with zipfile.ZipFile(file) as archive:  # torch does not compare the checksums
                    if damaged := archive.testzip():
                        raise ValueError(damaged)
                # With mmap, ranks of a node share the pages.
                where = {"map_location": "cpu", "mmap": _is_unicode(self.checkpoint)}
                state = torch.load(self.checkpoint, **where, weights_only=True)
            except Exception:  # torch raises whatever its readers run into in damaged files
                raise ValueError(
                    f"{option}: {name} is damaged or not a checkpoint{advice}"
                ) from None
        if not isinstance(state, dict) or not isinstance(state.get("format"), int):
            raise ValueError(f"{option}: {name} is not a checkpoint of guild train")
        if state["format"] != _FORMAT:
            raise ValueError(f"{option}: {name} has format {state['format']}, expected {_FORMAT}")
        _expect_state(state, f"{option}: {name}")
        return state

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json and, of it, sample.txt."""
        for path, text in (
            (self.sample, summary["sample"]),
            (self.summary, json.dumps(summary, indent=2) + "\n"),
        ):
            with self.replacing(path) as file:
                file.write(text.encode())

    def read_summary(self) -> dict[str, Any] | None:
        """What summary.json holds, or None when there is none that can be read as one."""
        try:
            summary = json.loads(self.summary.read_bytes())
        except (OSError, RecursionError, ValueError):
            return None
        return summary if isinstance(summary, dict) else None

    @staticmethod
    def _unfinished(path: Path) -> Path:
        return path.with_suffix(".unfinished")

    @contextlib.contextmanager
    def replacing(self, path: Path) -> Iterator[IO[bytes]]:
        """A file to write that replaces `path` when it is complete, and is removed otherwise.

        Raises
        ------
        OSError
            When it cannot be written; what was at the path is still there.
        """
        unfinished = self._unfinished(path)
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # a full disk may be reported only here
            os.replace(unfinished, path)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            cause = _system_error(error)
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error


def _is_unicode(path: Path) -> bool:
    """Whether torch can map the file: its path must consist of characters."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong_in(row: object) -> str | None:
    """What keeps a line of metrics.jsonl from being a row, as far as rows are read; None: nothing.

    A row is of a training step, with its loss, or of a validation.
    """
    if not isinstance(row, dict):
        return ""
    asked: dict[str, tuple[Callable[[Any], bool], str]] = {
        "step": (lambda v: type(v) is int and v >= 0, "an integer of at least 0"),
        "moe": (lambda v: v in LAYERS, f"one of {', '.join(LAYERS)}"),
    }
    if "loss" in row:
        asked["loss"] = (_is_number, "a finite number")
        asked["seconds"] = (lambda v: _is_number(v) and v > 0, "a positive number")
        asked["load"] = (_is_list_of_numbers, "a list of numbers")
    else:
        asked["validation_loss"] = (lambda v: type(v) is float or _is_number(v), "a number")
    for name, (is_right, expected) in asked.items():
        if name not in row:
            return f"no {name} in it"
        if not is_right(row[name]):
            return f"{name}: expected {expected}, got {row[name]!r}"
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _expect_state(state: dict[str, Any], name: str) -> None:
    """Raise ValueError unless the state is one that `save_checkpoint` was given."""
    for key, kind in _STATE.items():
        if not isinstance(state.get(key), kind) or isinstance(state[key], bool):
            raise ValueError(f"{name} is not a checkpoint of guild train: no {key} in it")
    unknown = set(state["settings"]) - set(Settings().as_dict())
    learners = state["learners"]
    if unknown or state["dtype"] not in _DTYPES or not learners or set(learners) - set(LAYERS):
        raise ValueError(f"{name} was written by another version of guild train")
    if state["step"] < 0:
        raise ValueError(f"{name}: step: expected 0 or more, got {state['step']}")
    try:
        Settings(**state["settings"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether the open file is the one at the path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _system_error(error: BaseException) -> OSError | None:
    """The cause of a failed write: torch.save turns a full disk's OSError into a RuntimeError."""
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        return error.__context__
    return error if isinstance(error, OSError) else None
