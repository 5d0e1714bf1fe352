"""So many holders at a time, for tasks: the verbs of ``dibs.Semaphore``, awaited."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.aio.lease import AsyncLease
from dibs.aio.lockable import AsyncLockable
from dibs.aio.tasks import Begun, owner, take

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dibs.semaphore import SemaphoreCore


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
        return Begun(self._core.release_some(owner(), n))

    async def available(self) -> int:
        """How many permits are free now: for people and metrics; see ``dibs.Semaphore.available``."""
        return await take(self._core.available())

    def __repr__(self) -> str:
        return f"<dibs.AsyncSemaphore {self.name!r} of {self.limit}>"
