"""Parameters that a framework has spread over ranks."""

from __future__ import annotations

from torch import Tensor


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors as they are."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
