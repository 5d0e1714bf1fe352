"""Looking after who waits while it holds something: that is how callers come to wait for each other.

An order of names that may deadlock is warned of (``dibs.lock_order``), and a wait that lasts is watched for a ring
(``dibs.notes``). Both are loaded by those who need them: ``dibs run`` stands in crontabs.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.hold import FOREVER
from dibs.waiting import NOTE_AFTER_S

if TYPE_CHECKING:
    from dibs.ask import Ask
    from dibs.lock_order import LockOrder
    from dibs.notes import Notes
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.wishes import AcquireAsk


class Rings:
    def __init__(self, session: Session, lock_order_warnings: bool) -> None:
        self._session = session
        self._lock_order_warnings = lock_order_warnings
        self._lock_order: LockOrder | None = None
        self._notes: Notes | None = None

    def taking(self, owner: object, *keys: str) -> None:
        """Somebody is about to wait for these names: warn when others are held that elsewhere are taken after them."""
        held = self._session.holdings.owned.get(owner)
        if held is None or not self._lock_order_warnings:
            return
        if self._lock_order is None:
            from dibs.lock_order import LockOrder

            self._lock_order = LockOrder(self._session.mutex)
        self._lock_order.taking(keys, held)

    def wait_holding(self, ask: AcquireAsk, limit_s: float | None, *, looks: bool = False) -> Steps[bool]:
        """Wait for an ask of somebody who holds something; a wait that may close a ring is looked after.

        Who ``looks`` on by itself is back as soon as it is looked after.
        """
        session = self._session
        settled = yield session, ask, NOTE_AFTER_S if limit_s is None else min(NOTE_AFTER_S, limit_s)
        if settled:
            return True
        from dibs.notes import Notes

        with session.mutex:
            if self._notes is None:
                self._notes = Notes(session, ask.request.name.partition(":")[0])
        until = FOREVER if limit_s is None else ask.started_at + limit_s
        self._notes.add(ask, until)
        if looks:
            return False
        return (yield session, ask, None if until == FOREVER else max(0.0, until - session.clock.now()))

    def withdraw(self) -> list[Ask]:
        """Take back what others know of these waits, under the mutex; what to wait for until that is done."""
        return [] if self._notes is None else self._notes.withdraw()

    def close(self) -> list[Ask]:
        """What to wait for until nobody is looked after any more."""
        return [] if self._notes is None else [self._notes.close()]
