"""What Ctrl-C does once a command has something to clean up: it raises KeyboardInterrupt, wherever it comes.

So does SIGTERM in the first process of a container, which the system does not end by a signal that nobody handles.
"""

from __future__ import annotations

import os
import signal
import sys

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

# A Ctrl-C that came where nothing can be raised, or nothing should, is raised again after so long.
AGAIN_S = 0.01
# What tracebacks call the file of the import system.
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
# What a function is called that is told of what could not be raised.
HOOK = "_raise_again"

FIRST_PROCESS = 1


class Terminated(KeyboardInterrupt):
    """SIGTERM has come, to a process that it does not end by itself."""

    exit_code = 128 + signal.SIGTERM


def heed_ctrl_c() -> None:
    """From here on there may be something to clean up: Ctrl-C raises KeyboardInterrupt, if it ended the process so far.

    (So it did while dibs was loaded: see ``dibs.__main__``.) Modules are loaded later, too: raised in the midst of it,
    an interrupt may leave the import system locked for all other threads, so it comes a moment later. So it does where
    a ``__del__`` runs and Python can raise nothing: it would show the interrupt and go on.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _raise_again
    if os.getpid() == FIRST_PROCESS and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
        sys.unraisablehook = _raise_again


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if is_no_place(frame):
        later(lambda: signal.raise_signal(signum))
    else:
        raise KeyboardInterrupt if signum == signal.SIGINT else Terminated


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        asked = signal.SIGTERM if issubclass(unraisable.exc_type, Terminated) else signal.SIGINT
        later(lambda: signal.raise_signal(asked))  # here, too, nothing can be raised
    else:
        sys.__unraisablehook__(unraisable)


def later(ask: Callable[[], None]) -> None:
    """Ask again in a moment; by a signal, which also ends a system call that waits."""
    signal.signal(signal.SIGALRM, lambda _signum, _frame: ask())
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


def is_no_place(frame: FrameType | None) -> bool:
    """Whether an interrupt would do harm, or be lost, in this frame or in one that it was called from.

    A module may be being loaded. Or what was raised where nothing can be is being taken here, so slowly that it comes
    again meanwhile.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_SYSTEM or frame.f_code.co_name == HOOK:
            return True
        frame = frame.f_back
    return False
