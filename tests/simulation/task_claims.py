"""Worlds of asyncio in which tasks work the items of a source.

What programs of threads do there is told in ``claims``, and all is checked that is checked of those; and besides what
is promised to tasks (``tasks``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dibs.aio.claims import AsyncBatch, AsyncClaims, AsyncItem
from dibs.aio.tasks import owner
from dibs.errors import LeaseLost, NotHeld, StoreUnavailable
from tests.simulation.claim_books import KEYS, ClaimChecker
from tests.simulation.claims import AtItems, Failed
from tests.simulation.tasks import UNCANCEL, TaskChecker, TaskMember, TaskProgram

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dibs.batch import Ends
    from dibs.claiming import ClaimsCore
    from dibs.hold import Hold
    from tests.simulation.claim_books import Work


class SimAsyncItem(AsyncItem[str]):
    """The shipped item for tasks; the checker hears when it is made."""

    __slots__ = ()

    def __init__(self, session: Any, hold: Hold, name: str, key: str, value: str, ends: Ends) -> None:
        super().__init__(session, hold, name, key, value, ends)
        session.checker.made(hold)


class SimAsyncBatch(AsyncBatch[str]):
    """The shipped batch for tasks; the checker hears how it ends."""

    __slots__ = ("works",)

    works: list[Work]

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        checker: ClaimChecker = self._ends.session.checker  # type: ignore[attr-defined]
        checker.all_ending(self.works)
        await super().__aexit__(exc_type, *exc)
        if exc_type is None:
            checker.batch_over(self, self.works)


class SimAsyncClaims(AsyncClaims):
    """The shipped claims for tasks; the checker hears of every take, those of a stream included."""

    __slots__ = ("_member",)

    def __init__(self, member: ClaimMember, core: ClaimsCore[Any]) -> None:
        super().__init__(core)
        self._member = member

    async def take(self, items: Any, **options: Any) -> Any:  # type: ignore[override]
        member = self._member
        with member.taking(owner(), items, options["limit"]) as taken:
            try:
                taken.append(await super().take(items, **options))
            except asyncio.CancelledError as error:
                if not member.verifying:  # else it waits for the answer to what it gives back
                    member._look_how_late(error)
                raise
            return taken[0]


class ClaimMember(AtItems, TaskMember):
    """A task that works items in batches."""

    checker: ClaimTaskChecker

    def note(self, text: str, *args: object) -> None:
        TaskMember.note(self, text, *args)

    async def _round(self) -> None:
        rand = self.world.random
        claims = SimAsyncClaims(self, self._claims_core(SimAsyncItem, SimAsyncBatch))
        try:
            if self.checker.max_tries is not None and rand() < 0.25:
                await self._revive(claims)
            if rand() < 0.4:
                await self._stream(claims)
            else:
                batch = await claims.take(self._some_keys(), limit=self._limit(), verify=self._verify())
                try:
                    await self._work_through(batch)
                finally:
                    del batch
        except (Failed, LeaseLost, NotHeld, StoreUnavailable) as error:
            self.note("is told: %s", repr(error))
            if self._cancelled and UNCANCEL:
                self.world.broken(f"asyncio: {self.name} was cancelled, and is told {error!r}")
        finally:
            self._let_go()

    def _verify(self) -> Callable[[list[str]], Awaitable[list[str]]] | None:
        rand = self.world.random
        if rand() < 0.6:
            return None

        async def verify(won: list[str]) -> list[str]:
            self.verifying = True
            await asyncio.sleep(self.habits.work_max_s * rand() ** 2)
            return self._due(won)

        return verify

    async def _revive(self, claims: SimAsyncClaims) -> None:
        for item in await claims.dead():
            self.checker.told_dead(item.key, item.tries)
        with self.checker.reviving(self.host.session):
            revived = await claims.revive(None if self.world.random() < 0.5 else KEYS[:2])
        self.note("has revived %d", revived)

    async def _work_through(self, batch: SimAsyncBatch) -> None:
        rand = self.world.random
        chance = rand()
        if chance < self.habits.drop:
            self.note("drops its batch")
            return
        async with batch:
            if chance < 0.6:
                async for item in batch:
                    await self._work_on(item, implicit=True)
            else:
                for item in sorted(batch.items, key=lambda _: rand()):
                    if rand() < 0.9:
                        await self._work_on(item, implicit=False)

    async def _stream(self, claims: SimAsyncClaims) -> None:
        rand, world = self.world.random, self.world
        until = world.now + 3.0 * rand()
        verify, limit, idle_s = self._verify(), 1 + int(3 * rand()), 0.1 + 0.5 * rand()
        self.note("has items streamed, %d at a time", limit)
        stream = claims.stream(self._some_keys, verify=verify, n=limit, idle=idle_s, stop=lambda: world.now > until)
        try:
            async for item in stream:
                if rand() < 0.1:
                    self.note("leaves its stream")
                    break
                await self._work_on(item, implicit=True)
        finally:
            if not world.closing:
                await stream.aclose()

    async def _work_on(self, item: AsyncItem[str], *, implicit: bool) -> None:
        rand = self.world.random
        timer = self._cancel_by(item._hold.trusted_until) if rand() < self.habits.interrupt / 2 else None
        try:
            await asyncio.sleep(self.habits.work_max_s * rand() ** 2)
            if rand() < 0.3:
                item.check()
            self._say(item, implicit=implicit)
        except asyncio.CancelledError as error:
            self._look_how_late(error)
            raise
        finally:
            if timer is not None:
                timer.cancel()


class ClaimTasks(TaskProgram):
    MEMBER = ClaimMember


class ClaimTaskChecker(TaskChecker, ClaimChecker):
    pass
