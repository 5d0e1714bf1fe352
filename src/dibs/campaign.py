"""Electing one of several candidates, in steps for either face.

An election is a lock on its name and a term is a lease, so everything that holds of leases holds of terms: one leader
at a time, a number that rises with every term (the fencing token), loss told before another can win, ``dibs ls`` and
``dibs break``. What is added here is the leader's ``value``, kept in the lease's info and so granted with it in one
step; whom the store puts off or turns away; and observing who leads.

A candidate that campaigns is one of three things:

* *standby*: in the store's line, like everybody who waits for a lock, and woken when it is its turn; with
  ``standby_max`` only in a seat (``dibs.standby``), and no longer than it has it;
* *reserve* (``priority`` below 0): in no line. It looks about once a second, and asks when nobody has led for
  ``-priority * RESERVE_STEP_S``, in which every standby and every reserve of a higher priority had its chance;
* refused: all seats are taken.

A leader may name its successor (``dibs.succession``). Whoever waits notices, and takes over out of turn if it is meant.

Priorities, seats and successors choose who is elected next. They unseat nobody and can do no harm to exclusion: who
leads is decided by the same conditional write as for any lock.
"""

from __future__ import annotations

import json

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from dibs.absence import AWAY_S, Absence
from dibs.errors import DibsError, InvalidOption, LeaseLost, LockTimeout, NotHeld, StoreUnavailable, WouldDeadlock
from dibs.handover import taking_over
from dibs.lease import LeaseFacts
from dibs.lock import LockCore
from dibs.names import check_seconds, check_timeout, people_call
from dibs.standby import Seats, check_seats
from dibs.steps import within
from dibs.store import Held
from dibs.succession import OFFER, VALUE, check_offer, offered, offering

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from dibs.desk import Desk, LeaseRecord
    from dibs.grips import Aim
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.standby import Seat
    from dibs.steps import Steps
    from dibs.terms import Terms

# A reserve, like whoever waits in line, looks after a random time between these two.
LOOK_MIN_S = 0.7
LOOK_MAX_S = 1.0
# How much longer than those of the next higher priority a reserve sees nobody lead before it asks. Whoever is one step
# higher notices a free name within LOOK_MAX_S and asks one step later, so that this leaves it 0.5 s for its request.
RESERVE_STEP_S = 1.5
assert LOOK_MAX_S + 0.5 <= RESERVE_STEP_S
PRIORITY_MIN = -9
# A standby looks up from waiting this often: at what it was told, and at the clock. It asks the store only if it must.
LOOK_UP_S = 0.3

L = TypeVar("L", bound=LeaseFacts)


class Leader(NamedTuple):
    """Who leads, as the store shows it to anybody: the number of the term, its value, the holder, and since when."""

    number: int
    value: Any
    holder: str
    since: datetime


