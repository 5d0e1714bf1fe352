"""Worlds of claims: what programs do with the items of a source there.

There are a few items, of which a program takes some at once, looks again which of them are due, and finishes, skips or
fails each, gives them back, loses or drops them; or it has them streamed. In most worlds tries count: an item that has
failed as often as it may is dead until somebody revives it. What may not happen is in ``claim_books``.
"""

from __future__ import annotations

from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from dibs.batch import Item
from dibs.claiming import claims_core
from dibs.claims import Batch, Claims
from dibs.errors import LeaseLost, NotHeld, StoreUnavailable
from dibs.hold import HELD
from dibs.steps import run
from tests.simulation.claim_books import KEYS, RETRY_IN_MAX_S, SOURCE
from tests.simulation.programs import TTLS_S, Program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dibs.batch import Ends
    from dibs.claiming import ClaimsCore
    from dibs.hold import Hold
    from tests.simulation.claim_books import ClaimChecker, Work
    from tests.simulation.process import Process
    from tests.simulation.programs import Habits, Host
    from tests.simulation.world import World


class Failed(Exception):
    """The work on an item did not succeed, and its program gives up the whole batch."""


class AtItems:
    """A program that works items, in a thread or in a task."""

    world: World
    process: Process
    host: Host
    habits: Habits
    checker: Any
    #: All that it was given in this round.
    works: list[Work]
    #: It looks again what is due of a batch, and will have it when it has.
    verifying: bool

    def note(self, text: str, *args: object) -> None:
        raise NotImplementedError

    def _claims_core(self, make_item: Any, make_batch: Any) -> ClaimsCore[Any]:
        self.works = []
        rand, desk = self.world.random, self.host.desk
        ttl, renew = TTLS_S[int(rand() * len(TTLS_S))], rand() < self.habits.renew
        tries = self.checker.max_tries
        return claims_core(desk, SOURCE, make_item, make_batch, ttl, renew, None, tries, None, "leases", None, None)

    def _some_keys(self) -> list[str]:
        rand = self.world.random
        return sorted(KEYS, key=lambda _: rand())[: 1 + int(len(KEYS) * rand())]

    def _limit(self) -> int | None:
        rand = self.world.random
        return None if rand() < 0.6 else 1 + int(2 * rand())

    @contextmanager
    def taking(self, who: object, keys: list[str], limit: int | None) -> Iterator[list[Any]]:
        """Around a take, which puts the batch into this list."""
        checker, session = self.checker, self.host.session
        self.verifying = False
        self.note("claims %s, limit %s", keys, limit)
        checker.attempt(who, self.process, None)
        taken: list[Any] = []
        try:
            yield taken
        finally:
            if not taken:
                checker.not_acquired(who, session)
        batch = taken[0]
        batch.works = checker.has_batch(who, session, batch, keys, limit)
        self.works += batch.works
        self.note("has won %s", ", ".join(work.tenure.claim_id for work in batch.works))

    def _due(self, won: list[str]) -> list[str]:
        """What of this is due."""
        rand = self.world.random
        if rand() < 0.1:
            raise Failed
        return [key for key in won if rand() < 0.7]

    def _say(self, item: Item[str], *, implicit: bool) -> None:
        """How the work on an item has ended. ``implicit``: it is done when the loop goes on to the next one."""
        self._say_of(next(work for work in self.works if work.tenure.hold is item._hold), item, implicit)

    def _say_of(self, work: Work, item: Item[str], implicit: bool) -> None:
        rand = self.world.random
        chance = rand()
        if chance < 0.05:
            raise Failed
        how = "done" if chance < 0.4 else "skip" if chance < 0.6 else "fail"
        self.note("says %s: %s", item.key, how)
        self.checker.ending(work, how)
        try:
            if how == "done":
                if not implicit or rand() < 0.5:
                    item.done()
                    self.checker.told_ended(work, item)
            elif how == "skip":
                item.skip()
            else:
                error = None if rand() < 0.3 else "it did not work"
                retry_in = 0.0 if rand() < 0.5 else RETRY_IN_MAX_S * rand()
                work.retry_in = min(work.retry_in, retry_in)
                item.fail(error, retry_in=retry_in)
                self.checker.told_ended(work, item)
        except LeaseLost:
            self.checker.told_item_lost(work)
            raise
        except BaseException:
            work.interrupted = True
            raise

    def _let_go(self) -> None:
        """The round is over: nobody has anything of it."""
        for work in self.works:
            work.tenure.dropped = work.tenure.hold.state == HELD
            work.tenure.release_called = not work.tenure.dropped
            work.item = None
        self.works = []


class SimItem(Item[str]):
    """The shipped item; the checker hears when it is made."""

    __slots__ = ()

    def __init__(self, session: Any, hold: Hold, name: str, key: str, value: str, ends: Ends) -> None:
        super().__init__(session, hold, name, key, value, ends)
        session.checker.made(hold)


