"""Ctrl-C as a request: the first one lets the current round finish, the second one ends at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

INTERRUPTED = 130  # exit status, as of a shell's command after Ctrl-C


class StopRequest:
    """Context manager that turns SIGINT and SIGTERM into `asked`.

    Inside, `asked` becomes True on the first signal; then the handlers that were there before are
    back, so a second signal acts as usual.
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
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
