"""Worlds in which the threads of a process share their lock objects, as programs do that keep them in a module.

Everything is checked that is checked of locks. The objects are used by several threads at once, in ``with`` blocks, one
in the other where they are reentrant, and by ``acquire()`` and ``release()``, also of what another thread acquired.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dibs.errors import LeaseLost, LockTimeout, NotHeld, StoreUnavailable
from dibs.hold import RELEASED
from dibs.lock import LockCore
from dibs.lockable import Lockable
from dibs.multilock import MultiCore
from dibs.owners import this_thread
from dibs.rwlock import RWCore
from dibs.semaphore import SemaphoreCore
from dibs.steps import run
from tests.simulation.permits import LIMIT, PermitChecker
from tests.simulation.programs import NAMES, TTLS_S, Program, SimLease
from tests.simulation.several import SeveralChecker
from tests.simulation.world import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dibs.hold import Hold
    from dibs.lease import Lease
    from dibs.terms import Terms
    from tests.simulation.process import Process
    from tests.simulation.programs import SimSession
    from tests.simulation.remembered import Tenure
    from tests.simulation.world import World

# One block in the other, at most.
DEPTH_MAX = 3


class Failed(Exception):
    """What a block may be left by."""


class SharedProgram(Program):
    checker: SharedChecker

    def _round(self) -> None:
        rand = self.world.random
        lock = self._shared(NAMES[int(rand() * self.habits.names)])
        self._maybe_interrupt()
        chance = rand()
        if chance < 0.6:
            self._block(lock, None, 1, lock._core.terms.timeout)
        elif chance < 0.9 or lock._core.terms.reentrant:
            self._acquire_and_release(lock)
        else:
            self._release_what_is_held(lock)

    def _shared(self, name: str) -> Lockable[Lease]:
        """One of the two locks of that name which all threads of the process have: one is reentrant."""
        rand, habits, checker = self.world.random, self.habits, self.checker
        key = name, rand() < 0.4
        lock = self.host.locks.get(key)
        if lock is None:

            def on_lost() -> None:
                checker.told_lost(on_lost)

            min_hold = 0.5 * rand() if rand() < habits.min_hold else 0.0
            max_hold = max(min_hold, 0.5 + 4.0 * rand()) if rand() < habits.max_hold else None
            ttl, renew = TTLS_S[int(rand() * len(TTLS_S))], rand() < habits.renew
            timeout = None if rand() < habits.patience else 3.0 * rand()
            terms = self.host.desk.terms(ttl, renew, timeout, key[1], min_hold, max_hold, on_lost, "raise", None)
            lock = self.host.locks[key] = self._lock(name, terms)
        return lock

    def _lock(self, name: str, terms: Terms) -> Lockable[Lease]:
        return Lockable(LockCore(self.host.desk, name, terms, SimLease))

    def _take(self, refuses: bool, acquire: Callable[[], Lease | None], timeout: float | None) -> Lease | None:
        """Acquire, seen by the checker; None when it could not be had."""
        checker = self.checker
        checker.attempt(self.name, self.process, timeout)
        lease = None
        try:
            lease = acquire()
            if lease is None:
                checker.refused(self.name, self.host.session)
                if timeout is None and not refuses:
                    self.world.broken("P12 who waits without limit is told that it could not be had in time")
        except LockTimeout as error:
            checker.refused(self.name, self.host.session)
            if timeout is None and not refuses:
                self.world.broken(f"P12 who waits without limit is told {error}")
        except self.CANNOT as error:
            checker.refused(self.name, self.host.session, error)
            self.world.note(self.process.name, "cannot have it: %s", str(error))
        finally:
            if lease is None:
                checker.not_acquired(self.name, self.host.session)
                self.world.note(self.process.name, "goes without")
        if lease is not None:
            self._has(lease)
        return lease

    def _has(self, lease: Lease) -> None:
        self.world.note(self.process.name, "holds %s", lease.claim_id)
        self.checker.acquired(self.name, self.host.session, lease._hold, lease._hold.terms.min_hold, [])

    def _tenures(self, lease: Lease) -> list[Tenure]:
        """What the checker knows of it."""
        return [self.checker.latest(lease)]

    def _block(self, lock: Lockable[Lease], outer: Lease | None, depth: int, timeout: float | None) -> None:
        """As in ``with lock as lease``, perhaps in another such block, and with others in it."""
        lease = self._take(self._refuses(lock), lock.__enter__, timeout)
        if lease is None:
            return
        failed: BaseException | None = None
        try:
            self._work(lock, lease, depth)
        except (Failed, Interrupted, LeaseLost, StoreUnavailable) as error:
            failed = error
        tenures = [] if lease is outer else self._tenures(lease)
        for tenure in tenures:
            self.checker.releasing(tenure)
        try:
            lock.__exit__(None if failed is None else type(failed), None, None)
            for tenure in tenures if failed is None else ():
                # Whoever releases it from outside may be in the midst of that, and the block does not wait for them.
                if not self.checker.let_go[tenure.process, tenure.hold.key]:
                    self.checker.release_returned(tenure, None)
        except (LeaseLost, StoreUnavailable) as error:
            self.world.note(self.process.name, "is told: %s", str(error))
        self.world.note(self.process.name, "has left a block of %s", [tenure.claim_id for tenure in tenures])
        if isinstance(failed, Interrupted):
            raise failed

    def _work(self, lock: Lockable[Lease], lease: Lease, depth: int) -> None:
        rand, habits = self.world.random, self.habits
        for _ in range(int(2 * rand()) + 1):
            self.process.clock.sleep(habits.work_max_s * rand())
            if rand() < habits.own_renewal:
                lease.renew()
            if lock._core.terms.reentrant and depth < DEPTH_MAX and rand() < 0.4 and lease.held:
                self._block(lock, lease, depth + 1, lock._core.terms.timeout)
            if rand() < 0.1:
                raise Failed
            lease.check()

    def _acquire_and_release(self, lock: Lockable[Lease]) -> None:
        rand = self.world.random
        timeout = 0.0 if rand() < 0.5 else lock._core.terms.timeout
        lease = self._take(self._refuses(lock), lambda: lock.acquire(timeout=timeout), timeout)
        if lease is None:
            return
        try:
            self.process.clock.sleep(self.habits.work_max_s * rand())
            if rand() < 0.3:
                lock.locked()
        finally:
            if not self.world.closing:
                if rand() < 0.5:
                    self._release_own(lease)
                else:
                    self._release_what_is_held(lock)

    def _refuses(self, lock: Lockable[Lease]) -> bool:
        """Whether it may turn away who has time."""
        return False

    def _release_own(self, lease: Lease) -> None:
        tenures = self._tenures(lease)
        for tenure in tenures:
            self.checker.releasing(tenure)
        confirmed = self._release(lease.release)
        for tenure in tenures if confirmed is not None else ():
            self.checker.release_returned(tenure, confirmed is True)

    def _release_what_is_held(self, lock: Lockable[Lease]) -> None:
        """Its own, or that of another thread: a plain lock may be released by anybody."""
        with self._letting_go(lock._core):
            self._release(lock.release)

    @contextmanager
    def _letting_go(self, core: Any) -> Iterator[None]:
        """Whichever it is that is released: to the checker, all of them may be."""
        cores = core._cores if isinstance(core, MultiCore) else (core,)
        at = [(self.process, core._key) for core in cores]
        for tenure in self.checker.tenures:
            if (tenure.process, tenure.hold.key) in at:
                self.checker.releasing(tenure)
        self.checker.let_go.update(at)
        try:
            yield
        finally:
            self.checker.let_go.subtract(at)

    def _release(self, release: Callable[[], bool]) -> bool | None:
        """Whether the store confirmed it; None when it raised."""
        confirmed = None
        try:
            confirmed = release()
            self.world.note(self.process.name, "has released: %s", confirmed)
        except (LeaseLost, NotHeld, StoreUnavailable, ValueError) as error:
            self.world.note(self.process.name, "is told: %s", str(error))
        return confirmed


class SharedPermitProgram(SharedProgram):
    """The same with a lock for readers and writers, and a semaphore of which some take more than one permit."""

    def _lock(self, name: str, terms: Terms) -> Lockable[Lease]:
        rand, desk = self.world.random, self.host.desk
        if name == NAMES[0]:
            sides: RWCore[Lease] = RWCore(desk, name, terms, SimLease)
            return Lockable(sides.writers if rand() < 0.4 else sides.readers)
        return Lockable(SemaphoreCore(desk, name, LIMIT, 1 + int(1.3 * rand()), False, terms, SimLease))

    def _release_what_is_held(self, lock: Lockable[Lease]) -> None:
        core = lock._core
        if isinstance(core, SemaphoreCore) and self.world.random() < 0.5:
            with self._letting_go(core):
                self._release(lambda: run(core.release_some(this_thread(), 1)))
        else:
            super()._release_what_is_held(lock)


class SharedChecker(SeveralChecker):
    """Besides, a reentrant lock gives the same lease again, and another thread may release what is not in hand yet."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        #: How many threads of a process are about to release whatever that holds of a name.
        self.let_go: Counter[tuple[Process, str]] = Counter()

    def latest(self, lease: Lease) -> Tenure:
        tenure = self._tenure(lease.claim_id)
        assert tenure is not None
        return tenure

    def acquired(self, who: object, session: SimSession, hold: Hold, min_hold: float, told: list[float]) -> Tenure:
        tenure = self._tenure(hold.claim_id)
        if tenure is not None:  # of a reentrant lock, which it holds
            self._over(who, session)
            return tenure
        return super().acquired(who, session, hold, min_hold, told)

    def _given(self, process: Process, session: SimSession, hold: Hold, min_hold: float, told: list[float]) -> Tenure:
        # By another thread, before it was in hand here.
        released = hold.state == RELEASED or self.let_go[process, hold.key] > 0
        self.claims[hold.claim_id].broken |= released
        tenure = super()._given(process, session, hold, min_hold, told)
        tenure.release_called = released
        return tenure


class SharedPermitChecker(SharedChecker, PermitChecker):
    """Both."""
