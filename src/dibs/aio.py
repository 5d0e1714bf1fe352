"""The face for asyncio: the verbs of ``dibs.client``, awaited. The only module that knows asyncio.

Nothing here waits for the store: a task's request goes to the lane's thread, and whatever was answered since the last
time wakes the event loop once (``_Mailbox``). A task is the owner of what it acquires. Cancelling a task anywhere
withdraws its request, and a grant that arrives too late is given back.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable
from functools import partial, wraps
from types import coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dibs import guarding
from dibs.batch import BatchFacts, Item
from dibs.campaign import ElectionCore, Over, TermFacts, Watch, election_core
from dibs.claims import ClaimsCore, check_limit, check_stream, claims_core
from dibs.door import Said, door_to
from dibs.errors import LeaseLost
from dibs.grips import Releasable
from dibs.handover import adopting, read_state
from dibs.history import keeping, reading
from dibs.hold import HELD, LOST
from dibs.lease import LeaseFacts, LostFacts
from dibs.lock import LockCore, check_decorated
from dibs.multilock import MultiCore, MultiLeaseFacts
from dibs.names import check_name, check_seconds, check_timeout
from dibs.once import OnceCore, OnceRunFacts, once_options
from dibs.once_keys import key_of_calls
from dibs.pausing import listing, pausing, resuming
from dibs.rwlock import RWCore
from dibs.semaphore import SemaphoreCore
from dibs.steps import begun
from dibs.succession import OFFER_S

V = TypeVar("V")

if TYPE_CHECKING:
    import contextvars
    from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable
    from threading import Event

    from dibs.campaign import Leader
    from dibs.desk import Desk, LeaseRecord
    from dibs.door import Door
    from dibs.grips import Gripped
    from dibs.guarding import Talk
    from dibs.history import HistoryRecord
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.once import OnceRecord
    from dibs.once_keys import Key
    from dibs.pausing import Pause
    from dibs.steps import Steps
    from dibs.store import Capabilities

    Verify = Callable[[list[V]], Iterable[V] | Awaitable[Iterable[V]]]
    Fetch = Callable[[], Iterable[V] | Awaitable[Iterable[V]]]
    OnElected = Callable[["AsyncTerm"], Awaitable[object]]
    OnLost = Callable[["AsyncTerm"], object]

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")
L = TypeVar("L", bound=Releasable)


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
        self._cancelled = False
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
        if self.opened or self._cancelled:
            return False
        self._cancelled = True
        self._loop.call_soon(self.open)
        return True

    def result(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError


class _Mailbox:
    """Answers on their way from other threads to the tasks of one event loop: many answers, one wake-up."""

    __slots__ = ("_called", "_letters", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._letters: deque[_Letter] = deque()
        self._called = False

    def put(self, letter: _Letter) -> None:
        self._letters.append(letter)
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: its tasks are gone, and their requests were withdrawn
                self._letters.clear()

    def _deliver(self) -> None:
        # Marked before emptied: a letter that comes in between calls once more, for nothing at worst.
        self._called = False
        letters = self._letters
        try:
            while letters:
                letters.popleft().open()
        finally:
            if letters:  # a task has ended the loop, by Ctrl-C or SystemExit: the others go on if the loop does
                self.loop.call_soon(self._deliver)


# One mailbox a loop, found by the loop's id; state of the module because loops are, too.
_MAILBOXES: dict[int, _Mailbox] = {}


def _mailbox(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    mailbox = _MAILBOXES.get(id(loop))
    if mailbox is None or mailbox.loop is not loop:
        for key, old in list(_MAILBOXES.items()):  # a loop that is closed needs none any more
            if old.loop.is_closed():
                _MAILBOXES.pop(key, None)
        mailbox = _MAILBOXES[id(loop)] = _Mailbox(loop)
    return mailbox


@coroutine
def _take(steps: Steps[T]) -> Generator[_Letter, None, T]:
    """Take the steps in this task. Awaited, it yields the letters that the task sleeps on."""
    try:
        session, ask, timeout = next(steps)
        while True:
            try:
                if not ask.settled:
                    loop = asyncio.get_running_loop()
                    letter = _Letter(loop)
                    ask.listen(_mailbox(loop).put, letter)
                    if ask.in_lane:
                        session.lane.start()
                    timer = None if timeout is None else loop.call_later(timeout, letter.open)
                    try:
                        if not letter.opened:
                            letter._asyncio_future_blocking = True
                            yield letter
                        letter.result()
                    finally:
                        if timer is not None:
                            timer.cancel()
            except BaseException as error:  # noqa: BLE001 - the steps raise it again when they have cleaned up
                session, ask, timeout = steps.throw(error)
            else:
                session, ask, timeout = steps.send(ask.settled)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def _converse(talk: Talk[T], door: Door) -> T:
    """Carry a talk with the store and the caller's connection along in this task."""
    try:
        said = next(talk)
        while True:
            try:
                heard = await (door.execute_async(*said) if isinstance(said, Said) else _take(said))
            except BaseException as error:  # noqa: BLE001 - the talk raises it again when it has cleaned up
                said = talk.throw(error)
            else:
                said = talk.send(heard)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class _Begun(Generic[T]):
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
            self._value = await _take(steps)
        return self._value

    def __await__(self) -> Generator[Any, None, T]:
        return self._rest().__await__()


