"""SQLite: leases in one file of this machine, with nothing to set up.

A request is one conditional UPDATE; an acquire which that does not settle (a new name, a held one, one with a line)
reads, decides and writes. Either happens inside one write transaction, and SQLite lets one writer in at a time, so what
was read is still true when it is written. A vector of several requests is one ``BEGIN IMMEDIATE`` transaction.

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
import stat
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dibs.clock import boot_id, boot_now, wall_now
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable, Unsupported
from dibs.store import (
    ANY_SLOT,
    GONE,
    LAST_TICKET,
    LINE_GRACE_S,
    PERMITS_MAX,
    PIN_KEEP_S,
    RELEASED,
    Acquire,
    Capabilities,
    Finding,
    Granted,
    Held,
    Mismatch,
    Outcome,
    Pin,
    Release,
    Renewed,
    Request,
    StoreAddress,
    StoreBusy,
    StoredGrant,
    StoredLease,
    Transfer,
    Watch,
)
from dibs.stores.identifiers import quoted_table

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import ModuleType

    from dibs.clock import Deadline
    from dibs.store import Renew

CAPABILITIES = Capabilities(
    store="SQLite",
    survives_restart="yes",
    fencing_token="strict",
    clock="the host's boot clock",
    waiting_line="FIFO",
    signal="poll of the file's change counter",
    queue=False,
    durable=True,
    ttl_min_s=0.05,
    ttl_max_s=30 * 24 * 3600.0,
    resolution_s=0.001,
    margin_s=0.010,
    permits=True,
    pause=True,
    history=True,
    guard=True,
)
OPTIONS = ("table",)
TOKENS_PER_BOOT = 2**40
# Of the tables: 2 has permits.
VERSION = "2"
# How long a fork waits for a request under way: they last well under a millisecond.
FORK_WAIT_S = 1.0
# How often a connection in use makes sure that the file at its path is still the one it has open.
LOOK_AT_FILE_S = 0.05
PAGE_BYTES = 1024
# Pages in the log before SQLite writes them back to the file, with two syncs: 4 MiB of log.
CHECKPOINT_PAGES = 4096
SQLITE_MIN = (3, 35, 0)
# Other kinds of shared file systems exist; these are the ones whose locks are known not to hold between machines.
NETWORK_FILE_SYSTEMS = frozenset(
    (
        "nfs nfs4 cifs smb smb2 smb3 smbfs 9p afs ceph glusterfs lustre gfs2 ocfs2 beegfs fuse.sshfs fuse.glusterfs"
    ).split()
)

_SCHEMA = """\
CREATE TABLE IF NOT EXISTS {lease} (
    name          TEXT NOT NULL,
    slot          INTEGER NOT NULL,
    claim_id      TEXT,                -- NULL: released
    holder        TEXT,
    fencing_token INTEGER NOT NULL,
    boot          INTEGER NOT NULL,    -- of which boot the times are
    granted_wall  REAL NOT NULL,       -- Unix time, to be read by people
    granted_boot  REAL NOT NULL,       -- seconds on the boot clock
    expires_boot  REAL NOT NULL,       -- seconds on the boot clock: when it is, or was, free
    info          TEXT,
    take          INTEGER,             -- of how many permits, where the name has permits; NULL: the name is a lock
    acquired_at   TEXT GENERATED ALWAYS AS (strftime('%Y-%m-%d %H:%M:%f', granted_wall, 'unixepoch')) VIRTUAL,
    expires_at    TEXT GENERATED ALWAYS AS
        (strftime('%Y-%m-%d %H:%M:%f', granted_wall + expires_boot - granted_boot, 'unixepoch')) VIRTUAL,
    PRIMARY KEY (name, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS {line} (
    ticket    INTEGER PRIMARY KEY AUTOINCREMENT,
    name      TEXT NOT NULL,
    claim_id  TEXT NOT NULL,
    seen_boot REAL NOT NULL,           -- when it last asked, on the boot clock
    take      INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX IF NOT EXISTS {line_index} ON {line} (name);
CREATE TABLE IF NOT EXISTS {pool} (
    name          TEXT PRIMARY KEY,    -- a name with permits: a semaphore, or a lock for readers and writers
    permits       INTEGER NOT NULL,
    fencing_token INTEGER NOT NULL     -- the last that was granted
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS {meta} (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
"""

# sqlite3 tells its error codes since Python 3.11; before, these exact texts of SQLite's own table stand for them.
_CODES_BY_TEXT = {
    "database is locked": 5,
    "database table is locked": 6,
    "attempt to write a readonly database": 8,
    "disk I/O error": 10,
    "database disk image is malformed": 11,
    "database or disk is full": 13,
    "unable to open database file": 14,
    "file is not a database": 26,
}
_BUSY, _LOCKED, _PERM, _READONLY, _CORRUPT, _CANTOPEN, _AUTH, _NOTADB = 5, 6, 3, 8, 11, 14, 23, 26


class SQLiteStore:
    def __init__(self, path: str, table: str, private: bool) -> None:
        self._path = path
        self._private = private
        self._db: sqlite3.Connection | None = None
        #: Held during every use of the connection, so that a fork can wait for its end.
        self._in_use = threading.Lock()
        self._fork_waits = False
        self._file: tuple[int, int] = (0, 0)
        self._look_at = 0.0
        #: Commits of the connection wait for the disk.
        self._synced = False
        self._boot = 0
        self._floor = 0
        self._meta_table = table + "_meta"
        names = {
            "lease": quoted_table(table),
            "line": quoted_table(table + "_line"),
            "line_index": quoted_table(table + "_line_name"),
            "pool": quoted_table(table + "_pool"),
            "meta": quoted_table(table + "_meta"),
        }
        self._table = table
        self._names = names
        self._schema = _SCHEMA.format(**names)
        self._lease_table = names["lease"]
        names["old"] = _OLD.format(**names)
        names["empty"] = _EMPTY.format(**names)
        self._sql = {verb: text.format(**names) for verb, text in _STATEMENTS.items()}
        self._grant_at_once = self._sql["grant_at_once"]

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        with self._in_use:
            return self._act(requests)

    def _act(self, requests: Sequence[Request]) -> list[Outcome]:
        db = self._open()
        outcomes: list[Outcome] = []
        # What is kept must outlive a power cut; of everything else only the tokens must, and the floor sees to that.
        synced = False
        for request in requests:
            if type(request) is Release and request.keep > PIN_KEEP_S:
                synced = True
        try:
            if synced != self._synced:
                db.execute(f"PRAGMA synchronous={'FULL' if synced else 'NORMAL'}")
                self._synced = synced
            if len(requests) == 1:
                # Most requests are one statement, which is a transaction by itself.
                outcome = self._at_once(db, requests[0], boot_now())
                if outcome is not None:
                    return [outcome]
            if requests:
                db.execute("BEGIN IMMEDIATE")
                now = boot_now()
                for request in requests:
                    outcome = self._at_once(db, request, now)
                    outcomes.append(self._looked_into(db, request, now) if outcome is None else outcome)
                db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._translated(error) from error
        except BaseException:  # interrupted: nothing of this call may stay half done in an open transaction
            self._roll_back()
            raise
        return outcomes

    def _at_once(self, db: sqlite3.Connection, request: Request, now: float) -> Outcome | None:
        """The outcome, when one statement decides it; None when the request must be looked into."""
        if type(request) is Acquire:
            name, claim_id, ttl, holder, info, _, ticket, permits, _, _ = request
            if ticket is not None or permits:
                return None
            granted = db.execute(
                self._grant_at_once,
                (name, claim_id, holder, info, self._boot, now, now + ttl, wall_now(), self._floor),
            ).fetchall()
            return Granted(*granted[0]) if granted else None
        if type(request) is Release:
            if request.ticket is not None:
                found = db.execute(self._sql["place"], (request.name, request.claim_id)).fetchone()
                if found is not None:
                    db.execute(self._sql["leave"], found)
            slots = (request.slot, request.slot) if request.slot != ANY_SLOT else (1, PERMITS_MAX)
            whose = (request.name, *slots, request.claim_id, self._boot, now)
            done = (
                db.execute(self._sql["release"], (now, *whose))
                if request.keep <= PIN_KEEP_S  # (a transaction that pins it is over, or we would not be here)
                else db.execute(self._sql["release_later"], (now + request.keep, request.info, *whose))
            )
            return RELEASED if done.rowcount else GONE
        if type(request) is Transfer:
            return None
        done = db.execute(
            self._sql["renew"],
            (now + request.ttl, request.name, request.slot, request.claim_id, self._boot, now),  # type: ignore[union-attr]
        )
        return Renewed(wall_now() + request.ttl) if done.rowcount else GONE  # type: ignore[union-attr]

    def _looked_into(self, db: sqlite3.Connection, request: Request, now: float) -> Outcome:
        """The outcome of what one statement does not decide, in the open transaction."""
        return self._transfer(db, request, now) if type(request) is Transfer else self._acquire(db, request, now)  # type: ignore[arg-type]

    def _transfer(self, db: sqlite3.Connection, request: Transfer, now: float) -> Outcome:
        name, claim_id, ttl, holder, from_claim, info, slot, permits = request
        floor = self._floor
        if permits:  # its token is above that of every slot
            pool = db.execute(self._sql["read_pool"], (name,)).fetchone()
            if pool is None:
                return GONE
            floor = max(floor, pool[1])
        if not from_claim:
            return GONE
        values = (name, slot, claim_id, from_claim, holder, info, self._boot, now, now + ttl, wall_now(), floor)
        moved = db.execute(self._sql["transfer"], (*values, not permits)).fetchall()
        if not moved:
            return GONE
        if permits:
            db.execute(self._sql["write_pool"], (name, pool[0], max(pool[1], moved[0][0])))
        ((token, granted_wall),) = moved
        return Granted(token, granted_wall, slot)

    def _acquire(self, db: sqlite3.Connection, request: Acquire, now: float) -> Outcome:
        """An acquire of a name that is new, held, or waited for: read, decide, write, in the open transaction."""
        if request.permits:
            return self._acquire_pool(db, request, now)
        name, claim_id = request.name, request.claim_id
        row = db.execute(self._sql["read"], (name,)).fetchone()
        if row is None or row[-1] is not None:
            pool = db.execute(self._sql["read_pool"], (name,)).fetchone()
            if pool is not None:
                return Mismatch(pool[0])
            # The floor as it is now: another process may have purged this very name.
            token = self._floor = self._meta(db, "token_floor")
            held_by, holder, granted_wall, free_at = None, None, 0.0, float("-inf")
        else:
            held_by, token, holder, boot, granted_wall, free_at, _ = row
            if boot != self._boot:
                held_by, free_at = None, float("-inf")
        mine = held_by == claim_id
        free = held_by is None or free_at <= now
        ticket = LAST_TICKET if request.ticket is None else request.ticket
        if mine or (free and not self._ahead(db, request, ticket, free_at, now)):
            until = now + request.ttl
            if mine:
                until = max(until, free_at)  # a repetition, however late, never shortens what a renewal gave
            else:
                token = max(token, self._floor) + 1
                granted_wall = wall_now()
            db.execute(
                self._sql["grant"],
                (name, claim_id, request.holder, token, self._boot, granted_wall, now, until, request.info),
            )
            if not mine or request.ticket is not None:  # who repeats its acquire passed nobody in line
                db.execute(self._sql["leave_until"], (name, ticket))
            return Granted(token, granted_wall)
        place = None
        if request.wake is not None:
            place = self._enter_line(db, request, free, now)
        if free:
            kept_for = free_at + LINE_GRACE_S - now
            return Held(None, token, granted_wall, kept_for if kept_for > 0 else LINE_GRACE_S, place, True)
        ahead = place is not None and db.execute(self._sql["anybody_before"], (name, place)).fetchone() is not None
        return Held(holder, token, granted_wall, free_at - now, place, ahead)

    def _acquire_pool(self, db: sqlite3.Connection, request: Acquire, now: float) -> Outcome:
        """An acquire of permits, in the open transaction."""
        from dibs.stores.permits import Holding, State, Waiting, decide

        name, claim_id = request.name, request.claim_id
        granted = self._take_permits(db, request, now)
        if granted is not None:
            return granted
        pool = db.execute(self._sql["read_pool"], (name,)).fetchone()
        if pool is None:
            if db.execute(self._sql["read"], (name,)).fetchone() is not None:
                return Mismatch(0)
            self._floor = self._meta(db, "token_floor")
        permits, token = pool or (None, 0)
        holdings = db.execute(self._sql["holdings"], (now, name, self._boot, now)).fetchall()
        line = db.execute(self._sql["read_line"], (now, name)).fetchall()
        state = State(
            permits, max(token, self._floor), [Holding(*row) for row in holdings], [Waiting(*row) for row in line]
        )
        decision = decide(state, request)
        if isinstance(decision, Mismatch):
            return decision
        if isinstance(decision, Held):
            if request.permits != permits:
                db.execute(self._sql["write_pool"], (name, request.permits, state.fencing_token))
            place = self._enter_line(db, request, True, now) if request.wake is not None else None
            return decision._replace(ticket=place)
        granted_wall, until = wall_now(), now + request.ttl
        if decision.again is not None:
            granted_wall, until = decision.again.acquired_at, max(until, now + decision.again.ends_in)
        db.execute(self._sql["write_pool"], (name, decision.permits, max(decision.fencing_token, state.fencing_token)))
        db.execute(
            self._sql["grant_permits"],
            (
                *(name, decision.slot, claim_id, request.holder, decision.fencing_token, self._boot),
                *(granted_wall, now, until, request.info, decision.take),
            ),
        )
        db.execute(self._sql["leave_claim"], (name, claim_id, now - LINE_GRACE_S))
        return Granted(decision.fencing_token, granted_wall, decision.slot)

    def _take_permits(self, db: sqlite3.Connection, request: Acquire, now: float) -> Granted | None:
        """Grant where it is plain that there are enough and nobody waits, without a look at each who holds."""
        name, claim_id = request.name, request.claim_id
        whose = (name, self._boot, now)
        pool = db.execute(self._sql["tally"], (name, self._boot, now, request.permits, claim_id)).fetchone()
        if pool is None:
            return None
        last_token, waited_for, mine, taken, count, highest = pool
        if waited_for or mine or taken + request.take > request.permits:
            return None
        slot = count + 1
        if count != (highest or 0):
            (slot,) = db.execute(self._sql["first_gap"], whose * 2).fetchone()
        token, granted_wall = max(last_token, self._floor) + 1, wall_now()
        db.execute(self._sql["raise_pool"], (token, name))
        db.execute(
            self._sql["grant_permits"],
            (
                *(name, slot, claim_id, request.holder, token, self._boot),
                *(granted_wall, now, now + request.ttl, request.info, request.take),
            ),
        )
        return Granted(token, granted_wall, slot)

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
            # That it was seen alive matters only while the name is free: no write, and no stir, at every other look. A
            # waiter that was passed over while it slept comes back to the place it had.
            if free or found is None:
                db.execute(self._sql["seen"], (ticket, request.name, request.claim_id, now, request.take))
            return int(ticket)
        entered = db.execute(self._sql["enter"], (request.name, request.claim_id, now, request.take)).lastrowid
        assert entered is not None
        return entered

    # -- pins -----------------------------------------------------------------------------------------------------

    def pin(self, request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline) -> Pin:
        """The pin is the lock that a transaction has on the whole file once it has written; it writes a renewal."""
        if files is None:
            raise InvalidOption(f"leases are kept in SQLite, and that connection is to {dialect}: use dibs.fencing")
        with self._in_use:
            self._open()
        alias = next((alias for _, alias, path in files if path and self._is_ours(path)), None)
        if alias is None:
            raise InvalidOption(
                f"that connection does not have the file {self._path!r} open, in which the leases are kept: "
                "ATTACH it, keep the leases in the connection's own file, or use dibs.fencing"
            )
        table = f"{quoted_table(alias, 'schema')}.{self._lease_table}"
        name, claim_id = (text.replace("'", "''") for text in (request.name, request.claim_id))
        now = boot_now()
        ours = (
            f"WHERE name = '{name}' AND slot = {request.slot:d} AND claim_id = '{claim_id}' AND boot = {self._boot:d}"
            f" AND expires_boot > {now!r} RETURNING slot"
        )

        def given_back(keep: float) -> str:
            if keep > 0:
                return f"UPDATE {table} SET claim_id = '', expires_boot = {boot_now() + keep!r} {ours}"
            return f"UPDATE {table} SET claim_id = NULL, holder = NULL, info = NULL, expires_boot = {now!r} {ours}"

        lock = f"UPDATE {table} SET expires_boot = max(expires_boot, {now + request.ttl!r}) {ours}"
        return Pin(lock, renews=True, release=given_back)

    def _is_ours(self, path: str) -> bool:
        try:
            there = os.stat(path)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == self._file

    def pinned(self, request: Renew, rows: Sequence[tuple[Any, ...]], deadline: Deadline) -> bool:
        return bool(rows)

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        with self._in_use:
            return self._leases(first, before)

    def _leases(self, first: str, before: str) -> list[StoredLease]:
        db = self._open()
        now, wall = boot_now(), wall_now()
        try:
            rows = db.execute(self._sql["list"], (first, before, self._boot, now)).fetchall()
        except sqlite3.Error as error:
            raise self._translated(error) from error
        return [
            StoredLease(
                name, slot, holder or "", token, since, wall + expires - now, expires - now, info, waiting, take
            )
            for name, slot, holder, token, since, expires, info, waiting, take in rows
        ]

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        moment = boot_now()
        with self._in_use:
            db = self._open()
            values = {"name": name, "token": fencing_token, "boot": self._boot, "now": moment}
            try:
                broken = bool(db.execute(self._sql["break"], values).rowcount)
                if broken and now:  # as a second step, so that a history can tell it from a release
                    db.execute(self._sql["break_now"], values)
                return broken
            except sqlite3.Error as error:
                raise self._translated(error) from error

    def purge(self, older_than: float, deadline: Deadline) -> int:
        with self._in_use:
            return self._purge(older_than)

    def _purge(self, older_than: float) -> int:
        db = self._open()
        now = boot_now()
        old = {"boot": self._boot, "before": now - older_than, "alive": now - LINE_GRACE_S}
        try:
            db.execute("BEGIN IMMEDIATE")
            (highest,) = db.execute(self._sql["purge_floor"], old).fetchone()
            db.execute(self._sql["purge_line"], old)
            purged = db.execute(self._sql["purge"], old).rowcount
            (highest_of_pools,) = db.execute(self._sql["purge_pool_floor"], old).fetchone()
            highest = max(highest or 0, highest_of_pools or 0)
            if highest:
                # In the same transaction as the deletion, so neither can be lost without the other.
                floor = max(self._meta(db, "token_floor"), highest)
                db.execute(self._sql["set_meta"], ("token_floor", str(floor)))
            db.execute(self._sql["purge_pool"], old)
            db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._translated(error) from error
        except BaseException:  # interrupted: not half done, and not left open
            self._roll_back()
            raise
        self._floor = self._meta(db, "token_floor")
        return purged

    def check(self, deadline: Deadline) -> list[Finding]:
        with self._in_use:
            return self._check()

    def _check(self) -> list[Finding]:
        db = self._open()
        try:
            mode = db.execute("PRAGMA journal_mode").fetchone()[0]
            mode_bits = stat.S_IMODE(os.stat(self._path).st_mode)
        except sqlite3.Error as error:
            raise self._translated(error) from error
        except OSError as error:
            raise StoreUnavailable(f"SQLite file {self._path!r}: {error.strerror}", maybe_applied=False) from error
        findings = [
            Finding("reachable", True, f"{self._path} (SQLite {sqlite3.sqlite_version})"),
            Finding("survives a crash of any process", mode == "wal", f"journal_mode={mode}"),
            Finding("tokens rise across power cuts", True, f"boot {self._boot} of this file, floor {self._floor}"),
            Finding("one machine only", True, f"the file lies on {_file_system(self._path) or 'a local file system'}"),
        ]
        if self._private:
            findings.append(Finding("private to this user", not mode_bits & 0o077, f"file mode {mode_bits:04o}"))
        return findings

    # -- opening --------------------------------------------------------------------------------------------------

    def setup(self, deadline: Deadline) -> None:
        with self._in_use:
            self._open(moved_here=True)

    def schema(self) -> str:
        return self._schema

    def _history_sql(self) -> tuple[ModuleType, dict[str, str]]:
        """The statements, and the names in them. Loaded by those who use it: `dibs run` stands in crontabs."""
        from dibs.stores import sqlite_history

        names = {key: quoted_table(self._table + end) for key, end in sqlite_history.NAMES.items()}
        return sqlite_history, {"lease": self._names["lease"], **names}

    def _history_statements(self, keep: int) -> list[str]:
        sql, names = self._history_sql()
        return [statement.format(**names, keep=keep) for statement in (sql.KEEP if keep else sql.FORGET)]

    def history_schema(self, keep: int) -> str:
        return "".join(f"{statement};\n" for statement in self._history_statements(keep))

    def keep_history(self, keep: int, deadline: Deadline) -> None:
        with self._in_use:
            db = self._open()
            try:
                db.execute("BEGIN IMMEDIATE")
                for statement in self._history_statements(keep):
                    db.execute(statement)
                db.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._translated(error) from error
            except BaseException:
                self._roll_back()
                raise

    def history(self, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
        with self._in_use:
            db = self._open()
            sql, names = self._history_sql()
            values = {"name": name, "limit": limit, "boot": self._boot, "now": boot_now()}
            try:
                if not db.execute(sql.EXISTS, (self._table + "_history",)).fetchone()[0]:
                    raise SetupRequired("no history is kept here: `dibs setup --history 100` begins one")
                return [StoredGrant(*row) for row in db.execute(sql.READ.format(**names), values)]
            except sqlite3.Error as error:
                raise self._translated(error) from error

    def _open(self, *, moved_here: bool = False) -> sqlite3.Connection:
        """The connection, opened anew when the file at the path is no longer the one that was opened."""
        db, now = self._db, boot_now()
        if db is not None:
            if now < self._look_at:
                return db
            try:
                there = os.stat(self._path)
                if (there.st_dev, there.st_ino) == self._file:
                    self._look_at = now + LOOK_AT_FILE_S
                    return db
            except OSError:
                pass
            # Replaced or deleted under us: others already use what is at the path now. Leases in the old file are
            # unknown there, and so their renewals say Gone.
            self._close()
        if sqlite3.sqlite_version_info < SQLITE_MIN:
            raise Unsupported(f"dibs needs SQLite 3.35 or later; this Python has {sqlite3.sqlite_version}")
        self._make_file()
        _FORKS.add(self)
        try:
            db = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(db, moved_here)
            except BaseException:
                db.close()
                raise
        except sqlite3.Error as error:
            raise self._translated(error) from error
        there = os.stat(self._path)
        self._file = (there.st_dev, there.st_ino)
        self._look_at = now + LOOK_AT_FILE_S
        self._synced = False
        self._db = db
        return db

    def _make_file(self) -> None:
        path = self._path
        if os.path.exists(path):
            return
        folder = os.path.dirname(path) or "."
        try:
            if self._private:
                os.makedirs(folder, mode=0o700, exist_ok=True)
            # SQLite gives its -wal and -shm files the mode of the database: 0600, since it says who works on what.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise SetupRequired(
                f"cannot make the SQLite file {path!r}: {error.strerror}. Make its folder writable, or name another "
                "file in the URL (sqlite:////absolute/path.db) or in $DIBS_URL"
            ) from error

    def _prepare(self, db: sqlite3.Connection, moved_here: bool) -> None:
        file_system = _file_system(self._path)
        if file_system in NETWORK_FILE_SYSTEMS:
            raise Unsupported(
                f"{self._path!r} lies on a network file system ({file_system}), where SQLite's locks do not hold "
                "between machines; use a local file, or a database server for more than one machine"
            )
        this_boot = boot_id()
        if this_boot is None:
            raise Unsupported("this system tells no boot id, which SQLite leases need: use a database server")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA busy_timeout=0")
        db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        known = db.execute(
            "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?", (self._meta_table,)
        ).fetchone()[0]
        if not known or self._meta(db, "boot_id") != this_boot or self._meta(db, "version") != VERSION:
            self._begin_boot(db, this_boot, moved_here)
        self._boot = self._meta(db, "boot")
        self._floor = self._meta(db, "token_floor")

    def _begin_boot(self, db: sqlite3.Connection, this_boot: str, moved_here: bool) -> None:
        """Make the tables if need be, and write down durably that a new boot has begun."""
        # The whole set-up needs other connections to be out of the way for moments only; SQLite waits for them here.
        db.execute("PRAGMA busy_timeout=5000")
        # Every commit writes whole pages to the log: small ones, as a lease is small. (Only a new file takes the size.)
        db.execute(f"PRAGMA page_size={PAGE_BYTES}")
        mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise SetupRequired(f"{self._path!r} cannot be put into WAL mode (it is in {mode} mode)")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in self._schema.split(";\n"):
                if statement.strip():
                    db.execute(statement)
            for table in ("lease", "line"):  # of a file that was made before names could have permits
                if "take" not in {row[1] for row in db.execute(self._sql[f"columns_of_{table}"])}:
                    db.execute(self._sql[f"widen_{table}"])
            db.execute(self._sql["set_meta"], ("version", VERSION))
            last_boot = self._meta(db, "boot_id")
            if last_boot != this_boot:
                here, there = _machine_id(), self._meta(db, "machine_id")
                if here and there and here != there and not moved_here:
                    raise SetupRequired(
                        f"{self._path!r} was last used on another machine. Two machines cannot share an SQLite file: "
                        "use a database server for that. If the file has moved here for good, run `dibs setup` once"
                    )
                boot, floor = 0, 0
                if last_boot is not None:
                    boot = self._meta(db, "boot") + 1
                    floor = self._meta(db, "token_floor") + TOKENS_PER_BOOT
                for key, value in (
                    ("boot_id", this_boot),
                    ("machine_id", here),
                    ("boot", str(boot)),
                    ("token_floor", str(floor)),
                ):
                    db.execute(self._sql["set_meta"], (key, value))
                db.execute(self._sql["clear_line"])
                db.execute(self._sql["carry_over"], (boot, boot_now(), wall_now(), boot - 1))
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        if last_boot is None:
            # A file that was just made must not vanish in a power cut and begin again with token 1.
            db.execute("PRAGMA wal_checkpoint(FULL)")
            folder = os.open(os.path.dirname(os.path.abspath(self._path)), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA busy_timeout=0")

    def _meta(self, db: sqlite3.Connection, key: str) -> Any:
        row = db.execute(self._sql["get_meta"], (key,)).fetchone()
        if key in ("boot", "token_floor"):
            return 0 if row is None else int(row[0])
        return None if row is None else row[0]

    # -- errors and the end ---------------------------------------------------------------------------------------

    def _roll_back(self) -> None:
        db = self._db
        if db is not None and db.in_transaction:
            try:
                db.execute("ROLLBACK")
            except sqlite3.Error:
                self._close()

    def _translated(self, error: sqlite3.Error) -> Exception:
        """The error dibs raises for one of SQLite's, by its code. The transaction, if any, is over afterwards."""
        self._roll_back()
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            code = _CODES_BY_TEXT.get(str(error), 1)
        primary = code & 0xFF
        if primary in (_BUSY, _LOCKED):
            return StoreBusy(str(error))
        text = f"SQLite file {self._path!r}: {error}"
        if primary in (_PERM, _READONLY, _AUTH, _CANTOPEN):
            return SetupRequired(f"{text}. This user must be able to write the file and its folder")
        if primary in (_CORRUPT, _NOTADB):
            return SetupRequired(f"{text}. Name another file, or restore this one")
        self._close()
        return StoreUnavailable(text, maybe_applied=False)

    def watch(self, address: str, deadline: Deadline) -> Watch:
        with self._in_use:
            return SQLiteWatch(self, address)

    def close(self) -> None:
        with self._in_use:
            self._close()

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    # -- forks ----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Finish what is under way and close: a child that inherits SQLite's idea of locks would hold none of them."""
        self._fork_waits = self._in_use.acquire(timeout=FORK_WAIT_S)
        if self._fork_waits:
            self._close()

    def after_fork(self) -> None:
        """In parent and child: go on, with a connection of each one's own."""
        if self._fork_waits:
            self._in_use.release()


class _Forks:
    """Every store of this process, told before it forks and afterwards on both sides."""

    def __init__(self) -> None:
        #: Held from before a fork until after it, so that no store opens in between.
        self._forking = threading.Lock()
        self._stores: WeakSet[SQLiteStore] = WeakSet()
        self._told: list[SQLiteStore] = []
        self._registered = False

    def add(self, store: SQLiteStore) -> None:
        if store in self._stores:
            return
        with self._forking:
            self._stores.add(store)
            if not self._registered:
                self._registered = True
                os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._after)

    def _before(self) -> None:
        self._forking.acquire()
        self._told = list(self._stores)
        for store in self._told:
            store.before_fork()

    def _after(self) -> None:
        told, self._told = self._told, []
        for store in told:
            store.after_fork()
        self._forking.release()


# A process forks as a whole, so what must be told of it is known to the module as a whole.
_FORKS = _Forks()


class SQLiteWatch:
    """Looks at the counter that every commit of another connection raises; reads rows only when it moved."""

    interval_s: float | None = 0.001

    def __init__(self, store: SQLiteStore, address: str) -> None:
        self._store = store
        # Claim ids begin with the id of their client, which is the address of its waiters.
        self._mine = address + "-"
        self._seen = self._version()

    def _version(self) -> int:
        return int(self._store._open().execute("PRAGMA data_version").fetchone()[0])

    def fileno(self) -> int | None:
        return None

    def changed(self, names: Collection[str]) -> Collection[str]:
        with self._store._in_use:
            return self._changed(names)

    def _changed(self, names: Collection[str]) -> Collection[str]:
        version = self._version()
        if version == self._seen:
            return ()
        self._seen = version
        store = self._store
        db, now = store._open(), boot_now()
        free: list[str] = []
        for name in names:
            values = {"name": name, "boot": store._boot, "now": now, "alive": now - LINE_GRACE_S}
            row = db.execute(store._sql["peek"], values).fetchone()
            if row is None or row[2]:  # no lock
                row = db.execute(store._sql["peek_pool"], values).fetchone()
            # Worth asking when nobody holds it and the first in line is one of ours (or the line is empty).
            if row is None or (row[0] and (row[1] is None or row[1].startswith(self._mine))):
                free.append(name)
        return free

    def close(self) -> None:
        self._store.close()


# Free for long enough, and not kept for anybody in line.
_OLD = (
    "(boot <> :boot OR expires_boot <= :before AND (expires_boot <= :alive OR name NOT IN (SELECT name FROM {line}))"
    " AND name NOT IN (SELECT name FROM {line} WHERE seen_boot > :alive))"
)
# Pools that nobody has held for long enough, and nobody who is alive waits for.
_EMPTY = "name NOT IN (SELECT name FROM {lease}) AND name NOT IN (SELECT name FROM {line} WHERE seen_boot > :alive)"
_STATEMENTS = {
    "read": (
        "SELECT claim_id, fencing_token, holder, boot, granted_wall, expires_boot, take FROM {lease}"
        " WHERE name = ? AND slot = 1"
    ),
    # A name with a row, that is free or this claim's already, and for which nobody waits.
    "grant_at_once": (
        # 1 name, 2 claim, 3 holder, 4 info, 5 boot, 6 now, 7 until, 8 Unix time, 9 floor
        "UPDATE {lease} SET claim_id = ?2, holder = ?3, info = ?4, boot = ?5,"
        " expires_boot = CASE WHEN claim_id = ?2 THEN max(expires_boot, ?7) ELSE ?7 END, granted_boot = ?6,"
        " granted_wall = CASE WHEN claim_id = ?2 THEN granted_wall ELSE ?8 END,"
        " fencing_token = CASE WHEN claim_id = ?2 THEN fencing_token ELSE max(fencing_token, ?9) + 1 END"
        " WHERE name = ?1 AND slot = 1 AND take IS NULL AND (claim_id = ?2 AND boot = ?5"
        " OR (claim_id IS NULL OR boot <> ?5 OR expires_boot <= ?6)"
        " AND NOT EXISTS (SELECT 1 FROM {line} WHERE name = ?1))"
        " RETURNING fencing_token, granted_wall"
    ),
    # A lease in force, of the one claim or, when this is repeated, of the other already.
    "transfer": (
        # 1 name, 2 slot, 3 claim, 4 from, 5 holder, 6 info, 7 boot, 8 now, 9 until, 10 Unix time, 11 floor, 12 lock
        "UPDATE {lease} SET claim_id = ?3, holder = ?5, info = ?6,"
        " expires_boot = CASE WHEN claim_id = ?3 THEN max(expires_boot, ?9) ELSE ?9 END,"
        " granted_boot = CASE WHEN claim_id = ?3 THEN granted_boot ELSE ?8 END,"
        " granted_wall = CASE WHEN claim_id = ?3 THEN granted_wall ELSE ?10 END,"
        " fencing_token = CASE WHEN claim_id = ?3 THEN fencing_token ELSE max(fencing_token, ?11) + 1 END"
        " WHERE name = ?1 AND slot = ?2 AND claim_id IN (?3, ?4) AND boot = ?7 AND expires_boot > ?8"
        " AND (take IS NULL) = ?12 RETURNING fencing_token, granted_wall"
    ),
    "grant": (
        "INSERT OR REPLACE INTO {lease} (name, slot, claim_id, holder, fencing_token, boot, granted_wall, granted_boot,"
        " expires_boot, info) VALUES (?, 1, ?, ?, ?, ?, ?, ?, ?, ?)"
    ),
    "renew": (
        "UPDATE {lease} SET expires_boot = max(expires_boot, ?)"
        " WHERE name = ? AND slot = ? AND claim_id = ? AND boot = ? AND expires_boot > ?"
    ),
    "release": (
        "UPDATE {lease} SET claim_id = NULL, holder = NULL, info = NULL, expires_boot = ?"
        " WHERE name = ? AND slot BETWEEN ? AND ? AND claim_id = ? AND boot = ? AND expires_boot > ?"
    ),
    # Under a claim that nobody has, so that nothing renews it.
    "release_later": (
        "UPDATE {lease} SET claim_id = '', expires_boot = ?, info = coalesce(?, info)"
        " WHERE name = ? AND slot BETWEEN ? AND ? AND claim_id = ? AND boot = ? AND expires_boot > ?"
    ),
    # What was kept (or broken) in the last boot is kept on in this one, for what the wall clock says is left of it:
    # there is no other clock that goes on while the machine is off. If it was set back, for the whole time once more.
    "carry_over": (
        # 1 boot, 2 now, 3 Unix time, 4 the boot before
        "UPDATE {lease} SET boot = ?1, granted_boot = ?2 + granted_wall - ?3,"
        " expires_boot = ?2 + min(expires_boot - granted_boot, granted_wall + expires_boot - granted_boot - ?3)"
        " WHERE claim_id = '' AND boot = ?4 AND granted_wall + expires_boot - granted_boot > ?3"
    ),
    "ahead": "SELECT 1 FROM {line} WHERE name = ? AND ticket < ? AND claim_id <> ? AND seen_boot > ? LIMIT 1",
    "anybody_before": "SELECT 1 FROM {line} WHERE name = ? AND ticket < ? LIMIT 1",
    "place": "SELECT ticket FROM {line} WHERE name = ? AND claim_id = ?",
    "enter": "INSERT INTO {line} (name, claim_id, seen_boot, take) VALUES (?, ?, ?, ?)",
    "seen": "INSERT OR REPLACE INTO {line} (ticket, name, claim_id, seen_boot, take) VALUES (?, ?, ?, ?, ?)",
    "leave": "DELETE FROM {line} WHERE ticket = ?",
    # With those who ask no more.
    "leave_claim": "DELETE FROM {line} WHERE name = ? AND (claim_id = ? OR seen_boot <= ?)",
    "read_pool": "SELECT permits, fencing_token FROM {pool} WHERE name = ?",
    "write_pool": "INSERT OR REPLACE INTO {pool} (name, permits, fencing_token) VALUES (?, ?, ?)",
    "raise_pool": "UPDATE {pool} SET fencing_token = ? WHERE name = ?",
    "tally": (
        "SELECT p.fencing_token, EXISTS (SELECT 1 FROM {line} WHERE name = ?1),"
        " max(l.claim_id = ?5), coalesce(sum(l.take), 0), count(l.slot), max(l.slot)"
        " FROM {pool} p LEFT JOIN {lease} l"
        " ON l.name = ?1 AND l.claim_id IS NOT NULL AND l.boot = ?2 AND l.expires_boot > ?3"
        " WHERE p.name = ?1 AND p.permits = ?4 GROUP BY p.name"
    ),
    # The smallest number that nobody has who holds: 1, or the one after somebody's.
    "first_gap": (
        "SELECT number FROM (SELECT 1 AS number UNION ALL SELECT * FROM (SELECT slot + 1 FROM {lease}"
        " WHERE name = ? AND claim_id IS NOT NULL AND boot = ? AND expires_boot > ? ORDER BY slot))"
        " WHERE NOT EXISTS (SELECT 1 FROM {lease} WHERE name = ? AND slot = number AND claim_id IS NOT NULL"
        " AND boot = ? AND expires_boot > ?) LIMIT 1"
    ),
    "holdings": (
        "SELECT slot, claim_id, take, coalesce(holder, ''), fencing_token, granted_wall, expires_boot - ? FROM {lease}"
        " WHERE name = ? AND claim_id IS NOT NULL AND boot = ? AND expires_boot > ?"
    ),
    "read_line": "SELECT ticket, claim_id, take, ? - seen_boot FROM {line} WHERE name = ?",
    "grant_permits": (
        "INSERT OR REPLACE INTO {lease} (name, slot, claim_id, holder, fencing_token, boot, granted_wall, granted_boot,"
        " expires_boot, info, take) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    ),
    "leave_until": "DELETE FROM {line} WHERE name = ? AND ticket <= ?",
    "clear_line": "DELETE FROM {line}",
    "peek": (
        "SELECT claim_id IS NULL OR boot <> :boot OR expires_boot <= :now,"
        " (SELECT claim_id FROM {line} WHERE name = :name ORDER BY ticket LIMIT 1), take IS NOT NULL"
        " FROM {lease} WHERE name = :name AND slot = 1"
    ),
    # Whether enough is left for the first in line who is alive.
    "peek_pool": (
        "SELECT w.take <= p.permits - (SELECT coalesce(sum(take), 0) FROM {lease}"
        " WHERE name = :name AND claim_id IS NOT NULL AND boot = :boot AND expires_boot > :now), w.claim_id"
        " FROM {pool} p JOIN {line} w ON w.name = p.name WHERE p.name = :name AND w.seen_boot > :alive"
        " ORDER BY w.ticket LIMIT 1"
    ),
    "list": (
        "SELECT l.name, slot, holder, fencing_token, granted_wall, expires_boot, info,"
        " (SELECT count(*) FROM {line} w WHERE w.name = l.name), coalesce(take, 1)"
        " FROM {lease} l WHERE name >= ? AND name < ? AND claim_id IS NOT NULL AND boot = ? AND expires_boot > ?"
        " ORDER BY name, slot"
    ),
    # A broken lease keeps its row until it would have expired, under a claim that nobody has.
    "break": (
        "UPDATE {lease} SET claim_id = '' WHERE name = :name AND fencing_token = :token AND claim_id IS NOT NULL"
        " AND boot = :boot AND expires_boot > :now"
    ),
    "break_now": (
        "UPDATE {lease} SET claim_id = NULL, holder = NULL, info = NULL, expires_boot = :now WHERE name = :name"
        " AND fencing_token = :token AND claim_id IS NOT NULL AND boot = :boot AND expires_boot > :now"
    ),
    "purge_floor": "SELECT max(fencing_token) FROM {lease} WHERE {old}",
    "purge_line": "DELETE FROM {line} WHERE name IN (SELECT name FROM {lease} WHERE {old})",
    "purge": "DELETE FROM {lease} WHERE {old}",
    "purge_pool_floor": "SELECT max(fencing_token) FROM {pool} WHERE {empty}",
    "purge_pool": "DELETE FROM {pool} WHERE {empty}",
    "columns_of_lease": "PRAGMA table_info({lease})",
    "columns_of_line": "PRAGMA table_info({line})",
    "widen_lease": "ALTER TABLE {lease} ADD COLUMN take INTEGER",
    "widen_line": "ALTER TABLE {line} ADD COLUMN take INTEGER NOT NULL DEFAULT 1",
    "get_meta": "SELECT value FROM {meta} WHERE key = ?",
    "set_meta": "INSERT OR REPLACE INTO {meta} (key, value) VALUES (?, ?)",
}


def _machine_id() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(path, encoding="ascii") as file:
                return file.read().strip()
        except (OSError, UnicodeDecodeError):
            continue
    return ""


def _file_system(path: str) -> str | None:
    """The type of the file system the path lies on, where the kernel tells (Linux)."""
    real = os.path.realpath(path)
    best, kind = "", None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                point = before.split(" ")[4].replace("\\040", " ")
                if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                    best, kind = point, after.split(" ", 1)[0]
    except (OSError, IndexError):
        return None
    return kind


def default_path() -> str:
    """The file used when no URL is given: in the user's state directory (XDG; on macOS, Application Support)."""
    home = os.path.expanduser("~")
    state = os.environ.get("XDG_STATE_HOME")
    if not state or not os.path.isabs(state):
        on_mac = os.uname().sysname == "Darwin"
        state = (
            os.path.join(home, "Library", "Application Support") if on_mac else os.path.join(home, ".local", "state")
        )
    return os.path.join(state, "dibs", "dibs.db")


def address(path: str | None, options: dict[str, str]) -> StoreAddress:
    """Where ``sqlite:///path`` points; no path means the default file, private to this user."""
    table = options.pop("table", "dibs_lease")
    quoted_table(table)
    private = path is None
    if path is None:
        path = default_path()
    elif not path or path == ":memory:" or path.endswith("/"):
        raise InvalidOption(
            "an SQLite URL names a file: sqlite:////absolute/path.db or sqlite:///relative.db; "
            "memory:// keeps leases in this process only"
        )
    path = os.path.abspath(path)
    return StoreAddress(f"sqlite:///{path}", CAPABILITIES, lambda: SQLiteStore(path, table, private))
