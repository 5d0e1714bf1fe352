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
import gc
import random
import sys
import warnings
from collections import deque
from contextlib import contextmanager
from functools import cache
from heapq import heappop, heappush
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from weakref import ref

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

import dibs.owners
from dibs.aio.tasks import _MAILBOXES
from dibs.errors import StoreUnavailable
from dibs.owners import ThreadOwner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType, FrameType

    from tests.simulation.loop import SimLoop
    from tests.simulation.process import Process

# A scenario that needs more of either is taken for one that goes round in circles.
STEPS_MAX = 30_000
SEAMS_MAX = 300_000
TIME_MAX_S = 200.0
# A thread that is put aside between two instructions goes on after this, or now and then after that.
SWITCHED_MAX_S = 0.005
SWITCHED_FOR_LONG_MAX_S = 0.3
# A thread that was interrupted while it had a mutex may be put aside before it cleans up, for up to this long.
ASIDE_MAX_S = 0.3
# Lines of the time line that are kept for a failure.
TIME_LINE_MAX = 5_000
TIME_LINE_SHOWN = 60
# What is called while garbage is collected: nobody sees what is raised there.
COLLECTING = "/dibs/dropped.py"
# The function that is called between two instructions where threads are switched there: none of the shipped code.
LOOK = "look"
_NOP = dis.opmap["NOP"]
_JUMPS = frozenset(code for name, code in dis.opmap.items() if name.startswith("JUMP"))
# After these the interpreter looks for signals.
_INTERRUPTIBLE = frozenset(
    code
    for name, code in dis.opmap.items()
    if (name.startswith("CALL") and "INTRINSIC" not in name) or name in ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
)
# But not after these (since 3.11), where what was called is written in Python.
_GOES_ON = frozenset(code for name, code in dis.opmap.items() if name in ("CALL", "CALL_KW"))


@cache
def _handlers(code: CodeType) -> list[Any] | None:
    """Which instructions of a function are covered by which handler; None before Python 3.11, where blocks say that."""
    return getattr(dis.Bytecode(code), "exception_entries", None)


def _is_handled_alike(code: CodeType, before: int, now: int) -> bool:
    """Whether what a signal raises after one instruction goes where it would go if the next one raised it.

    CPython looks for who handles it by the instruction that it has left, or by that in front of the place to which it
    has jumped: the end of a ``with`` that returns what was called in it is covered by nothing, that call is.
    """
    entries = _handlers(code)
    if entries is None:
        return code.co_code[now] != _NOP  # a `try:` that was jumped back to
    left = now - 2 if code.co_code[before] in _JUMPS else before
    return _handler(entries, left) == _handler(entries, now)


def _handler(entries: list[Any], at: int) -> object:
    return next((entry.target for entry in entries if entry.start <= at < entry.end), None)


class BrokenPromise(AssertionError):
    """The simulation saw something that was promised not to happen; the text has the seed and the time line."""

    def __init__(self, what: str, world: World) -> None:
        super().__init__(what)
        #: The promise and how it was broken.
        self.what = what
        self._world = world

    def told(self, last: int) -> str:
        """What was broken, and the end of the time line."""
        return f"seed {self._world.seed}: {self.what}\n\n{self._world.story(last)}"

    def __str__(self) -> str:
        return self.told(TIME_LINE_SHOWN)


class Interrupted(BaseException):
    """What Ctrl-C is in the simulation: it arrives from outside, at any seam or any line, in a program's own thread."""


class Task:
    """A thread of a simulated process."""

    __slots__ = (
        "blocked",
        "fatal",
        "greenlet",
        "interruptible",
        "loop",
        "me",
        "name",
        "over",
        "owner",
        "pending",
        "process",
        "turn",
        "value",
    )

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
        #: What ``dibs.owners`` takes this thread for.
        self.me: ThreadOwner | None = ThreadOwner()
        self.owner = ref(self.me)
        #: The event loop that runs in it.
        self.loop: SimLoop | None = None

    def go_on(self, error: type[BaseException] | None = None) -> None:
        """Let it run until its next seam, or raise this in it."""
        if self.loop is not None:
            self.loop.enter()
        if error is None:
            self.greenlet.switch()
        else:
            self.greenlet.throw(error)
        if self.loop is not None:
            self.loop.leave()


