"""SQLite: leases in one file of this machine, with nothing to set up.

A release or a renewal is one conditional UPDATE; an acquire reads, decides and writes. Either happens inside one write
transaction, and SQLite lets one writer in at a time, so what was read is still true when it is written. Several
requests are one ``BEGIN IMMEDIATE``.

*Clock.* There is no server, so the host's boot clock decides: it cannot be set. Rows carry the number of the boot they
were written in; under a new boot id every older lease is over: whoever held it is gone. A name that was kept when it
was released (``Release.keep``) stays kept, by the wall clock. A file whose last boot was another machine's is refused.

*Tokens.* The file is in WAL mode with ``synchronous=NORMAL``: a process that is killed loses nothing, a power cut may
lose the last commits. Tokens must not repeat even then, so the first process of a boot raises the floor under all
tokens by ``TOKENS_PER_BOOT`` with a synchronous commit, before anything is granted; no name is granted that often in
one boot (a million times a second, for twelve days without a pause), so what was lost lies below the new floor.
"""

from __future__ import annotations

import os
import sqlite3
from functools import cached_property

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import boot_now, wall_now
from dibs.store import (
    ANY_SLOT,
    GONE,
    LAST_TICKET,
    LINE_GRACE_S,
    PERMITS_MAX,
    PIN_KEEP_S,
    RELEASED,
    ROW_MARK,
    Acquire,
    Capabilities,
    Granted,
    Held,
    Mismatch,
    Outcome,
    Release,
    Renew,
    Renewed,
    Request,
    StoreAddress,
    StoredGrant,
    StoredLease,
    Transfer,
)
from dibs.stores.identifiers import check_table
from dibs.stores.sqlite_address import check_path, default_path
from dibs.stores.sqlite_file import SQLiteFile
from dibs.stores.sqlite_sql import numbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline
    from dibs.queries import Query
    from dibs.store import Finding, Pin, Watch
    from dibs.stores.sqlite_columns import SQLiteColumns
    from dibs.stores.sqlite_jobs import SQLiteJobs

CAPABILITIES = Capabilities(
    store="SQLite",
    survives_restart="yes",
    fencing_token="strict",
    clock="the host's boot clock",
    waiting_line="FIFO",
    signal="poll of the file's change counter",
    queue=True,
    durable=True,
    ttl_min_s=0.05,
    ttl_max_s=30 * 24 * 3600.0,
    resolution_s=0.001,
    margin_s=0.010,
    permits=True,
    pause=True,
    tries=True,
    query=True,
    history=True,
    guard=True,
    steady=True,
)
OPTIONS = ("table",)
# Fewer requests are done sooner one by one.
MANY_MIN = 8
# Each is one statement, a transaction by itself. (A release that gives up a place in line, too, is up to three, each of
# which may stand alone.)
_OF_ONE_STATEMENT = Release, Renew


