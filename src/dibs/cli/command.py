"""A process that becomes a command: forked first, told its environment later, in a process group of its own."""

from __future__ import annotations

import os
import signal
import sys

from dibs._typing import TYPE_CHECKING
from dibs.cli import NOT_EXECUTABLE, NOT_FOUND, SIGNALLED, CommandError, say
from dibs.cli.guard import send

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def find(command: str) -> str:
    """The path of the command. Looked for first: who waits an hour for a lock does not want to hear of a typo then."""
    found = False
    folders = [""] if os.sep in command else os.get_exec_path()
    for folder in folders if command else ():
        path = os.path.join(folder, command)
        if os.path.exists(path):
            if os.access(path, os.X_OK) and not os.path.isdir(path):
                return path
            found = True
    if found:
        raise CommandError(NOT_EXECUTABLE, f"cannot run {command!r}: it is not an executable file")
    raise CommandError(NOT_FOUND, f"cannot run {command!r}: no such command")


class Command:
    """The process that becomes the command, and leads its process group."""

    def __init__(
        self, path: str, argv: list[str], mask: set[int | signal.Signals], files: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Fork it. The calling process must have a single thread.

        files: which of this process's files the command has under which number, besides the standard ones as they are.
        """
        go_fd, self._go_fd = os.pipe()
        self._refusal_fd, refused_fd = os.pipe()  # the system closes its end when it becomes the command
        self.pid = os.fork()
        if not self.pid:
            _become_command(go_fd, self._go_fd, refused_fd, path, argv, mask, files)
        os.close(go_fd)
        os.close(refused_fd)
        try:
            os.setpgid(self.pid, self.pid)  # both do it, so that it is done whoever comes first
        except OSError:
            pass
        #: How it ended, as waitpid tells it.
        self.status: int | None = None

    def start(self, environment: dict[str, str]) -> None:
        """Let it become the command, with this added to its environment."""
        try:
            os.write(self._go_fd, "\0".join(f"{key}={value}" for key, value in environment.items()).encode())
        except BrokenPipeError:  # killed while it waited; its status tells
            pass
        os.close(self._go_fd)
        self._go_fd = -1

    def look(self) -> int | None:
        """The signal that has just stopped (not ended) it, if one has; notices its end."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                return os.WSTOPSIG(status)
            if pid:
                self.status = status
        return None

    def refused(self) -> bool:
        """Whether the system refused to run it, so that the exit code is not the command's. Asked once, at its end."""
        with open(self._refusal_fd, "rb") as refusal:
            return bool(refusal.read())

    def exit_code(self) -> int:
        """Its exit code, as a shell would tell it."""
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else SIGNALLED - code

    def end(self) -> None:
        """If it has not ended, kill it and its group, whether or not it was started."""
        if self.status is None:
            send(self.pid, signal.SIGKILL)
            _pid, self.status = os.waitpid(self.pid, 0)
        if self._go_fd >= 0:
            os.close(self._go_fd)
            self._go_fd = -1


def _become_command(
    go_fd: int,
    other_end: int,
    refused_fd: int,
    path: str,
    argv: list[str],
    mask: set[int | signal.Signals],
    files: Sequence[tuple[int, int]],
) -> NoReturn:
    code = NOT_EXECUTABLE
    try:
        os.setpgid(0, 0)
        os.close(other_end)
        # Python ignores these two for itself and catches SIGINT; whatever else is ignored was so before us (nohup).
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _die_with_parent()
        message = os.read(go_fd, 65536).decode()
        if not message:  # the wrapper is not going to hold the lease
            os._exit(0)
        environment = dict(os.environ)
        for fd, number in files:
            os.dup2(fd, number)
        for entry in message.split("\0"):
            key, _, value = entry.partition("=")
            environment[key] = value
        os.execve(path, argv, environment)  # noqa: S606 - without a shell is how it is meant
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        os.write(refused_fd, b"\0")
        say(f"cannot run {argv[0]!r}: {error.strerror}")
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    """Ask Linux for a KILL at the death of the wrapper: for the case that both it and the guard are killed at once."""
    # Loading ctypes takes 2 ms, while the wrapper is busy with the store.
    if sys.platform == "linux":
        try:
            from ctypes import CDLL

            CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        except (ImportError, OSError, AttributeError):  # a Python or a libc without; the guard is there all the same
            pass
