"""Worlds of permits: what programs take there, and what may not happen.

One name is a lock for readers and writers, some of whom become readers in the middle; the other is a semaphore of two,
of which a program takes one or both, and now and then somebody believes that it has three. In every fourth world some
export what they hold, and others adopt it. Everything else is as it is for locks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.errors import LimitMismatch
from dibs.rwlock import RWCore
from dibs.semaphore import SemaphoreCore
from dibs.steps import run
from dibs.store import LAST_TICKET, LINE_GRACE_S, PERMITS_MAX, Acquire, Granted, Release
from tests.simulation.checker import Checker
from tests.simulation.programs import NAMES, Program, SimLease

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.lease import Lease
    from dibs.lock import LockCore
    from dibs.store import Held, Outcome, Request, Transfer
    from dibs.terms import Terms
    from tests.simulation.network import Call
    from tests.simulation.remembered import Claim, Tenure
    from tests.simulation.world import World

LIMIT = 2
WRONG_LIMIT = 3


class PermitProgram(Program):
    """One thread of a process, which reads, writes, and takes permits."""

    CANNOT = (*Program.CANNOT, LimitMismatch)

    _sides: RWCore[Lease] | None = None

    def _core(self, name: str, terms: Terms) -> LockCore[Lease]:
        rand, desk = self.world.random, self.host.desk
        if name == NAMES[0]:
            self._sides = RWCore(desk, name, terms, SimLease)
            return self._sides.writers if rand() < 0.4 else self._sides.readers
        limit = WRONG_LIMIT if rand() < 0.1 else LIMIT
        return SemaphoreCore(desk, name, limit, 1 + int(1.3 * rand()), False, terms, SimLease)

    def _acquire(self, core: LockCore[Lease], timeout: float | None) -> Lease | None:
        lease = None
        try:
            lease = super()._acquire(core, timeout)
        finally:
            if lease is None:
                self._sides = None  # what is kept keeps its leases
        return lease

    def _use(self, core: LockCore[Lease], lease: Lease, tenure: Tenure, adopted: bool) -> None:
        sides, self._sides = self._sides, None
        if sides is not None and core is sides.writers and not adopted and self.world.random() < 0.6:
            self.process.clock.sleep(self.habits.work_max_s * self.world.random() ** 2)
            if self.world.random() < 0.3:
                self._meet_renewal(lease)
            self.world.note(self.process.name, "downgrades %s", lease.claim_id)
            run(sides.downgrade(self.name))
            core = sides.readers
        super()._use(core, lease, tenure, adopted)


class PermitChecker(Checker):
    """The promises P14 and P15 in the place of P1, and the line for permits in the place of that for locks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        #: Who waits at the store: by name and claim, the ticket, how many permits it wants, when it asked.
        self.waiters: dict[str, dict[str, tuple[int, int, float]]] = {}
        #: Since when everybody who waits for a name may have what it wants.
        self._free_since: dict[str, float] = {}
        #: When a permit of a name expired last, without having been released.
        self._expired_at: dict[str, float] = {}
        #: When somebody was granted the name last: those who wait are served one after the other.
        self._granted_at: dict[str, float] = {}

    # -- the store ------------------------------------------------------------------------------------------------

    def applied(self, call: Call, request: Request, holder: str | None, outcome: Outcome) -> None:
        if isinstance(request, Release) and request.ticket is not None:
            self.waiters.get(request.name, {}).pop(request.claim_id, None)
        if type(outcome) is Granted:
            self._granted_at[request.name] = self.world.now
        super().applied(call, request, holder, outcome)

    def _let_in(self, request: Acquire | Transfer, outcome: Granted, trusting: Sequence[Tenure]) -> None:
        if not request.permits:  # a waiting note (dibs.notes), which is a lock
            super()._let_in(request, outcome, trusting)
            return
        claim_id, holders = request.claim_id, self.holders.setdefault(request.name, {})
        take = request.take if isinstance(request, Acquire) else holders.pop(request.from_claim, 1)
        taken = sum(tenure.take for tenure in trusting)
        if taken + take > min([request.permits, *(tenure.hold.terms.permits for tenure in trusting)]):
            others = ", ".join(tenure.claim_id for tenure in trusting)
            self.world.broken(f"P5 the store grants {claim_id} {take} permits while {others} trust theirs")
        for tenure in trusting:
            if tenure.hold.granted.slot == outcome.slot:
                self.world.broken(f"P14 the store gives {claim_id} slot {outcome.slot}, which {tenure.claim_id} has")
        holders[claim_id] = take

    def _lines_up(self, request: Acquire, claim: Claim, outcome: Held) -> None:
        assert outcome.ticket is not None
        waiters = self.waiters.setdefault(request.name, {})
        waiters[request.claim_id] = outcome.ticket, request.take, self.world.now

    def _passes(self, request: Acquire, claim: Claim) -> None:
        """P13, P15: what is left after a grant suffices for those ahead of it in line who are alive."""
        if not request.permits:  # as above: nobody waits for it
            return
        waiters = self.waiters.get(request.name, {})
        place, _, _ = waiters.pop(request.claim_id, (LAST_TICKET, 0, 0.0))
        place = min(place, LAST_TICKET if request.ticket is None else request.ticket)
        now = self.world.now
        ahead = {
            claim_id: take
            for claim_id, (ticket, take, seen_at) in waiters.items()
            if ticket < place and now - seen_at < LINE_GRACE_S
        }
        if self._left(request.name) < sum(ahead.values()):
            promise = "P15" if request.permits == PERMITS_MAX else "P13"
            self.world.broken(f"{promise} {request.claim_id} is granted what is kept for {', '.join(ahead)}")

    def _left(self, name: str) -> int:
        """How many permits nobody has, by the store's books."""
        pool = self._network().shelf.pools[name]
        rows = pool.holdings.values()
        return pool.permits - sum(request.take for request, row in rows if row.expires_at > self.world.now)

    def _left_in_store(self) -> list[tuple[str, str]]:
        return [
            (name, row.claim_id)
            for name, pool in self._network().shelf.pools.items()
            for _, row in pool.holdings.values()
            if row.claim_id is not None and row.expires_at > self.world.now
        ]

    # -- every step -----------------------------------------------------------------------------------------------

    def _beside(self, others: list[Tenure], tenure: Tenure) -> None:
        """P14, P15: never more permits than there are, and no slot twice."""
        limit = tenure.hold.terms.permits
        promise = "P15" if limit == PERMITS_MAX else "P14"
        taken = tenure.take
        for other in others:
            taken += other.take
            limit = min(limit, other.hold.terms.permits)
            if other.hold.granted.slot == tenure.hold.granted.slot:
                self.world.broken(f"P14 {other.claim_id} and {tenure.claim_id} have the same slot")
        others.append(tenure)
        if taken > limit:
            who = ", ".join(f"{one.claim_id} (of {one.take})" for one in others)
            self.world.broken(f"{promise} {who} are held at the same moment, of {limit}")

    def _look_for_waiters(self, now: float) -> None:
        wanted: dict[str, int] = {}
        for attempt in self.attempts.values():
            ask = attempt.asks[-1] if attempt.asks else None
            if ask is not None and ask.blocking and not attempt.process.dead and not attempt.process.paused:
                name = ask.request.name
                wanted[name] = max(wanted.get(name, 0), ask.request.take)
        for name in (*wanted, *self._free_since):
            if name not in wanted or name not in self._network().shelf.pools or self._left(name) < wanted[name]:
                self._free_since.pop(name, None)
            else:
                self._free_since.setdefault(name, now)
        super()._look_for_waiters(now)

    def _free_at(self, name: str) -> float | None:
        # Not for each by itself: what is left for one may be kept for another who waits before it, and wants more.
        free_since = self._free_since.get(name)
        return None if free_since is None else max(free_since, self._granted_at.get(name, 0.0))

    def _ran_out(self, name: str) -> bool:
        pool = self._network().shelf.pools.get(name)
        ends = [] if pool is None else [row.expires_at for _, row in pool.holdings.values() if row.claim_id is not None]
        # (A store forgets them, with the next write.)
        latest = self._expired_at[name] = max(
            self._expired_at.get(name, 0.0), *(end for end in ends if end <= self.world.now), 0.0
        )
        return any(asked_at < latest for _, _, asked_at in self.waiters.get(name, {}).values())
