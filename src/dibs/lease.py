"""The lease: one grant, and everything that is true of holding it.

``LeaseFacts`` is what both faces share and needs no waiting; ``Lease`` adds the two verbs that talk to the store, for
threads (``dibs.aio.AsyncLease`` has them for tasks). Whether a lease is held is decided by this process's clock alone.
"""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING, Any, TypeVar
from dibs.errors import DibsError, InvalidOption, LeaseLost
from dibs.hold import HELD, LOST, RELEASED
from dibs.lost import Lost
from dibs.names import TTL_MAX_S, check_seconds
from dibs.renewing import renew, renewed
from dibs.steps import run, sending
from dibs.store import Gone, Released

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from dibs.ask import Ask
    from dibs.copies import LostLease
    from dibs.hold import Finish, Hold
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps

L = TypeVar("L", bound="Lease")


class LeaseFacts:
    """One grant of one name. It is the process's that got it: a forked child, a copy and a pickle hold nothing."""

    __slots__ = ("__weakref__", "_hold", "_name", "_session")

    def __init__(self, session: Session, hold: Hold, name: str) -> None:
        self._session = session
        self._hold = hold
        self._name = name
        hold.given = True

    @property
    def name(self) -> str:
        """What is held."""
        return self._name

    @property
    def slot(self) -> int:
        """Which of the name's permits this is: 1 for a lock."""
        return self._hold.granted.slot

    @property
    def claim_id(self) -> str:
        """The text that proves this lease to the store, random but for a count. Treat it as a secret."""
        return self._hold.claim_id

    @property
    def fencing_token(self) -> int:
        """Greater than that of every earlier grant of this name; send it to the resource you protect."""
        return self._hold.granted.fencing_token

    @property
    def holder(self) -> str:
        """Who holds it, as others see it: host/pid/client."""
        return self._session.holder

    @property
    def acquired_at(self) -> datetime:
        """When it was granted, by the store's clock; for people."""
        return _instant(self._hold.granted.acquired_at)

    @property
    def expires_at(self) -> datetime:
        """When the store lets others in unless it is renewed, by the store's clock; for people."""
        hold = self._hold
        return _instant(hold.granted.acquired_at + hold.ttl if hold.renewed_until is None else hold.renewed_until)

    @property
    def ttl(self) -> float:
        """Seconds that a grant or renewal lasts."""
        return self._hold.ttl

    @property
    def trusted_until(self) -> float:
        """The time on this machine's boot clock at which the lease stops being ``held`` unless it is renewed."""
        return self._hold.trusted_until

    @property
    def info(self) -> dict[str, Any] | None:
        """The JSON object given when it was acquired."""
        import json

        info = self._hold.terms.info
        return None if info is None else json.loads(info)

    @property
    def held(self) -> bool:
        """Whether this process may still rely on the lease. Decided by the clock: no network, no thread."""
        return self._session.keeper.is_held(self._hold)

    @property
    def _holds(self) -> tuple[Hold]:
        return (self._hold,)

    @property
    def _over(self) -> bool:
        return self._hold.state != HELD

    @property
    def _given_back(self) -> bool:
        return self._hold.state == RELEASED

    def _is_lost(self) -> bool:
        return not self.held and self._hold.state != RELEASED

    def _when_over(self, listener: Callable[[], None]) -> Callable[[], None]:
        return self._session.keeper.when_over(self._hold, listener)

    def _end(self, finish: Finish | None = None) -> None:
        """Give it back, if that has not begun, without waiting for the answer."""
        session = self._session
        if session.pid == os.getpid():
            session.keeper.release(self._hold, finish)
            session.lane.start()

    def remaining(self) -> float:
        """Seconds for which the lease can be relied on without another renewal; 0 when it is over."""
        if not self.held:
            return 0.0
        return max(0.0, self._hold.trusted_until - self._session.clock.now())

    def check(self) -> None:
        """Raise LeaseLost unless the lease is held. Call it before each step that must not be done by two."""
        if not self.held:
            raise LeaseLost(self._why())

    def _check_at_end(self) -> None:
        """The same for who is at the end of the work: when it raises, others need not wait for the ttl any more."""
        if not self.held:
            self._end()
            self.check()

    def _why(self) -> str:
        token = self._hold.granted.fencing_token
        if self._session.pid != os.getpid():
            return (
                f"the lease on {self._name!r} (token {token}) belongs to process {self._session.pid}, not to its fork"
            )
        if self._hold.state == LOST:
            return (
                f"the lease on {self._name!r} (token {token}) was lost: {self._hold.reason}. "
                "Others may have entered since; stop, and let the resource compare fencing tokens."
            )
        ended = "released"
        if self._hold.exported:
            ended = self._hold.reason or "exported: it is for whoever adopts it"
        return f"the lease on {self._name!r} (token {token}) was {ended}"

    def _renewing(self, ttl: Seconds | None) -> Steps[None]:
        session, hold = self._session, self._hold
        wanted = None
        if ttl is not None:
            limits = session.address.capabilities
            wanted = check_seconds("ttl", ttl, least=limits.ttl_min_s, most=min(limits.ttl_max_s, TTL_MAX_S))
        if session.address.observed and wanted is not None and wanted > hold.terms.ttl:
            raise InvalidOption(
                f"with takeover='observe' a lease is renewed for no longer than the ttl it was acquired with, "
                f"{hold.terms.ttl:g} s: so long those who want it watch it"
            )
        self.check()
        ask = yield from sending(
            session,
            lambda: renew(session, hold, wanted),
            session.request_timeout_s + session.patience_s,
            "the store did not answer the renewal; the lease ends unless a later one succeeds",
        )
        if not renewed(session, hold, ask):
            raise LeaseLost(self._why())

    def _releasing(self, finish: Finish | None = None) -> Steps[bool]:
        session, hold = self._session, self._hold
        try:
            if session.pid != os.getpid():
                return False
            ask = session.keeper.release(hold, finish)
            if ask is None:
                if hold.state == LOST:
                    raise LeaseLost(self._why())
                # It was released before, perhaps by another thread a moment ago: what the store says to that is told
                # here, too. (But without what was to be kept of it.)
                if hold.ending is None or finish is not None:
                    return False
                ask = hold.ending.echo()
            if hold.pins and hold.waits_for_us():
                # The caller's own transaction keeps the file locked: waiting here would wait for the caller.
                session.lane.start()
                return False
            # No time-out here: the lane answers every ask by the end of its patience, and a timer a release costs.
            yield session, ask, None
        except DibsError:
            raise
        except BaseException:  # whoever was interrupted, it is released, and what was queued is sent
            if session.pid == os.getpid():
                if hold.state == HELD:
                    session.keeper.release(hold, finish)
                session.lane.start()
            raise
        return type(ask.outcome) is Released or self._confirmed(ask)

    def _confirmed(self, ask: Ask) -> bool:
        """Whether the store confirmed the release. Raises LeaseLost if the lease was gone already."""
        gone = isinstance(ask.outcome, Gone)
        if gone and self._hold.ends_within:
            return True
        if gone and not ask.maybe_applied:
            self._session.keeper.found_gone(self._hold)
            raise LeaseLost(self._why())
        # After trouble, Gone may be the trace of a first attempt whose answer was lost.
        return ask.error is None and not gone

    def __repr__(self) -> str:
        state = f"held for {self.remaining():.1f} s more" if self.held else "not held"
        return f"<{type(self).__name__} {self._name!r} token {self._hold.granted.fencing_token}, {state}>"

    def __copy__(self) -> LostLease:
        from dibs.copies import LostLease

        return LostLease(self._name, self._hold.granted.fencing_token)

    def __deepcopy__(self, memo: object) -> LostLease:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        from dibs.copies import LostLease

        return LostLease, (self._name, self._hold.granted.fencing_token)