class World:
    #: The one that runs, and whether its threads are switched between any two instructions.
    running: ClassVar[World | None] = None
    switched: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.now = 0.0
        #: The greatest time one step takes, and how likely a seam lets others go on or holds its thread up.
        self.step_max_s = 0.0
        self.switch_part = 0.1
        #: How many times as long as usual it may take.
        self.size = 5 if self.switched else 1
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
        self._thread = get_ident()
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

    def max_hold(self) -> float | None:
        """In every eighth world some are to have what they take for so long only; the others stay what they were."""
        return 0.5 + 3.0 * self.random() if self.seed % 8 == 3 and self.random() < 0.5 else None

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
                if self.steps > self.size * STEPS_MAX or self.now > self.size * TIME_MAX_S:
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
                task.go_on()
                self.current = None
            elif timers:
                self.now = max(self.now, timers[0][0])
            else:
                self.broken("liveness: nobody can go on, and programs are not finished")
            self.observe()
        if self._broken is not None:
            raise BrokenPromise(self._broken, self)

    def run_to_the_end_of(self, tasks: Sequence[Task]) -> None:
        """Go on until all of them are over, or their processes dead."""
        left = list(tasks)

        def over() -> bool:
            while left and (left[-1].over or left[-1].process.dead):
                left.pop()
            return not left

        self.run(over)

    def run_for(self, seconds: float) -> None:
        """Let so much time pass, whether anything happens or not."""
        end = self.now + seconds
        self.at(end, _nothing)
        self.run(lambda: self.now >= end)

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
                task.go_on(GreenletExit)
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
        if self.seams > self.size * SEAMS_MAX:
            self.broken(f"liveness: {task.name} goes round in circles")
        chance = self.random()
        if chance < self.stall_part:
            self.stall(task)
        elif chance < self.switch_part:
            self._ready.append(task)
            self.hub.switch()
        if task.pending is not None and task.interruptible and not _is_collecting():
            self._raise_pending(task)

    def put_aside(self) -> None:
        """Let others go on between what an interruption has left half done and its clean-up."""
        task = self.current
        if task is None or self.closing or self.random() < 0.5:
            return
        self._hold_up(task, self.random() ** 2 * ASIDE_MAX_S)

    def is_running_here(self) -> bool:
        """Whether a task runs, and it is one of those that calls this."""
        return self.current is not None and not self.closing and get_ident() == self._thread

    def switch(self, function: str, line: int) -> None:
        """The interpreter lets other threads go on, between two instructions of the running one."""
        task = self.current
        assert task is not None
        self.note(task.process.name, "is put aside in line %d, in %s", line, function)
        chance = self.random()
        if chance < 0.4:
            self._ready.append(task)
            self.hub.switch()
        else:
            self._hold_up(task, self.random() * (SWITCHED_MAX_S if chance < 0.9 else SWITCHED_FOR_LONG_MAX_S))

    def stall(self, task: Task) -> None:
        """The operating system lets this thread wait for no reason."""
        seconds = self.random() * self.stall_max_s
        self.note(task.process.name, "stalls for %.3f s", seconds)
        self._hold_up(task, seconds)

    def _hold_up(self, task: Task, seconds: float) -> None:
        task.process.trouble(seconds)
        task.turn += 1
        task.blocked = True
        self.at(self.now + seconds, self._time_out, task, task.turn, task.process.slept_s)
        self.hub.switch()

    def block(self, timeout: float | None) -> bool:
        """Let the running task wait to be woken (True), or for ``timeout`` seconds of world time (False)."""
        task = self.current
        if self.closing:
            # What is garbage may be cleaned up by a real thread, which is not to say how it ended.
            raise GreenletExit if get_ident() == self._thread else StoreUnavailable("the world is over")
        assert task is not None
        task.turn += 1
        task.blocked = True
        if timeout is not None:
            self.at(self.now + max(0.0, timeout), self._time_out, task, task.turn, task.process.slept_s)
        self.hub.switch()
        if task.pending is not None and task.interruptible and not _is_collecting():
            self._raise_pending(task)
        return task.value is True

    def go_on(self, task: Task) -> None:
        """Let a task that was parked run again."""
        self._ready.append(task)

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
        task.process.interrupted = True
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
            task.me = None

        task = Task(process, name, body, self.hub, fatal=fatal)
        self.tasks.append(task)
        self._ready.append(task)
        return task

    def interrupt_after(self, task: Task, calls: int) -> None:
        """Interrupt ``task`` where a signal would, after that many calls and jumps back inside dibs.

        CPython runs signal handlers after a call of what is written in C (or a class), at the start of a function and
        at a jump back, nowhere else; so nothing comes between the ``__exit__`` of a mutex and the body that it ends.
        """
        if self._traced is not None:
            return  # one at a time: the interpreter has one trace function
        left = calls
        last: dict[FrameType, int] = {}
        called: dict[int, str] = {}  # by the callers' frames, which must not be kept

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if self._traced is None or self._traced[1] is not last:
                return None  # a frame that was traced for an earlier interruption, while another task is traced
            if event == "call":
                code = frame.f_code
                called[id(frame.f_back)] = code.co_name
                if (
                    self.current is not task
                    or "/dibs/" not in code.co_filename
                    or code.co_filename.endswith(COLLECTING)
                ):
                    return None
                frame.f_trace_opcodes = True
                frame.f_trace_lines = False
            elif event == "opcode":
                before, callee = last.get(frame), called.pop(id(frame), "")
                last[frame] = frame.f_lasti
                if before is None or frame.f_code.co_code[before] not in _INTERRUPTIBLE or callee == LOOK:
                    return trace
                if frame.f_code.co_code[before] in _GOES_ON and callee in frame.f_code.co_names:
                    return trace
                if not _is_handled_alike(frame.f_code, before, frame.f_lasti):
                    return trace
                left -= 1
                if left <= 0 and task.interruptible and self.current is task and not self.closing:
                    self.stop_tracing(task)
                    task.process.interrupted = True
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


