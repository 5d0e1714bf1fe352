"""``dibs``, and ``python -m dibs``: where the command line begins, and what Ctrl-C does until it has been loaded.

Loading takes some 20 ms, in which there is nothing to clean up. Python's own handler of SIGINT would raise
KeyboardInterrupt in the midst of an import: that is shown with its traceback, or, in a callback of the import system,
shown and forgotten. So until a command has its client (``dibs.cli.asked_for``) the signal ends the process as it ends
any other, without a word; shells call that 130.
"""

from __future__ import annotations

# `signal` itself would import `enum`, in a part of the time that this is about.
import _signal  # type: ignore[import-not-found]
import gc
import sys


def main() -> int:
    """Load the command line, run it with the arguments of this process, and return its exit code."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # not where it is ignored: in the background
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    gc.disable()  # what is loaded stays: looking through it for garbage would take 1.7 ms (medians of 80 starts)
    from dibs.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
