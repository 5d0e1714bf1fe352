"""A simulated process: a boot clock of its own, threads and locks of its own, and ways to stop.

``SimClock`` is what the shipped code takes for ``dibs.clock.Clock``. Each call to it is a seam of the world, a place
where another thread may go on. The gate, the bell and the mutex behave as the real ones do, down to what they raise.
"""

from __future__ import annotations

from errno import EMFILE
from typing import TYPE_CHECKING
from weakref import WeakSet

from tests.simulation.world import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import Task, World


class Process:
    """A process on a machine of its own: it can be paused, sleep with its machine, and crash."""

    def __init__(self, world: World, name: str, rate: float, offset: float) -> None:
        self.world = world
        self.name = name
        self.rate = rate
        self.offset = offset
        self.paused = False
        self.dead = False
        self.parked: list[Task] = []
        #: World seconds during which the machine slept: its boot clock counted them, its waits did not.
        self.slept_s = 0.0
        self._asleep_since: float | None = None
        #: Until then what it does may be late.
        self.troubled_at = 0.0
        #: Until then it has neither threads nor file descriptors left to give.
        self.starved_until = 0.0
        #: A Ctrl-C has reached it.
        self.interrupted = False
        #: What its threads sleep on, and its connections to the store, as long as they are open.
        self.bells: WeakSet[Bell] = WeakSet()
        self.connections: set[object] = set()
        self.clock = SimClock(world, self)
        world.processes.append(self)

    def trouble(self, seconds: float) -> None:
        """For so long it may be late."""
        self.troubled_at = max(self.troubled_at, self.world.now + seconds)
        self.world.trouble_until = max(self.world.trouble_until, self.troubled_at)

    def pause(self, seconds: float, asleep: bool) -> None:
        """Freeze every thread, as SIGSTOP does, or with ``asleep`` as a laptop's lid does."""
        if self.dead or self.paused:
            return
        self.world.note(self.name, "%s for %.3f s", "sleeps with its machine" if asleep else "is stopped", seconds)
        self.paused = True
        self._asleep_since = self.world.now if asleep else None
        self.trouble(seconds)
        self.world.at(self.world.now + seconds, self._resume, seconds if asleep else 0.0)

    def _resume(self, slept_s: float) -> None:
        if self.dead:
            return
        self.world.note(self.name, "goes on")
        self.paused = False
        self._asleep_since = None
        self.slept_s += slept_s
        for task in self.parked:
            self.world.go_on(task)
        self.parked.clear()

    def awake_s(self) -> float:
        """World time without the sleep, which CLOCK_MONOTONIC counts on Linux and nobody should trust."""
        now = self.world.now if self._asleep_since is None else self._asleep_since
        return now - self.slept_s

    def starve(self, seconds: float) -> None:
        """For a while it can have no new thread and no file descriptor."""
        if not self.dead:
            self.world.note(self.name, "can have no thread for %.3f s", seconds)
            self.starved_until = self.world.now + seconds
            self.trouble(seconds)

    def crash(self) -> None:
        """End without a word."""
        if not self.dead:
            self.world.note(self.name, "crashes")
            self.dead = True
            self.parked.clear()


