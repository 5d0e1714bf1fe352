"""The queues of a PostgreSQL store: acts on jobs, one statement a verb, on the store's own connection.

See dibs.stores.postgres_jobs_sql for the statements, and dibs.stores.postgres_jobs_places for where takes look.
"""

from __future__ import annotations

from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable
from dibs.jobs import (
    BACK,
    HINT_EVERY_S,
    JOB_LOCKED,
    KEY_LOCKED,
    REPLACE,
    RETRY,
    STATES,
    Depth,
    Elsewhere,
    Extend,
    Extended,
    Finish,
    Finished,
    KeyTaken,
    Put,
    PutDone,
    Take,
)
from dibs.store import RowBusy, StoreBusy
from dibs.stores import postgres_jobs_wire as wire
from dibs.stores.postgres_jobs_flights import BEGIN, COMMIT, JobFlights
from dibs.stores.postgres_jobs_places import QUEUES_MAX
from dibs.stores.postgres_jobs_tables import JobTables
from dibs.stores.postgres_jobs_takes import Takes
from dibs.stores.postgres_jobs_within import check_nulls, rows_of, said
from dibs.stores.postgres_wire import elements, float8, instant, integer, text, texts
from dibs.stores.told import Told, left

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.door import Answer, Said
    from dibs.jobs import JobOutcome, JobRequest, StoredJob, WithinOutcome
    from dibs.stores.postgres_jobs_flights import Statement
    from dibs.stores.postgres_link import Connection, Sql

    # A request with its place in the vector.
    Row = tuple[int, Any]

# A put with more in it than this is sent in parts.
PART_BYTES_MAX = 2**24
# How long a hint may take: nothing rests on it.
HINT_S = 1.0
_LIVE_STATES = STATES[:3]