class _Here:
    """What ``dibs.owners`` keeps for each thread: here, for each of the world's."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def owner(self) -> ref[ThreadOwner]:
        task = self._world.current
        assert task is not None
        return task.owner


@contextmanager
def new_world(seed: int, *expected: type[Warning]) -> Iterator[World]:
    """A world for one scenario. ``expected``: warnings that its programs bring about on purpose, besides the usual."""
    world = World(seed)
    # What modules keep for threads and loops is that of this world's.
    _MAILBOXES.clear()
    here, dibs.owners._HERE = dibs.owners._HERE, _Here(world)  # type: ignore[assignment]
    # What the garbage collector finds, and when, depends on what ran before; references are counted the same always.
    gc.disable()
    with warnings.catch_warnings():
        # Programs drop leases on purpose; that they are warned is tested elsewhere.
        silent: tuple[type[Warning], ...] = (ResourceWarning, *expected)
        for kind in silent:
            warnings.simplefilter("ignore", kind)
        World.running = world
        try:
            yield world
        finally:
            World.running = None
            dibs.owners._HERE = here
            world.close()
            gc.enable()


def _is_collecting() -> bool:
    """Whether it is what is called while garbage is collected that runs: nobody would see an interruption there."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(COLLECTING):
            return True
        frame = frame.f_back
    return False


def _nothing() -> None:
    pass


def _ignore(_: object) -> None:
    pass
