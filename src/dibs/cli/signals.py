"""Signals to a process that runs a command: they end the waiting for the lock, and are for the command afterwards."""

from __future__ import annotations

import os
import signal
import sys

from dibs._typing import TYPE_CHECKING
from dibs.cli.ctrl_c import is_no_place, later
from dibs.cli.stderr import is_read

if TYPE_CHECKING:
    from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP)


class Interrupted(BaseException):
    """A signal asked this process to end while it was waiting for the lock."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """Signals to this process: until ``collect`` they interrupt the waiting, afterwards they are collected.

    The waiting is a block ``with signals:`` in a ``try`` that catches Interrupted. What follows the ``try`` cleans up,
    and is never interrupted, however the block ended.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        for fd in (self.fd, self._write_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._waiting = True
        #: Whoever waits has been interrupted, or is to be soon.
        self._asked = False
        sys.unraisablehook = self._raise_again
        for signum in (*PASSED_ON, signal.SIGCHLD):
            # What is ignored stays ignored, here and in the command: nohup means it. And Ctrl-Z stops who waits.
            if signum == signal.SIGCHLD or (signum != signal.SIGTSTP and not _ignored(signum)):
                signal.signal(signum, self._handle)

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting = False

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self._waiting and signum in ENDING and not self._asked:
            self._asked = True  # a second one shall not interrupt the cleaning up
            self.taken()
            self._interrupt(signum)

    def _interrupt(self, signum: int) -> None:
        """Interrupt the waiting: now, or where nothing may be raised (see ``dibs.cli.ctrl_c``) in a moment."""
        if is_no_place(sys._getframe()):
            later(lambda: self._again(signum))
        else:
            raise Interrupted(signum)

    def _again(self, signum: int) -> None:
        if self._waiting:
            self._interrupt(signum)
        else:
            self._write(bytes([signum]))  # as if it had come now: it is for the command

    def _raise_again(self, unraisable: sys.UnraisableHookArgs) -> None:
        """See ``dibs.cli.ctrl_c``: where Python can raise nothing, it would show the interrupt and go on waiting."""
        if not isinstance(unraisable.exc_value, Interrupted):
            sys.__unraisablehook__(unraisable)
            return
        signum = unraisable.exc_value.signum
        later(lambda: self._again(signum))

    def collect(self) -> None:
        """From now on, whatever comes is for the command."""
        self.taken()
        self._waiting = False
        if not _ignored(signal.SIGTSTP):
            signal.signal(signal.SIGTSTP, self._handle)

    def taken(self) -> bytes:
        """The numbers of the signals that came since the last look (and zeros for ``ring``)."""
        try:
            return os.read(self.fd, 4096)
        except BlockingIOError:
            return b""

    def over(self) -> None:
        """Nothing is left to do but perhaps to say a last line, and who asks for the end does not wait for that.

        Such a signal ends the process from now on; and one that came while it cleaned up does, when nobody reads.
        """
        asked = [signum for signum in self.taken() if signum in ENDING]
        for signum in ENDING:
            if not _ignored(signum):
                signal.signal(signum, signal.SIG_DFL)
        if asked and not is_read():
            os.kill(os.getpid(), asked[0])

    def ring(self) -> None:
        """Wake whoever polls ``fd``; from any thread."""
        self._write(b"\0")

    def _write(self, number: bytes) -> None:
        try:
            os.write(self._write_fd, number)
        except BlockingIOError:  # full: it will wake anyway
            pass

    def stop_here(self) -> None:
        """Stop this process and the others of its group, as Ctrl-Z does; returns when somebody continues it."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)


def _ignored(signum: int) -> bool:
    return signal.getsignal(signum) is signal.SIG_IGN
