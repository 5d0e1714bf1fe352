"""What Ctrl-C does once a command has something to clean up: it raises KeyboardInterrupt, wherever it comes.

So does SIGTERM in the first process of a container, which the system does not end by a signal that nobody handles.
"""

from __future__ import annotations

import os
import signal
import sys

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

# A Ctrl-C that came where nothing can be raised is raised again after so long.
AGAIN_S = 0.01

FIRST_PROCESS = 1


class Terminated(KeyboardInterrupt):
    """SIGTERM has come, to a process that it does not end by itself."""

    exit_code = 128 + signal.SIGTERM


def heed_ctrl_c() -> None:
    """From here on there may be something to clean up: Ctrl-C raises KeyboardInterrupt, if it ended the process so far.

    (So it did while dibs was loaded: see ``dibs.__main__``.) Modules are loaded later, too, and where the import system
    is in a callback of its own, or a ``__del__`` runs, Python can raise nothing: it would show the interrupt and go on.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = _raise_again
    if os.getpid() == FIRST_PROCESS and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
        sys.unraisablehook = _raise_again


def _terminate(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        asked = signal.SIGTERM if issubclass(unraisable.exc_type, Terminated) else signal.SIGINT
        # In a moment, since here, too, nothing can be raised; by a signal, which also ends a system call that waits.
        signal.signal(signal.SIGALRM, lambda signum, frame: signal.raise_signal(asked))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    else:
        sys.__unraisablehook__(unraisable)