def releasing_all(leases: Sequence[LeaseFacts]) -> Steps[bool]:
    """Release several leases of one session in one call; whether the store confirmed all. LeaseLost if one was lost.

    Those of the process that this one was forked from are left alone.
    """
    asks: list[tuple[LeaseFacts, Ask]] = []
    lost: LeaseLost | None = None
    given, pid = len(leases), os.getpid()
    leases = [lease for lease in leases if lease._session.pid == pid]
    if not leases:
        return not given
    session = leases[0]._session
    try:
        for lease, ask in zip(leases, session.keeper.release_all([lease._hold for lease in leases]), strict=True):
            if ask is not None:
                asks.append((lease, ask))
            elif lease._hold.state == LOST:
                lost = lost or LeaseLost(lease._why())
            elif lease._hold.ending is not None:  # released before: see ``_releasing``
                asks.append((lease, lease._hold.ending.echo()))
        # As in ``_releasing``: the caller's own transaction keeps the file locked.
        unknown = any(lease._hold.pins and lease._hold.waits_for_us() for lease in leases)
        if unknown:
            session.lane.start()
        # First for what is queued, which is sent by that; what a renewal is under way of is queued when that is over.
        for _, ask in sorted(asks, key=lambda asked: not asked[1].in_lane):
            if not (ask.settled or unknown):
                yield session, ask, None
    except BaseException:  # Ctrl-C before all were queued: none may be left to be renewed by nobody
        for lease in leases:
            lease._end()
        session.lane.start()
        raise
    confirmed = len(leases) == given and not unknown
    for lease, ask in asks:
        try:
            confirmed = lease._confirmed(ask) and confirmed
        except LeaseLost as error:
            lost = lost or error
    if lost is not None:
        raise lost
    return confirmed


