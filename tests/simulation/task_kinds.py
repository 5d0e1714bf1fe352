"""Worlds of asyncio in which tasks take more than locks: permits, several names at once, works, and elections.

What programs of threads take there is told in the modules of these names (`permits`, `multilocks`, `onces`,
`elections`), and all is checked that is checked of those; and besides what is promised to tasks (`tasks`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dibs.aio.election import AsyncElection, AsyncTerm
from dibs.aio.lockable import AsyncLock
from dibs.aio.multilock import AsyncMultiLease, AsyncMultiLock
from dibs.aio.once import AsyncOnce, AsyncOnceRun
from dibs.aio.rwlock import AsyncRWLock
from dibs.aio.semaphore import AsyncSemaphore
from dibs.aio.tasks import owner
from dibs.campaign import ElectionCore
from dibs.errors import LeaseLost, LimitMismatch, LockTimeout, StoreUnavailable
from dibs.hold import HELD, LOST
from dibs.multilock import MultiCore
from dibs.once import OnceCore, once_options
from dibs.rwlock import RWCore
from dibs.semaphore import SemaphoreCore
from dibs.succession import VALUE
from tests.simulation.elections import OFFER_MAX_S, SEATS, ElectionChecker
from tests.simulation.multilocks import MULTI_NAMES, MultiChecker, Whole
from tests.simulation.onces import KEEPS_S, OnceChecker
from tests.simulation.permits import LIMIT, WRONG_LIMIT, PermitChecker
from tests.simulation.programs import NAMES, TTLS_S
from tests.simulation.tasks import UNCANCEL, Failed, SimAsyncLease, TaskChecker, TaskMember, TaskProgram

if TYPE_CHECKING:
    from dibs.terms import Terms
    from tests.simulation.remembered import Tenure

# -- permits ----------------------------------------------------------------------------------------------------------


class PermitMember(TaskMember):
    """A task that reads, writes, and takes permits."""

    CANNOT = (StoreUnavailable, LimitMismatch)

    program: PermitTasks

    def _lock(self, name: str, terms: Terms) -> Any:
        rand, desk = self.world.random, self.host.desk
        if name == NAMES[0]:
            sides = AsyncRWLock(RWCore(desk, name, terms, SimAsyncLease))
            if rand() >= 0.4:
                return sides.read()
            self.program.writers[sides.write()] = sides
            return sides.write()
        limit = WRONG_LIMIT if rand() < 0.1 else LIMIT
        return AsyncSemaphore(SemaphoreCore(desk, name, limit, 1 + int(1.3 * rand()), False, terms, SimAsyncLease))

    async def _change(self, lock: Any, lease: Any) -> Any:
        rand = self.world.random
        sides = self.program.writers.get(lock)
        if sides is None or rand() >= 0.6:
            return lock
        await asyncio.sleep(self.habits.work_max_s * rand() ** 2)
        self.note("downgrades %s", lease.claim_id)
        await sides.downgrade()
        if lease.held and sides.write().locked():
            self.world.broken(f"P15 {lease.claim_id} was downgraded, and writes on")
        return sides.read()

    async def _use(self, lock: Any, lease: Any, tenures: list[Tenure]) -> None:
        try:
            await super()._use(lock, lease, tenures)
        except ValueError as error:  # as of a semaphore of asyncio's that nobody has acquired
            if not self.host.session.closed:
                raise
            self.note("is told: %s", str(error))

    async def _take(self, lock: Any, *args: Any) -> None:
        try:
            await super()._take(lock, *args)
        finally:
            if lock not in self.program.locks.values():
                self.program.writers.pop(lock, None)


class PermitTasks(TaskProgram):
    MEMBER = PermitMember

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: Both sides of each lock of which there is a writers' side.
        self.writers: dict[AsyncLock, AsyncRWLock] = {}


class PermitTaskChecker(TaskChecker, PermitChecker):
    pass


# -- several names ----------------------------------------------------------------------------------------------------


class MultiMember(TaskMember):
    """A task that takes several names at once."""

    checker: MultiTaskChecker

    async def _round(self) -> None:
        rand = self.world.random
        if rand() < 0.3:
            await super()._round()
            return
        names = sorted(MULTI_NAMES, key=lambda _: rand())[: 2 + int(2 * rand())]
        timeout = self._timeout()
        grant = Whole(self.checker)
        ttl, renew = TTLS_S[int(rand() * len(TTLS_S))], rand() < self.habits.renew
        max_hold = self.world.max_hold()
        terms = self.host.desk.terms(ttl, renew, timeout, False, 0.0, max_hold, grant.told_lost, "raise", None)
        core: MultiCore[AsyncMultiLease, Any] = MultiCore(self.host.desk, names, terms, SimAsyncLease, AsyncMultiLease)
        had_any = False

        def had(multi: AsyncMultiLease) -> list[Tenure]:
            nonlocal had_any
            had_any = True
            tenures = self.checker.has_all(owner(), self.host.session, multi, names)
            grant.had(tenures)
            return tenures

        self.note("wants %s, waits %s", core.name, timeout)
        try:
            await self._take(AsyncMultiLock(core), timeout, rand() < 0.6, had)
        finally:
            if not had_any and not self.world.closing:
                grant.nothing_had()


class MultiTasks(TaskProgram):
    MEMBER = MultiMember


class MultiTaskChecker(TaskChecker, MultiChecker):
    pass


# -- works that are done once -----------------------------------------------------------------------------------------


class OnceMember(TaskMember):
    """A task that does works that are to be done once."""

    checker: OnceTaskChecker

    async def _round(self) -> None:
        rand, desk = self.world.random, self.host.desk
        ttl, keep_s = TTLS_S[int(rand() * len(TTLS_S))], KEEPS_S[int(rand() * len(KEEPS_S))]
        timeout = self._timeout()
        told: list[float] = []
        options = once_options(
            desk, keep_s, True, ttl, timeout, self.world.max_hold(), lambda: told.append(self.world.now), "raise", None
        )
        name = NAMES[int(rand() * self.habits.names)]
        core: OnceCore[Any, AsyncOnceRun] = OnceCore(desk, name, None, options, SimAsyncLease, AsyncOnceRun)
        once = AsyncOnce(core)
        in_block = rand() < 0.5
        begun = await self._begin(once, timeout, in_block)
        if begun is None or not begun:
            if in_block and begun is not None:
                await once.__aexit__(None)
            return
        tenure = self.checker.acquired(owner(), self.host.session, begun.lease._hold, 0.0, told)
        self.note("does %s under %s", name, tenure.claim_id)
        try:
            await self._do(once if in_block else begun, begun, tenure)
            self.note("has done %s", name)
        except Failed:
            self.note("has failed at %s", name)
        except LeaseLost as error:
            self.checker.run_lost(tenure.claim_id)
            self.note("is told: %s", str(error))
            if self._cancelled and UNCANCEL:
                self.world.broken(f"asyncio: {self.name} was cancelled, and is told {error}")
        except StoreUnavailable as error:
            self.note("does not know: %s", str(error))
        finally:
            # The block is over, and with it the run: who was cancelled on the way in has given it back, too.
            tenure.release_called = True
            del once, core, begun

    async def _begin(self, once: AsyncOnce, timeout: float | None, in_block: bool) -> AsyncOnceRun | None:
        """What was begun, or found to be done."""
        since = self.world.now
        self.note("is to do %s once, waits %s", once.name, timeout)
        begun: AsyncOnceRun | None = await self._attempt(
            once.__aenter__() if in_block else once.begin(), timeout, refused=True
        )
        if begun is not None and not begun:
            self.checker.not_acquired(owner(), self.host.session)
        if begun is not None and begun.done is not None:
            self.note("finds %s done by %s", once.name, begun.result)
            self.checker.found_done(once.name, begun.done, since)
        elif begun is not None and not begun and timeout is None:
            self.world.broken(f"P12 who waits for {once.name} without limit is told that it is neither free nor done")
        return begun

    async def _do(self, block: AsyncOnce | AsyncOnceRun, begun: AsyncOnceRun, tenure: Tenure) -> None:
        """As in ``async with`` of the one or the other, of which the once was entered."""
        if block is begun:
            await begun.__aenter__()

        async def body() -> None:
            for _ in range(int(3 * self.world.random()) + 1):
                await self._be_at_work([tenure])
            if self.world.random() < 0.3:
                raise Failed
            begun.result = tenure.claim_id

        error = await self._error_in(body, tenure.hold.trusted_until)
        self.checker.releasing(tenure)
        if error is None:
            self.checker.succeeds(tenure.claim_id)
        try:
            await block.__aexit__(None if error is None else type(error))
            if error is not None:
                raise error
            self.checker.told_done(tenure.claim_id)
        finally:
            del error


class OnceTasks(TaskProgram):
    MEMBER = OnceMember


class OnceTaskChecker(TaskChecker, OnceChecker):
    pass


# -- elections --------------------------------------------------------------------------------------------------------


class SimAsyncTerm(SimAsyncLease, AsyncTerm):
    """The shipped term for tasks; the checker hears when it is made."""

    __slots__ = ()


class CandidateMember(TaskMember):
    """A task that is a candidate: it campaigns, leads in a block, or has itself run."""

    checker: ElectionTaskChecker

    async def _round(self) -> None:
        rand, desk = self.world.random, self.host.desk
        timeout = self._timeout()
        told: list[float] = []
        ttl, info = TTLS_S[int(rand() * len(TTLS_S))], {VALUE: self.name}
        terms = desk.terms(ttl, True, None, False, 0.0, None, lambda: told.append(self.world.now), "raise", info)
        name = NAMES[int(rand() * self.habits.names)]
        reserve = rand() < 0.2
        seats = SEATS if not reserve and rand() < 0.4 else None
        core: ElectionCore[SimAsyncTerm] = ElectionCore(
            desk, name, terms, SimAsyncTerm, self.name, -1 if reserve else 0, seats, seats is not None and rand() < 0.5
        )
        self.checker.candidates.add(self.name)
        election = AsyncElection(core)  # type: ignore[arg-type]
        self.note("campaigns for %s, waits %s", name, timeout)
        if rand() < 0.3:
            await self._be_run(election, told, refused=seats is not None)
            return

        def had(term: SimAsyncTerm) -> list[Tenure]:
            return [self.checker.acquired(owner(), self.host.session, term._hold, 0.0, told)]

        in_block = rand() < 0.6
        await self._take(Seat(election, timeout, seats is not None), timeout, in_block, had)

    async def _acquire(self, lock: Seat, timeout: float | None, in_block: bool) -> Any:
        acquiring = lock.__aenter__() if in_block else lock.election.campaign(timeout)
        return await self._attempt(acquiring, timeout, refused=lock.refuses)

    async def _work(self, lease: Any, tenures: list[Tenure]) -> None:
        for _ in range(int(3 * self.world.random()) + 1):
            await self._be_at_work(tenures)

    async def _use(self, lock: Seat, lease: Any, tenures: list[Tenure]) -> None:
        rand = self.world.random
        await asyncio.sleep(self.habits.work_max_s * rand())
        lease.check()
        others = sorted(self.checker.candidates - {self.name})
        if not others or rand() < 0.5:
            await super()._use(lock, lease, tenures)
            return
        to, (tenure,) = others[int(rand() * len(others))], tenures
        self.note("resigns for %s", to)
        self.checker.releasing(tenure)
        given = await (lease if rand() < 0.5 else lock.election).resign(to=to, timeout=OFFER_MAX_S * rand())
        self.checker.export_returned(tenure)
        self.checker.resigned(tenure, to, given)
        self.note("has resigned: %s", given)

    async def _be_run(self, election: AsyncElection, told: list[float], *, refused: bool) -> None:
        """Lead as long as a function runs, which is cancelled when the term is lost."""
        led: list[Tenure] = []
        lost: list[str] = []

        async def lead(term: AsyncTerm) -> None:
            led.append(self.checker.acquired(owner(), self.host.session, term._hold, 0.0, told))
            self.note("leads under %s", term.claim_id)
            try:
                await self._work(term, led)
                if self.world.random() < 0.2:
                    raise Failed
            except BaseException as error:
                if not self.world.closing:
                    self._look_how_late(error)
                raise
            finally:
                self.checker.releasing(led[0])

        checker, me = self.checker, owner()
        checker.attempt(me, self.process, None)
        error: BaseException | None = None
        try:
            await election.run(lead, lambda term: lost.append(term.claim_id))
            self.note("has led")
        except asyncio.CancelledError as raised:
            error = raised
            if not led:
                self._look_how_late(raised)
            raise
        except (Failed, LeaseLost, LockTimeout, StoreUnavailable) as raised:
            error = raised
            self.note("has led, or not, and is told: %r", raised)
            self._look_why(raised, led, refused=refused)
        finally:
            if not led:
                checker.not_acquired(me, self.host.session)
            for tenure in led:
                self._look_back(tenure, lost, error)
            del error

    def _look_why(self, error: Exception, led: list[Tenure], *, refused: bool) -> None:
        """What was raised is what may be raised."""
        before: tuple[type[Exception], ...] = (LockTimeout,) if refused else ()
        if not isinstance(error, (StoreUnavailable, *((Failed, LeaseLost) if led else before))):
            raise error
        if isinstance(error, LeaseLost) and self._cancelled and UNCANCEL:
            self.world.broken(f"asyncio: {self.name} was cancelled, and is told {error}")

    def _look_back(self, tenure: Tenure, lost: list[str], error: BaseException | None) -> None:
        """A run has ended in which this was led."""
        tenure.dropped = tenure.hold.state == HELD
        if self.world.closing:
            return
        if isinstance(error, LeaseLost) and lost != [tenure.claim_id]:
            self.world.broken(f"elections: the loss of {tenure.claim_id} is raised, and on_lost was told {lost}")
        if lost and (lost != [tenure.claim_id] or tenure.hold.state != LOST):
            self.world.broken(f"elections: on_lost was told {lost}, and {tenure.claim_id} is {tenure.hold.state}")


class Seat:
    """An election as the thing that is taken."""

    def __init__(self, election: AsyncElection, timeout: float | None, refuses: bool) -> None:
        self.election = election
        #: It may turn candidates away.
        self.refuses = refuses
        self._lead = election.lead(timeout)

    async def __aenter__(self) -> AsyncTerm:
        return await self._lead.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:
        await self._lead.__aexit__(*exc)

    def release(self) -> Any:
        return self.election.resign()


class ElectionTasks(TaskProgram):
    MEMBER = CandidateMember


class ElectionTaskChecker(TaskChecker, ElectionChecker):
    pass
