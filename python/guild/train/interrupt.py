"""Ctrl-C as a request: the first one lets the current round finish, the second one ends at once.

SIGTERM always is a request: schedulers and torchrun send it several times.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

INTERRUPTED = 130  # exit status, as of a shell's command after Ctrl-C


class StopRequest:
    """Context manager that turns SIGINT and SIGTERM into `asked`.

    Inside, `asked` becomes True on the first signal; a second SIGINT acts as it did before.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._ask)
        except ValueError:  # not the main thread: signals go elsewhere
            self._previous.clear()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
