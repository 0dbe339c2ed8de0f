"""The error of a rank that ends because the rank that writes has failed."""

from __future__ import annotations


class OtherRankError(RuntimeError):
    """The rank that writes has failed, and says why."""