class Lease(LeaseFacts):
    """A lease held by this process, for threads."""

    __slots__ = ()

    @property
    def lost(self) -> Lost:
        """Set when the lease is lost; can be waited for."""
        return Lost(self)

    def renew(self, ttl: Seconds | None = None) -> None:
        """Renew now, and from now on, for ``ttl`` seconds (default: as before).

        It lasts at least that long from now; a renewal never shortens what an earlier one gave. Raises LeaseLost, or
        StoreUnavailable when the answer is unknown.
        """
        run(self._renewing(ttl))

    def release(self) -> bool:
        """Give it back. May be called twice.

        Returns False when the store did not confirm: the lease is over for this process all the same, and ends in the
        store by its ttl. False, too, when it was exported, and then nothing is done: it is its adopter's. Raises
        LeaseLost when it had been lost: others need not wait for the rest of its ttl then.
        """
        try:
            return run(self._releasing())
        except DibsError:
            raise
        except BaseException:  # Ctrl-C before the first step
            self._end()
            raise

    def export(self) -> dict[str, Any]:
        """Give it away to another process, and return what that needs for ``client.adopt``: a dict, fit for JSON.

        It is over for this process at once, and renewed no more; in the store it stays in force until it would have
        expired, so nobody else gets in while it is handed over. Whoever adopts it gets a new claim id and a greater
        fencing token. If nobody does, it ends by its ttl. The state proves ownership: treat it as a secret.

        Raises LeaseLost when the lease is over.
        """
        from dibs.handover import exporting

        return run(exporting(self))

    def guard(self, connection: Any) -> None:
        """Pin this lease inside the transaction that is open on ``connection``, the caller's own.

        When it returns, the lease is in force, and nobody else gets the name before that transaction has ended: what
        it writes is committed by the holder, or not at all. The lease is renewed by it, and goes on being renewed.
        Releasing it before the commit keeps others out until the transaction has ended all the same. (On PostgreSQL a
        rollback to a savepoint ends what was pinned after it: pin before.)

        connection: of psycopg, psycopg2, PyMySQL, mysqlclient, mysql.connector or sqlite3, a Connection or Session of
        SQLAlchemy, or a connection of Django, to the database in which the leases are kept. Nothing is committed,
        rolled back or set on it.

        Raises LeaseLost when the lease is over: the transaction must be rolled back then (PostgreSQL refuses its
        commit, and Django rolls it back). Raises InvalidOption for a connection without a transaction or to another
        database, Unsupported where leases are not kept in a database with transactions, StoreUnavailable when it could
        not be told whether the lease is in force.
        """
        from dibs import guarding
        from dibs.door import door_to

        door = door_to(connection)
        guarding.converse(guarding.guard(self, door), door)

    def release_after_commit(self, connection: Any) -> None:
        """Give it back, and keep others out until the transaction on ``connection`` has ended, either way.

        Pins the lease as ``guard`` does, with the same errors, and hands it over to the transaction: the lease is over
        for this program (``held`` is false, nothing is renewed), and the database lets nobody else in as long as the
        transaction is open. Those who wait enter within a second after its end. On SQLite, after a rollback that comes
        later than the client's ``patience``, they wait for the ttl.
        """
        from dibs import guarding
        from dibs.door import door_to

        door = door_to(connection)
        guarding.converse(guarding.release_after_commit(self, door), door)

    def __enter__(self: L) -> L:
        try:
            self.check()  # a block that is entered after the end would hold nothing
        except DibsError:
            raise
        except BaseException:  # Ctrl-C in front of the block
            self._end()
            raise
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            self._session.end(self._releasing(), exc_type)
        except LeaseLost:
            if exc_type is None:
                raise
        except DibsError:
            raise
        except BaseException:  # as in ``release``
            self._end()
            raise


def _instant(seconds: float) -> datetime:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(seconds, timezone.utc)
