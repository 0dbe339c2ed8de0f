"""Errors that need no word of their own."""

from __future__ import annotations


class OtherRankError(RuntimeError):
    """The rank that writes has failed, and says why."""
