"""Permits on SQLite: read, decided and written in one transaction.

SQLite lets one writer in at a time, so whoever holds permits is counted, and nobody comes in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.store import LINE_GRACE_S, Granted, Held, Mismatch
from dibs.stores.permits import Holding, State, Waiting, decide

if TYPE_CHECKING:
    import sqlite3

    from dibs.store import Acquire
    from dibs.stores.sqlite_file import SQLiteFile


def acquire(file: SQLiteFile, db: sqlite3.Connection, request: Acquire, now: float) -> Granted | Held | Mismatch:
    """Decide an acquire of permits, in the open transaction; ``Held.ticket`` is left for who keeps the line."""
    name, claim_id = request.name, request.claim_id
    granted = _take(file, db, request, now)
    if granted is not None:
        return granted
    pool = db.execute(file.sql["read_pool"], (name,)).fetchone()
    if pool is None:
        if db.execute(file.sql["read"], (name,)).fetchone() is not None:
            return Mismatch(0)
        file.floor = file.meta(db, "token_floor")
    permits, token = pool or (None, 0)
    holdings = db.execute(file.sql["holdings"], (now, name, file.boot, now)).fetchall()
    line = db.execute(file.sql["read_line"], (now, name)).fetchall()
    state = State(permits, max(token, file.floor), [Holding(*row) for row in holdings], [Waiting(*row) for row in line])
    decision = decide(state, request)
    if isinstance(decision, Mismatch):
        return decision
    if isinstance(decision, Held):
        if request.permits != permits:
            db.execute(file.sql["write_pool"], (name, request.permits, state.fencing_token))
        return decision
    granted_wall, until = None, now + request.ttl
    if decision.again is not None:
        granted_wall, until = decision.again.acquired_at, max(until, now + decision.again.ends_in)
    db.execute(file.sql["write_pool"], (name, decision.permits, max(decision.fencing_token, state.fencing_token)))
    ((granted_wall,),) = db.execute(
        file.sql["grant_permits"],
        (
            *(name, decision.slot, claim_id, request.holder, decision.fencing_token, file.boot),
            *(granted_wall, now, until, request.info, decision.take),
        ),
    )
    db.execute(file.sql["leave_claim"], (name, claim_id, now - LINE_GRACE_S))
    return Granted(decision.fencing_token, granted_wall, decision.slot)


def _take(file: SQLiteFile, db: sqlite3.Connection, request: Acquire, now: float) -> Granted | None:
    """Grant where it is plain that there are enough and nobody waits, without a look at each who holds."""
    name, claim_id = request.name, request.claim_id
    whose = (name, file.boot, now)
    pool = db.execute(file.sql["tally"], (name, file.boot, now, request.permits, claim_id)).fetchone()
    if pool is None:
        return None
    last_token, waited_for, mine, taken, count, highest = pool
    if waited_for or mine or taken + request.take > request.permits:
        return None
    slot = count + 1
    if count != (highest or 0):
        (slot,) = db.execute(file.sql["first_gap"], whose * 2).fetchone()
    token = max(last_token, file.floor) + 1
    db.execute(file.sql["raise_pool"], (token, name))
    ((granted_wall,),) = db.execute(
        file.sql["grant_permits"],
        (
            *(name, slot, claim_id, request.holder, token, file.boot),
            *(None, now, now + request.ttl, request.info, request.take),
        ),
    )
    return Granted(token, granted_wall, slot)
