"""Many readers or one writer, for tasks: the verbs of ``dibs.RWLock``, awaited."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.aio.lockable import AsyncLock
from dibs.aio.tasks import owner, take

if TYPE_CHECKING:
    from dibs.aio.lease import AsyncLease
    from dibs.rwlock import RWCore


class AsyncRWLock:
    """Many readers or one writer of a name, for asyncio; see ``dibs.RWLock``.

    ``read()`` and ``write()`` are locks like ``AsyncLock``.
    """

    __slots__ = ("__weakref__", "_core", "_read", "_write")

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
        await take(self._core.downgrade(owner()))

    def __repr__(self) -> str:
        return f"<dibs.AsyncRWLock {self.name!r}>"
