"""Worlds in which threads share locks of several names, of which some are reentrant.

All is checked that is checked of multilocks, and of what is shared (``shared``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dibs.lockable import Lockable
from dibs.multilock import MultiCore, MultiLease
from tests.simulation.multilocks import MULTI_NAMES, MultiChecker
from tests.simulation.programs import SimLease
from tests.simulation.shared import SharedChecker, SharedProgram

if TYPE_CHECKING:
    from dibs.lease import Lease
    from dibs.multilock import MultiLeaseFacts
    from dibs.terms import Terms
    from tests.simulation.programs import SimSession
    from tests.simulation.remembered import Tenure


class SharedMultiProgram(SharedProgram):
    checker: SharedMultiChecker

    def _lock(self, name: str, terms: Terms) -> Lockable[Lease]:
        rand = self.world.random
        names = sorted(MULTI_NAMES, key=lambda _: rand())[: 2 + int(2 * rand())]
        terms = terms._replace(min_hold=0.0)
        return Lockable(cast("Any", MultiCore(self.host.desk, names, terms, SimLease, MultiLease)))

    def _has(self, lease: Lease) -> None:
        multi = cast("MultiLeaseFacts[Any]", lease)
        tenures = self.checker.has_all(self.name, self.host.session, multi, [*multi._leases])
        self.world.note(self.process.name, "holds %s", ", ".join(tenure.claim_id for tenure in tenures))

    def _tenures(self, lease: Lease) -> list[Tenure]:
        return self.checker.known(cast("MultiLeaseFacts[Any]", lease))


class SharedMultiChecker(SharedChecker, MultiChecker):
    def known(self, multi: MultiLeaseFacts[Any]) -> list[Tenure]:
        """Each of its leases, as far as it was in somebody's hand before."""
        found = (self._tenure(lease._hold.claim_id) for lease in multi._leases.values())
        return [tenure for tenure in found if tenure is not None]

    def has_all(self, who: object, session: SimSession, multi: MultiLeaseFacts[Any], names: list[str]) -> list[Tenure]:
        tenures = self.known(multi)
        if tenures:
            self._over(who, session)
            return tenures
        return super().has_all(who, session, multi, names)
