"""Pinning a lease inside the caller's own transaction, so that a superseded holder cannot commit.

A *pin* is a lock of the database that the caller's transaction takes and that ends with it, however it ends. Stores
that can pin (``Capabilities.guard``) grant a name whose lease has expired, was broken, or was given back under its pin
to nobody as long as the pin is there. So it is enough to take the pin first, and to see afterwards, over dibs's own
connection, that the lease is still in force: from then on nobody enters before the transaction has ended. Renewals go
on meanwhile, because they and the pin are different rows or locks (not on SQLite, which has only one lock).

It takes two that talk: the store, through the session's lane, and the caller's connection, through a *door*. What is
said is written once, as a *talk*: it yields a statement for the door, or steps for the session, and each
face carries it along in its own way.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from dibs._typing import TYPE_CHECKING, Any, TypeVar, cast
from dibs.door import FILES, POSTGRESQL, SQLITE, Answer, Said
from dibs.errors import InvalidOption, LeaseLost, Unsupported
from dibs.hold import GONE_REASON
from dibs.steps import acting, run
from dibs.store import Renew

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.abilities import Pinning
    from dibs.clock import Deadline
    from dibs.door import Door
    from dibs.lease import LeaseFacts
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.store import Pin, Release, Store

# How often a row to be locked is made anew that somebody deleted meanwhile.
PIN_TRIES = 5
T = TypeVar("T")
# What is yielded is a statement or steps; what is sent is an Answer, or what the steps returned.
Talk = Generator["Said | Steps[Any]", Any, T]

# After this statement the server refuses everything but a rollback. MySQL and SQLite have no such state.
_SPOIL = {
    POSTGRESQL: Said("SELECT CAST('dibs: the lease was lost; this transaction must not be committed' AS integer)")
}


def converse(talk: Talk[T], door: Door) -> T:
    """Carry a talk along in this thread. (dibs.aio has the same for tasks.)"""
    try:
        said = next(talk)
        while True:
            try:
                heard = door.execute(*said) if isinstance(said, Said) else run(said)
            except BaseException as error:  # noqa: BLE001 - the talk raises it again when it has cleaned up
                said = talk.throw(error)
            else:
                said = talk.send(heard)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def converse_async(talk: Talk[T], door: Door) -> T:
    """The same in a task, for a talk with the caller's connection alone."""
    answer: Answer | None = None
    try:
        while True:
            said = talk.send(answer)
            assert isinstance(said, Said)
            answer = await door.execute_async(*said)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def guard(lease: LeaseFacts, door: Door) -> Talk[None]:
    """Pin the lease in the transaction that is open behind the door."""
    yield from _pinned(lease, door)


def release_after_commit(lease: LeaseFacts, door: Door, also: Release | None = None) -> Talk[None]:
    """Pin the lease, then give it back: the store lets nobody in before the transaction has ended.

    ``also`` is another lease, which ends if that transaction is committed, and else stays as it is.
    """
    pin = yield from _pinned(lease, door)
    if also is not None:
        yield Said((yield from _ending(also, lease._session, door)))
    # Whatever was to be told first is for who gives it back of their own accord.
    lease._hold.first = None
    if pin.release is not None:
        # Where the pin is the lock on everything: given back inside the transaction itself. If that is rolled back,
        # the release that waits behind it does it.
        keep = lease._hold.t0 + lease._hold.terms.min_hold - lease._session.clock.now()
        yield Said(pin.release(keep))
        lease._hold.ends_within = True
    yield lease._releasing()


def _pinned(lease: LeaseFacts, door: Door) -> Talk[Pin]:
    session, hold = lease._session, lease._hold
    offered = session.address.capabilities
    if not offered.guard:
        raise Unsupported(
            f"{offered.store} has no transactions that a lease could be pinned in. Where the resource is, compare "
            "fencing tokens: dibs.fencing.advance(connection, …)"
        )
    try:
        lease.check()
        request = Renew(hold.key, hold.claim_id, hold.ttl, hold.granted.slot)
        files: Answer | None = (yield FILES) if door.dialect == SQLITE else None
        rows = files.rows if files is not None else None
        for _ in range(PIN_TRIES):
            ask = partial(_pin, request, door.dialect, rows)
            pin: Pin = session.aside(ask) if rows is not None else (yield acting(session, ask))
            # From here on a release is one that has the pin looked at, whatever comes of this.
            hold.pins = (*(earlier for earlier in hold.pins if earlier.blocks_all()), door)
            locked: Answer = yield Said(pin.lock)
            if pin.decides or locked.rows:
                break
            # On MySQL somebody has deleted the row before it was locked. For an earlier lease's: it is made again. But
            # not for one that is over: that would wait for the transaction that has looked for it (REPEATABLE READ).
            lease.check()
        if pin.decides and locked.rows:
            # That transaction alone can write the lease now; a renewal would wait for it.
            pinned = (
                door.in_transaction() is not False if rows is not None else (yield _there(session, request, locked))
            )
        elif pin.decides and rows is not None:
            session.keeper.lose(hold, GONE_REASON)
            pinned = False
        else:
            yield lease._renewing(None)
            pinned = bool(locked.rows) and (yield _there(session, request, locked))
        lease.check()
        if not pinned:
            raise _not_pinned(door)
    except LeaseLost:
        yield from _spoiled(door)
        raise
    return pin


def _pin(request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, store: Store, by: Deadline) -> Pin:
    return cast("Pinning", store).pin(request, dialect, files, by)


def _there(session: Session, request: Renew, locked: Answer) -> Steps[bool]:
    return acting(session, lambda store, by: cast("Pinning", store).pinned(request, locked.rows, by))


def _ending(request: Release, session: Session, door: Door) -> Talk[str]:
    files: Answer | None = (yield FILES) if door.dialect == SQLITE else None
    if files is None:
        return cast("str", (yield acting(session, lambda store, by: cast("Pinning", store).ending(request))))
    renewal = Renew(request.name, request.claim_id, session.address.capabilities.ttl_max_s)
    pin: Pin = session.aside(partial(_pin, renewal, door.dialect, files.rows))
    assert pin.release is not None
    return pin.release(0.0)


def _not_pinned(door: Door) -> InvalidOption:
    return InvalidOption(
        f"{door} did not keep the lease pinned: it has no transaction open (autocommit), or it leads to another "
        "database than the one this client keeps its leases in. Begin a transaction first (BEGIN, autocommit off, "
        "engine.begin(), transaction.atomic()), or compare fencing tokens there (dibs.fencing)"
    )


def _spoiled(door: Door) -> Talk[None]:
    """Make it impossible to commit, where the database or the framework has a way."""
    door.spoil()
    statement = _SPOIL.get(door.dialect)
    if statement is not None:
        try:
            yield statement
        except Exception:  # noqa: BLE001 - that it fails is what it is for
            pass
