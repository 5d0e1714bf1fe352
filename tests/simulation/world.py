"""A world in one thread: virtual time, a scheduler that a seed decides, and processes that think they are alone.

Every thread of every simulated process is a greenlet. One of them runs at a time, until it reaches a *seam* (it reads
its clock, takes or leaves a mutex, opens a gate, rings a bell, starts a thread, or blocks); there the scheduler may let
another go on. Time passes by small steps while something can run, and jumps to the next timer when nothing can. It
answers for *when* things happen, and knows nothing of locks: what happens is in ``programs`` and ``network``, what may
not happen in ``checker``.

World time is the store's clock. A process has a boot clock of its own, ``offset + rate * world time``, and its sleeps
and time-outs are counted on it.
"""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, NoReturn

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

# A scenario that needs more of either is taken for one that goes round in circles.
STEPS_MAX = 30_000
SEAMS_MAX = 300_000
TIME_MAX_S = 200.0
# Lines of the time line that are kept for a failure.
TIME_LINE_MAX = 5_000
TIME_LINE_SHOWN = 60


# After these the interpreter looks for signals.
_INTERRUPTIBLE = frozenset(
    code
    for name, code in dis.opmap.items()
    if (name.startswith("CALL") and "INTRINSIC" not in name) or name in ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
)


class BrokenPromise(AssertionError):
    """The simulation saw something that was promised not to happen; the text has the seed and the time line."""

    def __init__(self, what: str, world: World) -> None:
        super().__init__(what)
        self._what = what
        self._world = world

    def told(self, last: int) -> str:
        """What was broken, and the end of the time line."""
        return f"{self._what}\n\n{self._world.story(last)}"

    def __str__(self) -> str:
        return self.told(TIME_LINE_SHOWN)


class Interrupted(BaseException):
    """What Ctrl-C is in the simulation: it arrives from outside, at any seam or any line, in a program's own thread."""


