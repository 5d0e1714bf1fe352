"""How a task takes steps: while its request is under way it sleeps on a letter, which is opened for the answer.

The request goes to the lane's thread, and whatever was answered since the last time wakes the event loop once
(``_Mailbox``). A cancellation is thrown into the steps, which clean up. ``dibs.steps.run`` takes them in a thread.
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections import deque
from types import coroutine
from weakref import ref

from dibs._typing import TYPE_CHECKING, Any, Generic, TypeVar
from dibs.steps import begun, run
from dibs.threads import unattended

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable, Generator

    from dibs.session import Session
    from dibs.steps import Steps

T = TypeVar("T")
#: A task as the owner of what it acquires.
Owner = ref["asyncio.Task[Any]"]


class _Letter:
    """What a task sleeps on until it is opened: a future as tasks understand one, without a queue of callbacks.

    A task's future calls the task by way of the loop's queue. A letter is opened inside the loop already and goes on
    with its task at once, which saves a quarter of a task's time on a pair (``benchmarks``, sqlite-async).
    """

    __slots__ = ("_asyncio_future_blocking", "_cancelled", "_context", "_loop", "opened", "_wake_task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False  # this attribute is what makes it a future (asyncio.isfuture)
        self._loop = loop
        self.opened = False
        #: What the cancellation says, if there was one.
        self._cancelled: tuple[object, ...] | None = None
        self._wake_task: Callable[[_Letter], object] | None = None

    def open(self) -> None:
        """Let the task go on; nothing when it does already. Called inside the loop."""
        if not self.opened:
            self.opened = True
            wake_task = self._wake_task
            if wake_task is not None:
                self._context.run(wake_task, self)

    # What a task asks of a future.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, wake_task: Callable[[_Letter], object], *, context: contextvars.Context) -> None:
        self._wake_task = wake_task
        self._context = context

    def cancel(self, msg: object = None) -> bool:
        if self.opened or self._cancelled is not None:
            return False
        self._cancelled = () if msg is None else (msg,)  # by its text, anyio knows a cancellation of its own
        self._loop.call_soon(self.open)
        return True

    def result(self) -> None:
        if self._cancelled is not None:
            raise asyncio.CancelledError(*self._cancelled)


class _Mailbox:
    """Answers on their way from other threads to the tasks of one event loop: many answers, one wake-up."""

    __slots__ = ("_called", "_letters", "loop", "post")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._letters: deque[_Letter] = deque()
        self._called = False
        #: ``put``, made once: every ask that is under way has it.
        self.post = self.put

    def put(self, letter: _Letter) -> None:
        self._letters.append(letter)
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: its tasks are gone, and their requests were withdrawn
                self._letters.clear()

    def _deliver(self) -> None:
        # Marked before counted: a letter that comes in between calls once more, for nothing at worst. What comes while
        # these are opened has its turn after whatever else the loop has to do.
        self._called = False
        letters = self._letters
        left = len(letters)
        try:
            while left and letters:  # (a task that runs a loop within the loop may have opened them)
                left -= 1
                letters.popleft().open()
        finally:
            if left and letters:  # a task has ended the loop, by Ctrl-C say: the others go on if the loop does
                self.loop.call_soon(self._deliver)


# One mailbox a loop, found by the loop's id; state of the module because loops are, too.
_MAILBOXES: dict[int, _Mailbox] = {}


def _new_mailbox(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    for key, old in list(_MAILBOXES.items()):  # a loop that is closed needs none any more
        if old.loop.is_closed():
            _MAILBOXES.pop(key, None)
    mailbox = _MAILBOXES[id(loop)] = _Mailbox(loop)
    return mailbox


@coroutine
def take(steps: Steps[T]) -> Generator[_Letter, None, T]:
    """Take the steps in this task. Awaited, it yields the letters that the task sleeps on."""
    try:
        session, ask, timeout = next(steps)
        while True:
            try:
                if not ask.settled:
                    loop = get_running_loop()
                    letter = _Letter(loop)
                    mailbox = _MAILBOXES.get(id(loop))
                    if mailbox is None or mailbox.loop is not loop:
                        mailbox = _new_mailbox(loop)
                    ask.listen(mailbox.post, letter)
                    if ask.in_lane:
                        session.lane.start()
                    if letter.opened:
                        pass
                    elif timeout is None:
                        letter._asyncio_future_blocking = True
                        yield letter  # a cancellation is raised here: the task asks the letter for its result
                    else:
                        timer = loop.call_later(timeout, letter.open)
                        try:
                            letter._asyncio_future_blocking = True
                            yield letter
                        finally:
                            timer.cancel()
            except BaseException as error:
                if type(error) is GeneratorExit and session.is_busy_here():
                    unattended(steps.close)
                    raise
                session, ask, timeout = steps.throw(error)
            else:
                session, ask, timeout = steps.send(ask.settled)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except (KeyboardInterrupt, SystemExit):  # between two steps, as in dibs.steps.run
        steps.close()
        raise


async def end(session: Session, steps: Steps[object], error: type[BaseException] | None, entered: Owner | None) -> None:
    """Take the steps that end a block which was left by an error of this type, if by any; see ``Session.end``.

    ``entered``: the task that has entered it. Where another one runs, or none, the block may be that of a coroutine
    which is garbage: awaited there, nothing of it would be ended any more, this block nor those around it.
    """
    if error is GeneratorExit and (not is_here(entered) or session.is_busy_here()):
        unattended(lambda: run(steps))
    else:
        await take(steps)


class Begun(Generic[T]):
    """Steps whose first has been taken: it happens whether or not the rest is awaited."""

    __slots__ = ("_steps", "_value")

    def __init__(self, steps: Steps[T]) -> None:
        self._steps: Steps[T] | None = None
        try:
            session, ask, timeout = next(steps)
        except StopIteration as stop:
            self._value: T = stop.value
        else:
            if ask.in_lane:
                session.lane.start()
            self._steps = begun((session, ask, timeout), steps)

    async def _rest(self) -> T:
        steps, self._steps = self._steps, None
        if steps is not None:
            self._value = await take(steps)
        try:
            return self._value
        except AttributeError:  # as of a coroutine
            raise RuntimeError("this was awaited before, and has not returned: call the method again") from None

    def __await__(self) -> Generator[Any, None, T]:
        return self._rest().__await__()


def owner() -> Owner | None:
    """Who acquires what is acquired here: the task that is running, which is not kept alive by what it acquires."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs here: the garbage collector closes a coroutine
        return None
    return None if task is None else ref(task)


def is_here(task: Owner | None) -> bool:
    """Whether it is the task that is running."""
    return task is not None and task is owner()


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Have the loop call the function, from any thread; nothing when the loop is closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop is closed, and whoever waited has gone with it
        pass
