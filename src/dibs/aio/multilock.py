"""Several names, all or nothing, for tasks: the verbs of ``dibs.MultiLock``, awaited."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.aio.lease import AsyncLease, AsyncLost
from dibs.aio.lockable import AsyncLockable
from dibs.aio.tasks import Begun, end, owner, take
from dibs.errors import LeaseLost
from dibs.multilock import MultiLeaseFacts

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dibs.multilock import MultiCore
    from dibs.names import Seconds


class AsyncMultiLease(MultiLeaseFacts[AsyncLease]):
    """Several names held by this process, for tasks. ``leases[name]`` is the lease of each."""

    __slots__ = ("_entered",)

    @property
    def lost(self) -> AsyncLost:
        """Set when one of the leases is lost; can be waited for."""
        return AsyncLost(*self.leases.values())

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Renew all of them now, in one call; see ``dibs.Lease.renew``."""
        await take(self._renewing(ttl))

    def release(self) -> Awaitable[bool]:
        """Give all of them back, at once and in one call; see ``AsyncLease.release``."""
        return Begun(self._releasing())

    async def __aenter__(self) -> AsyncMultiLease:
        if not any(lease.held for lease in self.leases.values()):
            self.check()  # a block that is entered after the end would hold nothing
        self._entered = owner()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            await end(self._session, self._releasing(), exc_type, getattr(self, "_entered", None))
        except LeaseLost:
            if exc_type is None:
                raise


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