class ElectionCore(LockCore[L]):
    """What an election does, in steps for either face."""

    __slots__ = ("_refusal", "_seats", "_value", "priority", "standby_max")

    def __init__(
        self,
        desk: Desk,
        name: str,
        terms: Terms,
        make_term: Callable[[Session, Hold, str], L],
        value: Any,
        priority: int,
        standby_max: int | None,
        replace: bool,
    ) -> None:
        super().__init__(desk, name, terms, make_term)
        self.priority = priority
        self.standby_max = standby_max
        self._value = value
        self._seats = Seats(desk, self.name, standby_max, replace) if standby_max is not None else None
        #: Why this candidate was turned away last, when it was not the time-out.
        self._refusal: str | None = None

    def campaign(self, owner: object, timeout: Seconds | None) -> Steps[L | None]:
        """A term; None when it could not be had in time, there were standbys enough, or it was replaced as one."""
        return self.acquire(owner, True, check_timeout(timeout))

    def stand_by(self, owner: object, tell: Callable[[str], object] | None = None) -> Steps[L | None]:
        """Campaign without a limit, also while the store is away, which is told, or logged: it has nothing to lose."""
        session = self._desk.session()
        if tell is None:
            import logging

            tell = logging.getLogger("dibs").warning
        absence = Absence(session, lambda text: tell(f"election {self.name!r}: {text}"))
        while True:
            try:
                if absence.since is not None:
                    yield from self._desk.pinging()
                    absence.over()
                return (yield from self.campaign(owner, None))
            except StoreUnavailable as error:
                if session.closed or not absence.borne(error):
                    raise
            yield session, session.pause(), AWAY_S

    def obtain(self, owner: object, limit_s: float | None, *, gripped: bool = False) -> Steps[L | None]:
        term = yield from self._elected(owner, limit_s)
        if gripped and term is not None:
            try:
                self._grip(owner, term)
            except BaseException:  # Ctrl-C: nobody has it in hand
                term._end()
                raise
        return term

    def _elected(self, owner: object, limit_s: float | None) -> Steps[L | None]:
        self._refusal = None
        if limit_s is None:
            self.refuse_own(owner)
        if limit_s == 0:
            return (yield from super().obtain(owner, limit_s))
        clock = self._desk.session().clock
        until = None if limit_s is None else clock.now() + limit_s
        if self.priority:
            return (yield from self._in_reserve(owner, until))
        if self._seats is None:
            return (yield from self._stand_by(owner, until, None))
        term = yield from super().obtain(owner, 0.0)
        if term is not None or self._is_over(until):
            return term
        seat = yield from self._seats.take(owner, until)
        if seat is None:
            if not self._is_over(until):
                many = f"{self.standby_max} candidates stand" if self.standby_max != 1 else "1 candidate stands"
                self._refusal = f"{many} by already, where standby_max is {self.standby_max}"
            return None
        try:
            try:
                term = None
                if not self._is_over(until):
                    term = yield from self._stand_by(owner, until, seat)
                if term is None:  # whoever is told that it stands by no more finds the seat free
                    yield from seat.left(self._time_left(until))
                return term
            finally:
                seat.leave()
        except BaseException:  # Ctrl-C on the way out: nobody has it in hand
            if term is not None:
                term._end()
            raise

    def _stand_by(self, owner: object, until: float | None, seat: Seat | None) -> Steps[L | None]:
        """Wait in line, and look up now and then: for a term that is offered to this candidate, and after its seat."""
        clock = self._desk.session().clock
        began = clock.now()
        waiting = super().obtain(owner, None if until is None else max(0.0, until - began))
        if seat is None and self._value is None:
            return (yield from waiting)
        looked: set[int] = set()  # the token of whom it looked at last
        term: L | None = None
        try:
            try:
                session, ask, timeout = next(waiting)
                while True:
                    end = None if timeout is None else clock.now() + timeout
                    settled = False
                    while not settled and (end is None or clock.now() < end):
                        settled = yield session, ask, LOOK_UP_S if end is None else min(LOOK_UP_S, end - clock.now())
                        if settled:
                            break
                        if seat is not None and not self._is_over(until) and not (yield from seat.kept()):
                            with session.mutex:
                                self.refused = (session.waiting.seen(self._key), clock.now() - began)
                            newer = people_call(seat.taken_by() or "?")
                            self._refusal = f"this standby was replaced by a newer one, {newer}"
                            return None
                        term = yield from self._called(owner, session, looked, until)
                        if term is not None:
                            return term
                    session, ask, timeout = waiting.send(settled or ask.settled)
            except StopIteration as stop:
                term = stop.value
                return term
            finally:
                waiting.close()  # which leaves the line, wherever this ends
        except BaseException:  # as above
            if term is not None:
                term._end()
            raise

    def _called(self, owner: object, session: Session, looked: set[int], until: float | None) -> Steps[L | None]:
        """A term that is offered to this candidate. It looks once at each lease that it hears of while it waits."""
        with session.mutex:
            seen = session.waiting.seen(self._key)
        if self._value is None or seen is None or seen.holder is None or seen.fencing_token in looked:
            return None
        if self._is_over(until):
            return None
        try:
            record = yield from self._look(until)
        except StoreUnavailable:  # it will look again
            return None
        looked.clear()
        if record is None:
            return None
        looked.add(record.fencing_token)
        return (yield from self._take_up(owner, session, record, until))

    def _take_up(self, owner: object, session: Session, record: LeaseRecord, until: float | None) -> Steps[L | None]:
        """The term, if this is an offer to this candidate and nobody was faster."""
        claim = offered(record.info, self._value) if self._value is not None else None
        if claim is None or self._is_over(until):
            return None
        limit_s = self._time_left(until)
        try:
            steps = taking_over(
                session, self._key, claim, 1, self.terms, owner, self._make_lease, limit_s, pausable=True
            )
            return (yield from steps)
        except LeaseLost:  # this process slept from then until its end: it campaigns on
            return None

    def resign(self, owner: object, to: Any, timeout: Seconds) -> Steps[bool]:
        """Give up what this owner leads through this object, for the candidate with this value if there is one."""
        return self.resigning(self.aim(owner), to, timeout)

    def aim(self, owner: object) -> Aim[L]:
        """Nothing, if it is not led through this object: what is wrong with the call is told first."""
        grip = self._find(owner)
        return [] if grip is None else [(grip, 0)]

    def resigning(self, aim: Aim[L], to: Any, timeout: Seconds) -> Steps[bool]:
        try:
            check_seconds("timeout", timeout)
            offer = None if to is None else check_offer(self._desk.session(), to, timeout)
            if not aim:
                raise NotHeld(f"{self.name!r} is not led through this object")
            if offer is None:
                return (yield from self.releasing(aim))
            lease = self._let_go(aim[0][0])
            assert lease is not None  # a term is acquired once
            return (yield from offering(lease, to, *offer))
        except DibsError:
            raise
        except BaseException:
            self.make_sure(aim)
            raise

    def refuse_own(self, owner: object) -> None:
        try:
            super().refuse_own(owner)
        except WouldDeadlock:
            raise WouldDeadlock(
                f"{self.name!r} is led by this very caller, who would wait for itself for ever: resign first, or pass "
                "a timeout"
            ) from None

    def _look(self, until: float | None) -> Steps[LeaseRecord | None]:
        """Who leads, if the store answers within one request's time after ``until``."""
        return (yield from within(self._time_left(until), self._desk.holder(self.name)))

    # A campaign with a time limit begins nothing new after it, and what it has begun may take one request's time more.

    def _is_over(self, until: float | None) -> bool:
        return until is not None and self._desk.session().clock.now() >= until

    def _time_left(self, until: float | None) -> float | None:
        return self._desk.session().time_left(until)

    def _in_reserve(self, owner: object, until: float | None) -> Steps[L | None]:
        """Ask when nobody has led for long enough that nobody of a higher priority can be there."""
        session = self._desk.session()
        clock = session.clock
        began = clock.now()
        turn_at: float | None = None
        while True:
            record = yield from self._look(until)
            now = clock.now()
            if record is not None:
                term = yield from self._take_up(owner, session, record, until)
                if term is not None:
                    return term
                turn_at = None
                seen = Held(
                    record.holder, record.fencing_token, record.acquired_at.timestamp(), max(0.0, record.expires_in)
                )
            else:
                turn_at = now - self.priority * RESERVE_STEP_S if turn_at is None else turn_at
                if now >= turn_at and not self._is_over(until):
                    lease = yield from super().obtain(owner, 0.0)
                    if lease is not None:
                        return lease
                paused = self.refused[0] is not None and self.refused[0].paused
                seen = Held(None, 0, 0.0, 0.0, paused=paused or None)
            now = clock.now()
            if until is not None and now >= until:
                self.refused = (seen, now - began)
                return None
            pause_s = LOOK_MIN_S + (LOOK_MAX_S - LOOK_MIN_S) * clock.jitter()
            look_at = now + pause_s if turn_at is None or now >= turn_at else min(now + pause_s, turn_at)
            yield session, session.pause(), (look_at if until is None else min(look_at, until)) - now
            if session.closed:
                raise StoreUnavailable("this dibs client was closed while waiting", maybe_applied=False)

    def timed_out(self) -> LockTimeout:
        if self._refusal is None:
            return super().timed_out()
        held, waited = self.refused
        if held is not None and held.paused is not None:
            text = f"{self.name!r} {held.paused} (and {self._refusal})"
            return LockTimeout(text, name=self.name, waited=waited, paused=held.paused)
        if held is None or held.holder is None:
            return LockTimeout(f"{self.name!r}: {self._refusal}", name=self.name, waited=waited)
        return LockTimeout(
            f"{self.name!r} is led by {people_call(held.holder)} (term {held.fencing_token}), and {self._refusal}",
            name=self.name,
            holder=held.holder,
            since=held.acquired_at,
            free_in=held.free_in,
            waited=waited,
        )

    def leader(self) -> Steps[Leader | None]:
        record = yield from self._desk.holder(self.name)
        if record is None or OFFER in (record.info or {}):  # nobody leads while a term is offered
            return None
        return Leader(record.fencing_token, (record.info or {}).get(VALUE), record.holder, record.acquired_at)