class SimClock:
    """``dibs.clock.Clock`` in a world: time and threads of one process."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._fds = 0
        self.readable: dict[int, FakeFile] = {}

    def boot(self) -> float:
        """The boot clock, for whoever only looks on."""
        return self._process.offset + self._process.rate * self._world.now

    def now(self) -> float:
        world = self._world
        if world.current is None:
            return self.boot()
        if world.random() < 0.5:
            world.seam()
            return self.boot()
        now = self.boot()
        world.seam()  # read, but not yet used: others go on in between
        return now

    def wall(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.block(max(0.0, seconds) / self._process.rate)

    def jitter(self) -> float:
        return self._world.random()

    def mutex(self) -> Mutex:
        return Mutex(self._world)

    def gate(self) -> Gate:
        return Gate(self._world, self._process)

    def bell(self) -> Bell:
        if self._is_starved() and self._world.random() < 0.5:
            raise OSError(EMFILE, "Too many open files")
        return Bell(self._world, self._process, self)

    def spawn(self, name: str, run: Callable[[], None]) -> None:
        if self._is_starved():
            raise RuntimeError("can't start new thread")
        if not self._world.closing:
            self._world.start(self._process, name, run)
            self._world.seam()

    def _is_starved(self) -> bool:
        return self._world.now < self._process.starved_until and not self._world.closing

    def open_fd(self) -> tuple[int, FakeFile]:
        """A file descriptor that a bell can wait for."""
        self._fds += 1
        file = self.readable[self._fds] = FakeFile(self._world)
        return self._fds, file


class Mutex:
    """A lock that strikes at taking it twice in one thread, and is fair to nobody."""

    __slots__ = ("_owner", "_waiters", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Task | None = None
        self._waiters: list[Task] = []

    def locked(self) -> bool:
        return self._owner is not None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        raise AssertionError("whoever has a mutex has it in a block")

    def release(self) -> None:
        self.__exit__()

    def __enter__(self) -> None:
        world = self._world
        task = world.current
        if task is None or world.closing:
            return
        world.seam()
        while self._owner is not None:
            if self._owner is task:
                world.broken(f"deadlock: {task.name} takes a mutex it has")
            self._waiters.append(task)
            try:
                world.block(None)
            finally:
                if task in self._waiters:
                    self._waiters.remove(task)
        self._owner = task

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        if self._owner is None:
            return
        self._owner = None
        waiters = self._waiters
        if waiters:
            for task in waiters:
                self._world.wake(task)
            waiters.clear()
        self._world.seam() if kind is not Interrupted else self._world.put_aside()


class Gate:
    """As ``dibs.clock.RealGate``: shut, then opened once."""

    __slots__ = ("_open", "_process", "_waiter", "_world")

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._open = False
        self._waiter: Task | None = None

    def open(self) -> None:
        self._open = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._world.wake(waiter)
        self._world.seam()

    def wait(self, timeout: float | None) -> bool:
        world = self._world
        world.seam()
        if not self._open:
            self._waiter = world.current
            try:
                if not world.block(None if timeout is None else timeout / self._process.rate):
                    return False
            finally:
                self._waiter = None
        self._open = False
        return True


class Bell:
    """As ``dibs.clock.RealBell``."""

    __slots__ = ("__weakref__", "_clock", "_process", "_rung", "_waiter", "_world")

    def __init__(self, world: World, process: Process, clock: SimClock) -> None:
        self._world = world
        self._process = process
        self._clock = clock
        self._rung = False
        self._waiter: Task | None = None
        process.bells.add(self)

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._rouse()
        self._world.seam()

    def _rouse(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._world.wake(waiter)

    def wait(self, timeout: float | None, fd: int | None = None) -> None:
        world = self._world
        world.seam()
        file = None if fd is None else self._clock.readable[fd]
        if not self._rung and (file is None or not file.ready):
            self._waiter = world.current
            if file is not None:
                file.rouse = self._rouse
            try:
                if not world.block(None if timeout is None else timeout / self._process.rate):
                    return  # a ring from now on is for the next wait
            finally:
                self._waiter = None
                if file is not None:
                    file.rouse = _nothing
        self._rung = False

    def close(self) -> None:
        """Nobody sleeps on it any more."""
        self._process.bells.discard(self)


class FakeFile:
    """The end of a connection that becomes readable."""

    __slots__ = ("_world", "ready", "rouse")

    def __init__(self, world: World) -> None:
        self._world = world
        self.ready = False
        self.rouse: Callable[[], None] = _nothing

    def arrive(self) -> None:
        self.ready = True
        self.rouse()


def _nothing() -> None:
    pass
