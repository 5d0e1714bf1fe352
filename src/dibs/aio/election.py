"""One leader among candidates, for tasks: the verbs of ``dibs.Election``, awaited."""

from __future__ import annotations

import asyncio

from dibs._typing import TYPE_CHECKING, Any
from dibs.aio.lease import AsyncLease
from dibs.aio.lockable import AsyncLockable
from dibs.aio.tasks import Begun, owner, take
from dibs.errors import LeaseLost
from dibs.leaders import Over, Watch
from dibs.lock import check_decorated
from dibs.names import check_flag, check_timeout
from dibs.succession import OFFER_S, TermFacts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dibs.campaign import ElectionCore, Leader
    from dibs.names import Seconds
    from dibs.steps import Steps

    OnElected = Callable[["AsyncTerm"], Awaitable[object]]
    OnLost = Callable[["AsyncTerm"], object]


class AsyncTerm(TermFacts, AsyncLease):
    """One reign: an ``AsyncLease`` on the name of an election. ``async with term:`` resigns at the end."""

    __slots__ = ()

    def resign(self, *, to: Any = None, timeout: Seconds = OFFER_S) -> Awaitable[bool]:
        """Stop leading, and let the next candidate win at once; with ``to``, the one with that value, out of its turn.

        Without ``to`` it is the same as ``release()``; with it, nothing happens before it is awaited. See
        ``dibs.Term.resign``.
        """
        steps = self._resigning(to, timeout)
        return Begun(steps) if to is None else take(steps)

    async def __aenter__(self) -> AsyncTerm:
        await super().__aenter__()
        return self


class AsyncLead:
    """``async with election.lead() as term:`` campaigns, leads, and resigns at the end."""

    __slots__ = ("_block", "_campaign", "_core")

    def __init__(self, core: ElectionCore[AsyncTerm], campaign: Callable[[object], Steps[AsyncTerm | None]]) -> None:
        self._core = core
        self._block = AsyncLockable(core)
        self._campaign = campaign

    async def __aenter__(self) -> AsyncTerm:
        me = owner()
        term = await take(self._campaign(me))
        if term is None:
            raise self._core.timed_out()
        self._block._enter(me, term)
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
            return await take(self._watch.next())
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
        return await take(self._core.campaign(owner(), timeout))

    def lead(self, timeout: Seconds | None = None) -> AsyncLead:
        """Lead for the length of a block: ``async with election.lead() as term:``.

        Raises LockTimeout where ``campaign`` returns None. A block whose term is lost is cancelled and ends with
        LeaseLost.
        """
        limit_s, core = check_timeout(timeout), self._core
        return AsyncLead(core, lambda owner: core.campaign(owner, limit_s))

    async def run(self, on_elected: OnElected, on_lost: OnLost | None = None, *, forever: bool = False) -> None:
        """Campaign, await ``on_elected(term)`` in this task, and resign when it returns; with ``forever`` again.

        When the term is lost meanwhile, ``on_elected`` is cancelled at once, before another can win; when it has ended,
        ``on_lost(term)`` is called, and awaited if it is async. Then LeaseLost is raised, or with ``forever`` the next
        campaign begins. Any other error of ``on_elected`` ends the term and is raised, as is an error of ``on_lost``.

        Raises what ``campaign`` raises, and LockTimeout when there are standbys enough. With ``forever`` it waits for a
        store that is away; see ``dibs.Election.run``.
        """
        check_flag("forever", forever)
        check_decorated(on_elected, awaited=True)
        if on_lost is not None and not callable(on_lost):
            raise TypeError(f"on_lost takes a function, not {on_lost!r}")
        while True:
            term: AsyncTerm | None = None
            try:
                async with AsyncLead(self._core, self._core.stand_by) if forever else self.lead() as term:
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
        and the term ends by its ttl). Raises NotHeld when this task does not lead through this object, LeaseLost
        when the term had been lost.
        """
        steps = self._core.resign(owner(), to, timeout)
        return Begun(steps) if to is None else take(steps)

    async def leader(self) -> Leader | None:
        """Who leads now, or None."""
        return await take(self._core.leader())

    def observe(self, interval: Seconds = 1.0) -> AsyncLeaders:
        """Who leads, at once and then whenever that changes: ``async for leader in election.observe():``.

        See ``dibs.Election.observe``.
        """
        return AsyncLeaders(Watch(self._core, interval))

    def __repr__(self) -> str:
        return f"<dibs.AsyncElection {self.name!r}>"
