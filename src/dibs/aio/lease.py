"""A lease for tasks: the verbs of ``dibs.Lease``, awaited. Whether it is held is decided in ``dibs.lease``."""

from __future__ import annotations

import asyncio
from functools import partial
from weakref import ref

from dibs import guarding
from dibs._typing import TYPE_CHECKING, Any, TypeVar
from dibs.aio.tasks import Begun, call_in, end, owner, take
from dibs.door import Said, door_to
from dibs.errors import LeaseLost
from dibs.lease import LeaseFacts
from dibs.lost import LostFacts
from dibs.names import check_event_timeout
from dibs.threads import unattended

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dibs.door import Door
    from dibs.guarding import Talk
    from dibs.names import Seconds

T = TypeVar("T")


def _set_in(loop: asyncio.AbstractEventLoop, event: ref[asyncio.Event]) -> None:
    """Set the event, if somebody waits for it: a task whose loop is gone is not kept alive by what it waits for."""
    over = event()
    if over is not None:
        call_in(loop, over.set)


class AsyncLost(LostFacts):
    """The event of a lease's loss, as ``asyncio.Event`` without ``set``; it also fires by the clock alone."""

    __slots__ = ()

    async def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until a lease is lost (True), or all are released, or ``timeout`` seconds went by (False)."""
        clock = self._leases[0]._session.clock
        wait_s = check_event_timeout(timeout)
        until = None if wait_s is None else clock.now() + wait_s
        loop = asyncio.get_running_loop()
        over: asyncio.Event | None = None
        unlisten: list[Callable[[], None]] = []
        try:
            while not self.is_set() and (held := self._held()):
                now = clock.now()
                if until is not None and now >= until:
                    break
                if over is None:
                    over = asyncio.Event()
                    tell = partial(_set_in, loop, ref(over))
                    unlisten += [lease._when_over(tell) for lease in held]
                look_at = min(lease._hold.trusted_until for lease in held)
                # Not wait_for, which before Python 3.12 swallows a cancellation that comes just after the event.
                timer = loop.call_later((look_at if until is None else min(look_at, until)) - now, over.set)
                try:
                    await over.wait()
                finally:
                    timer.cancel()
                over.clear()  # whoever is told from here on has ended before what is looked at next
        except GeneratorExit:  # perhaps by the garbage collector, in the midst of what `forget` would wait for
            begun, unlisten = unlisten, []
            unattended(lambda: [forget() for forget in begun])
            raise
        finally:
            for forget in unlisten:
                forget()
        return self.is_set()


class AsyncLease(LeaseFacts):
    """A lease held by this process, for tasks."""

    __slots__ = ("_entered",)

    @property
    def lost(self) -> AsyncLost:
        """Set when the lease is lost; can be waited for."""
        return AsyncLost(self)

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Renew now, and from now on, for ``ttl`` seconds (default: as before); see ``dibs.Lease.renew``."""
        await take(self._renewing(ttl))

    def release(self) -> Awaitable[bool]:
        """Give it back, at once; await it to know that the store has confirmed. May be called twice.

        False when the store did not confirm: the lease is over for this process all the same, and ends in the store
        by its ttl. False, too, when it was exported: it is its adopter's. Raises LeaseLost when it had been lost:
        others need not wait for the rest of its ttl then.
        """
        return Begun(self._releasing())

    async def export(self) -> dict[str, Any]:
        """Give it away to another process, and return what that needs for ``adopt``; see ``dibs.Lease.export``."""
        from dibs.handover import exporting

        return await take(exporting(self))

    async def guard(self, connection: Any) -> None:
        """Pin this lease inside the transaction that is open on ``connection``; see ``dibs.Lease.guard``.

        connection: one of asyncpg, aiomysql, asyncmy or aiosqlite, a psycopg.AsyncConnection, an AsyncConnection or
        AsyncSession of SQLAlchemy, or what ``dibs.Lease.guard`` takes, which blocks the event loop as it always does.
        """
        door = door_to(connection)
        await converse(guarding.guard(self, door), door)

    async def release_after_commit(self, connection: Any) -> None:
        """Give it back, and keep others out until the transaction has ended; see ``dibs.Lease``."""
        door = door_to(connection)
        await converse(guarding.release_after_commit(self, door), door)

    async def __aenter__(self) -> AsyncLease:
        self.check()  # a block that is entered after the end would hold nothing
        self._entered = owner()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            await end(self._session, self._releasing(), exc_type, getattr(self, "_entered", None))
        except LeaseLost:
            if exc_type is None:
                raise


async def converse(talk: Talk[T], door: Door) -> T:
    """Carry a talk with the store and the caller's connection along in this task."""
    try:
        said = next(talk)
        while True:
            try:
                heard = await (door.execute_async(*said) if isinstance(said, Said) else take(said))
            except BaseException as error:  # noqa: BLE001 - the talk raises it again when it has cleaned up
                said = talk.throw(error)
            else:
                said = talk.send(heard)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