class PostgresJobs:
    def __init__(self, connection: Connection, schema: str, table: str) -> None:
        self._tables = JobTables(schema, table)
        self._flights = JobFlights(connection, self._tables)
        self._takes = Takes(self._flights)
        self._told = Told()
        #: When which queue's last hint was sent; and those that have room in a group now, of which none was sent.
        self._hinted: dict[str, float] = {}
        self._with_room: set[str] = set()
        #: Which server and database our connection led to when that was last asked.
        self._place: str | None = None

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[JobRequest], deadline: Deadline) -> list[JobOutcome]:
        outcomes = self._told.begin(requests)
        try:
            for kind, verb in ((Finish, self._finish), (Extend, self._extend), (Put, self._put)):
                rows = left(kind, requests, outcomes)
                if rows:
                    verb(rows, outcomes, deadline)
            self._hint([*self._with_news(requests, outcomes), *self._with_room], deadline)
            self._with_room.clear()
            for i, request in left(Take, requests, outcomes):
                outcomes[i] = self._takes.take(request, deadline)
        except BaseException:
            self._takes.forget()
            self._told.failed(requests, outcomes)
            raise
        return outcomes

    # -- put ------------------------------------------------------------------------------------------------------

    def _put(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """In their order; those without keys that follow each other in one statement."""
        runs: list[list[Row]] = []
        for row in rows:
            keyed, large = _keyed(row[1]), _bytes_of(row[1]) > PART_BYTES_MAX
            if runs and not keyed and not large and _fits(runs[-1], row[1]):
                runs[-1].append(row)
            else:
                runs.append([row])
        for run in runs:
            put = run[0][1]
            if _keyed(put):
                try:
                    outcomes[run[0][0]] = self._put_keyed(put, deadline)
                except RowBusy as error:
                    outcomes[run[0][0]] = error
            elif len(run) == 1 and _bytes_of(put) > PART_BYTES_MAX:
                outcomes[run[0][0]] = self._put_in_parts(put, deadline)
            else:
                self._put_plain(run, outcomes, deadline)

    def _put_plain(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        puts = [put for _, put in rows]
        (result,) = self._flights.run([("PUT", (*wire.put(puts), b"true"))], deadline)
        made, known = elements(result.get_value(0, 1)), integer(result.get_value(0, 0))
        if known:  # some are repeated, and nothing was put for them
            for i, put in rows:
                (found,) = self._flights.run([("PUT_KNOWN", (wire.put_id(put).encode(),))], deadline)
                outcomes[i] = PutDone(tuple(elements(found.get_value(0, 0))))
            return
        start = 0
        for i, put in rows:
            outcomes[i] = PutDone(tuple(made[start : start + len(put.jobs)]))
            start += len(put.jobs)

    def _put_in_parts(self, put: Put, deadline: Deadline) -> PutDone:
        ids: list[int] = []

        def work() -> None:
            ids.clear()
            for start, part in _parts(put):
                which = list(wire.put([part]))
                which[2] = b"{%d}" % -start  # the places go on
                statement: Sql = (self._flights.sql["PUT"], (*which, b"false" if start else b"true"))
                result = self._flights.execute([statement] if start else [BEGIN, statement], deadline)[-1]
                ids.extend(elements(result.get_value(0, 1)))
                if not ids:  # repeated
                    break
            self._flights.execute([COMMIT], deadline)

        self._flights.transaction(work, deadline)
        if not ids:
            (found,) = self._flights.run([("PUT_KNOWN", (wire.put_id(put).encode(),))], deadline)
            ids = elements(found.get_value(0, 0))
        return PutDone(tuple(ids))

    def _put_keyed(self, put: Put, deadline: Deadline) -> PutDone | KeyTaken:
        statements: list[Statement] = [("PUT_" + put.on_conflict, wire.put_keyed(put))]
        if put.on_conflict == REPLACE:
            keys = [job.key for job in put.jobs if job.key is not None]
            statements.insert(0, ("PUT_LOCK", (put.name.encode(), texts(keys))))
        result = self._flights.run_unless_locked(statements, KEY_LOCKED, deadline)[-1]
        get = result.get_value
        rows = [
            (text(get(r, 0)) or "", integer(get(r, 1)), integer(get(r, 2)), text(get(r, 3)), get(r, 4) == b"\x01")
            for r in range(result.ntuples)
        ]
        outcome = _of_keyed(put, rows)
        if outcome is None:
            raise StoreBusy("PostgreSQL: another put has the same key at this moment")
        return outcome

    # -- extend, end ----------------------------------------------------------------------------------------------

    def _extend(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        for group, found, result in self._of_claims(rows, deadline):
            now = instant(result.get_value(0, 1))
            for i, request in group:
                outcomes[i] = Extended(now + request.ttl, _others(request, found))

    def _finish(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        jobs = [job for _, request in rows for job in request.ids]
        # Of several ends of one job the first counts.
        apart = len(set(jobs)) < len(jobs) or any(request.elsewhere for _, request in rows)
        for batch in [[row] for row in rows] if apart else [rows]:
            try:
                claims = self._of_claims(batch, deadline)
            except RowBusy as error:
                if not batch[0][1].elsewhere:
                    raise
                outcomes[batch[0][0]] = error
                continue
            for group, found, result in claims:
                first = group[0][1]
                if first.end == BACK:
                    self._takes.given_back(first.name, result)
                else:
                    self._takes.ended(first.name, found, deadline.now())
                    if integer(result.get_value(0, 1)):
                        self._with_room.add(first.name)
                for i, request in group:
                    outcomes[i] = Finished(_others(request, found))

    def _of_claims(self, rows: list[Row], deadline: Deadline) -> Iterable[tuple[list[Row], set[int], PGresult]]:
        """Send these in one flight, in one statement those that differ only in their jobs; which of them it found."""
        groups: dict[Any, list[Row]] = {}
        for row in rows:
            groups.setdefault(row[1]._replace(ids=()), []).append(row)
        flight: list[Statement] = []
        for group in groups.values():
            request, jobs = group[0][1], sorted(job for _, request in group for job in request.ids)
            if type(request) is Finish:
                flight.append((wire.verb_of(request), wire.finish(request, jobs)))
            else:
                flight.append(("EXTEND", wire.extend(request, jobs)))
        first = rows[0][1]
        if type(first) is Finish and first.elsewhere:  # it is alone
            results = self._flights.run_unless_locked(flight, JOB_LOCKED, deadline)
        else:
            results = self._flights.run(flight, deadline)
        return [
            (group, set(elements(result.get_value(0, 0))), result)
            for group, result in zip(groups.values(), results, strict=True)
        ]

    # -- hints ----------------------------------------------------------------------------------------------------

    def _with_news(self, requests: Sequence[JobRequest], outcomes: Sequence[Any]) -> Iterable[str]:
        """The queues in which something is ready that was not; see ``_with_room``, too."""
        for request, outcome in zip(requests, outcomes, strict=True):
            if type(request) is Put:
                if type(outcome) is PutDone:
                    yield request.name
            elif type(request) is Finish and (request.end == BACK or (request.end == RETRY and not request.delay)):
                yield request.name

    def _hint(self, names: Iterable[str], deadline: Deadline) -> None:
        """Tell everybody who watches, unless they were told just now. It may get lost."""
        now = deadline.now()
        names = [name for name in dict.fromkeys(names) if now - self._hinted.get(name, float("-inf")) >= HINT_EVERY_S]
        if not names:
            return
        if len(self._hinted) > QUEUES_MAX:
            self._hinted.clear()
        self._hinted |= dict.fromkeys(names, now)
        # Without it, too, what was put is there, and whoever waits looks once a second.
        with suppress(StoreUnavailable, SetupRequired, StoreBusy):
            self._flights.run([("HINT", (self._tables.channel.encode(), texts(names)))], deadline.within(HINT_S))

    # -- within ---------------------------------------------------------------------------------------------------

    def within(
        self, request: Put | Finish, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline
    ) -> Generator[Said, Answer, WithinOutcome]:
        if dialect != "postgresql":
            raise InvalidOption(f"jobs are kept in PostgreSQL, and that connection is to {dialect}")
        place = self._place  # which the thread of another caller may make unknown
        if place is None:
            (result,) = self._flights.run([("PLACE", ())], deadline)  # makes the tables, too
            place = self._place = text(result.get_value(0, 0)) or ""
        return self._said_within(request, place)

    def _said_within(self, request: Put | Finish, place: str) -> Generator[Said, Answer, WithinOutcome]:
        """What is said on the caller's connection, in whichever thread: ours is not used for it."""
        if isinstance(request, Finish):
            answer = yield said(self._flights.sql[wire.verb_of(request)], wire.finish(request, sorted(request.ids)))
            gone = _others(request, set(answer.rows[0][0] or ()))
            if gone:  # or never there
                answer = yield said(self._flights.sql["PLACE"], ())
                if rows_of(answer)[0][0] != place:
                    return self._elsewhere()
            return Finished(gone)
        if _keyed(request):
            return (yield from self._put_keyed_within(request, place))
        ids: list[int] = []
        for start, part in _parts(request):
            which = list(wire.put([part]))
            which[2] = b"{%d}" % -start
            yield from check_nulls(which)
            given = (*which, b"false" if start else b"true", place.encode())
            answer = yield said(self._flights.sql["PUT_WITHIN"], given)
            known, put, here = answer.rows[0]
            if not here:
                return self._elsewhere()
            if known:
                answer = yield said(self._flights.sql["PUT_KNOWN"], (wire.put_id(request).encode(),))
                return PutDone(tuple(answer.rows[0][0]))
            ids += put
        return PutDone(tuple(ids))

    def _put_keyed_within(self, put: Put, place: str) -> Generator[Said, Answer, PutDone | KeyTaken | Elsewhere]:
        given = wire.put_keyed(put)
        yield from check_nulls(given)
        statement = said(self._flights.sql[f"PUT_{put.on_conflict}_WITHIN"], (*given, place.encode()))
        unput = said(self._flights.sql["UNPUT"], (wire.put_id(put).encode(),))
        while True:
            rows = rows_of((yield statement))
            if any(kind == "elsewhere" for kind, *_ in rows):
                return self._elsewhere()
            outcome = _of_keyed(put, rows)
            if outcome is not None:
                return outcome
            # Another transaction has put a job with one of the keys in the meantime: again, now that it can be seen.
            yield unput

    def _elsewhere(self) -> Elsewhere:
        self._place = None  # ours may be where it was no longer: it is asked for once more
        return Elsewhere()

    # -- see and mend ---------------------------------------------------------------------------------------------

    def depths(self, first: str, before: str, deadline: Deadline) -> list[Depth]:
        (result,) = self._flights.run([("DEPTHS", (first.encode(), before.encode()))], deadline)
        get = result.get_value
        return [
            Depth(
                text(get(r, 0)) or "",
                integer(get(r, 1)),
                integer(get(r, 2)),
                integer(get(r, 3)),
                integer(get(r, 4)),
                float8(get(r, 5)),
            )
            for r in range(result.ntuples)
        ]

    def jobs_in(self, name: str, state: str, limit: int, deadline: Deadline) -> list[StoredJob]:
        verb = "LIST_LIVE" if state in _LIVE_STATES else "LIST_ENDED"
        (result,) = self._flights.run([(verb, (name.encode(), state.encode(), b"%d" % limit))], deadline)
        return wire.stored_jobs(result)

    def find(self, name: str, job: int, deadline: Deadline) -> StoredJob | None:
        (result,) = self._flights.run([("FIND", (name.encode(), b"%d" % job))], deadline)
        return next(iter(wire.stored_jobs(result)), None)

    def cancel(self, name: str, ids: Sequence[int], keep: float, deadline: Deadline) -> list[int]:
        statement: Statement = ("CANCEL", (name.encode(), wire.ids(ids), b"%r" % keep))
        (result,) = self._flights.run_unless_locked([statement], JOB_LOCKED, deadline)
        self._hint([name] if integer(result.get_value(0, 1)) else [], deadline)
        return elements(result.get_value(0, 0))

    def revive(self, name: str, ids: Sequence[int] | None, deadline: Deadline) -> int:
        statement: Statement = ("REVIVE", (name.encode(), wire.ids(ids)))
        (result,) = self._flights.run_unless_locked([statement], KEY_LOCKED, deadline)
        revived = integer(result.get_value(0, 0))
        self._hint([name] if revived else [], deadline)
        return revived

    def forget(self, name: str, ids: Sequence[int] | None, older_than: float, deadline: Deadline) -> int:
        (result,) = self._flights.run([("FORGET", (name.encode(), wire.ids(ids), b"%r" % older_than))], deadline)
        return integer(result.get_value(0, 0))

    @property
    def tables(self) -> list[str]:
        """As a statement names them."""
        return self._tables.names

    def schema(self) -> str:
        return self._tables.schema

    def set_up(self, deadline: Deadline) -> bool:
        """Whether the tables are there."""
        return self._flights.set_up(self._tables.last_made, deadline)


def _keyed(put: Put) -> bool:
    return any(job.key is not None for job in put.jobs)


def _bytes_of(put: Put) -> int:
    return sum(len(job.payload) for job in put.jobs)


def _fits(run: list[Row], put: Put) -> bool:
    """Whether it may follow these in the same statement."""
    return not _keyed(run[0][1]) and sum(_bytes_of(other) for _, other in run) + _bytes_of(put) <= PART_BYTES_MAX


def _parts(put: Put) -> Iterable[tuple[int, Put]]:
    """The put in parts of bounded size, each with the number of jobs before it."""
    start, size = 0, 0
    for place, job in enumerate(put.jobs):
        size += len(job.payload)
        if size > PART_BYTES_MAX and place > start:
            yield start, put._replace(jobs=put.jobs[start:place])
            start, size = place, len(job.payload)
    yield start, put._replace(jobs=put.jobs[start:])


def _others(request: Finish | Extend, found: set[int]) -> tuple[int, ...]:
    return tuple([job for job in request.ids if job not in found])


def _of_keyed(put: Put, rows: Sequence[tuple[Any, ...]]) -> PutDone | KeyTaken | None:
    """What a put with keys is told by the rows of its statement; None where another put came in between."""
    of: dict[str, dict[int, int]] = {"found": {}, "put": {}, "known": {}}
    for kind, place, job, key, claimed in rows:
        if kind == "refused":
            return KeyTaken(key, job, bool(claimed))
        of[kind][place] = job
    ids = {**of["found"], **of["put"], **of["known"]}
    if not of["known"] and len(ids) < len(put.jobs):
        return None
    return PutDone(tuple(ids[place] for place in sorted(ids)))
