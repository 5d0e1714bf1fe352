"""Permits on SQLite, where one statement does not decide: read, decided and written in one transaction.

SQLite lets one writer in at a time, so whoever holds permits is counted, and nobody comes in between. The last token
of a name is the greatest in its rows; that of rows which were purged is kept with the number of permits.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.store import LINE_GRACE_S, Granted, Held, Mismatch
from dibs.stores.permits import Holding, State, Waiting, decide

if TYPE_CHECKING:
    import sqlite3

    from dibs.store import Acquire
    from dibs.stores.sqlite_file import SQLiteFile


def acquire(file: SQLiteFile, db: sqlite3.Connection, request: Acquire, now: float) -> Granted | Held | Mismatch:
    """Decide an acquire of permits, in the open transaction; ``Held.ticket`` is left for who keeps the line."""
    name, claim_id = request.name, request.claim_id
    pool = db.execute(file.sql["read_pool"], (name,)).fetchone()
    if pool is None:
        row = db.execute(file.sql["read"], (name,)).fetchone()
        if row is not None and row[-1] is None:  # (else it is of a pool whose table was dropped)
            return Mismatch(0)
        file.floor = file.meta(db, "token_floor")
    permits, token = pool or (None, *db.execute(file.sql["last_token"], (name,)).fetchone())
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
    if decision.permits != permits:
        db.execute(file.sql["write_pool"], (name, decision.permits, state.fencing_token))
    ((granted_wall,),) = db.execute(
        file.sql["grant_permits"],
        (
            *(name, decision.slot, claim_id, request.holder, decision.fencing_token, file.boot),
            *(granted_wall, now, until, request.info, decision.take),
        ),
    )
    db.execute(file.sql["leave_claim"], (name, claim_id, now - LINE_GRACE_S))
    return Granted(decision.fencing_token, granted_wall, decision.slot)
