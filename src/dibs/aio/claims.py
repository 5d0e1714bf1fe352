"""Claims on the items of a source, for tasks: the verbs of ``dibs.claims``, awaited."""

from __future__ import annotations

from collections.abc import Awaitable

from dibs._typing import TYPE_CHECKING, Any, TypeVar, overload
from dibs.aio.lease import converse
from dibs.aio.tasks import Begun, end, owner, take
from dibs.batch import BatchFacts, Item
from dibs.claiming import N_DEFAULT, check_functions, check_stream
from dibs.door import door_to

V = TypeVar("V")

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable
    from threading import Event

    from dibs.claiming import ClaimsCore, Params
    from dibs.names import Seconds
    from dibs.once_keys import Key
    from dibs.steps import Steps
    from dibs.tries import DeadItem

    Verify = Callable[[list[V]], Iterable[V] | Awaitable[Iterable[V]]]
    Fetch = Callable[[], Iterable[V] | Awaitable[Iterable[V]]]


class AsyncItem(Item[V]):
    """One item of a batch, as won, for tasks; see ``dibs.Item``."""

    __slots__ = ()

    def done(self, connection: Any = None) -> Awaitable[None]:  # type: ignore[override]
        """It is finished: free it, at once. With a connection it must be awaited; see ``dibs.Item.done``.

        connection: of those that ``AsyncLease.guard`` takes.
        """
        if connection is None:
            super().done()
            return Begun(_nothing())
        door = door_to(connection)
        return converse(self._done_in(door), door)


def _nothing() -> Steps[None]:
    """What there is to wait for when nobody waits for the store."""
    return
    yield


class AsyncBatch(BatchFacts[V]):
    """What was won, for one task: ``async with await claims.take(rows) as batch: async for item in batch: …``.

    See ``dibs.claims.Batch``.
    """

    __slots__ = ("_entered",)

    @property
    def items(self) -> list[AsyncItem[V]]:  # type: ignore[override]
        """The leases of what was won, for callers that do not iterate."""
        return super().items  # type: ignore[return-value]

    async def release(self) -> None:
        """Give back what is left, and wait until the store has answered to everything; ``lost`` is exact then.

        What it gives no answer to for the client's ``patience`` ends by its ttl.
        """
        await take(self._ending())

    def __aiter__(self) -> AsyncBatch[V]:
        return self

    async def __anext__(self) -> AsyncItem[V]:
        item = self._move_on()
        if item is None:
            raise StopAsyncIteration
        return item  # type: ignore[return-value]

    async def __aenter__(self) -> AsyncBatch[V]:
        self._entered = owner()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        await end(self._ends.session, self._ending(), exc_type, getattr(self, "_entered", None))


class AsyncClaims:
    """Claims on the items of one source, for asyncio; see ``dibs.claims.Claims``."""

    __slots__ = ("_core",)

    def __init__(self, core: ClaimsCore[AsyncBatch[Any]]) -> None:
        self._core = core

    @property
    def source(self) -> str:
        """What the items are of."""
        return self._core.source

    @overload
    async def take(
        self,
        items: Iterable[V],
        *,
        key: Callable[[V], Key] | None = None,
        verify: Verify[V] | None = None,
        limit: int | None = None,
    ) -> AsyncBatch[V]: ...
    @overload
    async def take(
        self, *, query: str, n: int = N_DEFAULT, params: Params = (), verify: Verify[Any] | None = None
    ) -> AsyncBatch[Any]: ...
    async def take(
        self,
        items: Iterable[Any] | None = None,
        *,
        key: Callable[[Any], Key] | None = None,
        verify: Verify[Any] | None = None,
        limit: int | None = None,
        query: str | None = None,
        n: int = N_DEFAULT,
        params: Params = (),
    ) -> AsyncBatch[Any]:
        """Claim those of ``items`` that are free, or of what a query yields; see ``dibs.claims.Claims.take``.

        verify may be an async function.
        """
        core = self._core
        me = owner()
        batch: AsyncBatch[Any] = await take(core.take(me, items, key, limit, query, n, params, verify))
        if verify is not None and len(batch):
            try:
                batch._keep_due(core.due(await _result(verify(batch.won)), key, query))
            except BaseException as error:
                await end(batch._ends.session, batch._ending(), type(error), me)
                raise
        return batch

    @overload
    def stream(
        self,
        fetch: Fetch[V],
        *,
        key: Callable[[V], Key] | None = None,
        verify: Verify[V] | None = None,
        n: int = 100,
        idle: Seconds = 1.0,
        stop: Event | Callable[[], bool] | None = None,
    ) -> AsyncGenerator[AsyncItem[V], None]: ...
    @overload
    def stream(
        self,
        *,
        query: str,
        params: Params = (),
        verify: Verify[Any] | None = None,
        n: int = 100,
        idle: Seconds = 1.0,
        stop: Event | Callable[[], bool] | None = None,
    ) -> AsyncGenerator[AsyncItem[Any], None]: ...
    def stream(
        self,
        fetch: Fetch[Any] | None = None,
        *,
        key: Callable[[Any], Key] | None = None,
        verify: Verify[Any] | None = None,
        n: int = 100,
        idle: Seconds = 1.0,
        stop: Event | Callable[[], bool] | None = None,
        query: str | None = None,
        params: Params = (),
    ) -> AsyncGenerator[AsyncItem[Any], None]:
        """Work without end: claim up to ``n`` of what ``fetch()`` returns, yield them one by one, and so on.

        See ``dibs.claims.Claims.stream``. fetch and verify may be async functions. Left in the middle, it gives back
        what is left when it is closed: ``async with contextlib.aclosing(claims.stream(…)) as items:``.
        """
        idle_s, stopped = check_stream(fetch, query, params, n, idle, stop)
        check_functions(key, verify)
        if query is not None:
            self._core.take(
                None, None, key, None, query, n, params, verify
            ).close()  # checked now; taken when it is asked for
            return self._stream(lambda: self.take(query=query, n=n, params=params, verify=verify), idle_s, stopped)

        async def taken() -> AsyncBatch[Any]:
            assert fetch is not None
            return await self.take(await _result(fetch()), key=key, verify=verify, limit=n)

        return self._stream(taken, idle_s, stopped)

    async def _stream(
        self, take_some: Callable[[], Awaitable[AsyncBatch[Any]]], idle_s: float, stopped: Callable[[], bool]
    ) -> AsyncGenerator[AsyncItem[Any], None]:
        while not stopped():
            async with await take_some() as batch:
                while not stopped() and (item := batch._move_on()) is not None:
                    yield item  # type: ignore[misc]
                batch._finish()
            if not batch.won:
                await take(self._core.pausing(idle_s, stopped))

    async def dead(self) -> list[DeadItem]:
        """The items that were tried ``max_tries`` times, by key; see ``dibs.claims.Claims.dead``."""
        return await take(self._core.dead())

    async def revive(self, keys: Iterable[Key] | None = None) -> int:
        """Let dead items be tried again, those of ``keys`` or all; see ``dibs.claims.Claims.revive``."""
        return await take(self._core.revive(keys))

    def __repr__(self) -> str:
        return f"<dibs.AsyncClaims {self.source!r}>"


async def _result(given: Iterable[V] | Awaitable[Iterable[V]]) -> Iterable[V]:
    """What a function of the caller's returned, awaited if it is to be."""
    if isinstance(given, Awaitable):
        return await given
    return given