def _owner() -> object:
    return asyncio.current_task()


class AsyncLost(LostFacts):
    """The event of a lease's loss, as ``asyncio.Event`` without ``set``; it also fires by the clock alone."""

    __slots__ = ()

    async def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until a lease is lost (True), or all are released, or ``timeout`` seconds went by (False)."""
        clock = self._leases[0]._session.clock
        until = None if timeout is None else clock.now() + check_seconds("timeout", timeout)
        loop = asyncio.get_running_loop()
        over: asyncio.Event | None = None
        while not self.is_set() and (held := self._held()):
            if over is None:
                over = asyncio.Event()
                for lease in held:
                    lease._session.when_over(lease._hold, partial(_call_in, loop, over.set))
            now = clock.now()
            if until is not None and now >= until:
                break
            look_at = min(lease._hold.trusted_until for lease in held)
            try:
                await asyncio.wait_for(over.wait(), look_at - now if until is None else min(look_at, until) - now)
                over = None
            except asyncio.TimeoutError:
                pass
        return self.is_set()


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop is closed, and whoever waited has gone with it
        pass


class AsyncLease(LeaseFacts):
    """A lease held by this process, for tasks."""

    __slots__ = ()

    @property
    def lost(self) -> AsyncLost:
        """Set when the lease is lost; can be waited for."""
        return AsyncLost(self)

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Renew now, and from now on, for ``ttl`` seconds (default: as before); see ``dibs.Lease.renew``."""
        await _take(self._renewing(ttl))

    def release(self) -> Awaitable[bool]:
        """Give it back, at once; await it to know that the store has confirmed. May be called twice.

        False when the store did not confirm: the lease is over for this process all the same, and ends in the store
        by its ttl. False, too, when it was exported: it is its adopter's. Raises LeaseLost when it had been lost.
        """
        return _Begun(self._releasing())

    async def export(self) -> dict[str, Any]:
        """Give it away to another process, and return what that needs for ``adopt``; see ``dibs.Lease.export``."""
        return await _take(self._exporting())

    async def guard(self, connection: Any) -> None:
        """Pin this lease inside the transaction that is open on ``connection``; see ``dibs.Lease.guard``.

        connection: a psycopg.AsyncConnection, an AsyncConnection or AsyncSession of SQLAlchemy, or what
        ``dibs.Lease.guard`` takes, which blocks the event loop as any use of it does.
        """
        door = door_to(connection)
        await _converse(guarding.guard(self, door), door)

    async def release_after_commit(self, connection: Any) -> None:
        """Give it back, and keep others out until the transaction has ended; see ``dibs.Lease``."""
        door = door_to(connection)
        await _converse(guarding.release_after_commit(self, door), door)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            await _take(self._releasing())
        except LeaseLost:
            if exc_type is None:
                raise


