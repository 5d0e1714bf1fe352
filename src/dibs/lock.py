"""A lock: the description of a name to be held by one at a time. The steps here are taken by both faces."""

from __future__ import annotations

import math
import threading
from contextlib import _AsyncGeneratorContextManager, _GeneratorContextManager
from types import AsyncGeneratorType, CoroutineType, GeneratorType

from dibs._typing import TYPE_CHECKING, Any, TypeVar
from dibs.dropped import told, watch
from dibs.errors import LockTimeout, WouldDeadlock, once_more
from dibs.grips import Gripped
from dibs.hold import HELD, Hold
from dibs.lease import LeaseFacts
from dibs.names import body_of, check_flag, check_name, check_seconds, lasting, people_call
from dibs.steps import look_pauses
from dibs.store import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.desk import Desk
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms
    from dibs.wishes import AcquireAsk

L = TypeVar("L", bound=LeaseFacts)


class LockCore(Gripped[L]):
    """What a lock does, in steps for either face."""

    __slots__ = ("_desk", "_key", "_make_lease", "refused")

    #: What is waited for may be over before it is free: see ``is_over``.
    LOOKS = False

    def __init__(self, desk: Desk, name: str, terms: Terms, make_lease: Callable[[Session, Hold, str], L]) -> None:
        super().__init__(check_name(name), terms)
        self._desk = desk
        self._key = desk.key_prefix + self.name
        self._make_lease = make_lease
        #: The last answer that was "not now", and how long the caller waited.
        self.refused: tuple[Held | None, float] = (None, 0.0)

    def acquire(self, owner: object, blocking: bool = True, timeout: Seconds | None = -1) -> Steps[L | None]:
        terms = self.terms
        limit_s = terms.timeout if timeout == -1 and blocking is True else wait_limit(terms, blocking, timeout)
        if self._grips and not terms.permits:
            self._let_go_of_lost(owner)
        return self._again(owner, limit_s) if terms.reentrant else self.obtain(owner, limit_s, gripped=True)

    def _again(self, owner: object, limit_s: float | None) -> Steps[L | None]:
        """What this owner holds through this object already, or else has acquired."""
        grip = self._held_by(owner)
        if grip is None:
            return (yield from self.obtain(owner, limit_s, gripped=True))
        grip.count += 1
        return grip.lease

    def obtain(self, owner: object, limit_s: float | None, *, gripped: bool = False) -> Steps[L | None]:
        """A lease; None when ``limit_s`` seconds did not suffice for it, or what it waits for is over (LOOKS).

        No ``release`` of this lock knows of it, unless it is to be ``gripped``.
        """
        session = self._desk.session()
        holding = limit_s != 0 and owner in session.holdings.owned
        if holding:
            if limit_s is None:
                self.refuse_own(owner)
            session.rings.taking(owner, self._key)
        ask = self._wish(session, owner, limit_s != 0)
        try:
            session.submit(ask)
            if self.LOOKS and limit_s != 0:
                waited = yield from self._look_on(session, ask, limit_s, holding)
                if waited is None:
                    self.refused = (ask.seen, session.clock.now() - ask.started_at)
                    session.withdraw(ask)
                    return None
                settled = waited
            elif holding and session.address.capabilities.deadlocks:
                settled = yield from session.rings.wait_holding(ask, limit_s)
            else:
                settled = yield session, ask, session.request_timeout_s if limit_s == 0 else limit_s
            if not settled and limit_s:
                settled = yield from heard_in_time(session, ask, limit_s)
            hold = ask.outcome
            if type(hold) is not Hold:
                hold = self._answered(session, ask, settled)
                if hold is None:
                    return None
            lease = self._make_lease(session, hold, self.name)
            if session.made(lease, hold):
                if gripped:
                    self._grip(owner, lease)
                return lease
            # This process slept from the grant until its end. Whoever may wait longer asks again.
            session.withdraw(ask)
            left_s = None if limit_s is None else limit_s - (session.clock.now() - ask.started_at)
            if left_s is not None and left_s <= 0:
                return None
            return (yield from LockCore.obtain(self, owner, left_s, gripped=gripped))
        except BaseException:
            session.withdraw(ask)
            raise

    def _wish(self, session: Session, owner: object, blocking: bool) -> AcquireAsk:
        """What the store is to be asked."""
        return session.wish(self._key, self.terms, owner, blocking)

    def is_over(self, within_s: float | None) -> Steps[bool]:
        """Whether there is nothing to wait for any more, if the store answers within so many seconds."""
        yield from ()
        return False

    def _look_on(self, session: Session, ask: AcquireAsk, limit_s: float | None, holding: bool) -> Steps[bool | None]:
        """Wait, without losing the place in line; whether the ask is settled in time, None when ``is_over``."""
        noted = not (holding and session.address.capabilities.deadlocks)
        until = None if limit_s is None else ask.started_at + limit_s
        pauses, took_s = look_pauses(session.waiting.behind(ask.line)), 0.0
        while True:
            if noted:
                # (A store that is far away, or looked at by many, is not asked all the time.)
                pause_s = max(took_s, next(pauses))
                left_s = pause_s if until is None else max(0.0, until - session.clock.now())
                settled = yield session, ask, min(pause_s, left_s)
            else:
                noted = True
                settled = yield from session.rings.wait_holding(ask, limit_s, looks=True)
            now = session.clock.now()
            if settled or (until is not None and now >= until):
                return settled
            if (yield from self.is_over(session.time_left(until))):
                return None
            took_s = session.clock.now() - now

    def _answered(self, session: Session, ask: AcquireAsk, settled: bool) -> Hold | None:
        """What became of an ask that is waited for no longer; None when the answer is "not now"."""
        hold = answered(session, ask, settled)
        if hold is not None:
            return hold
        self.refused = (ask.seen, session.clock.now() - ask.started_at)
        session.withdraw(ask)
        return None

    def refuse_own(self, owner: object) -> None:
        """Raise WouldDeadlock if this caller would wait for what it holds itself."""
        session = self._desk.session()
        mine = session.holdings.held.get(self._key)
        if mine is not None and mine.owner == owner and not mine.orphan and session.keeper.is_held(mine):
            raise WouldDeadlock(
                f"{self.name!r} is held by this very caller (token {mine.granted.fencing_token}), who would wait "
                f"for itself for ever: {self.instead('lock')}"
            )

    def instead(self, kind: str) -> str:
        """What a caller may do who would wait for itself."""
        if self.terms.reentrant:
            return (
                "release it first, pass a timeout, or use the very object that it was taken with, for being "
                f"reentrant belongs to the {kind} object, not to the name"
            )
        return f"release it first, pass a timeout, or build the {kind} with reentrant=True and use that one object"

    def timed_out(self) -> LockTimeout:
        held, waited = self.refused
        name = self.name
        wait = f"after {waited:.1f} s of waiting" if waited >= 0.05 else "without waiting"
        if held is not None and held.paused is not None:
            return LockTimeout(f"{name!r} {held.paused} (gave up {wait})", name=name, waited=waited, paused=held.paused)
        if held is None or held.holder is None:
            who = "is kept for others who wait in line" if held is not None else "could not be had in time"
            return LockTimeout(f"{name!r} {who} ({wait})", name=name, waited=waited)
        from datetime import datetime

        since = datetime.fromtimestamp(held.acquired_at).astimezone()
        free = f"unless renewed, it is free in {lasting(held.free_in)}"
        if held.free_in <= 0 and self._desk.address.capabilities.guard:
            free = "its lease is over, but a transaction in which it was pinned (lease.guard) is open still"
        return LockTimeout(
            f"{name!r} is held by {people_call(held.holder)} since {since:%Y-%m-%d %H:%M:%S %Z} "
            f"(token {held.fencing_token}); {free}. Gave up {wait}.",
            name=name,
            holder=held.holder,
            since=held.acquired_at,
            free_in=held.free_in,
            waited=waited,
        )

    def locked(self) -> bool:
        session = self._desk.session()
        hold = session.holdings.held.get(self._key)
        return hold is not None and session.keeper.is_held(hold)