class SQLiteStore:
    def __init__(self, path: str, table: str, private: bool) -> None:
        self._table = table
        self._file = SQLiteFile(path, table, private)
        self._sql = self._file.sql

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    # Loaded when they are used: most programs have neither queues, nor claims in columns of their tables.

    @cached_property
    def jobs(self) -> SQLiteJobs:
        from dibs.stores.sqlite_jobs import SQLiteJobs

        return SQLiteJobs(self._file)

    @cached_property
    def _columns(self) -> SQLiteColumns:
        from dibs.stores.sqlite_columns import SQLiteColumns

        return SQLiteColumns(self._file)

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        with self._file.in_use:  # and no loop in here: see ``dibs.session`` on what Python 3.13 makes of one
            return self._act(requests, deadline)

    def _act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        file = self._file
        outcomes: list[Outcome] = []
        # What is kept must outlive a power cut; of everything else only the tokens must, and the floor sees to that.
        synced = False
        for request in requests:
            if ROW_MARK in request[0]:
                return self._columns.act(requests, deadline, self._act)
            if type(request) is Release and request.keep > PIN_KEEP_S:
                synced = True
        db = file.open(deadline)
        try:
            file.sync(db, synced)
            if len(requests) == 1:
                (request,) = requests
                if type(request) in _OF_ONE_STATEMENT:
                    return [self._tried(db, request, boot_now())]
                db.execute("BEGIN IMMEDIATE")
                outcomes = [self._tried(db, request, boot_now())]
                db.execute("COMMIT")
            elif requests:
                db.execute("BEGIN IMMEDIATE")
                now = boot_now()
                known: dict[int, Outcome] = {}
                if len(requests) >= MANY_MIN:
                    from dibs.stores.sqlite_many import decided  # for who asks for much at once

                    known = decided(file, db, requests, now)
                for place, request in enumerate(requests):
                    outcomes.append(known.get(place) or self._tried(db, request, now))
                db.execute("COMMIT")
        except sqlite3.Error as error:
            raise file.translated(error) from error
        except BaseException:  # interrupted: nothing of this call may stay half done in an open transaction
            file.roll_back()
            raise
        return outcomes

    def _tried(self, db: sqlite3.Connection, request: Request, now: float) -> Outcome:
        """The outcome of one request, in the open transaction if there is one."""
        if type(request) is Acquire:
            return self._acquire(db, request, now)
        if type(request) is Release:
            return self._release(db, request, now)
        if type(request) is Transfer:
            return self._transfer(db, request, now)
        name, claim_id, ttl, slot = request  # type: ignore[misc]
        done = db.execute(self._sql["renew"], (now + ttl, name, slot, claim_id, self._file.boot, now))
        return Renewed(wall_now() + ttl) if done.rowcount else GONE

    def _release(self, db: sqlite3.Connection, request: Release, now: float) -> Outcome:
        name, claim_id, slot, ticket, keep, info = request
        if ticket is not None:
            found = db.execute(self._sql["place"], (name, claim_id)).fetchone()
            if found is not None:
                db.execute(self._sql["leave"], found)
        slots = (slot, slot) if slot != ANY_SLOT else (1, PERMITS_MAX)
        whose = (name, *slots, claim_id, self._file.boot, now)
        done = (
            db.execute(self._sql["release"], (now, *whose))
            if keep <= PIN_KEEP_S  # (a transaction that pins it is over, or we would not be here)
            else db.execute(self._sql["release_later"], (now + keep, info, *whose))
        )
        return RELEASED if done.rowcount else GONE

    def _transfer(self, db: sqlite3.Connection, request: Transfer, now: float) -> Outcome:
        name, claim_id, ttl, holder, from_claim, info, slot, permits = request
        floor = self._file.floor
        if permits:  # its token is above that of every slot
            pool = db.execute(self._sql["read_pool"], (name,)).fetchone()
            if pool is None:
                return GONE
            floor = max(floor, pool[1])
        if not from_claim:
            return GONE
        values = (name, slot, claim_id, from_claim, holder, info, self._file.boot, now, now + ttl, floor)
        moved = db.execute(self._sql["transfer"], numbered((*values, not permits))).fetchall()
        if not moved:
            return GONE
        return Granted(moved[0][0], moved[0][1], slot)

    def _acquire(self, db: sqlite3.Connection, request: Acquire, now: float) -> Outcome:
        """An acquire: read, decide, write, in the open transaction, in which nobody comes in between."""
        if request.permits:
            from dibs.stores.sqlite_pools import acquire

            outcome = acquire(self._file, db, request, now)
            if type(outcome) is Held and request.wake is not None:
                outcome = outcome._replace(ticket=self._enter_line(db, request, True, now))
            return outcome
        name, claim_id, ttl, own_holder, info, _, asked_ticket, _, _, _ = request
        row = db.execute(self._sql["read"], (name, name)).fetchone()
        if row is None or row[6] is not None:
            pool = db.execute(self._sql["read_pool"], (name,)).fetchone()
            if pool is not None:
                return Mismatch(pool[0])
            # The floor as it is now: another process may have purged this very name.
            token = self._file.floor = self._file.meta(db, "token_floor")
            held_by, holder, granted_wall, free_at, waited_for = None, None, 0.0, float("-inf"), True
            (wall,) = db.execute(self._sql["wall_now"]).fetchone()
        else:
            held_by, token, holder, boot, granted_wall, free_at, _, waited_for, wall = row
            if boot != self._file.boot:
                held_by, free_at = None, float("-inf")
        mine = held_by == claim_id
        free = held_by is None or free_at <= now
        ticket = LAST_TICKET if asked_ticket is None else asked_ticket
        if mine or (free and not (waited_for and self._ahead(db, request, ticket, free_at, now))):
            until = now + ttl
            if mine:
                # A repetition, however late, never shortens what a renewal gave.
                until, wall = max(until, free_at), granted_wall
            else:
                token = max(token, self._file.floor) + 1
            db.execute(self._sql["grant"], (name, claim_id, own_holder, token, self._file.boot, wall, now, until, info))
            if waited_for and not (mine and asked_ticket is None):  # who repeats its acquire passed nobody in line
                db.execute(self._sql["leave_until"], (name, ticket))
            return Granted(token, wall)
        place = None
        if request.wake is not None:
            place = self._enter_line(db, request, free, now)
        if free:
            kept_for = free_at + LINE_GRACE_S - now
            return Held(None, token, granted_wall, kept_for if kept_for > 0 else LINE_GRACE_S, place, True)
        ahead = place is not None and db.execute(self._sql["anybody_before"], (name, place)).fetchone() is not None
        return Held(holder, token, granted_wall, free_at - now, place, ahead)

    def _ahead(self, db: sqlite3.Connection, request: Acquire, ticket: int, free_at: float, now: float) -> bool:
        """Whether a live waiter stands before this ticket."""
        seen_since = float("-inf") if now < free_at + LINE_GRACE_S else now - LINE_GRACE_S
        found = db.execute(self._sql["ahead"], (request.name, ticket, request.claim_id, seen_since)).fetchone()
        return found is not None

    def _enter_line(self, db: sqlite3.Connection, request: Acquire, free: bool, now: float) -> int:
        # A first request that is repeated, because no answer came, may be in line already.
        found = db.execute(self._sql["place"], (request.name, request.claim_id)).fetchone()
        ticket = request.ticket if found is None else found[0]
        if ticket is not None:
            # Seen alive matters while the name is free. Who was passed over while it slept comes back to its place.
            if free or found is None:
                db.execute(self._sql["seen"], (ticket, request.name, request.claim_id, now, request.take))
            return int(ticket)
        entered = db.execute(self._sql["enter"], (request.name, request.claim_id, now, request.take)).lastrowid
        assert entered is not None
        return entered

    # -- pins -----------------------------------------------------------------------------------------------------

    def pin(self, request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline) -> Pin:
        """The pin is the lock that a transaction has on the whole file once it has written; it writes a renewal."""
        from dibs.stores import sqlite_pins

        if ROW_MARK in request.name:
            with self._file.in_use:
                return self._columns.pin(request, dialect, files, deadline)
        return sqlite_pins.pin(self._file, request, dialect, files, deadline)

    def pinned(self, request: Renew, rows: Sequence[tuple[Any, ...]], deadline: Deadline) -> bool:
        return bool(rows)

    def find(self, query: Query, deadline: Deadline) -> list[tuple[Any, ...]]:
        from dibs.stores import sqlite_query

        with self._file.in_use:
            rows = None if query.place is None else self._columns.table(query.place, deadline)
            return sqlite_query.find(self._file, self._file.open(deadline), query, deadline, rows)

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        with self._file.in_use:
            db = self._file.open(deadline)
            now, wall = boot_now(), wall_now()
            try:
                rows = db.execute(self._sql["list"], (first, before, self._file.boot, now)).fetchall()
            except sqlite3.Error as error:
                raise self._file.translated(error) from error
        return [
            StoredLease(
                name, slot, holder or "", token, since, wall + expires - now, expires - now, info, waiting, take
            )
            for name, slot, holder, token, since, expires, info, waiting, take in rows
        ]

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        moment = boot_now()
        with self._file.in_use:
            db = self._file.open(deadline)
            values = {"name": name, "token": fencing_token, "boot": self._file.boot, "now": moment}
            try:
                broken = bool(db.execute(self._sql["break"], values).rowcount)
                if broken and now:  # as a second step, so that a history can tell it from a release
                    db.execute(self._sql["break_now"], values)
                return broken
            except sqlite3.Error as error:
                raise self._file.translated(error) from error

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        with self._file.in_use:
            file = self._file
            db, now = file.open(deadline), boot_now()
            old = {"boot": file.boot, "before": now - older_than, "alive": now - LINE_GRACE_S}
            purged = file.transaction(db, lambda db: self._purge(db, {**old, "first": first, "end": before}))
            file.floor = file.meta(db, "token_floor")
            return purged

    def _purge(self, db: sqlite3.Connection, old: dict[str, object]) -> int:
        file = self._file
        (highest,) = db.execute(self._sql["purge_floor"], old).fetchone()
        db.execute(self._sql["purge_line"], old)
        db.execute(self._sql["raise_pools"], old)
        purged = db.execute(self._sql["purge"], old).rowcount
        (highest_of_pools,) = db.execute(self._sql["purge_pool_floor"], old).fetchone()
        highest = max(highest or 0, highest_of_pools or 0)
        if highest:
            # In the same transaction as the deletion, so neither can be lost without the other.
            floor = max(file.meta(db, "token_floor"), highest)
            db.execute(self._sql["set_meta"], ("token_floor", str(floor)))
        db.execute(self._sql["purge_pool"], old)
        return purged

    def check(self, deadline: Deadline) -> list[Finding]:
        from dibs.stores import sqlite_check

        with self._file.in_use:
            return sqlite_check.findings(self._file, deadline)

    def setup(self, deadline: Deadline) -> None:
        with self._file.in_use:
            self._file.open(deadline, mend=True)
        self.jobs.set_up(deadline)

    def schema(self) -> str:
        return self._file.schema + self.jobs.schema()

    def history_schema(self, keep: int) -> str:
        from dibs.stores import sqlite_history

        return "".join(f"{statement};\n" for statement in sqlite_history.keeping(self._table, keep))

    def keep_history(self, keep: int, deadline: Deadline) -> None:
        from dibs.stores import sqlite_history

        with self._file.in_use:
            sqlite_history.keep(self._file, keep, deadline)

    def history(self, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
        from dibs.stores import sqlite_history

        with self._file.in_use:
            return sqlite_history.read(self._file, name, limit, deadline)

    # -- waiting, and the end -------------------------------------------------------------------------------------

    def watch(self, address: str, deadline: Deadline) -> Watch:
        from dibs.stores.sqlite_watch import SQLiteWatch

        return SQLiteWatch(self._file, address, deadline)

    def close(self) -> None:
        with self._file.in_use:
            self._file.close()


def address(path: str | None, options: dict[str, str]) -> StoreAddress:
    """Where ``sqlite:///path`` points; no path means the default file, private to this user."""
    table = options.pop("table", "dibs_lease")
    check_table(table)
    private = path is None
    path = os.path.abspath(default_path() if path is None else check_path(path))
    return StoreAddress(f"sqlite:///{path}", CAPABILITIES, lambda: SQLiteStore(path, table, private), together=True)
