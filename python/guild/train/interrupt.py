"""Ctrl-C and SIGTERM: an exception, or a request while a run can still write a checkpoint.

The first Ctrl-C lets the current round finish, the second one ends at once. SIGTERM always is a
request then: schedulers and torchrun send it several times.
"""

from __future__ import annotations

import contextlib
import signal
from types import FrameType, TracebackType

INTERRUPTED = 130  # exit status, as of a shell's command after Ctrl-C


class _Handlers:
    """Context manager that gives signals their previous handlers again."""

    def __init__(self) -> None:
        self._previous: dict[int, object] = {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


class Interruption(_Handlers):
    """Context manager that raises KeyboardInterrupt on SIGINT and SIGTERM.

    Until `imported` is called the first signal is only remembered: torch loses exceptions that are
    raised while it imports NumPy. Signals that the process ignores, or handles in another way, stay
    as they are.

    Attributes
    ----------
    came : bool
        Whether there was one, which code in between may have turned into another exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self.came, self._waits = False, True

    def __enter__(self) -> Interruption:
        with contextlib.suppress(ValueError):  # not the main thread: signals go elsewhere
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if handler in (signal.default_int_handler, signal.SIG_DFL):
                    signal.signal(number, self._interrupt)
                    self._previous[number] = handler
        return self

    def imported(self) -> None:
        """From now on raise at once; raises if there was a signal before."""
        self._waits = False
        if self.came:
            raise KeyboardInterrupt

    def end_quietly(self) -> None:
        """To the end of the process: Ctrl-C ends it at once, schedulers' SIGTERMs are ignored."""
        for number, how in ((signal.SIGINT, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_IGN)):
            if self._previous.pop(number, None) is not None:
                signal.signal(number, how)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        first, self.came = not self.came, True
        if self._waits and first:
            return
        if number == signal.SIGTERM:  # the next one must not end what tidies up
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt


class StopRequest(_Handlers):
    """Context manager that turns SIGINT and SIGTERM into `asked`.

    Inside, `asked` becomes True on the first signal; a second SIGINT acts as it did before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __enter__(self) -> StopRequest:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._ask)
        except ValueError:  # not the main thread: signals go elsewhere
            self._previous.clear()
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
