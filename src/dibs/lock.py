"""A lock: the description of a name to be held by one at a time, and what was acquired through it.

The steps here are taken by both faces. A lock is a description; what is true of holding lives on the lease. The lock
remembers the leases acquired through it (its *grips*) only so that it can be released like ``threading.Lock``: the
caller's own grip first, or for a plain lock that of whoever holds it.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from dibs.errors import LockTimeout, NotHeld, StoreUnavailable, WouldDeadlock, once_more
from dibs.hold import HELD, Hold
from dibs.lease import LeaseFacts
from dibs.names import check_name, check_seconds, people_call
from dibs.store import Held

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.desk import Desk
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms

L = TypeVar("L", bound=LeaseFacts)

# Code flags of functions whose body does not run inside the call (CPython's inspect.CO_*).
_GENERATOR = 0x20
_COROUTINE = 0x80
_ASYNC_GENERATOR = 0x200


class Grip(Generic[L]):
    """One lease acquired through a lock, by whom, and how often (reentrant)."""

    __slots__ = ("count", "lease", "owner")

    def __init__(self, owner: object, lease: L) -> None:
        self.owner = owner
        self.lease = lease
        self.count = 1


class LockCore(Generic[L]):
    """What a lock does, in steps for either face."""

    __slots__ = ("_desk", "_grips", "_key", "_make_lease", "name", "refused", "terms")

    def __init__(self, desk: Desk, name: str, terms: Terms, make_lease: Callable[[Session, Hold, str], L]) -> None:
        self._desk = desk
        self.name = name
        self._key = desk.key_prefix + check_name(name)
        self.terms = terms
        self._make_lease = make_lease
        self._grips: list[Grip[L]] = []
        #: The last answer that was "not now", and how long the caller waited.
        self.refused: tuple[Held | None, float] = (None, 0.0)

    # -- acquire --------------------------------------------------------------------------------------------------

    def acquire(self, owner: object, blocking: bool = True, timeout: Seconds | None = -1) -> Steps[L | None]:
        """A lease, or None when the name could not be had in time (``timed_out`` makes the error of it)."""
        terms = self.terms
        limit_s = terms.timeout if timeout == -1 and blocking else self._limit(blocking, timeout)
        if terms.reentrant:
            for grip in self._grips:
                if grip.owner == owner and grip.lease.held:
                    grip.count += 1
                    return grip.lease
        session = self._desk.session()
        if limit_s is None:
            mine = session.held.get(self._key)
            if mine is not None and mine.owner == owner and not mine.orphan and session.is_held(mine):
                raise WouldDeadlock(
                    f"{self.name!r} is held by this very caller (token {mine.granted.fencing_token}), who would wait "
                    "for itself for ever: release it first, pass a timeout, or build the lock with reentrant=True"
                )
        ask = session.wish(self._key, terms, owner, limit_s != 0)
        try:
            session.submit(ask)
            settled = yield session, ask, session.request_timeout_s if limit_s == 0 else limit_s
            if not settled and limit_s and not ask.heard:
                # A first answer may take one request's time longer than the wait.
                answer_s = limit_s + session.request_timeout_s - (session.clock.now() - ask.started_at)
                settled = yield session, ask, max(0.0, answer_s)
            if not settled and (limit_s == 0 or not ask.heard):
                waited = f"the store did not answer for {session.clock.now() - ask.started_at:.1f} s"
                raise StoreUnavailable(f"{waited}: {ask.trouble}" if ask.trouble else waited) from ask.trouble
            hold = ask.outcome if ask.settled else None
            if ask.error is not None:
                raise once_more(ask.error)
            if type(hold) is not Hold:
                self.refused = (ask.seen, session.clock.now() - ask.started_at)
                session.withdraw(ask)
                return None
            if hold.state != HELD or session.clock.now() >= hold.trusted_until:
                # This process slept from the grant until its end. Whoever may wait longer asks again.
                left_s = None if limit_s is None else limit_s - (session.clock.now() - ask.started_at)
                if left_s is not None and left_s <= 0:
                    return None
                return (yield from self.acquire(owner, True, left_s))
            lease = self._make_lease(session, hold, self.name)
        except BaseException:
            session.withdraw(ask)
            raise
        grips = self._grips
        if grips:
            # Grips on leases that have ended are of no use to anybody any more, except a loss its owner must hear of.
            grips[:] = [grip for grip in grips if grip.lease._hold.state == HELD or grip.owner != owner]
        grips.append(Grip(owner, lease))
        return lease

    def _limit(self, blocking: bool, timeout: Seconds | None) -> float | None:
        """How long to wait, from the arguments of ``threading.Lock.acquire``; -1 means what the lock was built with."""
        if not blocking:
            if timeout != -1 and timeout is not None:
                raise ValueError("can't specify a timeout for a non-blocking call")
            return 0.0
        if timeout is None:
            return None
        if type(timeout) is int and timeout == -1:
            return self.terms.timeout
        if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
            if timeout == -1:
                return self.terms.timeout
            if not math.isnan(timeout) and timeout > threading.TIMEOUT_MAX:
                raise OverflowError("timeout value is too large")
        return check_seconds("timeout", timeout, most=threading.TIMEOUT_MAX)

    def timed_out(self) -> LockTimeout:
        """The error for a caller who could not get the lock: who has it, since when, for how long still."""
        held, waited = self.refused
        name = self.name
        wait = f"after {waited:.1f} s of waiting" if waited >= 0.05 else "without waiting"
        if held is None or held.holder is None:
            who = "is kept for others who wait in line" if held is not None else "could not be had in time"
            return LockTimeout(f"{name!r} {who} ({wait})", name=name, waited=waited)
        from datetime import datetime

        since = datetime.fromtimestamp(held.acquired_at).astimezone()
        return LockTimeout(
            f"{name!r} is held by {people_call(held.holder)} since {since:%Y-%m-%d %H:%M:%S %Z} "
            f"(token {held.fencing_token}); "
            f"unless renewed, it is free in {held.free_in:.1f} s. Gave up {wait}.",
            name=name,
            holder=held.holder,
            since=held.acquired_at,
            free_in=held.free_in,
            waited=waited,
        )

    # -- release --------------------------------------------------------------------------------------------------

    def release(self, owner: object) -> Steps[bool]:
        """Release as ``threading.Lock`` and ``RLock`` do: what this owner acquired, else (plain locks) what is held."""
        grip = self._find(owner)
        if grip is None:
            if self.terms.reentrant and self._grips:
                raise NotHeld(f"{self.name!r} was acquired by another owner; only its owner can release it")
            raise NotHeld(f"release of {self.name!r}, which is not held through this lock")
        lease = self._let_go(grip)
        return True if lease is None else (yield from lease._releasing())

    def leave(self, owner: object) -> L | None:
        """The end of a ``with`` block: the lease to be released; None when an outer block goes on or none is held."""
        grips = self._grips
        grip = grips[-1] if grips else None
        if grip is None or grip.owner != owner:
            grip = self._find(owner)
            if grip is None or grip.owner != owner:
                return None
        return self._let_go(grip)

    def _find(self, owner: object) -> Grip[L] | None:
        grips = self._grips
        for grip in reversed(grips):
            if grip.owner == owner:
                return grip
        if self.terms.reentrant:
            return None
        # A plain lock may be released by anybody: the grip that is held, if there is one.
        return next((grip for grip in reversed(grips) if grip.lease._hold.state == HELD), None)

    def _let_go(self, grip: Grip[L]) -> L | None:
        """Loosen a grip; the lease to be released when that was the last of it."""
        if grip.count > 1:
            grip.count -= 1
            return None
        try:
            self._grips.remove(grip)
        except ValueError:
            raise NotHeld(f"{self.name!r} was released by another thread at the same moment") from None
        return grip.lease

    def locked(self) -> bool:
        """Whether this client holds the name, as far as this process knows. ``client.holder(name)`` asks the store."""
        session = self._desk.session()
        hold = session.held.get(self._key)
        return hold is not None and session.is_held(hold)


def check_decorated(function: object, *, awaited: bool) -> None:
    """Refuse functions whose body would run outside the lock."""
    if not callable(function):
        raise TypeError(f"a lock decorates a function, not {function!r}")
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    if flags & (_GENERATOR | _ASYNC_GENERATOR):
        raise TypeError(f"{function!r} is a generator: its body would run after the lock was released")
    if flags & _COROUTINE and not awaited:
        raise TypeError(f"{function!r} is async: use a lock of dibs.connect_async()")
    if not flags & _COROUTINE and awaited:
        raise TypeError(f"{function!r} is not async: use a lock of dibs.connect()")