class _Block:
    """One ``async with`` block, whose task is cancelled when its lease is lost."""

    __slots__ = ("_task", "cancelled", "over")

    def __init__(self, lease: Releasable, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.cancelled = False
        self.over = False
        for hold in lease._holds:
            tell = partial(self._tell, hold)
            # Nearly always nobody else knows this hold yet, except the renewer: whoever ends it changes its state
            # before it calls its listeners, so entering first and looking afterwards misses nothing.
            hold.listeners = [tell] if hold.listeners is None else [*hold.listeners, tell]
            if hold.state != HELD:
                self._tell(hold)

    def _tell(self, hold: Hold) -> None:
        if hold.state == LOST and not self.over:
            _call_in(self._task.get_loop(), self._cancel)

    def end(self, exc_type: type[BaseException] | None) -> bool:
        """The block is over: whether by the loss of its lease and nothing else."""
        self.over = True
        by_loss = self.cancelled and exc_type is not None and issubclass(exc_type, asyncio.CancelledError)
        if self.cancelled and sys.version_info >= (3, 11):
            # The cancellation was ours. If somebody else cancelled the task as well, that one goes on.
            by_loss = self._task.uncancel() == 0 and by_loss
        return by_loss

    def _cancel(self) -> None:
        if not self.over and not self.cancelled:
            self.cancelled = True
            self._task.cancel("the dibs lease of this block was lost")


class AsyncMultiLease(MultiLeaseFacts[AsyncLease]):
    """Several names held by this process, for tasks. ``leases[name]`` is the lease of each."""

    __slots__ = ()

    @property
    def lost(self) -> AsyncLost:
        """Set when one of the leases is lost; can be waited for."""
        return AsyncLost(*self.leases.values())

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Renew all of them now, in one call; see ``dibs.Lease.renew``."""
        await _take(self._renewing(ttl))

    def release(self) -> Awaitable[bool]:
        """Give all of them back, at once and in one call; see ``AsyncLease.release``."""
        return _Begun(self._releasing())

    async def __aenter__(self) -> AsyncMultiLease:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            await _take(self._releasing())
        except LeaseLost:
            if exc_type is None:
                raise


class AsyncLockable(Generic[L]):
    """What all locks for tasks have in common: the verbs of ``asyncio.Lock``, ``async with``, and decorating."""

    __slots__ = ("_blocks", "_core")

    def __init__(self, core: Gripped[L]) -> None:
        self._core = core
        self._blocks: dict[object, list[_Block]] = {}

    async def acquire(self, blocking: bool = True, timeout: Seconds | None = -1) -> L | None:
        """Wait up to ``timeout`` seconds for it; its lease, or None when it could not be had.

        ``timeout=-1`` means what the lock was built with, None for ever, 0 (or ``blocking=False``) asks exactly once.
        Raises StoreUnavailable when the store gives no answer, SetupRequired when it is not set up,
        WouldDeadlock when this task holds it already and would wait without limit, or began to wait last in a ring of
        callers who wait for each other.
        """
        return await _take(self._core.acquire(_owner(), blocking, timeout))

    def release(self) -> Awaitable[bool]:
        """Release what this task acquired through this lock, or what another did if the lock is not reentrant.

        It happens at once, as with ``asyncio.Lock``; await it to know that the store has confirmed (False: it did
        not, and the lease ends by its ttl). Raises NotHeld (a RuntimeError) when nothing is held, LeaseLost when it
        had been lost.
        """
        return _Begun(self._core.release(_owner()))

    def locked(self) -> bool:
        """Whether this client holds it now, as far as this process knows."""
        return self._core.locked()

    async def __aenter__(self) -> L:
        task = asyncio.current_task()
        assert task is not None
        lease = await _take(self._core.acquire(task))
        if lease is None:
            raise self._core.timed_out()
        self._enter(task, lease)
        return lease

    def _enter(self, task: asyncio.Task[Any], lease: L) -> None:
        self._core.enter(lease)
        block = _Block(lease, task)
        blocks = self._blocks.get(task)
        if blocks is None:
            self._blocks[task] = [block]
        else:
            blocks.append(block)

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        task = asyncio.current_task()
        blocks = self._blocks[task]
        block = blocks.pop()
        if not blocks:
            del self._blocks[task]
        by_loss = block.end(exc_type)
        lease = self._core.leave(task)
        if lease is not None:
            try:
                await _take(lease._releasing())
            except LeaseLost:
                if exc_type is None or by_loss:
                    raise

    def __call__(self, function: F) -> F:
        """Decorate: each call holds the lock. When it cannot be had: LockTimeout, or with on_busy="skip" None."""
        check_decorated(function, awaited=True)
        core = self._core

        @wraps(function)
        async def locked(*args: Any, **kwargs: Any) -> Any:
            if core.terms.on_busy == "skip":
                lease = await self.acquire()
                if lease is None:
                    return None
                task = asyncio.current_task()
                assert task is not None
                self._enter(task, lease)
            else:
                await self.__aenter__()
            try:
                result = await function(*args, **kwargs)
            except BaseException as error:
                await self.__aexit__(type(error))
                raise
            await self.__aexit__(None)
            return result

        return locked  # type: ignore[return-value]


class AsyncLock(AsyncLockable[AsyncLease]):
    """A name held by one at a time, for asyncio. A description: acquiring it gives an ``AsyncLease``.

    Works like ``asyncio.Lock`` (owner-only when ``reentrant=True``), as an async context manager and as a decorator
    of async functions. An ``async with`` block whose lease is lost is cancelled and ends with LeaseLost.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """What the lock is about."""
        return self._core.name

    def __repr__(self) -> str:
        return f"<dibs.AsyncLock {self.name!r}>"


class AsyncMultiLock(AsyncLockable[AsyncMultiLease]):
    """Several names, all or nothing, for asyncio; see ``dibs.MultiLock``. Acquiring it gives an ``AsyncMultiLease``."""

    __slots__ = ()

    _core: MultiCore[AsyncMultiLease, AsyncLease]

    @property
    def names(self) -> tuple[str, ...]:
        """What the lock is about, in the order given."""
        return self._core.names

    def __repr__(self) -> str:
        return f"<dibs.AsyncMultiLock of {len(self.names)} names>"


class AsyncOnceRun(OnceRunFacts[AsyncLease]):
    """What ``begin()`` found: true when the work is this caller's to do, false when it is done or being done.

    Leaving the block without an exception marks the work as done, and keeps it so for ``keep`` seconds; an exception,
    whichever, gives the name up for the next to try. A block whose lease is lost is cancelled and ends with LeaseLost.
    """

    __slots__ = ("_block",)

    async def __aenter__(self) -> AsyncOnceRun:
        self._enter()
        return self

    def _enter(self) -> None:
        self._block: _Block | None = None
        if self._lease is not None:
            self._lease.check()
            task = asyncio.current_task()
            assert task is not None
            self._block = _Block(self._lease, task)

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        block = self._block
        by_loss = block is not None and block.end(exc_type)
        try:
            await _take(self._core.end(self, exc_type is not None))
        except LeaseLost:
            if exc_type is None or by_loss:
                raise


class AsyncOnce:
    """Work that is to be done at most once in ``keep`` seconds. A description: ``begin()`` makes a run of it.

    ``async with once as run:`` begins one, waiting as long as ``timeout`` while somebody else is at it. Safe to share
    among tasks.
    """

    __slots__ = ("_core",)

    def __init__(self, core: OnceCore[AsyncLease, AsyncOnceRun]) -> None:
        self._core = core

    @property
    def name(self) -> str:
        """The name under which it is kept: name/key, or the name alone. ``client.holder(once.name)`` shows it."""
        return self._core.name

    async def begin(self, timeout: Seconds | None = -1) -> AsyncOnceRun:
        """A run, to be used as ``async with`` block: true when the work is this caller's to do; see ``dibs.Once``."""
        return await _take(self._core.begin(_owner(), timeout))

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Await the function unless it is done, and return its result; see ``dibs.Once.run``."""
        check_decorated(function, awaited=True)
        async with self as begun:
            if begun:
                begun.result = await function(*args, **kwargs)
        return begun.result

    async def done(self) -> OnceRecord | None:
        """The successful run that is kept; None when there is none, also while one goes on."""
        return await _take(self._core.look())

    async def forget(self) -> bool:
        """Let it be run again although it is done; False when it is not. Does nothing to a run that goes on."""
        return await _take(self._core.forget())

    async def __aenter__(self) -> AsyncOnceRun:
        begun = await _take(self._core.enter(_owner()))
        begun._enter()
        return begun

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        await self._core.leave(_owner()).__aexit__(exc_type, *exc)

    def __repr__(self) -> str:
        return f"<dibs.AsyncOnce {self.name!r}>"


class AsyncSemaphore(AsyncLockable[AsyncLease]):
    """At most so many holders of a name at a time, for asyncio; see ``dibs.Semaphore``.

    Works like ``asyncio.BoundedSemaphore``, as an async context manager and as a decorator: one object, many holders.
    """

    __slots__ = ()

    _core: SemaphoreCore[AsyncLease]

    @property
    def name(self) -> str:
        """What the semaphore is about."""
        return self._core.name

    @property
    def limit(self) -> int:
        """How many permits there are."""
        return self._core.terms.permits

    def release(self, n: int = 1) -> Awaitable[bool]:
        """Release ``n`` of what was acquired through this object, first what this task did.

        It happens at once; await it to know that the store has confirmed (False: it did not, and those leases end by
        their ttl). Raises ValueError when so many are not held through it, LeaseLost when one had been lost.
        """
        return _Begun(self._core.release_some(_owner(), n))

    async def available(self) -> int:
        """How many permits are free now, asked of the store: for people and metrics, as it may change at once."""
        return await _take(self._core.available())

    def __repr__(self) -> str:
        return f"<dibs.AsyncSemaphore {self.name!r} of {self.limit}>"


class AsyncRWLock:
    """Many readers or one writer of a name, for asyncio; see ``dibs.RWLock``.

    ``read()`` and ``write()`` are locks like ``AsyncLock``.
    """

    __slots__ = ("_core", "_read", "_write")

    def __init__(self, core: RWCore[AsyncLease]) -> None:
        self._core = core
        self._read = AsyncLock(core.readers)
        self._write = AsyncLock(core.writers)

    @property
    def name(self) -> str:
        """What the lock is about."""
        return self._core.name

    def read(self) -> AsyncLock:
        """The side of the readers: any number of them at a time, while no writer holds it or waits for it."""
        return self._read

    def write(self) -> AsyncLock:
        """The side of the writers: one at a time, and no reader meanwhile."""
        return self._write

    async def downgrade(self) -> None:
        """Make the write lease of this task a read lease, with no gap; see ``dibs.RWLock.downgrade``."""
        await _take(self._core.downgrade(_owner()))

    def __repr__(self) -> str:
        return f"<dibs.AsyncRWLock {self.name!r}>"


class AsyncTerm(TermFacts, AsyncLease):
    """One reign: an ``AsyncLease`` on the name of an election. ``async with term:`` resigns at the end."""

    __slots__ = ()

    def resign(self, *, to: Any = None, timeout: Seconds = OFFER_S) -> Awaitable[bool]:
        """Stop leading, and let the next candidate win at once; with ``to``, the one with that value, out of its turn.

        Without ``to`` it is the same as ``release()``; with it, nothing happens before it is awaited. See
        ``dibs.Term.resign``.
        """
        return self.release() if to is None else _take(self._resigning(to, timeout))

    async def __aenter__(self) -> AsyncTerm:
        return self


class AsyncLead:
    """``async with election.lead() as term:`` campaigns, leads, and resigns at the end."""

    __slots__ = ("_block", "_core", "_timeout")

    def __init__(self, core: ElectionCore[AsyncTerm], timeout: float | None) -> None:
        self._core = core
        self._block = AsyncLockable(core)
        self._timeout = timeout

    async def __aenter__(self) -> AsyncTerm:
        task = asyncio.current_task()
        assert task is not None
        term = await _take(self._core.campaign(task, self._timeout))
        if term is None:
            raise self._core.timed_out()
        self._block._enter(task, term)
        return term

    async def __aexit__(self, *exc: Any) -> None:
        await self._block.__aexit__(*exc)


class AsyncLeaders:
    """Who leads, one after the other: an asynchronous iterator of ``Leader``, and of None when nobody does."""

    __slots__ = ("_watch",)

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def close(self) -> None:
        """End the iteration, also from another task while it waits."""
        self._watch.close()

    def __aiter__(self) -> AsyncLeaders:
        return self

    async def __anext__(self) -> Leader | None:
        try:
            return await _take(self._watch.next())
        except Over:
            raise StopAsyncIteration from None


class AsyncElection:
    """One leader among candidates, for asyncio. A description: campaigning gives an ``AsyncTerm``."""

    __slots__ = ("_core",)

    def __init__(self, core: ElectionCore[AsyncTerm]) -> None:
        self._core = core

    @property
    def name(self) -> str:
        """What the election is about. A lock of the same name excludes it: they are the same."""
        return self._core.name

    async def campaign(self, timeout: Seconds | None = None) -> AsyncTerm | None:
        """Wait up to ``timeout`` seconds to be elected; see ``dibs.Election.campaign``."""
        return await _take(self._core.campaign(_owner(), timeout))

    def lead(self, timeout: Seconds | None = None) -> AsyncLead:
        """Lead for the length of a block: ``async with election.lead() as term:``.

        Raises LockTimeout where ``campaign`` returns None. A block whose term is lost is cancelled and ends with
        LeaseLost.
        """
        return AsyncLead(self._core, check_timeout(timeout))

    async def run(self, on_elected: OnElected, on_lost: OnLost | None = None, *, forever: bool = False) -> None:
        """Campaign, await ``on_elected(term)`` in this task, and resign when it returns; with ``forever`` again.

        When the term is lost meanwhile, ``on_elected`` is cancelled at once, before another can win; when it has ended,
        ``on_lost(term)`` is called, and awaited if it is async. Then LeaseLost is raised, or with ``forever`` the next
        campaign begins. Any other error of ``on_elected`` ends the term and is raised.

        Raises what ``campaign`` raises, and LockTimeout when there are standbys enough.
        """
        check_decorated(on_elected, awaited=True)
        if on_lost is not None and not callable(on_lost):
            raise TypeError(f"on_lost takes a function, not {on_lost!r}")
        while True:
            term: AsyncTerm | None = None
            try:
                async with self.lead() as term:
                    await on_elected(term)
            except (Exception, asyncio.CancelledError) as error:
                lost = term is not None and term.lost.is_set()
                if lost and term is not None and on_lost is not None:
                    done = on_lost(term)
                    if hasattr(done, "__await__"):
                        await done
                if not (lost and forever and isinstance(error, LeaseLost)):
                    raise
            if not forever:
                return

    def resign(self, *, to: Any = None, timeout: Seconds = OFFER_S) -> Awaitable[bool]:
        """Stop leading, if it was through this object, and let the next candidate win at once; or the one with value
        ``to``, as ``AsyncTerm.resign``.

        It happens at once, unless there is a ``to``; await it to know that the store has confirmed (False: it did not,
        and the term ends by its ttl). Raises NotHeld when this task leads through this object in no term, LeaseLost
        when the term had been lost.
        """
        if to is None:
            return _Begun(self._core.release(_owner()))
        return _take(self._core.resign(_owner(), to, timeout))

    async def leader(self) -> Leader | None:
        """Who leads now, or None."""
        return await _take(self._core.leader())

    def observe(self, interval: Seconds = 1.0) -> AsyncLeaders:
        """Who leads, at once and then whenever that changes: ``async for leader in election.observe():``.

        See ``dibs.Election.observe``.
        """
        return AsyncLeaders(self._core.watch(interval))

    def __repr__(self) -> str:
        return f"<dibs.AsyncElection {self.name!r}>"


class AsyncBatch(BatchFacts[V]):
    """What was won, for one task: ``async with await claims.take(rows) as batch: async for item in batch: …``.

    See ``dibs.claims.Batch``.
    """

    __slots__ = ()

    async def release(self) -> None:
        """Give back what is left, and wait until the store has confirmed everything; ``lost`` is exact then."""
        await _take(self._ending())

    def __aiter__(self) -> AsyncBatch[V]:
        return self

    async def __anext__(self) -> Item[V]:
        item = self._move_on()
        if item is None:
            raise StopAsyncIteration
        return item

    async def __aenter__(self) -> AsyncBatch[V]:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await _take(self._ending())


class AsyncClaims:
    """Claims on the items of one source, for asyncio; see ``dibs.claims.Claims``."""

    __slots__ = ("_core",)

    def __init__(self, core: ClaimsCore[AsyncBatch[Any]]) -> None:
        self._core = core

    @property
    def source(self) -> str:
        """What the items are of."""
        return self._core.source

    async def take(
        self,
        items: Iterable[V],
        *,
        key: Callable[[V], Key] | None = None,
        verify: Verify[V] | None = None,
        limit: int | None = None,
    ) -> AsyncBatch[V]:
        """Claim those of ``items`` that are free, in one round trip for a thousand; see ``dibs.claims.Claims.take``.

        verify may be an async function.
        """
        core = self._core
        most = check_limit(limit)
        keyed = core.keyed(items, key)
        batch: AsyncBatch[V] = await _take(core.taking(_owner(), keyed, most))
        if verify is not None and len(batch):
            try:
                batch._keep_due(core.keyed(await _result(verify(batch.won)), key))
            except BaseException:
                await _take(batch._ending())
                raise
        return batch

    def stream(
        self,
        fetch: Fetch[V],
        *,
        key: Callable[[V], Key] | None = None,
        verify: Verify[V] | None = None,
        n: int = 100,
        idle: Seconds = 1.0,
        stop: Event | Callable[[], bool] | None = None,
    ) -> AsyncGenerator[Item[V], None]:
        """Work without end: claim up to ``n`` of what ``fetch()`` returns, yield them one by one, and so on.

        See ``dibs.claims.Claims.stream``. fetch and verify may be async functions. Left in the middle, it gives back
        what is left when it is closed: ``async with contextlib.aclosing(claims.stream(…)) as items:``.
        """
        idle_s, stopped = check_stream(fetch, n, idle, stop)
        return self._stream(fetch, key, verify, n, idle_s, stopped)

    async def _stream(
        self,
        fetch: Fetch[V],
        key: Callable[[V], Key] | None,
        verify: Verify[V] | None,
        n: int,
        idle_s: float,
        stopped: Callable[[], bool],
    ) -> AsyncGenerator[Item[V], None]:
        while not stopped():
            found = await _result(fetch())
            async with await self.take(found, key=key, verify=verify, limit=n) as batch:
                while not stopped() and (item := batch._move_on()) is not None:
                    yield item
                batch._finish()
            if not batch.won:
                await _take(self._core.pausing(idle_s, stopped))

    def __repr__(self) -> str:
        return f"<dibs.AsyncClaims {self.source!r}>"


async def _result(given: Iterable[V] | Awaitable[Iterable[V]]) -> Iterable[V]:
    """What a function of the caller's returned, awaited if it is to be."""
    if isinstance(given, Awaitable):
        return await given
    return given


class AsyncClient:
    """A connection to the place where leases are kept, for asyncio; made by ``dibs.connect_async``.

    Safe to share among the tasks of a loop.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: str = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncLock:
        """Describe a lock on ``name``; nothing is sent. The parameters are those of ``dibs.Client.lock``."""
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return AsyncLock(LockCore(self._desk, name, terms, AsyncLease))

    def multilock(
        self,
        names: Collection[str],
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: str = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncMultiLock:
        """Describe a lock on all of these names at once; see ``dibs.Client.multilock``."""
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return AsyncMultiLock(MultiCore(self._desk, names, terms, AsyncLease, AsyncMultiLease))

    def claims(
        self,
        source: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = False,
        margin: Seconds | None = None,
        info: dict[str, Any] | None = None,
    ) -> AsyncClaims:
        """Describe claims on items of ``source``; see ``dibs.Client.claims``."""
        return AsyncClaims(claims_core(self._desk, source, AsyncBatch, ttl, renew, margin, info))

    def election(
        self,
        name: str,
        *,
        value: Any = None,
        ttl: Seconds | None = None,
        priority: int = 0,
        standby_max: int | None = None,
        standby_full: str = "refuse",
        info: dict[str, Any] | None = None,
    ) -> AsyncElection:
        """Describe an election, in which this client is a candidate or looks on; see ``dibs.Client.election``."""
        return AsyncElection(
            election_core(self._desk, name, AsyncTerm, value, ttl, priority, standby_max, standby_full, info)
        )

    def semaphore(
        self,
        name: str,
        limit: int,
        *,
        weight: int = 1,
        resize: bool = False,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: str = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncSemaphore:
        """Describe a semaphore: at most ``limit`` permits of ``name``; see ``dibs.Client.semaphore``."""
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return AsyncSemaphore(SemaphoreCore(self._desk, name, limit, weight, resize, terms, AsyncLease))

    def rwlock(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: str = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncRWLock:
        """Describe a lock for many readers or one writer of ``name``; see ``dibs.Client.rwlock``."""
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return AsyncRWLock(RWCore(self._desk, name, terms, AsyncLease))

    def once(
        self,
        name: str,
        key: Key | None = None,
        *,
        keep: Seconds,
        keep_result: bool = True,
        ttl: Seconds | None = None,
        timeout: Seconds | None = None,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: str = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncOnce:
        """Describe work that is to be done at most once in ``keep`` seconds for this key; see ``dibs.Client.once``."""
        options = once_options(self._desk, keep, keep_result, ttl, timeout, max_hold, on_lost, on_busy, info)
        return AsyncOnce(OnceCore(self._desk, name, key, options, AsyncLease, AsyncOnceRun))

    def once_per(
        self,
        name: str,
        *,
        keep: Seconds,
        key: Callable[..., Key] | None = None,
        keep_result: bool = True,
        ttl: Seconds | None = None,
        timeout: Seconds | None = None,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: str = "raise",
        info: dict[str, Any] | None = None,
    ) -> Callable[[F], F]:
        """Decorate an async function: each call is ``once(name, its key).run(function, …)``.

        See ``dibs.Client.once_per``.
        """
        options = once_options(self._desk, keep, keep_result, ttl, timeout, max_hold, on_lost, on_busy, info)
        check_name(name)

        def decorate(function: F) -> F:
            check_decorated(function, awaited=True)
            key_of = key_of_calls(function, key)

            @wraps(function)
            async def at_most_once(*args: Any, **kwargs: Any) -> Any:
                core = OnceCore(self._desk, name, key_of(*args, **kwargs), options, AsyncLease, AsyncOnceRun)
                return await AsyncOnce(core).run(function, *args, **kwargs)

            return at_most_once  # type: ignore[return-value]

        return decorate

    async def adopt(
        self,
        state: dict[str, Any],
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        info: dict[str, Any] | None = None,
    ) -> AsyncLease:
        """Take over a lease that another process exported; see ``dibs.Client.adopt``."""
        given = read_state(self._desk, state)
        info = given.info if info is None else info
        terms = self._desk.terms(ttl, renew, None, False, min_hold, max_hold, on_lost, "raise", info)
        return await _take(adopting(self._desk, given, terms, _owner(), AsyncLease))

    async def leases(self, prefix: str = "") -> list[LeaseRecord]:
        """The leases in force in this namespace whose name starts with ``prefix``, by name."""
        return await _take(self._desk.leases(prefix))

    async def holder(self, name: str) -> LeaseRecord | None:
        """Who holds ``name`` now, or None."""
        return await _take(self._desk.holder(name))

    async def break_lease(self, name: str, *, fencing_token: int, now: bool = False) -> bool:
        """Take a lease from its holder; see ``dibs.Client.break_lease``."""
        return await _take(self._desk.breaking(name, fencing_token, now))

    async def purge(self, older_than: Seconds) -> int:
        """Delete the rows of names that have been free for ``older_than`` seconds; return how many."""
        return await _take(self._desk.purging(older_than))

    async def pause(
        self, name: str, note: str | None = None, *, ttl: Seconds | None = None, by: str | None = None
    ) -> Pause:
        """Stop new grants of ``name`` for every client of this namespace; a ``*`` at its end means all that begin so.

        Who holds goes on, renews and releases; who asks is refused, and who waits goes on waiting. They are told who
        paused it, and ``note``. It ends by itself after ``ttl`` seconds (default: an hour; at most the store's longest
        ttl) or with ``resume``. Pausing again says all of it anew; the last one counts. by: who is said to have done
        it (default: user@host).

        It returns when the pause is in force: after a good second, in which every client looks. A request that was on
        its way at that moment, for at most its request time-out, may be granted yet. Raises InvalidName,
        InvalidOption, and Unsupported where the store cannot keep it (``capabilities.pause``).
        """
        return await _take(pausing(self._desk, name, note, ttl, by))

    async def resume(self, name: str) -> bool:
        """End the pause of exactly this ``name`` or ``prefix*``; False when there was none.

        Other clients notice within half a second, and their waiters ask within a second more.
        """
        return await _take(resuming(self._desk, name))

    async def pauses(self) -> list[Pause]:
        """The pauses in force in this namespace, by name."""
        return await _take(listing(self._desk))

    async def setup(self, *, history: int | None = None) -> None:
        """Make the tables; harmless when they exist. Raises SetupRequired when the login may not.

        history: from now on the store writes down who had each name, and keeps the last so many grants of each
        (``history(name)``); 0 switches that off and forgets it, None leaves it as it is. Unsupported where the store
        cannot (``capabilities.history``).
        """
        await _take(self._desk.setting_up() if history is None else keeping(self._desk, history))

    async def history(self, name: str, limit: int = 100) -> list[HistoryRecord]:
        """Who had ``name`` and when, newest first: up to ``limit`` grants, whichever client made them.

        The store writes them down while it is told to (``setup(history=100)``). Raises SetupRequired when it was not,
        and Unsupported where it cannot (``capabilities.history``).
        """
        return await _take(reading(self._desk, name, limit))

    async def ping(self) -> float:
        """Reach the store and return the seconds it took; raises StoreUnavailable or SetupRequired."""
        return await _take(self._desk.pinging())

    @property
    def capabilities(self) -> Awaitable[Capabilities]:
        """What this store really promises, to be awaited: some of it is read from the server's settings."""
        return _take(self._desk.capabilities())

    async def close(self) -> None:
        """Give back what is held, refuse who waits, close the connections. May be called twice."""
        await _take(self._desk.closing())

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<dibs.AsyncClient {self._desk.address.shown}>"