class SimBatch(Batch[str]):
    """The shipped batch; the checker hears how it ends."""

    __slots__ = ("works",)

    works: list[Work]

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        checker: ClaimChecker = self._ends.session.checker  # type: ignore[attr-defined]
        works = getattr(self, "works", [])  # none of a batch whose take has failed
        checker.all_ending(works)
        super().__exit__(exc_type, *exc)
        if exc_type is None:
            checker.batch_over(self, works)


class SimClaims(Claims):
    """The shipped claims; the checker hears of every take, those of a stream included."""

    __slots__ = ("_program",)

    def __init__(self, program: ClaimProgram, core: ClaimsCore[Any]) -> None:
        super().__init__(core)
        self._program = program

    def take(self, items: Any, **options: Any) -> Any:  # type: ignore[override]
        with self._program.taking(self._program.name, items, options["limit"]) as taken:
            taken.append(super().take(items, **options))
            return taken[0]


class ClaimProgram(AtItems, Program):
    """One thread of a process, which works items in batches."""

    def note(self, text: str, *args: object) -> None:
        self.world.note(self.process.name, text, *args)

    def _round(self) -> None:
        rand = self.world.random
        core = self._claims_core(SimItem, SimBatch)
        claims = SimClaims(self, core)
        self._maybe_interrupt()
        if self.checker.max_tries is not None and rand() < 0.25:
            self._revive(claims)
        try:
            if rand() < 0.3:
                self._stream(claims)
            else:
                batch = claims.take(self._some_keys(), limit=self._limit(), verify=self._verify())
                try:
                    self._work(batch)
                finally:
                    del batch
        except Failed:
            self.note("has failed with its batch")
        except StoreUnavailable as error:
            self.note("does not know: %s", str(error))
        except (LeaseLost, NotHeld) as error:
            self.note("is told: %s", str(error))
        finally:
            self._let_go()
        if rand() < 0.3:
            self._pause(core)

    def _verify(self) -> Callable[[list[str]], list[str]] | None:
        rand = self.world.random
        if rand() < 0.7:
            return None

        def verify(won: list[str]) -> list[str]:
            self.verifying = True
            self.process.clock.sleep(self.habits.work_max_s * rand() ** 2)
            return self._due(won)

        return verify

    def _pause(self, core: ClaimsCore[Any]) -> None:
        until = self.world.now + 1.0
        try:
            run(core.pausing(0.2, lambda: self.world.now > until))
        except StoreUnavailable as error:
            if not self.host.session.closed:
                raise
            self.note("is told: %s", str(error))

    def _revive(self, claims: SimClaims) -> None:
        try:
            for item in claims.dead():
                self.checker.told_dead(item.key, item.tries)
            with self.checker.reviving(self.host.session):
                revived = claims.revive(None if self.world.random() < 0.5 else KEYS[:2])
            self.note("has revived %d", revived)
        except StoreUnavailable as error:
            self.note("cannot revive: %s", str(error))

    def _work(self, batch: SimBatch) -> None:
        rand = self.world.random
        chance = rand()
        if chance < self.habits.drop:
            self.note("drops its batch")
            return
        with batch:
            self._work_all(batch, chance < 0.6)

    def _work_all(self, batch: SimBatch, in_order: bool) -> None:
        rand = self.world.random
        if in_order:
            for item in batch:
                self._work_on(item, implicit=True)
        else:
            for item in sorted(batch.items, key=lambda _: rand()):
                if rand() < 0.9:
                    self._work_on(item, implicit=False)

    def _stream(self, claims: SimClaims) -> None:
        rand, world = self.world.random, self.world
        until = world.now + 3.0 * rand()
        verify, limit, idle_s = self._verify(), 1 + int(3 * rand()), 0.1 + 0.5 * rand()
        self.note("has items streamed, %d at a time", limit)
        stream = claims.stream(self._some_keys, verify=verify, n=limit, idle=idle_s, stop=lambda: world.now > until)
        assert self.task is not None
        # A Ctrl-C in what Python itself closes would reach nobody.
        leaves_it = rand() < 0.3 and not self.task.interruptible
        with nullcontext(stream) if leaves_it else closing(stream) as items:
            del stream
            for item in items:
                if rand() < 0.1:
                    self.note("leaves its stream")
                    break
                self._work_on(item, implicit=True)

    def _work_on(self, item: Item[str], *, implicit: bool) -> None:
        rand = self.world.random
        self.process.clock.sleep(self.habits.work_max_s * rand() ** 2)
        if rand() < 0.3:
            item.check()
        if rand() < 0.3:
            self._meet(item)
        self._say(item, implicit=implicit)

    def _meet(self, item: Item[str]) -> None:
        wait_s = item._hold.due - self.process.clock.boot()
        if 0.0 < wait_s < 2.0:
            self.process.clock.sleep(wait_s + 0.005 * self.world.random() ** 2)