def election_core(
    desk: Desk,
    name: str,
    make_term: Callable[[Session, Hold, str], L],
    value: Any,
    ttl: Seconds | None,
    priority: Any,
    standby_max: Any,
    standby_full: str,
    info: dict[str, Any] | None,
) -> ElectionCore[L]:
    """Check what a caller gave; raises InvalidName, InvalidOption and Unsupported before any I/O."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not PRIORITY_MIN <= priority <= 0:
        raise InvalidOption(
            f"priority is 0 for a candidate in line, or {PRIORITY_MIN} to -1 for a reserve, not {priority!r}"
        )
    check_seats(standby_max, standby_full)
    if standby_max is not None and priority:
        raise InvalidOption("standby_max is for candidates in line: one with a priority below 0 stands in none")
    if isinstance(info, dict) and (VALUE in info or OFFER in info):
        raise InvalidOption(f"{VALUE!r} and {OFFER!r} in the info of an election are its own: give a value as value=")
    if info is None and desk.info is not None:
        info = {key: each for key, each in json.loads(desk.info).items() if key not in (VALUE, OFFER)}
    if value is not None and (info is None or isinstance(info, dict)):
        info = {**(info or {}), VALUE: value}
    terms = desk.terms(ttl, True, None, False, 0, None, None, "raise", info)
    if value is not None:
        value = json.loads(terms.info or "{}").get(VALUE)  # as others see it, and nobody changes it
    return ElectionCore(desk, name, terms, make_term, value, priority, standby_max, standby_full == "replace")
