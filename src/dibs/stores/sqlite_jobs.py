"""Queues in an SQLite file: jobs as rows that are claimed, in one write transaction a call.

SQLite lets one writer in at a time, so what a take reads is still true when it writes. Jobs that nobody has claimed are
in one index, in the order in which they are taken, and claimed ones in another, by their expiry: so neither those that
are worked nor those that were worked lately are passed over by a take, and no place of the last one need be remembered.
(Nothing is left of what was deleted: a reader that stays makes the log longer, and no index.)

*Clocks.* When a job is due is counted by the wall clock, since jobs outlive a boot. When a claim expires is counted by
the boot clock, as for leases: under a new boot every older claim is over.

*Durability.* A call with a put or an end in it is one commit that waits for the disk. A take or an extension does not:
what a power cut takes back of it is over in the next boot anyway, and tokens that were granted so lie below the floor
that the next boot begins with (``dibs.stores.sqlite``).
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress

from dibs._typing import TYPE_CHECKING, Any, TypeVar
from dibs.clock import boot_id, boot_now, wall_now
from dibs.door import SQLITE, Answer, Said
from dibs.errors import InvalidOption
from dibs.jobs import (
    CANCELLED,
    CLAIMED,
    CRASHES_MAX,
    DEAD,
    LATER,
    NO_TRIES_LEFT,
    NOTHING_CLAIMED,
    READY,
    TAKE_MAX,
    Depth,
    Extend,
    Extended,
    Finish,
    JobOutcome,
    JobRequest,
    Put,
    StoredJob,
    Take,
    Taken,
    TakenJob,
)
from dibs.store import Held
from dibs.stores import sqlite_jobs_sql, sqlite_pins
from dibs.stores.sqlite_jobs_talks import Moment, finish, gone, in_json, put
from dibs.stores.sqlite_jobs_turns import Turns
from dibs.stores.sqlite_sql import VERSION
from dibs.stores.tables import refuse_newer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from dibs.clock import Deadline
    from dibs.jobs import WithinOutcome
    from dibs.stores.sqlite_file import SQLiteFile

_T = TypeVar("_T")
# What no row has as the boot of its claim: this one has not begun for the file yet, so no claim is in force.
NO_BOOT = -1
# Ended jobs whose time is over that a call with an end in it deletes: more than a take claims, so they do not pile up.
DROP_MAX = 2 * TAKE_MAX


class SQLiteJobs:
    """The queues of one file, over the connection that the leases use."""

    def __init__(self, file: SQLiteFile) -> None:
        self._file = file
        self._names = sqlite_jobs_sql.names(file.table)
        self._sql = sqlite_jobs_sql.statements(self._names, "?")
        self._turns = Turns(self._sql)
        #: The connection that has seen the tables.
        self._seen_by: sqlite3.Connection | None = None

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[JobRequest], deadline: Deadline) -> list[JobOutcome]:
        durable = any(type(request) is Put or type(request) is Finish for request in requests)
        return self._write(lambda db, at: self._act(db, requests, at), deadline, durable=durable)

    def _act(self, db: sqlite3.Connection, requests: Sequence[JobRequest], at: Moment) -> list[JobOutcome]:
        outcomes: dict[int, JobOutcome] = {}
        ended = False
        for place, request in enumerate(requests):
            if type(request) is Finish:
                outcomes[place] = _carried(db, finish(self._sql, request, at))
                ended = True
        if ended:
            self._drop_old(db, at)
        for place, request in enumerate(requests):
            if type(request) is Extend:
                outcomes[place] = self._extend(db, request, at)
        for place, request in enumerate(requests):
            if type(request) is Put:
                outcomes[place] = _carried(db, put(self._sql, request, at))
        for place, request in enumerate(requests):
            if type(request) is Take:
                outcomes[place] = self._take(db, request, at)
        return [outcomes[place] for place in range(len(requests))]

    def _extend(self, db: sqlite3.Connection, request: Extend, at: Moment) -> Extended:
        name, ids, fencing_token, ttl = request
        mine = (in_json(ids), name, fencing_token, at.boot, at.now)
        rows = db.execute(self._sql["extend"], (at.wall + ttl, at.now + ttl, *mine)).fetchall()
        return Extended(at.wall + ttl, gone(ids, rows))

    def _take(self, db: sqlite3.Connection, request: Take, at: Moment) -> Taken | Held:
        name, claim_id, _, ttl, holder, _, _ = request
        rows = db.execute(self._sql["repeated"], (claim_id, name, at.boot, at.now)).fetchall()
        if rows:
            token, claimed_wall = rows[0][-2:]
            ids = tuple([row[0] for row in rows])
            self._extend(db, Extend(name, ids, token, ttl), at)
            return Taken(token, claimed_wall, tuple([TakenJob(*row[:-2]) for row in rows]))
        if not request.n:
            return NOTHING_CLAIMED
        self._free_what_is_over(db, name, at)
        priorities = db.execute(self._sql["priorities"], (name,)).fetchall()
        chosen = self._chosen(db, request, priorities, at)
        if not chosen:
            return Held(None, 0, 0.0, self._next_in(db, name, priorities, at))
        token = max(self._file.floor, *[row[-1] for row in chosen]) + 1
        claim = (claim_id, holder, token, at.boot, at.wall, at.wall + ttl, at.now + ttl)
        db.executemany(self._sql["claim"], [(*claim, row[0]) for row in chosen])
        jobs = [
            TakenJob(job, payload, tries + 1, max_tries, crashes, created_wall, key, group)
            for job, payload, tries, max_tries, crashes, created_wall, key, group, _ in chosen
        ]
        return Taken(token, at.wall, tuple(jobs))

    def _free_what_is_over(self, db: sqlite3.Connection, name: str, at: Moment) -> None:
        """Count the claims that have expired as crashes; bury their jobs, or let them wait again."""
        over = (name, at.boot, at.now)
        if db.execute(self._sql["over"], over).fetchone() is not None:
            db.execute(self._sql["count_crashes"], over)
            db.execute(self._sql["bury"], (NO_TRIES_LEFT, DEAD, at.wall, None, None, *over))
            db.execute(self._sql["buried"], over)
            db.execute(self._sql["free"], over)

    def _chosen(
        self, db: sqlite3.Connection, request: Take, priorities: Sequence[tuple[int, float]], at: Moment
    ) -> list[tuple[Any, ...]]:
        """What a take gets, in its order."""
        in_order = self._turns.rows if request.group_limit else self._ready
        chosen: list[tuple[Any, ...]] = []
        with closing(in_order(db, request, priorities, at.wall)) as rows:
            for row in rows:
                crashes = row[4]
                if crashes < CRASHES_MAX:
                    chosen.append(row)
                elif not chosen:
                    return [row]
                if len(chosen) == request.n:
                    break
        return chosen

    def _ready(
        self, db: sqlite3.Connection, request: Take, priorities: Sequence[tuple[int, float]], wall: float
    ) -> Generator[tuple[Any, ...], None, None]:
        """Rows that may be claimed, in the claim order."""
        for priority, first_due in priorities:
            if first_due <= wall:
                rows = db.execute(self._sql["take"], (request.name, priority, wall))
                try:
                    for row in rows:  # noqa: UP028 - `yield from` would close them by itself, and fail
                        yield row
                finally:
                    with suppress(sqlite3.ProgrammingError):  # left here by Ctrl-C, and the connection closed since
                        rows.close()

    def _next_in(self, db: sqlite3.Connection, name: str, priorities: Sequence[tuple[int, float]], at: Moment) -> float:
        """After how many seconds a job is due, or a claim expires.

        What is due already and was not taken waits for another of its group, and so for one of these, or for an act.
        """
        after = []
        for priority, first_due in priorities:
            due = first_due
            if due <= at.wall:
                (due,) = db.execute(self._sql["next_due"], (name, priority, at.wall)).fetchone()
            if due is not None:
                after.append(due - at.wall)
        (expires,) = db.execute(self._sql["next_over"], (name, at.boot)).fetchone()
        if expires is not None:
            after.append(expires - at.now)
        return max(0.0, min(after, default=float("inf")))

    def _drop_old(self, db: sqlite3.Connection, at: Moment) -> None:
        old = db.execute(self._sql["old"], (at.wall, DROP_MAX)).fetchall()
        if old:
            db.executemany(self._sql["drop_old"], old)

    # -- in the caller's transaction ------------------------------------------------------------------------------

    def within(
        self, request: Put | Finish, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline
    ) -> Generator[Said, Answer, WithinOutcome]:
        if files is None or dialect != SQLITE:
            raise InvalidOption(f"jobs are kept in SQLite, and that connection is to {dialect}")
        return self._said_within(request, sqlite_pins.alias_of(self._file, files, "the jobs", "use no connection="))

    def _said_within(self, request: Put | Finish, alias: str) -> Generator[Said, Answer, WithinOutcome]:
        # All of it on that connection: what it has written already keeps every other from writing, ours as well.
        table = self._file.table
        names = sqlite_jobs_sql.names(table, alias)
        sql = sqlite_jobs_sql.statements(names)
        exists = sqlite_jobs_sql.exists(alias)
        # First of all the lock that a write takes. It is waited for, as long as that connection is patient; but not by
        # who has read before in that transaction: they are refused at once while others write.
        yield Said(sqlite_jobs_sql.begin(alias))
        if not (yield Said(exists, (table + "_job_end",))).rows[0][0]:
            if (yield Said(exists, (table + "_meta",))).rows[0][0]:
                refuse_newer((yield Said(sql["version"])).rows[0][0], VERSION)
            for statement in _each(sqlite_jobs_sql.schema(names)):
                yield Said(statement)
        # The same once more, since sqlite3 of Python begins a transaction with this one at the earliest. The time is
        # read, and all else, after it.
        yield Said(sql["lock"])
        boot = NO_BOOT
        if (yield Said(exists, (table + "_meta",))).rows[0][0]:
            rows = (yield Said(sql["boot"], (boot_id(),))).rows
            boot = rows[0][0] if rows else NO_BOOT
        at = Moment(boot, boot_now(), wall_now())
        return (yield from put(sql, request, at) if isinstance(request, Put) else finish(sql, request, at))

    # -- see and mend ---------------------------------------------------------------------------------------------

    def depths(self, first: str, before: str, deadline: Deadline) -> list[Depth]:
        def read(db: sqlite3.Connection, at: Moment) -> list[Depth]:
            counts: dict[str, list[Any]] = {}  # ready, later, claimed, dead, when the oldest ready one was due

            def of(name: str) -> list[Any]:
                return counts.setdefault(name, [0, 0, 0, 0, at.wall])

            for name, ready, later, oldest in db.execute(
                self._sql["waiting_depths"], (at.wall, at.wall, first, before)
            ):
                of(name)[0] += ready
                of(name)[1] += later
                of(name)[4] = min(oldest, at.wall)
            for name, claimed, due in db.execute(self._sql["claimed_depths"], (at.boot, at.now, first, before)):
                count = of(name)
                count[2 if claimed else 0 if due <= at.wall else 1] += 1
                if not claimed:
                    count[4] = min(count[4], due)
            for name, dead in db.execute(self._sql["ended_depths"], (first, before)):
                of(name)[3] += dead
            return [Depth._make((name, *count[:4], at.wall - count[4])) for name, count in sorted(counts.items())]

        return self._read(read, deadline)

    def jobs_in(self, name: str, state: str, limit: int, deadline: Deadline) -> list[StoredJob]:
        def read(db: sqlite3.Connection, at: Moment) -> list[StoredJob]:
            if state not in (READY, LATER, CLAIMED):
                rows = db.execute(self._sql["list_ended"], (name, state, limit))
                return [StoredJob._make(row) for row in rows]
            rows = db.execute(self._sql["list_claimed"], (at.boot, at.now, name))
            found = [shown for shown in (_shown(row, at) for row in rows) if shown.state == state]
            if state != CLAIMED:  # there are also those whose claims have expired
                rows = db.execute(self._sql["list_waiting"], (name, at.wall, state == READY, limit))
                found += [_shown(row, at) for row in rows]
                found.sort(key=lambda job: (-job.priority, job.due_at, job.id))
            return found[:limit]

        return self._read(read, deadline)

    def find(self, name: str, job: int, deadline: Deadline) -> StoredJob | None:
        def read(db: sqlite3.Connection, at: Moment) -> StoredJob | None:
            live = db.execute(self._sql["find_live"], (at.boot, at.now, job, name)).fetchone()
            if live is not None:
                return _shown(live, at)
            ended = db.execute(self._sql["find_ended"], (job, name)).fetchone()
            return None if ended is None else StoredJob._make(ended)

        return self._read(read, deadline)

    def cancel(self, name: str, ids: Sequence[int], keep: float, deadline: Deadline) -> list[int]:
        def write(db: sqlite3.Connection, at: Moment) -> list[int]:
            cancelled: list[int] = []
            kept = (CANCELLED, at.wall, at.wall + keep, None)
            for job in ids:
                if keep > 0:
                    db.execute(self._sql["keep_cancelled"], (*kept, job, name))
                cancelled += [row[0] for row in db.execute(self._sql["cancel"], (job, name)).fetchall()]
            self._drop_old(db, at)
            return cancelled

        return self._write(write, deadline, durable=True)

    def revive(self, name: str, ids: Sequence[int] | None, deadline: Deadline) -> int:
        def write(db: sqlite3.Connection, at: Moment) -> int:
            which = (name, ids is None, in_json(ids or ()))
            revived = db.execute(self._sql["revive"], (at.wall, *which)).rowcount
            db.execute(self._sql["revived_left"], (name,))
            return revived

        return self._write(write, deadline, durable=True)

    def forget(self, name: str, ids: Sequence[int] | None, older_than: float, deadline: Deadline) -> int:
        def write(db: sqlite3.Connection, at: Moment) -> int:
            values = (name, at.wall - older_than, ids is None, in_json(ids or ()))
            return db.execute(self._sql["forget"], values).rowcount

        return self._write(write, deadline, durable=True)

    # -- the connection -------------------------------------------------------------------------------------------

    def schema(self) -> str:
        return sqlite_jobs_sql.schema(self._names)

    def set_up(self, deadline: Deadline) -> None:
        """Make the tables that are missing."""
        with self._file.in_use:
            self._make_tables(self._file.open(deadline))

    def _read(self, read: Callable[[sqlite3.Connection, Moment], _T], deadline: Deadline) -> _T:
        return self._in_transaction("BEGIN", read, deadline)

    def _write(self, write: Callable[[sqlite3.Connection, Moment], _T], deadline: Deadline, *, durable: bool) -> _T:
        return self._in_transaction("BEGIN IMMEDIATE", write, deadline, durable=durable)

    def _in_transaction(
        self, begin: str, run: Callable[[sqlite3.Connection, Moment], _T], deadline: Deadline, *, durable: bool = False
    ) -> _T:
        file = self._file

        def now(db: sqlite3.Connection) -> _T:
            # The time is read when nobody else writes any more, so that what is put later is due later.
            return run(db, Moment(file.boot, boot_now(), wall_now()))

        with file.in_use:
            db = file.open(deadline)
            if db is not self._seen_by:
                if not file.transaction(db, lambda db: file.has_table(db, file.table + "_job_end"), begin="BEGIN"):
                    self._make_tables(db)
                self._seen_by = db
            return file.transaction(db, now, begin=begin, synced=durable)

    def _make_tables(self, db: sqlite3.Connection) -> None:
        def make(db: sqlite3.Connection) -> None:
            self._file.refuse_newer(db)
            for statement in _each(self.schema()):
                db.execute(statement)

        self._file.transaction(db, make, synced=True)


def _carried(db: sqlite3.Connection, talk: Generator[Said, Answer, _T]) -> _T:
    """Run what is said on the store's own connection."""
    try:
        said = next(talk)
        while True:
            cursor = db.execute(said.sql, said.values)
            said = talk.send(Answer(cursor.fetchall(), cursor.rowcount))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def _each(schema: str) -> list[str]:
    return [statement for statement in schema.split(";\n") if statement.strip()]


def _shown(row: tuple[Any, ...], at: Moment) -> StoredJob:
    job, claimed, *columns = row
    state = CLAIMED if claimed else READY if columns[7] <= at.wall else LATER
    return StoredJob._make((job, state, *columns, None, None))
