"""The etcd leases that a store's keys hang on: granted for a call, used again by the next, kept alive, asked about."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from dibs.clock import boot_now
from dibs.errors import StoreUnavailable
from dibs.store import Acquire
from dibs.stores.etcd_flights import OPS_MAX, LeaseGone, Sent
from dibs.stores.etcd_gateway import Refusal
from dibs.trust import DRIFT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dibs.clock import Deadline
    from dibs.stores.etcd_flights import Flights
    from dibs.stores.etcd_gateway import Gateway

# Questions after etcd leases in one flight.
FLIGHT_MAX = 500
# Places in line vanish this long after their client's last question.
LINE_TTL_S = 10
# What a store remembers: grants whose etcd lease it will use again, idle leases of a ttl.
USES_MAX = 100_000
IDLE_MAX = 64
# Of an etcd lease in its last second no more is known than that.
LAST_SECOND_S = 0.5


class Row(NamedTuple):
    """A request and its place in the vector."""

    place: int
    request: Any


class Asking(Protocol):
    """What stands for a request while it is served."""

    @property
    def request(self) -> Any: ...


A = TypeVar("A", bound=Asking)


class Lease(NamedTuple):
    """An etcd lease for grants: its id, its ttl, and when it was asked for or for its last keepalive."""

    id: str
    ttl: int
    asked_at: float

    def lasts(self, ttl: float, now: float) -> bool:
        """Whether it certainly lasts ``ttl`` seconds from ``now``, whatever the clocks."""
        return (now - self.asked_at) / (1.0 - DRIFT) <= self.ttl - ttl


class Time(NamedTuple):
    """Of an etcd lease: its ttl, the whole seconds it has left, and how many keys hang on it."""

    ttl: int
    left: int
    keys: int

    @property
    def free_in(self) -> float:
        """Seconds after which it may have ended."""
        return float(self.left) if self.left else LAST_SECOND_S


NO_TIME = Time(0, 0, 0)


class Leases:
    def __init__(self, gateway: Gateway, flights: Flights) -> None:
        self._gateway = gateway
        self._flights = flights
        # Etcd leases on which nothing hangs, by ttl.
        self._idle: dict[int, deque[Lease]] = {}
        # Those on which grants of this store hang, by claim; how many grants do, by the lease's id.
        self._lease_of: dict[str, Lease] = {}
        self._grants_on: dict[str, int] = {}
        #: That of this store's places in line; empty before the first.
        self.of_line = ""

    def attach(
        self,
        rows: list[A],
        text: Callable[[A, str], str],
        ttls: list[int],
        deadline: Deadline,
        together_max: int = OPS_MAX,
    ) -> tuple[dict[int, Lease], Sent]:
        """Send a transaction for each row that may hang a key on an etcd lease of its ttl; one lease for each ttl.

        From now on the leases last what the rows' requests ask for, or longer.
        """
        now = boot_now()
        for again in (False, True):
            leases: dict[int, Lease] = {}
            older: list[str] = []
            for ttl in set(ttls):
                if again:
                    self._idle.pop(ttl, None)  # as old as the one that was gone
                elif self._idle.get(ttl):
                    lease = leases[ttl] = self._idle[ttl].pop()
                    asked = [row.request for row, its in zip(rows, ttls, strict=True) if its == ttl]
                    if not all(type(one) is Acquire and lease.lasts(one.ttl, now) for one in asked):
                        older.append(lease.id)
                        leases[ttl] = lease._replace(asked_at=now)
            before = [("lease/keepalive", keepalives(older))] if older else []
            missing = [ttl for ttl in set(ttls) if ttl not in leases]
            for ttl, new in zip(missing, self._new(missing, deadline), strict=True):
                leases[ttl] = Lease(new, ttl, now)
            texts = [text(row, leases[ttl].id) for row, ttl in zip(rows, ttls, strict=True)]
            try:
                sent = self._flights.transactions(texts, deadline, before, together_max)
            except LeaseGone:
                continue
            if before and len(sent.terms) > 1:
                raise StoreUnavailable("etcd: the leader changed during a keepalive, which may have been in vain")
            return leases, sent
        raise StoreUnavailable("etcd: a lease was gone as soon as it was granted")

    def _new(self, ttls: list[int], deadline: Deadline) -> list[str]:
        if not ttls:
            return []
        answers = self._gateway.flight([("lease/grant", f'{{"TTL":"{ttl}"}}') for ttl in ttls], deadline)
        return [answer["ID"] for answer in answers]

    def granted(self, leases: dict[int, Lease], claims: list[tuple[int, str]]) -> None:
        """Note which claims were granted on these leases, by their ttls; those that serve nobody are put by."""
        count = dict.fromkeys(leases, 0)
        for ttl, claim_id in claims:
            count[ttl] += 1
            if len(self._lease_of) < USES_MAX:
                self._lease_of[claim_id] = leases[ttl]
        for ttl, lease in leases.items():
            if count[ttl]:
                self._grants_on[lease.id] = count[ttl]
            else:
                self._put_by(lease)

    def ended(self, claim_id: str, *, released: bool) -> None:
        """Note the end of a grant. An etcd lease on which all grants have ended is put by for the next."""
        lease = self._lease_of.pop(claim_id, None)
        if lease is None:
            return
        grants = self._grants_on.pop(lease.id, 0)
        if not released or not grants:  # it was broken, perhaps, and its marker hangs there
            return
        if grants > 1:
            self._grants_on[lease.id] = grants - 1
        else:
            self._put_by(lease)

    def _put_by(self, lease: Lease) -> None:
        self._idle.setdefault(lease.ttl, deque(maxlen=IDLE_MAX)).append(lease)

    def in_line(self, rows: list[A], text: Callable[[A, str], str], deadline: Deadline) -> Sent:
        """Send transactions that put places in line, which hang on an etcd lease of this store."""
        if self.of_line:
            alive = ("lease/keepalive", keepalives([self.of_line]))
            with suppress(LeaseGone):  # when nobody here has asked for so long that all places are gone
                return self._flights.transactions([text(row, self.of_line) for row in rows], deadline, [alive])
        self.of_line = self._new([LINE_TTL_S], deadline)[0]
        return self._flights.transactions([text(row, self.of_line) for row in rows], deadline)

    def times_left(
        self, leases: Iterable[str], deadline: Deadline, *, with_keys: bool = False
    ) -> tuple[dict[str, Time], set[str]]:
        """How long etcd leases have left, and the terms in which that was answered."""
        asked = [lease for lease in leases if lease != "0"]
        more = ',"keys":true' if with_keys else ""
        times: dict[str, Time] = {"0": NO_TIME}
        terms: set[str] = set()
        for start in range(0, len(asked), FLIGHT_MAX):
            part = asked[start : start + FLIGHT_MAX]
            flight = [("lease/timetolive", f'{{"ID":"{lease}"{more}}}') for lease in part]
            for lease, answer in zip(part, self._gateway.flight(flight, deadline), strict=True):
                if type(answer) is Refusal:
                    times[lease] = NO_TIME
                    continue
                left = max(0, int(answer.get("TTL", 0)))  # -1 when it is gone
                times[lease] = Time(int(answer.get("grantedTTL", 0)), left, len(answer.get("keys", ())))
                terms.add(answer["header"]["raft_term"])
        return times, terms


def whole(ttl: float) -> int:
    """The ttl of the etcd lease for one: the next whole second above it, so that a lease just used can serve again."""
    return int(ttl) + 1


def keepalives(leases: Iterable[str]) -> str:
    return "".join(f'{{"ID":"{lease}"}}' for lease in leases)
