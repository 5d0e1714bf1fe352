"""Seats for the standbys of an election: at most so many candidates wait at a time, on every store.

A seat is a lease of its own, one of ``standby_max``, under a name that no user's can be, as no namespace has a ``~``
in it; so ``client.leases()`` does not show it. Whoever finds no free seat is refused, or takes that of the standby that
has sat the longest. Seats last for seconds: a dead standby's is soon free, and one that was taken is soon missed.

Seats decide who may wait, never who leads. For as long as it takes a standby to notice that its seat is taken, a second
or so, there may be one more in line.
"""

from __future__ import annotations

from hashlib import sha256

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption, StoreUnavailable
from dibs.lease import LeaseFacts
from dibs.lock import LockCore
from dibs.steps import within

if TYPE_CHECKING:
    from dibs.desk import Desk
    from dibs.steps import Steps

# A seat lasts this long without a renewal, and is renewed every third of it.
SEAT_TTL_S = 4.0
# A newcomer asks for one seat after the other, so there is a limit to what is a limit.
STANDBY_MAX = 1000
# How often a newcomer that replaces looks for the longest-standing again because another newcomer was faster.
REPLACE_TRIES = 5
# A longer name stands in the name of a seat as its hash, so that no store's limit is met.
NAME_BYTES_MAX = 160


class SeatCore(LockCore[LeaseFacts]):
    """One seat, as a lock."""

    __slots__ = ()

    def __init__(self, desk: Desk, name: str, number: int) -> None:
        limits = desk.address.capabilities
        ttl = min(max(SEAT_TTL_S, limits.ttl_min_s), limits.ttl_max_s)
        super().__init__(desk, name, desk.terms(ttl, True, 0, False, 0, None, None, "raise", None), LeaseFacts)
        short = len(name.encode()) <= NAME_BYTES_MAX
        told = f"~standby:{name}" if short else f"~standby-sha256:{sha256(name.encode()).hexdigest()}"
        self._key = f"{desk.namespace}{told}/{number}"


class Seat:
    """A seat that was taken by a standby."""

    __slots__ = ("_core", "_lease", "_owner")

    def __init__(self, core: SeatCore, lease: LeaseFacts, owner: object) -> None:
        self._core = core
        self._lease = lease
        self._owner = owner

    def kept(self) -> Steps[bool]:
        """Whether it is still this standby's. One that ended, in an outage say, is taken again if nobody has it."""
        if self._lease.held:
            return True
        self.leave()  # if its end was only this standby's own loss, the seat is free
        try:
            lease = yield from self._core.obtain(self._owner, 0.0)
        except StoreUnavailable:  # not known: the next look will tell
            return True
        if lease is not None:
            self._lease = lease
        return lease is not None

    def taken_by(self) -> str | None:
        """Who has it, when it is kept no more."""
        held = self._core.refused[0]
        return None if held is None else held.holder

    def leave(self) -> None:
        """Let the next have it; nothing is waited for."""
        self._lease._end()

    def left(self, limit_s: float | None) -> Steps[None]:
        """The same, and wait until the store has been told, or for as long as a request or ``limit_s`` may take."""
        session = self._lease._session
        ask = session.keeper.release(self._lease._hold)
        if ask is not None:
            ask.overdue = limit_s is not None
            yield session, ask, session.request_timeout_s if limit_s is None else limit_s


class Seats:
    """The seats of one election."""

    __slots__ = ("_cores", "_desk", "_replace")

    def __init__(self, desk: Desk, name: str, count: int, replace: bool) -> None:
        self._desk = desk
        self._cores = [SeatCore(desk, name, number) for number in range(1, count + 1)]
        self._replace = replace

    def take(self, owner: object, until: float | None) -> Steps[Seat | None]:
        """A free seat, or that of the longest-standing; None when all are taken, or at ``until`` by the boot clock."""
        clock = self._desk.session().clock
        for _ in range(REPLACE_TRIES):
            sitting: list[tuple[float, int, SeatCore]] = []
            for core in self._cores:
                lease = yield from core.obtain(owner, 0.0)
                if lease is not None:
                    return Seat(core, lease, owner)
                held, _ = core.refused
                if held is not None and held.holder is not None:
                    sitting.append((held.acquired_at, held.fencing_token, core))
                if until is not None and clock.now() >= until:
                    return None
            if not self._replace or not sitting:
                return None
            _, token, core = min(sitting, key=_sat_since)
            yield from self._vacate(core, token, until)
            if until is not None and clock.now() >= until:
                return None
            lease = yield from core.obtain(owner, 0.0)
            if lease is not None:
                return Seat(core, lease, owner)
        return None

    def _vacate(self, core: SeatCore, token: int, until: float | None) -> Steps[None]:
        key = core._key
        limit_s = self._desk.session().time_left(until)
        yield from within(
            limit_s, self._desk._acting(lambda store, deadline: store.break_lease(key, token, True, deadline))
        )


def check_seats(count: object, full: object) -> None:
    """Refuse what is not a number of standbys, or not what to do when there are as many."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= STANDBY_MAX):
        raise InvalidOption(
            f"standby_max is a whole number from 0 to {STANDBY_MAX}, or None for no limit, not {count!r}"
        )
    if full not in ("refuse", "replace"):
        raise InvalidOption(f"standby_full is 'refuse' or 'replace', not {full!r}")
    if full == "replace" and not count:
        raise InvalidOption("standby_full='replace' goes with a standby_max of at least 1")


def _sat_since(sitting: tuple[float, int, Any]) -> tuple[float, int]:
    return sitting[:2]
