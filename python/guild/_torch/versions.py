"""Notices changes to lists of tensors between forward and backward, as autograd does for one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Versions:
    """Version counters of a list of tensors: as saving them, but fast for many."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._name, self._tensors = name, tensors
        self._versions = self._present()

    def _present(self) -> list[int]:
        return [0 if t.is_inference() else t._version for t in self._tensors]

    def expect_unchanged(self) -> None:
        """Raise RuntimeError if one was written to since."""
        if self._present() != self._versions:
            raise RuntimeError(
                f"{self._name}: one of the experts' tensors needed for gradient computation has "
                "been modified by an inplace operation"
            )


class Held(Versions):
    """A list of tensors whose memory a backward reads: kept alive, whatever becomes of the list."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        super().__init__(name, [t.detach() for t in tensors])  # other data may be set in `tensors`
        self._addresses = [t.data_ptr() for t in tensors]

    def expect_unchanged(self) -> None:
        """Raise RuntimeError if one was written to, or its storage was freed or moved."""
        super().expect_unchanged()
        if [t.data_ptr() for t in self._tensors] != self._addresses:
            raise RuntimeError(
                f"{self._name}: the storage of experts' tensors needed for gradient computation "
                "has moved; make them views of one tensor, as guild.lay_evenly does once"
            )
