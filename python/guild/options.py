"""Errors about a command line's options that do not go together, named as they are typed."""

from __future__ import annotations


def option(name: str) -> str:
    """An option as it is typed, from the name of its value."""
    return f"--{name.replace('_', '-')}"


def excludes(name: str, others: str) -> ValueError:
    """The error for the option of a value together with `others`, as these are typed."""
    return ValueError(f"{option(name)}: cannot be used with {others}")


def needs(name: str, other: str) -> ValueError:
    """The error for the option of a value without `other`, as that is typed."""
    return ValueError(f"{option(name)}: needs {other}")
