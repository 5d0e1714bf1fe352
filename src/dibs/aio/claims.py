"""Claims on the items of a source, for tasks: the verbs of ``dibs.claims``, awaited."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from dibs.aio.tasks import owner, take
from dibs.batch import BatchFacts, Item
from dibs.claims import check_limit, check_stream

V = TypeVar("V")

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable
    from threading import Event

    from dibs.claims import ClaimsCore
    from dibs.names import Seconds
    from dibs.once_keys import Key

    Verify = Callable[[list[V]], Iterable[V] | Awaitable[Iterable[V]]]
    Fetch = Callable[[], Iterable[V] | Awaitable[Iterable[V]]]


class AsyncBatch(BatchFacts[V]):
    """What was won, for one task: ``async with await claims.take(rows) as batch: async for item in batch: …``.

    See ``dibs.claims.Batch``.
    """

    __slots__ = ()

    async def release(self) -> None:
        """Give back what is left, and wait until the store has confirmed everything; ``lost`` is exact then."""
        await take(self._ending())

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
        await take(self._ending())


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
        batch: AsyncBatch[V] = await take(core.taking(owner(), keyed, most))
        if verify is not None and len(batch):
            try:
                batch._keep_due(core.keyed(await _result(verify(batch.won)), key))
            except BaseException:
                await take(batch._ending())
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
                await take(self._core.pausing(idle_s, stopped))

    def __repr__(self) -> str:
        return f"<dibs.AsyncClaims {self.source!r}>"


async def _result(given: Iterable[V] | Awaitable[Iterable[V]]) -> Iterable[V]:
    """What a function of the caller's returned, awaited if it is to be."""
    if isinstance(given, Awaitable):
        return await given
    return given
