"""Signals that tell workers to stop: what SIGTERM and Ctrl-C do while jobs are worked, in threads or in tasks."""

from __future__ import annotations

import signal
from weakref import ref

from dibs._typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dibs.crew import Crew


class Signals:
    """While it is open, SIGTERM and the first Ctrl-C tell the crew to stop. Nothing, outside the main thread.

    What the program does about them itself is put back at the end, and has the second Ctrl-C. A signal that is ignored
    (by nohup, or in the background of a shell) stays so. An event loop's own handlers are called besides.
    """

    def __init__(self, crew: Crew) -> None:
        # What is installed lives on where the event loop is gone: it does not keep the jobs.
        self._crew = ref(crew)
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
        crew = self._crew()
        if crew is None or (crew.stopping and number == signal.SIGINT):
            self.__exit__()
            signal.raise_signal(number)
        if crew is not None:
            crew.stopping = True

    def __exit__(self, *exc: object) -> None:
        try:
            for number in list(self._before):
                signal.signal(number, self._before[number])
                del self._before[number]
        except ValueError:  # a task whose event loop is gone ends in whichever thread: left to the next signal
            pass
