"""Work that is done at most once, for tasks: the verbs of ``dibs.Once``, awaited."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.aio.block import Block
from dibs.aio.lease import AsyncLease
from dibs.aio.tasks import end, owner, take
from dibs.errors import LeaseLost
from dibs.lock import check_decorated, ran
from dibs.once import OnceRunFacts

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.names import Seconds
    from dibs.once import OnceCore
    from dibs.once_record import OnceRecord


class AsyncOnceRun(OnceRunFacts[AsyncLease]):
    """What ``begin()`` found: true when the work is this caller's to do, false when it is done or being done.

    Leaving the block without an exception marks the work as done, and keeps it so for ``keep`` seconds; an exception,
    whichever, gives the name up for the next to try. A block whose lease is lost is cancelled and ends with LeaseLost.
    """

    __slots__ = ("_block", "_entered")

    async def __aenter__(self) -> AsyncOnceRun:
        if self._lease is not None:
            self._lease.check()
        self._enter()
        return self

    def _enter(self) -> None:
        self._block: Block | None = None
        self._entered = me = owner()
        if self._lease is not None:
            assert me is not None
            self._block = Block(self._lease, me)

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        block: Block | None = getattr(self, "_block", None)
        by_loss = block is not None and block.end(exc_type)
        try:
            steps = self._core.end(self, exc_type is not None)
            await end(self._core._desk.session(), steps, exc_type, getattr(self, "_entered", None))
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
        return await take(self._core.begin(owner(), timeout))

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Await the function unless it is done, and return its result; see ``dibs.Once.run``."""
        check_decorated(function, awaited=True)
        async with self as begun:
            if begun:
                begun.result = ran(await function(*args, **kwargs))
        return begun.result

    async def done(self) -> OnceRecord | None:
        """The successful run that is kept; None when there is none, also while one goes on."""
        return await take(self._core.look())

    async def forget(self) -> bool:
        """Let it be run again although it is done; False when it is not. Does nothing to a run that goes on."""
        return await take(self._core.forget())

    async def __aenter__(self) -> AsyncOnceRun:
        begun = await take(self._core.enter(owner()))
        begun._enter()
        return begun

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        me = owner()
        if exc_type is GeneratorExit:  # of a coroutine that is garbage, perhaps, whichever task runs meanwhile
            me = self._core.blocks.of_the_gone() or me
        await self._core.blocks.leave(me).__aexit__(exc_type, *exc)

    def __repr__(self) -> str:
        return f"<dibs.AsyncOnce {self.name!r}>"