class Task:
    """A thread of a simulated process."""

    __slots__ = ("blocked", "fatal", "greenlet", "interruptible", "name", "over", "pending", "process", "turn", "value")

    def __init__(self, process: Process, name: str, run: Callable[[], object], hub: greenlet, *, fatal: bool) -> None:
        self.process = process
        self.name = name
        self.greenlet = greenlet(run, hub)
        self.blocked = False
        #: Rises with every block, so that an older timer finds that it is out of date.
        self.turn = 0
        self.value: object = None
        self.pending: type[BaseException] | None = None
        self.interruptible = False
        self.over = False
        self.fatal = fatal


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.now = 0.0
        #: The greatest time one step takes, and how likely a seam lets others go on or holds its thread up.
        self.step_max_s = 0.0
        self.switch_part = 0.1
        self.stall_part = 0.0
        self.stall_max_s = 0.0
        self.hub = getcurrent()
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.tasks: list[Task] = []
        #: When the last thing happened that nobody promises to be quick through: a stall, a pause, a fault.
        self.trouble_until = 0.0
        self.time_line: deque[tuple[float, str, str, str, tuple[object, ...]]] = deque(maxlen=TIME_LINE_MAX)
        #: Called after each step: the checker's eyes.
        self.observe: Callable[[], None] = _nothing
        self.steps = 0
        self.seams = 0
        self.closing = False
        self._broken: str | None = None
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushes = 0
        self._traced: tuple[Task, dict[FrameType, int]] | None = None

    # -- the time line, and its end -------------------------------------------------------------------------------

    def note(self, who: str, text: str, *args: object) -> None:
        """Remember what happened; the text is put together only if somebody will read it."""
        task = self.current
        self.time_line.append((self.now, who, "" if task is None else task.name, text, args))

    def broken(self, what: str) -> None:
        """A promise was broken: end the run. In a task this does not return."""
        if self._broken is None:
            self._broken = what
            self.note("!", what.replace("%", "%%"))
        if self.current is not None and not self.closing:
            self.hub.switch()
            raise GreenletExit

    def story(self, last: int) -> str:
        """The end of the time line, one line for each thing that happened."""
        lines = [f"{'store time':>10}  {'process':8} {'thread':12} what"]
        for now, who, task, text, args in list(self.time_line)[-last:]:
            lines.append(f"{now:10.4f}  {who:8} {task:12} {text % args if args else text}")
        return "\n".join(lines)

    # -- running --------------------------------------------------------------------------------------------------

    def at(self, when: float, event: Callable[..., None], *args: object) -> None:
        """Let something happen at a time, outside every task."""
        self._pushes += 1
        heappush(self._timers, (when, self._pushes, event, args))

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until that is true. Raises BrokenPromise."""
        rand = self.random
        timers = self._timers
        ready = self._ready
        while self._broken is None and not until():
            while timers and timers[0][0] <= self.now:
                _, _, event, args = heappop(timers)
                event(*args)
            if ready:
                self.steps += 1
                if self.steps > STEPS_MAX or self.now > TIME_MAX_S:
                    self.broken("liveness: this takes too long; somebody goes round in circles or waits for ever")
                    break
                index = int(rand() * len(ready))
                task = ready[index]
                ready[index] = ready[-1]
                ready.pop()
                process = task.process
                if process.dead:
                    continue
                if process.paused:
                    process.parked.append(task)
                    continue
                self.now += self.step_max_s * rand()
                self.current = task
                task.greenlet.switch()
                self.current = None
            elif timers:
                self.now = max(self.now, timers[0][0])
            else:
                self.broken("liveness: nobody can go on, and programs are not finished")
            self.observe()
        if self._broken is not None:
            raise BrokenPromise(f"seed {self.seed}: {self._broken}", self)

    def close(self) -> None:
        """End what is left of every task, so that nothing of it runs later."""
        self.closing = True
        if self._traced is not None:
            self.stop_tracing(self._traced[0])
        sys.unraisablehook = _ignore  # generators that end here clean up, and are ended again
        for task in self.tasks:
            while not task.greenlet.dead:
                if not task.greenlet:  # never started: nothing to end
                    break
                self.current = task
                task.greenlet.throw(GreenletExit)
        self.current = None
        sys.unraisablehook = sys.__unraisablehook__
        self.tasks.clear()
        self._ready.clear()
        self._timers.clear()

    # -- what tasks call ------------------------------------------------------------------------------------------

    def seam(self) -> None:
        """A place where the scheduler may let another task go on."""
        task = self.current
        if task is None or self.closing:
            return
        self.seams += 1
        if self.seams > SEAMS_MAX:
            self.broken(f"liveness: {task.name} goes round in circles")
        chance = self.random()
        if chance < self.stall_part:
            self.stall(task)
        elif chance < self.switch_part:
            self._ready.append(task)
            self.hub.switch()
        if task.pending is not None and task.interruptible:
            self._raise_pending(task)

    def stall(self, task: Task) -> None:
        """The operating system lets this thread wait for no reason."""
        seconds = self.random() * self.stall_max_s
        self.note(task.process.name, "stalls for %.3f s", seconds)
        self.trouble_until = max(self.trouble_until, self.now + seconds)
        task.process.troubled_at = self.now + seconds
        task.turn += 1
        task.blocked = True
        self.at(self.now + seconds, self._time_out, task, task.turn, task.process.slept_s)
        self.hub.switch()

    def block(self, timeout: float | None) -> bool:
        """Let the running task wait to be woken (True), or for ``timeout`` seconds of world time (False)."""
        task = self.current
        if self.closing:
            raise GreenletExit
        assert task is not None
        task.turn += 1
        task.blocked = True
        if timeout is not None:
            self.at(self.now + max(0.0, timeout), self._time_out, task, task.turn, task.process.slept_s)
        self.hub.switch()
        if task.pending is not None and task.interruptible:
            self._raise_pending(task)
        return task.value is True

    def wake(self, task: Task) -> None:
        """End the wait of a blocked task."""
        if task.blocked:
            task.blocked = False
            task.value = True
            self._ready.append(task)

    def _time_out(self, task: Task, turn: int, slept_s: float) -> None:
        if task.turn != turn or not task.blocked:
            return
        # A machine that slept has not counted that time towards its waits.
        extra = task.process.slept_s - slept_s
        if extra > 0.0:
            self.at(self.now + extra, self._time_out, task, turn, task.process.slept_s)
            return
        task.blocked = False
        task.value = False
        self._ready.append(task)

    def interrupt(self, task: Task) -> None:
        """Deliver an interruption: at once if the task is blocked, at its next seam if not."""
        if task.over or task.process.dead or task.pending is not None or not task.interruptible:
            return
        self.note(task.process.name, "Ctrl-C arrives in %s", task.name)
        task.pending = Interrupted
        self.wake(task)

    def _raise_pending(self, task: Task) -> NoReturn:
        task.pending = None
        raise Interrupted  # made here: one that is kept in a frame would keep that frame's leases

    def start(self, process: Process, name: str, run: Callable[[], object], *, fatal: bool = True) -> Task:
        """Start a thread in a process. ``fatal``: an exception that ends it is a broken promise."""

        def body() -> None:
            try:
                run()
            except GreenletExit:
                pass
            except BaseException as error:  # noqa: BLE001 - a thread that ends in silence is what is looked for
                if not self.closing and task.fatal:
                    self.note(process.name, "dies of %s", repr(error))
                    self._broken = self._broken or f"the thread {name!r} of {process.name} died of {error!r}"
            task.over = True

        task = Task(process, name, body, self.hub, fatal=fatal)
        self.tasks.append(task)
        self._ready.append(task)
        return task

    def interrupt_after(self, task: Task, calls: int) -> None:
        """Interrupt ``task`` where a signal would, after that many calls and jumps back inside dibs.

        CPython runs signal handlers after a call, at the start of a function and at a jump back, nowhere else; so
        nothing comes between the ``__exit__`` of a mutex and the body that it ends.
        """
        if self._traced is not None:
            return  # one at a time: the interpreter has one trace function
        left = calls
        last: dict[FrameType, int] = {}

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if event == "call":
                code = frame.f_code
                if self.current is not task or "/dibs/" not in code.co_filename or code.co_name == "__del__":
                    return None  # what is raised in __del__ is never seen again
                frame.f_trace_opcodes = True
                frame.f_trace_lines = False
            elif event == "opcode":
                before = last.get(frame)
                last[frame] = frame.f_lasti
                if before is None or frame.f_code.co_code[before] not in _INTERRUPTIBLE:
                    return trace
                left -= 1
                if left <= 0 and task.interruptible and self.current is task and not self.closing:
                    self.stop_tracing(task)
                    self.note(
                        task.process.name,
                        "Ctrl-C arrives in %s, line %s of %s",
                        task.name,
                        frame.f_lineno,
                        frame.f_code.co_name,
                    )
                    raise Interrupted
            elif event in ("exception", "return"):
                last.pop(frame, None)  # a call that raises is not followed by a look for signals
            return trace

        self._traced = (task, last)
        sys.settrace(trace)

    def stop_tracing(self, task: Task) -> None:
        """No interruption is to come from ``interrupt_after`` any more."""
        if self._traced is not None and self._traced[0] is task:
            sys.settrace(None)
            self._traced[1].clear()  # frames keep what they see alive, leases too
            self._traced = None


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
        self.troubled_at = 0.0
        self.clock = SimClock(world, self)
        world.processes.append(self)

    def pause(self, seconds: float, asleep: bool) -> None:
        """Freeze every thread, as SIGSTOP does, or with ``asleep`` as a laptop's lid does."""
        if self.dead or self.paused:
            return
        self.world.note(self.name, "%s for %.3f s", "sleeps with its machine" if asleep else "is stopped", seconds)
        self.paused = True
        self._asleep_since = self.world.now if asleep else None
        self.troubled_at = self.world.now + seconds
        self.world.trouble_until = max(self.world.trouble_until, self.world.now + seconds)
        self.world.at(self.world.now + seconds, self._resume, seconds if asleep else 0.0)

    def _resume(self, slept_s: float) -> None:
        if self.dead:
            return
        self.world.note(self.name, "goes on")
        self.paused = False
        self._asleep_since = None
        self.slept_s += slept_s
        for task in self.parked:
            self.world._ready.append(task)
        self.parked.clear()

    def awake_s(self) -> float:
        """World time without the sleep, which CLOCK_MONOTONIC counts on Linux and nobody should trust."""
        now = self.world.now if self._asleep_since is None else self._asleep_since
        return now - self.slept_s

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
        return Bell(self._world, self._process, self)

    def spawn(self, name: str, run: Callable[[], None]) -> None:
        if not self._world.closing:
            self._world.start(self._process, name, run)
            self._world.seam()

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

    @property
    def taken(self) -> bool:
        return self._owner is not None

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

    def __exit__(self, *exc: object) -> None:
        if self._owner is None:
            return
        self._owner = None
        waiters = self._waiters
        if waiters:
            for task in waiters:
                self._world.wake(task)
            waiters.clear()
        self._world.seam()


class Gate:
    """As ``dibs.clock.RealGate``: shut, then opened once."""

    __slots__ = ("_open", "_process", "_waiter", "_world")

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._open = False
        self._waiter: Task | None = None

    def open(self) -> None:
        if self._open:
            raise RuntimeError("release unlocked lock")
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

    __slots__ = ("_clock", "_process", "_rung", "_waiter", "_world")

    def __init__(self, world: World, process: Process, clock: SimClock) -> None:
        self._world = world
        self._process = process
        self._clock = clock
        self._rung = False
        self._waiter: Task | None = None

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
        """Nothing to close."""


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


def _ignore(_: object) -> None:
    pass
