"""Permits on SQLite, where one statement does not decide: read, decided and written in one transaction.

SQLite lets one writer in at a time, so whoever holds permits is counted, and nobody comes in between. The last token
of a name is the greatest in its rows; that of rows which were purged is kept with the number of permits.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.store import LINE_GRACE_S, Granted, Held, Mismatch
from dibs.stores.permits import Grant, Holding, State, Waiting, decide
from dibs.stores.sqlite_sql import numbered

if TYPE_CHECKING:
    import sqlite3

    from dibs.store import Acquire
    from dibs.stores.sqlite_file import SQLiteFile


def acquire(file: SQLiteFile, db: sqlite3.Connection, request: Acquire, now: float) -> Granted | Held | Mismatch:
    """Decide an acquire of permits, in the open transaction; ``Held.ticket`` is left for who keeps the line."""
    name, claim_id, ttl, holder, info, _, _, permits, take, _ = request
    asked = numbered((name, claim_id, take, permits, file.boot, now))
    ((plain, slot, token, granted_wall),) = db.execute(file.sql["look_at_pool"], asked).fetchall()
    until = now + ttl
    if plain:  # enough are left, and nobody waits
        token = max(token, file.floor) + 1
        if slot is None:  # the smallest that nobody has
            # (All of them: what is read in part holds the transaction open, in the traceback of a Ctrl-C, say.)
            held = db.execute(file.sql["held_slots"], (name, file.boot, now)).fetchall()
            slot = next(number for number, (taken,) in enumerate(held, 1) if number != taken)
    else:
        decision = _decide(file, db, request, now)
        if not isinstance(decision, Grant):
            return decision
        slot, token, take = decision.slot, decision.fencing_token, decision.take
        if decision.again is not None:
            granted_wall, until = decision.again.acquired_at, max(until, now + decision.again.ends_in)
        db.execute(file.sql["leave_claim"], (name, claim_id, now - LINE_GRACE_S))
    db.execute(
        file.sql["grant_permits"],
        (name, slot, claim_id, holder, token, file.boot, granted_wall, now, until, info, take),
    )
    return Granted(token, granted_wall, slot)


def _decide(file: SQLiteFile, db: sqlite3.Connection, request: Acquire, now: float) -> Grant | Held | Mismatch:
    """Who gets what, by all who hold the name and all who wait; the number of permits is written if it is another."""
    name = request.name
    pool = db.execute(file.sql["read_pool"], (name,)).fetchone()
    if pool is None:
        row = db.execute(file.sql["read"], (name, name)).fetchone()
        if row is not None and row[6] is None:  # (else it is of a pool whose table was dropped)
            return Mismatch(0)
        file.floor = file.meta(db, "token_floor")
    permits, token = pool or (None, *db.execute(file.sql["last_token"], (name,)).fetchone())
    holdings = db.execute(file.sql["holdings"], (now, name, file.boot, now)).fetchall()
    line = db.execute(file.sql["read_line"], (now, name)).fetchall()
    state = State(permits, max(token, file.floor), [Holding(*row) for row in holdings], [Waiting(*row) for row in line])
    decision = decide(state, request)
    if isinstance(decision, Held):
        wanted = request.permits
    elif isinstance(decision, Grant):
        wanted = decision.permits
    else:
        return decision
    if wanted != permits:
        db.execute(file.sql["write_pool"], (name, wanted, state.fencing_token))
    return decision
