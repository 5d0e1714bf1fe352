"""Whose turn it is at the keyboard of a terminal: the shell's job control, for a command in a group of its own."""

from __future__ import annotations

import os
import signal


class Terminal:
    """Whose turn it is at the keyboard: the wrapper's group, or the command's when that wants it."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._fd: int | None = None
        self.given = False
        # In `dibs run … | less` the keyboard is the reader's, unless the command asks for it (see ``Supervisor``).
        self.wanted = os.isatty(0) and not _is_pipe(1)

    def give(self) -> bool:
        """If it is wanted and ours to give, let the command read from the terminal and be reached by Ctrl-C."""
        if not self.wanted:
            return False
        try:
            if self._fd is None:
                self._fd = os.open("/dev/tty", os.O_RDWR)
            if os.tcgetpgrp(self._fd) == os.getpgrp():
                # Taking it back is done from the background, for which a process is stopped unless it ignores this.
                signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                os.tcsetpgrp(self._fd, self._group)
                self.given = True
        except OSError:  # no terminal, or not this session's
            pass
        return self.given

    def take_back(self) -> None:
        """Put the wrapper's group into the foreground again, if the command's was."""
        if self.given and self._fd is not None:
            self.given = False
            try:
                os.tcsetpgrp(self._fd, os.getpgrp())
            except OSError:  # it was closed meanwhile
                pass


def _is_pipe(fd: int) -> bool:
    return os.fstat(fd).st_mode & 0o170000 == 0o010000  # stat.S_ISFIFO
