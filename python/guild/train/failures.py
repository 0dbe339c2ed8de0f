"""Errors that the commands report in a way of their own."""

from __future__ import annotations


class OtherRankError(RuntimeError):
    """Another rank has failed as well, and says why."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or GPU memory ran out: for the host's, torch has no error type of its own.

    Compared by name, as torch may not be installed.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    allocated = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return allocated or bool(names & {"MemoryError", "OutOfMemoryError"})
