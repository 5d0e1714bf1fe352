"""Time and threads: the only module that reads a clock, sleeps, or starts a thread.

Everything that runs concurrently in dibs takes a ``Clock`` and makes its mutexes, gates, bells and threads from it, so
a test can put a virtual clock and a scheduler of its own in the place of this machine's (see ``tests/simulation``).

Trust is counted on the *boot clock*: it cannot be set, and it goes on while the machine sleeps. Waiting uses the
operating system's timeouts, which may not count sleep: a thread can wake late, and so decides nothing but looks at the
boot clock again.
"""

from __future__ import annotations

import _thread
import os
import select
import sys
import threading
import time
from errno import EMFILE, ENFILE
from functools import partial

from dibs._typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

# One wait of the operating system is never longer than this; longer waits are made of several.
WAIT_SLICE_S = 3600.0
# Nor one of the main thread than this: a signal that comes between Python's last look and the system call interrupts
# neither, and is seen when the thread comes round.
MAIN_SLICE_S = 0.5


class Gate(Protocol):
    """A door that opens once. One thread waits."""

    def open(self) -> None:
        """Let whoever waits go on; called again after a Ctrl-C, it does no harm."""
        ...

    def wait(self, timeout: float | None) -> bool:
        """True when the gate is open, False when ``timeout`` seconds went by first."""
        ...


class Bell(Protocol):
    """What a service thread sleeps on: anybody may ring, the thread wakes and the ringing is over."""

    def ring(self) -> None: ...
    def wait(self, timeout: float | None, fd: int | None = None) -> None:
        """Return when rung, when ``fd`` can be read, or after ``timeout`` seconds."""
        ...

    def close(self) -> None: ...


class Mutex(Protocol):
    """What only one thread has at a time; whoever has it must not take it again."""

    def __enter__(self) -> object: ...
    def __exit__(self, kind: Any, error: Any, traceback: Any, /) -> bool | None: ...

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool:
        """Whether anybody has it."""
        ...


class Clock(Protocol):
    """Where a session gets its time and its threads from."""

    def now(self) -> float:
        """Seconds on the boot clock."""
        ...

    def wall(self) -> float:
        """Unix time, for people only; nothing is decided by it."""
        ...

    def sleep(self, seconds: float) -> None: ...
    def jitter(self) -> float:
        """A random number in [0, 1)."""
        ...

    def mutex(self) -> Mutex: ...
    def gate(self) -> Gate: ...
    def bell(self) -> Bell: ...
    def spawn(self, name: str, run: Callable[[], None]) -> None:
        """Run ``run`` in a thread that does not keep the process alive."""
        ...


class Deadline:
    """The moment by which a store's act must be over, handed to the store so that it needs no clock of its own."""

    __slots__ = ("_clock", "at")

    def __init__(self, clock: Clock, at: float) -> None:
        self._clock = clock
        self.at: float = at

    def within(self, seconds: float) -> Deadline:
        """This deadline, or one ``seconds`` from now, whichever is sooner."""
        return Deadline(self._clock, min(self.at, self._clock.now() + seconds))

    def now(self) -> float:
        """This moment, on the clock of the deadline."""
        return self._clock.now()

    def remaining(self) -> float:
        """Seconds left, never less than 0."""
        return max(0.0, self.at - self._clock.now())


def namespace_ahead_s(told: str = "/proc/self/timens_offsets") -> float:
    """By how much the boot clock of this process is ahead of its machine's.

    So it is in a time namespace: of a container of LXC, say, or one that was moved here from another machine.
    """
    try:
        with open(told, encoding="ascii") as file:
            for clock, seconds, nanoseconds in map(str.split, file):
                if clock == "boottime":
                    return int(seconds) + int(nanoseconds) / 1e9
    except (OSError, ValueError):  # without such namespaces
        pass
    return 0.0


def _boot_clock() -> Callable[[], float]:
    # macOS counts sleep on its CLOCK_MONOTONIC; elsewhere but on Linux no clock is documented to.
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime, time.CLOCK_MONOTONIC) if sys.platform == "darwin" else time.monotonic
    ahead_s = namespace_ahead_s()
    if ahead_s:
        return lambda: time.clock_gettime(time.CLOCK_BOOTTIME) - ahead_s
    return partial(time.clock_gettime, time.CLOCK_BOOTTIME)


# Seconds since this machine booted, sleep included; the same for all of its processes, which may share a file. A bare C
# call where it can be, since every act reads it several times.
boot_now: Callable[[], float] = _boot_clock()

