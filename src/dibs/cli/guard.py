"""The guard of ``dibs run``: a process that ends the command when the wrapper no longer can.

The wrapper renews the lease, and stops the command in good time before its trust ends. It cannot do so when it was
killed with -9 (nobody renews, and the command would run on into somebody else's turn) or when it is paused or hangs. So
a second process, forked before the wrapper starts any thread, watches over the command's process group:

* *unarmed*: no deadline was told. The command is not running yet: the guard was told before it may start.
* *armed*: it knows by when to send TERM and by when KILL. Each renewal moves both.
* *acted*: a moment passed without being moved; TERM or KILL was sent, and nothing is moved any more.

In every state the end of the pipe without ``done`` means that the wrapper died: KILL at once. ``done`` ends the guard.

The guard lives in a session of its own, so that no terminal reaches it, with all signals blocked that can be, and with
nothing open but its end of the pipe: somebody who waits for the end of the command's output does not wait for it. What
it cannot reach is a process that left the command's process group, as daemons do, or that runs as another user.
"""

from __future__ import annotations

import os
import select
import signal

from dibs._typing import TYPE_CHECKING
from dibs.clock import boot_now

if TYPE_CHECKING:
    from typing import NoReturn

NEVER = float("inf")
OUT_OF_REACH = (
    "runs as another user: it cannot be signalled and goes on. Put sudo before dibs and not behind it: "
    "sudo dibs … -- COMMAND"
)
# The system's waiting does not count the time a machine sleeps, the deadline does: look at the clock this often.
SLICE_S = 0.5
_DONE = b"done"
_ACTED = 1
_BROKEN = 2


class GuardDiedError(Exception):
    """The guard does not read any more: nobody would stop the command if this process were killed."""


class Guard:
    """The wrapper's side: what to tell the guard."""

    def __init__(self, group: int) -> None:
        """Fork the guard of this process group. The calling process must have a single thread."""
        read_fd, self.fd = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            _be_guard(read_fd, group)
        os.close(read_fd)
        os.set_blocking(self.fd, False)

    def tell(self, term_at: float, kill_at: float) -> None:
        """Send TERM and KILL at these moments (boot clock) unless told otherwise before. Raises GuardDiedError."""
        self._write(b"%r %r\n" % (term_at, kill_at))

    def dismiss(self) -> bool:
        """The command is over: end the guard, and return whether it had acted."""
        try:
            self._write(_DONE + b"\n")
        except GuardDiedError:
            pass
        return self.close() == _ACTED

    def close(self) -> int:
        """Give up the pipe, for which the guard kills the group unless it was dismissed before; its exit code."""
        if self.fd < 0:
            return 0
        os.close(self.fd)
        self.fd = -1
        _pid, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _write(self, line: bytes) -> None:
        try:
            os.write(self.fd, line)  # shorter than PIPE_BUF: all of it or nothing
        except OSError as error:  # nobody reads: it ended, or (the pipe is full) it has not looked for a long time
            raise GuardDiedError from error


def _be_guard(read_fd: int, group: int) -> NoReturn:
    code = _BROKEN
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        os.setsid()
        close_all_but(read_fd)
        name_process("dibs-guard")
        code = _watch_over(group, read_fd)
    finally:
        os._exit(code)  # also after an error: the wrapper sees the pipe break and stops the command


def _watch_over(group: int, fd: int) -> int:
    term_at = kill_at = NEVER
    acted = 0
    unread = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        now = boot_now()
        if now >= kill_at:
            send(group, signal.SIGKILL)
            term_at = kill_at = NEVER
            acted = _ACTED
        elif now >= term_at:
            send(group, signal.SIGTERM)
            send(group, signal.SIGCONT)  # a stopped process would not hear of it
            term_at = NEVER
            acted = _ACTED
        slice_s = max(0.0, min(SLICE_S, term_at - now, kill_at - now))
        if not poll.poll(None if kill_at == NEVER else int(slice_s * 1000) + 1):
            continue
        data = os.read(fd, 4096)
        if not data:
            send(group, signal.SIGKILL)
            return _ACTED
        lines = (unread + data).split(b"\n")
        unread = lines.pop()
        if _DONE in lines:
            return acted
        if lines and not acted:
            term_at, kill_at = map(float, lines[-1].split())


def send(group: int, signum: int) -> bool:
    """Signal every process of the group that this user may signal; False when none at all is left."""
    try:
        os.killpg(group, signum)
    except PermissionError:  # they are there, as another user: see ``out_of_reach``
        return True
    except OSError:
        return False
    return True


def out_of_reach(group: int) -> bool:
    """Whether all that is left of the group runs as another user: no signal of ours reaches it."""
    try:
        os.killpg(group, 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def close_all_but(*keep: int) -> None:
    """Close every other file; those of the standard three that are not kept become /dev/null."""
    next_fd = 0
    for fd in (*sorted(keep), 256):
        if fd > next_fd:  # closerange(0, 0) closes everything, by close_range(2) with an end below 0
            os.closerange(next_fd, fd)
        next_fd = max(next_fd, fd + 1)
    try:
        higher = [int(fd) for fd in os.listdir("/dev/fd") if int(fd) >= 256]
    except OSError:  # no such folder here; more than 256 open files are rare enough
        higher = []
    for fd in higher:
        if fd not in keep:
            os.closerange(fd, fd + 1)
    for fd in range(3):
        if fd not in keep:
            os.open(os.devnull, os.O_RDWR)


def name_process(name: str) -> None:
    """Let ``ps`` and ``top`` show what this process is (Linux; elsewhere it looks like the wrapper)."""
    try:
        fd = os.open("/proc/self/comm", os.O_WRONLY)
    except OSError:
        return
    os.write(fd, name.encode())
    os.close(fd)
