"""What Ctrl-C does once a command has something to clean up: it raises KeyboardInterrupt, wherever it comes."""

from __future__ import annotations

import signal
import sys

# A Ctrl-C that came where nothing can be raised is raised again after so long.
AGAIN_S = 0.01


def heed_ctrl_c() -> None:
    """From here on there may be something to clean up: Ctrl-C raises KeyboardInterrupt, if it ended the process so far.

    (So it did while dibs was loaded: see ``dibs.__main__``.) Modules are loaded later, too, and where the import system
    is in a callback of its own, or a ``__del__`` runs, Python can raise nothing: it would show the interrupt and go on.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = _raise_again


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    if unraisable.exc_type is KeyboardInterrupt:
        # In a moment, since here, too, nothing can be raised; by a signal, which also ends a system call that waits.
        signal.signal(signal.SIGALRM, lambda signum, frame: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    else:
        sys.__unraisablehook__(unraisable)