# Unix time, for people only.
wall_now: Callable[[], float] = time.time


def boot_id() -> str | None:
    """A text that changes with every boot of this machine, or None where the system tells none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        if error.errno in (EMFILE, ENFILE):
            raise
    if sys.platform == "darwin":
        import subprocess

        try:
            shown = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return shown.stdout.strip() or None
    return None


def can_poll() -> bool:
    """Whether bells can be waited for here."""
    return hasattr(select, "poll")


_RLock: Any = _thread.RLock


class ExactMutex(_RLock):  # type: ignore[misc]
    """A mutex that is had in its ``with`` block and nowhere else, also where a Ctrl-C comes at the beginning of that.

    Since 3.14 Python lets it in between having a lock and entering the block, which leaves a bare lock had for ever.
    This one knows whose it is, and lets go. Its end is C's, with nothing in between.
    """

    __slots__ = ()

    def __enter__(self) -> bool:
        try:
            had: bool = _RLock.acquire(self)
        except BaseException:
            if self._is_owned():
                self.release()
            raise
        return had

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As with a bare lock, whoever has it does not get it once more; but need not wait to be told so."""
        return not self._is_owned() and bool(_RLock.acquire(self, blocking, timeout))


class RealGate:
    """A gate made of one bare lock, the cheapest thing a thread can wait on."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def open(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # it is open
            pass

    def wait(self, timeout: float | None) -> bool:
        slice_s = MAIN_SLICE_S if _thread.get_ident() == threading.main_thread().ident else WAIT_SLICE_S
        until = float("inf") if timeout is None else boot_now() + timeout
        left_s = until if timeout is None else timeout
        while left_s > slice_s:
            if self._lock.acquire(True, slice_s):
                return True
            left_s = until - boot_now()
        return self._lock.acquire(True, max(left_s, 0.0))


class RealBell:
    """A bell made of a pipe, so that a thread can wait for it and for a connection at once."""

    _read_fd = _write_fd = -1

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._rung = False

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            try:
                os.write(self._write_fd, b"!")
            except OSError:  # full means already rung; closed means nobody listens any more
                pass

    def wait(self, timeout: float | None, fd: int | None = None) -> None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        if fd is not None:
            poll.register(fd, select.POLLIN)
        slice_s = WAIT_SLICE_S if timeout is None else min(max(timeout, 0.0), WAIT_SLICE_S)
        # Rounded up: a wake-up just before the moment it was meant for would be spent on another wait.
        for ready, _event in poll.poll(int(slice_s * 1000) + 1 if slice_s > 0 else 0):
            if ready == self._read_fd:
                # Emptied first, then marked: a ring in between is not written, but whoever rang had already made the
                # change that this thread, about to return, will look at.
                os.read(self._read_fd, 4096)
                self._rung = False

    def close(self) -> None:
        read_fd, write_fd = self._read_fd, self._write_fd
        self._read_fd = self._write_fd = -1  # first: once they are closed, these numbers may be other files
        os.close(read_fd)
        os.close(write_fd)

    def __del__(self) -> None:
        # Whose thread was never begun, as a Ctrl-C came first. (In a forked child these numbers may be other files.)
        if self._read_fd >= 0 and self._pid == os.getpid():
            self.close()


class RealClock:
    """This machine's clock, threads and locks."""

    now = staticmethod(boot_now)
    wall = staticmethod(wall_now)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def jitter() -> float:
        # Asked a few times a second at most; the module `random` would cost every start 3 ms.
        return int.from_bytes(os.urandom(4), "big") / 2**32

    gate = staticmethod(RealGate)
    bell = staticmethod(RealBell)

    @staticmethod
    def mutex() -> Mutex:
        return ExactMutex() if sys.version_info >= (3, 14) else _thread.allocate_lock()

    @staticmethod
    def spawn(name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()


class Readiness:
    """Waits for one file descriptor, for stores that talk to a server themselves and must not wait for ever."""

    __slots__ = ("_fd", "_poll")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def readable(self, timeout: float) -> bool:
        """True when something can be read (or the peer is gone), False after ``timeout`` seconds."""
        return bool(self._poll.poll(timeout * 1000.0 + 1.0))

    def writable(self, timeout: float) -> bool:
        """True when more can be written, or something can be read."""
        self._poll.modify(self._fd, select.POLLIN | select.POLLOUT)
        try:
            return bool(self._poll.poll(timeout * 1000.0 + 1.0))
        finally:
            self._poll.modify(self._fd, select.POLLIN)
