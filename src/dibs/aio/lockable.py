"""The verbs that all locks for tasks have in common (``dibs.lockable`` has them for threads)."""

from __future__ import annotations

from functools import wraps

from dibs._typing import TYPE_CHECKING, Any, Generic, TypeVar
from dibs.aio.block import Block
from dibs.aio.lease import AsyncLease
from dibs.aio.tasks import Begun, end, owner, take
from dibs.errors import LeaseLost
from dibs.grips import Releasable
from dibs.lock import check_decorated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dibs.aio.tasks import Owner
    from dibs.grips import Gripped
    from dibs.hold import Hold
    from dibs.names import Seconds

F = TypeVar("F", bound="Callable[..., Any]")
L = TypeVar("L", bound=Releasable)


class AsyncLockable(Generic[L]):
    """What all locks for tasks have in common: the verbs of ``asyncio.Lock``, ``async with``, and decorating."""

    __slots__ = ("__weakref__", "_blocks", "_core")

    def __init__(self, core: Gripped[L]) -> None:
        self._core = core
        #: The blocks that tasks are in, of each task the innermost last.
        self._blocks: list[Block] = []

    async def acquire(self, blocking: bool = True, timeout: Seconds | None = -1) -> L | None:
        """Wait up to ``timeout`` seconds for it; its lease, or None when it could not be had.

        ``timeout=-1`` means what the lock was built with, None for ever, 0 (or ``blocking=False``) asks exactly once.
        Raises StoreUnavailable when the store gives no answer, SetupRequired when it is not set up,
        WouldDeadlock when this task holds it already and would wait without limit, or began to wait last in a ring of
        callers who wait for each other.
        """
        return await take(self._core.acquire(owner(), blocking, timeout))

    def release(self) -> Awaitable[bool]:
        """Release what this task acquired through this lock, or what another did if the lock is not reentrant.

        It happens at once, as with ``asyncio.Lock``; await it to know that the store has confirmed (False: it did
        not, and the lease ends by its ttl). Raises NotHeld (a RuntimeError) when nothing is held, LeaseLost when it
        had been lost.
        """
        return Begun(self._core.release(owner()))

    def locked(self) -> bool:
        """Whether it is held, as far as this process knows; ``client.holder(name)`` asks the store.

        A lock: whether this client holds it, through whichever object; a multilock: all of its names. A side of a
        read/write lock: whether it is held through this object. A semaphore: whether what is held through this object
        leaves too few permits for another acquire through it.
        """
        return self._core.locked()

    async def __aenter__(self) -> L:
        me = owner()
        lease = await take(self._core.acquire(me))
        if lease is None:
            raise self._core.timed_out()
        self._enter(me, lease)
        return lease

    def _enter(self, me: Owner | None, lease: L) -> None:
        assert me is not None
        self._core.enter(lease)
        self._blocks.append(Block(lease, me))

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        me = owner()
        if exc_type is GeneratorExit:  # of a coroutine that is garbage, perhaps, whichever task runs meanwhile
            me = next((block.task for block in self._blocks[:] if block.alive() is None), me)
        by_loss = self._end_block(exc_type, me)
        lease = self._core.leave(me, self._core.block_of(me))
        if by_loss is None:  # another task has entered it: an asynchronous generator, for one, may be closed elsewhere
            me, by_loss = None, lease is not None and self._end_block(exc_type, None, lease._holds) is True
        if lease is not None:
            try:
                if exc_type is GeneratorExit:
                    await end(lease._session, lease._releasing(), exc_type, me)
                else:
                    await take(lease._releasing())
            except LeaseLost:
                if exc_type is None or by_loss:
                    raise

    def _end_block(
        self, exc_type: type[BaseException] | None, me: object, holds: Sequence[Hold] | None = None
    ) -> bool | None:
        """The innermost block of a task, or that of these holds, is over: whether by its loss; None without any."""
        for block in self._blocks[::-1]:  # of a copy, as other loops' threads add theirs meanwhile
            if block.task is me if holds is None else block.holds == holds:
                try:
                    self._blocks.remove(block)
                except ValueError:  # another thread has just done so, of a coroutine that is garbage
                    continue
                return block.end(exc_type)
        return None

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
                self._enter(owner(), lease)
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