def heard_in_time(session: Session, ask: AcquireAsk, limit_s: float) -> Steps[bool]:
    """The time of an ask is over; whether it is settled once it has been answered, or the store had time to answer."""
    with session.mutex:  # an answer that is just being received is received before
        session.waiting.hurry(ask)
        if ask.heard:
            return ask.settled
    # An answer may take one request's time longer than the wait.
    ask.overdue = True
    answer_s = limit_s + session.request_timeout_s - (session.clock.now() - ask.started_at)
    yield session, ask, max(0.0, answer_s)
    with session.mutex:
        return ask.settled


def answered(session: Session, ask: AcquireAsk, settled: bool) -> Hold | None:
    """What became of an ask that is waited for no longer; None when the answer is "not now"."""
    if not settled and not ask.heard:
        silent_s = session.clock.now() - max(ask.started_at, ask.heard_at)
        raise ask.unanswered(f"the store did not answer for {silent_s:.1f} s")
    if ask.error is not None:
        raise once_more(ask.error)
    hold = ask.outcome if ask.settled else None
    return hold if isinstance(hold, Hold) else None


def obtain_all(cores: Sequence[LockCore[L]], owner: object, within_s: float) -> Steps[list[L | None]]:
    """Ask once for several names of one client, in one call; the leases, and None for those that are not to be had.

    The store has to answer within so many seconds. When it raises, everything that was asked for is given back.
    """
    if not cores:
        return []
    session = cores[0]._desk.session()
    end = session.clock.now() + within_s
    asks = [core._wish(session, owner, False) for core in cores]
    for ask in asks:
        ask.overdue = within_s < session.request_timeout_s
    try:
        session.submit_all(asks)
        leases: list[L | None] = []
        for core, ask in zip(cores, asks, strict=True):
            settled = ask.settled or (yield session, ask, max(0.0, end - session.clock.now()))
            hold = core._answered(session, ask, settled)
            if hold is not None and hold.state == HELD and session.clock.now() < hold.trusted_until:
                lease = core._make_lease(session, hold, core.name)
                leases.append(lease)
                watch(lease, hold, session, told)
            else:
                leases.append(None)
        return leases
    except BaseException:
        session.withdraw(*asks)
        raise


