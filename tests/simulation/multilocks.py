"""Worlds of multilocks: what programs take there, and what may not happen.

There are three names, of which a program takes several at once, in any order, or one as a plain lock. Every lease of a
multilock is a lock's lease, of which everything is checked that is checked of locks. What a multilock promises besides:
whoever waits for it holds none of it, and whoever has it has all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dibs.errors import LeaseLost, NotHeld, StoreUnavailable
from dibs.hold import HELD, LOST
from dibs.multilock import MultiCore, MultiLease
from dibs.steps import run
from tests.simulation.checker import Checker
from tests.simulation.programs import TTLS_S, Program, SimLease

if TYPE_CHECKING:
    from dibs.lease import Lease
    from dibs.multilock import MultiLeaseFacts
    from dibs.store import Acquire, Held
    from dibs.wishes import AcquireAsk
    from tests.simulation.programs import SimSession
    from tests.simulation.remembered import Claim, Tenure

MULTI_NAMES = ("blue", "green", "red")


class Whole:
    """One multilock that a program acquires: its ``on_lost`` does not say which of the names it is called for."""

    def __init__(self, checker: MultiChecker) -> None:
        self._checker = checker
        self._told: list[float] = []
        self._tenures: list[Tenure] | None = None

    def told_lost(self) -> None:
        """It is called once for each name that is lost, and may be on its way before the acquire has returned."""
        self._told.append(self._checker.world.now)
        if self._tenures is not None:
            self.had(self._tenures)

    def had(self, tenures: list[Tenure]) -> None:
        """The acquire returned these."""
        self._tenures = tenures
        lost = [tenure for tenure in tenures if tenure.hold.state == LOST and not tenure.told]
        lost.sort(key=lambda tenure: tenure.dropped)  # of what was dropped it need not be called
        for tenure in lost[: len(self._told)]:
            tenure.told.append(self._told.pop(0))
        if self._told:
            self._checker.world.broken("loss is loud: on_lost of a multilock is called more often than names were lost")

    def nothing_had(self) -> None:
        """The acquire returned nothing. (Interrupted, it may have been there, and lost.)"""
        if self._told and not self._checker.interrupts:
            self._checker.world.broken("loss is loud: on_lost is called, and nothing was had")


class MultiProgram(Program):
    """One thread of a process, which takes several names at once."""

    checker: MultiChecker

    def _round(self) -> None:
        world, habits = self.world, self.habits
        rand = world.random
        if rand() < 0.3:
            super()._round()
            return
        names = sorted(MULTI_NAMES, key=lambda _: rand())[: 2 + int(2 * rand())]
        ttl = TTLS_S[int(rand() * len(TTLS_S))]
        chance = rand()
        timeout = None if chance < habits.patience else 0.0 if chance < 0.8 else 3.0 * rand()
        grant = Whole(self.checker)
        terms = self.host.desk.terms(
            ttl, rand() < habits.renew, timeout, False, 0.0, world.max_hold(), grant.told_lost, "raise", None
        )
        core: MultiCore[MultiLease, Lease] = MultiCore(self.host.desk, names, terms, SimLease, MultiLease)
        self._maybe_interrupt()
        multi = self._acquire_all(core, timeout)
        if multi is None:
            grant.nothing_had()
            return
        tenures = self.checker.has_all(self.name, self.host.session, multi, names)
        grant.had(tenures)
        try:
            world.note(self.process.name, "holds %s", ", ".join(tenure.claim_id for tenure in tenures))
            self._use_all(core, multi, tenures)
        except StoreUnavailable as error:
            world.note(self.process.name, "does not know: %s", str(error))
        except (LeaseLost, NotHeld) as error:
            if all(tenure.hold.state == HELD for tenure in tenures):
                world.broken(f"multilock: it is told to be lost, and all of it is held: {error}")
            world.note(self.process.name, "is told: %s", str(error))
        finally:
            for tenure in tenures:
                tenure.dropped = tenure.hold.state == HELD
            del core, multi

    def _acquire_all(self, core: MultiCore[MultiLease, Lease], timeout: float | None) -> MultiLease | None:
        text = "for ever" if timeout is None else f"{timeout:.2f} s"
        self.world.note(self.process.name, "wants %s, waits %s", core.name, text)
        return self._attempt(core.acquire(self.name), timeout)

    def _use_all(self, core: MultiCore[MultiLease, Lease], multi: MultiLease, tenures: list[Tenure]) -> None:
        world, clock, habits = self.world, self.process.clock, self.habits
        rand = world.random
        for _ in range(int(3 * rand()) + 1):
            clock.sleep(habits.work_max_s * rand())
            if rand() < habits.own_renewal:
                self._meet_renewal(next(iter(multi)))
                multi.renew(None if rand() < 0.5 else TTLS_S[int(rand() * len(TTLS_S))])
            multi.check()
        chance = rand()
        if chance < habits.drop:
            world.note(self.process.name, "drops all")
            return
        if chance < habits.drop + habits.sit:
            multi.lost.wait(3.0 * rand())
        else:
            self._meet_renewal(next(iter(multi)))
        for tenure in tenures:
            self.checker.releasing(tenure)
        confirmed = multi.release() if rand() < 0.5 else run(core.release(self.name))
        for tenure in tenures:
            self.checker.release_returned(tenure, confirmed)
        world.note(self.process.name, "has released all: %s", confirmed)


class MultiChecker(Checker):
    """What a multilock promises besides what its locks promise."""

    WANTS_ONE = False

    def has_all(self, who: object, session: SimSession, multi: MultiLeaseFacts[Any], names: list[str]) -> list[Tenure]:
        """An acquire of these names returned this: a tenure for each."""
        attempt = self._over(who, session)
        holds = [lease._hold for lease in multi._leases.values()]  # no code of dibs runs here: nothing is interrupted
        if [hold.key for hold in holds] != [f"default:{name}" for name in names] or [*multi._leases] != names:
            self.world.broken(f"multilock: {names} was asked for, and {[*multi._leases]} is there")
        had = {hold.claim_id for hold in holds}
        for ask in attempt.asks:
            if ask.request.claim_id not in had:
                self._withdrawn(attempt.process, session, ask)
        return [self._given(attempt.process, session, hold, 0.0, []) for hold in holds]

    def _lines_up(self, request: Acquire, claim: Claim, outcome: Held) -> None:
        super()._lines_up(request, claim, outcome)
        if not self.calm:
            return  # what gives it back may have been lost on its way, and is sent once more
        mine = next((a.asks for a in self.attempts.values() if a.asks and self._is_of(request, a.asks[-1])), [])
        others = {ask.request.claim_id for ask in mine[:-1]}
        for name, claim_id in self._left_in_store():
            if claim_id in others:
                self.world.broken(f"multilock: {request.claim_id} waits for {request.name}, and holds {name} meanwhile")

    @staticmethod
    def _is_of(request: Acquire, ask: AcquireAsk) -> bool:
        return ask.request.claim_id == request.claim_id
