"""Signals that tell workers to stop: what SIGTERM and Ctrl-C do while jobs are worked, in threads or in tasks."""

from __future__ import annotations

import signal

from dibs._typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dibs.crew import Crew


class Signals:
    """While it is open, SIGTERM and the first Ctrl-C tell the crew to stop. Nothing, outside the main thread.

    What the program does about them itself is put back at the end, and has the second Ctrl-C. A signal that is ignored
    (by nohup, or in the background of a shell) stays so. An event loop's own handlers are called besides.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._stop)
        except ValueError:  # signals are for the main thread
            pass
        return self

    def _stop(self, number: int, frame: object) -> None:
        # A handler of signals runs anywhere, so it only marks; who sleeps looks at the mark.
        if self._crew.stopping and number == signal.SIGINT:
            self.__exit__()
            signal.raise_signal(number)
        self._crew.stopping = True

    def __exit__(self, *exc: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
