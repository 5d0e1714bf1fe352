"""Worlds in which the threads of a process share their elections: each is a candidate of all of them.

They lead in blocks, or campaign and resign, also from what another thread has won, and now and then for a candidate of
another process. Everything is checked that is checked of elections, and of what is shared (``shared``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dibs.campaign import ElectionCore
from dibs.election import Election, Lead, Term
from dibs.errors import LeaseLost, NotHeld, StoreUnavailable
from dibs.succession import VALUE
from tests.simulation.elections import OFFER_MAX_S, SEATS, ElectionChecker, SimTerm
from tests.simulation.shared import SharedChecker, SharedProgram

if TYPE_CHECKING:
    from dibs.lease import Lease
    from dibs.lockable import Lockable
    from dibs.terms import Terms


class Reign(Lead):
    """The shipped block."""

    def __init__(self, core: ElectionCore[Any], timeout: float | None) -> None:
        super().__init__(core, lambda owner: core.campaign(owner, timeout))
        self._core = core


class Contest:
    """An election where the others have a lock."""

    def __init__(self, core: ElectionCore[SimTerm]) -> None:
        self._core = core
        self._election = Election(core)  # type: ignore[arg-type]

    def lead(self, timeout: float | None) -> Any:
        """A block of one thread."""
        return Reign(self._core, timeout)

    def acquire(self, *, timeout: float | None) -> Term | None:
        return self._election.campaign(timeout)

    def release(self) -> bool:
        return self._election.resign()

    def locked(self) -> bool:
        return False


class SharedElectionProgram(SharedProgram):
    checker: SharedElectionChecker

    def _lock(self, name: str, terms: Terms) -> Lockable[Lease]:
        rand, desk = self.world.random, self.host.desk
        value = f"{self.process.name}, {'first' if rand() < 0.5 else 'second'}"
        terms = desk.terms(terms.ttl, True, None, False, 0.0, None, terms.on_lost, "raise", {VALUE: value})
        reserve = rand() < 0.2
        seats = SEATS if not reserve and rand() < 0.4 else None
        replaces = seats is not None and rand() < 0.5
        self.checker.candidates.add(value)
        core = ElectionCore(desk, name, terms, SimTerm, value, -1 if reserve else 0, seats, replaces)
        return cast("Lockable[Lease]", Contest(core))

    def _refuses(self, lock: Lockable[Lease]) -> bool:
        return cast("Any", lock)._core.standby_max is not None

    def _block(self, lock: Lockable[Lease], outer: Lease | None, depth: int, timeout: float | None) -> None:
        rand = self.world.random
        timeout = None if rand() < self.habits.patience else 3.0 * rand()
        super()._block(cast("Any", lock).lead(timeout), outer, depth, timeout)

    def _release_own(self, lease: Lease) -> None:
        rand, checker = self.world.random, self.checker
        assert isinstance(lease, Term)
        others = sorted(checker.candidates - {lease.value})
        if not others or rand() < 0.5:
            super()._release_own(lease)
            return
        to, tenure = others[int(rand() * len(others))], checker.latest(lease)
        self.world.note(self.process.name, "resigns for %s", to)
        checker.releasing(tenure)
        try:
            given = lease.resign(to=to, timeout=OFFER_MAX_S * rand())
        except (LeaseLost, NotHeld, StoreUnavailable) as error:
            self.world.note(self.process.name, "is told: %s", str(error))
            return
        checker.export_returned(tenure)
        checker.resigned(tenure, to, given)
        self.world.note(self.process.name, "has resigned: %s", given)


class SharedElectionChecker(SharedChecker, ElectionChecker):
    """Both."""
