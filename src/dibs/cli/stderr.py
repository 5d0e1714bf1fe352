"""The standard error of this process, written to without ever waiting for whoever reads it.

A terminal after Ctrl-S, a stopped pager and a full pipe let a write wait without end. Whoever has something to do in
time asks first whether there is room, writes no more at once than then fits, and keeps the rest.
"""

from __future__ import annotations

import os
import select
import stat

from dibs.cli import say

# Once so much is unread, no more is to be added: whoever says it then waits, as for a pipe that is full.
UNREAD_MAX = 65_536
# How long a line waits to be read.
SAY_S = 1.0
# A pipe that has room at all takes so much at once.
_PIECE = select.PIPE_BUF


def say_if_read(message: str) -> bool:
    """One line on stderr, unless nobody reads there: for who has something else to do afterwards."""
    read = is_read()
    if read:
        say(message)
    return read


def is_read() -> bool:
    """Whether there is room for a line now, or before SAY_S is over."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    return bool(poll.poll(int(SAY_S * 1000)))


class Stderr:
    """What is on its way to stderr, in order. Only so much is kept as is added: ask ``full`` before."""

    def __init__(self) -> None:
        self.fd = _way_of_our_own()
        self._unsent = bytearray()
        #: How many bytes were added since the beginning, and how many of them have been written.
        self.added = self.written = 0
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLOUT)

    @property
    def full(self) -> bool:
        """Whether nothing is to be added before some of it has been read."""
        return len(self._unsent) >= UNREAD_MAX

    def add(self, data: bytes) -> None:
        """Write it behind what was added before, as soon as there is room."""
        self._unsent += data
        self.added += len(data)
        self.send()

    def send(self, wait_s: float = 0.0) -> bool:
        """Write as much as there is room for, after waiting for the first of it; whether some was written."""
        before = self.written
        while self._unsent and self._poll.poll(int(wait_s * 1000)):
            wait_s = 0.0
            try:
                size = os.write(self.fd, self._unsent[:_PIECE])
            except BlockingIOError:  # somebody else was quicker
                break
            except OSError:  # nobody listens any more
                size = len(self._unsent)
            del self._unsent[:size]
            self.written += size
        return self.written > before


def _way_of_our_own() -> int:
    """A file of its own for the pipe or terminal that stderr is, in which a write never waits; else stderr itself.

    Other processes may fill it between a look and a write, and a terminal takes less than a pipe. The mode of stderr
    itself is not ours to change: it is shared with them.
    """
    try:
        if stat.S_ISFIFO(os.fstat(2).st_mode) or os.isatty(2):
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # of another user, or nobody listens, or no Linux
        pass
    return 2