def wait_limit(terms: Terms, blocking: bool, timeout: Seconds | None) -> float | None:
    """How long to wait, from the arguments of ``threading.Lock.acquire``; -1 means what the lock was built with."""
    if blocking not in (True, False):  # or 1 and 0, which are as good for the locks of threading
        check_flag("blocking", blocking)
    if not blocking:
        if timeout != -1 and timeout is not None:
            raise ValueError("can't specify a timeout for a non-blocking call")
        return 0.0
    if timeout is None:
        return None
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        if timeout == -1:
            return terms.timeout
        if not math.isnan(timeout) and timeout > threading.TIMEOUT_MAX:
            raise OverflowError("timeout value is too large")
    return check_seconds("timeout", timeout, most=threading.TIMEOUT_MAX)


def check_decorated(function: object, *, awaited: bool) -> None:
    """Refuse functions whose body would run outside the lock."""
    if not callable(function):
        above = isinstance(function, (classmethod, property))
        hint = f": write @{type(function).__name__} above it" if above else ""
        raise TypeError(f"this takes a function, not {function!r}{hint}")
    body = body_of(function)
    if body == "generator":
        raise TypeError(
            f"{function!r} is a generator: its body would run after the call, when nothing is held any more"
        )
    if body == "async" and not awaited:
        raise TypeError(f"{function!r} is async: use a client of dibs.connect_async()")
    if body != "async" and awaited:
        raise TypeError(f"{function!r} is not async: use a client of dibs.connect()")


def ran_inside(result: Any) -> Any:
    """What a decorated function has returned; TypeError when that is a body yet to run, as ``body_of`` cannot see."""
    if isinstance(result, (CoroutineType, _GeneratorContextManager, _AsyncGeneratorContextManager)):
        raise TypeError(
            f"the function returned {result!r}, whose body would run after the call, when nothing is held any more: "
            "take the lock inside it (an async function is for a client of dibs.connect_async())"
        )
    return result


def ran(result: Any) -> Any:
    """What a function has returned; TypeError when that is the body of another, which nobody would run any more.

    A lambda around an async function, or a forgotten ``await``, is not seen by ``body_of``.
    """
    if isinstance(result, (CoroutineType, GeneratorType, AsyncGeneratorType)):
        raise TypeError(
            f"the function returned {result!r}, whose body has not run, so nothing was done: await it, or iterate over "
            "it, inside the function (an async function is for a client of dibs.connect_async())"
        )
    return result
