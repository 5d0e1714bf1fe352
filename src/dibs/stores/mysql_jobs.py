"""The queues of MySQL and MariaDB: the acts on jobs, on the connection of the store.

Live jobs lie in one table in the order in which they are claimed, those that have ended and are kept in another. How
jobs are put, taken and ended is told in the modules of these names; here is what a call does with them: in which order,
in how many transactions, and what people see.
"""

from __future__ import annotations

from functools import partial

from dibs._typing import TYPE_CHECKING, Any, TypeVar
from dibs.door import MYSQL, Said
from dibs.errors import InvalidOption, StoreUnavailable
from dibs.jobs import (
    BACK,
    CANCELLED,
    DEAD,
    DONE,
    KEY_LOCKED,
    NOTHING_CLAIMED,
    Depth,
    Elsewhere,
    Extend,
    Extended,
    Finish,
    Finished,
    Put,
    PutDone,
    StoredJob,
    Take,
)
from dibs.store import RowBusy
from dibs.stores import mysql_jobs_ends as ends
from dibs.stores import mysql_jobs_put as puts
from dibs.stores import mysql_jobs_sql as sql
from dibs.stores.mysql_jobs_take import Takes, held
from dibs.stores.mysql_jobs_turns import Turns
from dibs.stores.mysql_values import hexed, us
from dibs.stores.told import Told, left

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from dibs.clock import Deadline
    from dibs.door import Answer as DoorAnswer
    from dibs.jobs import JobOutcome, JobRequest, KeyTaken, Taken, WithinOutcome
    from dibs.store import Held
    from dibs.stores.mysql_drivers import Answer
    from dibs.stores.mysql_jobs_turns import Outcome
    from dibs.stores.mysql_link import Connection
    from dibs.stores.mysql_tables import Tables

_T = TypeVar("_T")
# What operators do to many jobs is done to so many in one statement.
STEP_JOBS = 1000
STEPS_MAX = 100_000


class MySQLJobs:
    def __init__(self, connection: Connection, tables: Tables) -> None:
        self._connection = connection
        self._tables = tables
        self._schema = tables.jobs_schema()
        self._text = tables.text
        self._takes = Takes(tables.text)
        self._turns = Turns(self._takes, tables.text, lambda: connection.certifies)
        self._told = Told()
        #: The takes with a limit lock a row of a table that serves leases, too.
        self._whole_schema = tables.schema() + self._schema

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[JobRequest], deadline: Deadline) -> list[JobOutcome]:
        self._connection.wrote = False
        outcomes = self._told.begin(requests)
        try:
            self._finish_and_put(requests, outcomes, deadline)
            for place, request in left(Take, requests, outcomes):
                outcomes[place] = self._take(request, deadline)
        except BaseException:
            self._told.failed(requests, outcomes)
            raise
        return outcomes

    def _finish_and_put(self, requests: Sequence[JobRequest], outcomes: list[Any], deadline: Deadline) -> None:
        finishes = left(Finish, requests, outcomes)
        if finishes:
            done = self._finish([request for _, request in finishes], deadline)
            for (place, _), outcome in zip(finishes, done, strict=True):
                outcomes[place] = outcome
        for place, request in left(Extend, requests, outcomes):
            outcomes[place] = self._extend(request, deadline)
        put = left(Put, requests, outcomes)
        if put and self._connection.counts_by_one and all(job.key is None for _, one in put for job in one.jobs):
            told = self._put_at_once([one for _, one in put], deadline)
            if told is not None:
                for (place, _), put_done in zip(put, told, strict=True):
                    outcomes[place] = put_done
                return
        for place, one in put:
            outcomes[place] = self._put_one(one, deadline)

    def _finish(self, finishes: list[Finish], deadline: Deadline) -> Sequence[Finished | RowBusy]:
        elsewhere = any(finish.elsewhere for finish in finishes)
        if elsewhere and len(finishes) > 1:
            return [self._finish([finish], deadline)[0] for finish in finishes]
        for finish in finishes:
            if finish.end == BACK:
                self._takes.look_back(finish.name)
            else:
                self._takes.ended(finish.name, finish.ids)
        end_all = ends.end_unless_locked if elsewhere else ends.end_all
        if all(map(ends.is_plain, finishes)) and not elsewhere:
            try:
                self._transaction(partial(ends.remove, finishes, self._text), deadline)
                return [Finished()] * len(finishes)
            except ends.NotAll:
                pass
        try:
            done = self._transaction(partial(end_all, finishes, self._text), deadline)
        except RowBusy as error:
            return [error]
        if any(finish.end == DONE and finish.keep > 0 for finish in finishes):
            self._drop_old(deadline)
        return done

    def _drop_old(self, deadline: Deadline) -> None:
        """Forget some of what was to be kept until now."""
        over = self._ids(self._ask(self._text(sql.OVER) % STEP_JOBS, deadline))
        if over:
            self._forget(over, deadline)

    def _extend(self, extend: Extend, deadline: Deadline) -> Extended:
        until = self._connection.server_now(deadline) / 1e6 + extend.ttl
        which = ends.in_force([extend], self._text)
        index, where = which.listed()
        extended = self._ask(self._text(sql.EXTEND) % (index, us(extend.ttl), where), deadline).affected
        self._connection.wrote = self._connection.wrote or extended > 0
        if extended == len(set(extend.ids)):
            return Extended(until)
        # Those that go on were extended: a claim that was lost does not come back.
        rows = self._ask(self._text(sql.PLACES) % which.joined(), deadline).rows
        found = {int(job or 0) for _, _, job in rows}
        return Extended(until, tuple(job for job in extend.ids if job not in found))

    def _put_at_once(self, several: list[Put], deadline: Deadline) -> list[PutDone | KeyTaken] | None:
        """All in one statement; None when they are too many, or one of them was put before."""
        rows = [puts.row(put, place, job) for put in several for place, job in enumerate(put.jobs)]
        parts = list(puts.parts(rows)) if len(rows) <= puts.ROWS_MAX else []
        if len(parts) != 1:
            return [PutDone(())] * len(several) if not rows else None
        statement = self._text(sql.PUT) % parts[0]
        answer = self._connection.unless_there(statement, deadline, self._schema)
        if answer is None:
            return None
        self._connection.wrote = True
        # The server numbers the rows of such a statement one after the other.
        told: list[PutDone | KeyTaken] = []
        first = answer.insert_id
        for put in several:
            told.append(PutDone(tuple(range(first, first + len(put.jobs)))))
            first += len(put.jobs)
        return told

    def _put_one(self, put: Put, deadline: Deadline) -> PutDone | KeyTaken | RowBusy:
        def work(execute: Callable[[str], Answer]) -> PutDone | KeyTaken:
            # Begun again, it looks again.
            seen = puts.look(put, self._text, lambda statement: execute(statement).rows)
            told: PutDone | KeyTaken | None = puts.known(put, seen)
            if told is not None:
                return told
            for statement in puts.locking(put, seen, self._text):
                ends.at_once(statement, KEY_LOCKED, execute)
            done: PutDone = ends.run(puts.putting(put, seen, self._text), execute)
            return done

        try:
            return self._transaction(work, deadline)
        except RowBusy as error:
            return error

    def _take(self, take: Take, deadline: Deadline) -> Taken | Held:
        ask = partial(self._ask, deadline=deadline)
        if not take.n:
            return self._takes.again(take, ask) or NOTHING_CLAIMED
        if take.group_limit:
            return self._take_in_turn(take, deadline)
        taken, spent = self._transaction(partial(self._takes.take, take), deadline)
        if spent:
            self._transaction(partial(ends.bury, spent, self._text), deadline)
        taken = taken or self._takes.again(take, ask)
        return taken or held(self._takes.next_in(take, ask))

    def _take_in_turn(self, take: Take, deadline: Deadline) -> Taken | Held:
        def transaction(work: Callable[[Callable[[str], Answer]], Outcome]) -> Outcome:
            outcome = self._connection.transaction(work, deadline, self._whole_schema)
            self._connection.wrote = self._connection.wrote or outcome.taken is not None
            return outcome

        def bury(spent: Sequence[int]) -> None:
            self._transaction(partial(ends.bury, spent, self._text), deadline)

        return self._turns.take(take, partial(self._ask, deadline=deadline), transaction, bury)

    # -- somebody else's transaction ------------------------------------------------------------------------------

    def within(
        self, request: Put | Finish, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline
    ) -> Generator[Said, DoorAnswer, WithinOutcome]:
        if dialect != MYSQL:
            raise InvalidOption(f"jobs are kept in MySQL, and that connection is to {dialect}")
        # Before the caller's connection does anything: making missing tables there would commit its transaction.
        self._connection.wrote = False
        if isinstance(request, Put):
            seen = puts.look(request, self._text, lambda statement: self._ask(statement, deadline).rows)
            return self._said(puts.putting_within(request, seen, self._tables.within, self._connection.server))
        which = ends.in_force([request], self._text)
        rows = self._ask(self._text(sql.PLACES) % which.joined(), deadline).rows
        places = [(int(rank or 0), (due_at or b"").decode(), int(job or 0)) for rank, due_at, job in rows]
        return self._said(self._ending_within(request, places, self._connection.server))

    def _ending_within(
        self, finish: Finish, places: list[tuple[int, str, int]], server: str | None
    ) -> Generator[str, Any, Finished | Elsewhere]:
        """By the primary key, in which the server locks these rows alone, however the transaction is isolated."""
        gone = set(finish.ids)
        for first in range(0, len(places), ends.WITHIN_MAX):
            some = places[first : first + ends.WITHIN_MAX]
            which = ends.by_places(finish.name, some, self._tables.within)
            done = yield from ends.ending(finish, which, self._tables.within)
            gone &= set(done.gone)
        if gone and server and not (yield from puts.is_ours(server, self._tables.within)):
            return Elsewhere()
        return Finished(tuple(job for job in finish.ids if job in gone))

    def _said(self, statements: Generator[str, Any, _T]) -> Generator[Said, DoorAnswer, _T]:
        """The statements for a door; what it raises is raised where the statement stands."""
        try:
            statement = next(statements)
            while True:
                answer = yield Said(self._connection.for_caller(statement))
                statement = statements.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    # -- see and mend ---------------------------------------------------------------------------------------------

    def depths(self, first: str, before: str, deadline: Deadline) -> list[Depth]:
        between = hexed(first), hexed(before)
        found: dict[bytes, list[int]] = {}
        for name, *counts in self._ask(self._text(sql.DEPTHS) % between, deadline).rows:
            found[name or b""] = [int(count or 0) for count in counts]
        dead = {
            name or b"": int(count or 0)
            for name, count in self._ask(self._text(sql.DEPTHS_ENDED) % between, deadline).rows
        }
        depths = []
        for name in sorted({*found, *dead}):
            ready, later, claimed, oldest_us = found.get(name, (0, 0, 0, 0))
            depths.append(Depth(name.decode(), ready, later, claimed, dead.get(name, 0), max(0.0, oldest_us / 1e6)))
        return depths

    def jobs_in(self, name: str, state: str, limit: int, deadline: Deadline) -> list[StoredJob]:
        statement = sql.ENDED_IN if state in (DONE, DEAD, CANCELLED) else sql.LIVE_IN
        return [_shown(row) for row in self._ask(self._text(statement) % (hexed(name), state, limit), deadline).rows]

    def find(self, name: str, job: int, deadline: Deadline) -> StoredJob | None:
        # A job ends by leaving one table for the other, or is revived by the way back, which it may just be on.
        for statement in (sql.FIND_LIVE, sql.FIND_ENDED, sql.FIND_LIVE):
            rows = self._ask(self._text(statement) % (job, hexed(name)), deadline).rows
            if rows:
                return _shown(rows[0])
        return None

    def cancel(self, name: str, ids: Sequence[int], keep: float, deadline: Deadline) -> list[int]:
        self._connection.wrote = False
        cancelled: list[int] = []
        every = sorted(set(ids))
        for first in range(0, len(every), STEP_JOBS):
            some = every[first : first + STEP_JOBS]
            cancelled += self._step(partial(ends.cancel, name, some, keep, self._text), deadline)
        self._drop_old(deadline)
        return cancelled

    def revive(self, name: str, ids: Sequence[int] | None, deadline: Deadline) -> int:
        self._connection.wrote = False
        revived = last = 0
        for _ in range(STEPS_MAX):
            statement = self._text(sql.ALL_DEAD) % (hexed(name), _only(ids), last, STEP_JOBS)
            some = self._ids(self._ask(statement, deadline))
            if not some:
                break
            last = some[-1]
            revived += self._step(partial(ends.revive, some, name, self._text), deadline)
        return revived

    def forget(self, name: str, ids: Sequence[int] | None, older_than: float, deadline: Deadline) -> int:
        self._connection.wrote = False
        forgotten = last = 0
        for _ in range(STEPS_MAX):
            statement = self._text(sql.ENDED) % (hexed(name), us(older_than), _only(ids), last, STEP_JOBS)
            some = self._ids(self._ask(statement, deadline))
            if not some:
                break
            last = some[-1]
            forgotten += self._forget(some, deadline)
        return forgotten

    def _forget(self, ids: list[int], deadline: Deadline) -> int:
        forgotten = self._ask(self._text(sql.FORGET) % ",".join(map(str, sorted(ids))), deadline).affected
        self._connection.wrote = self._connection.wrote or forgotten > 0
        return forgotten

    def schema(self) -> str:
        return self._schema

    # -- the connection -------------------------------------------------------------------------------------------

    def _ask(self, statement: str, deadline: Deadline) -> Answer:
        return self._connection.ask(statement, deadline, self._schema)

    def _transaction(self, work: Callable[[Callable[[str], Answer]], _T], deadline: Deadline) -> _T:
        done = self._connection.transaction(work, deadline, self._schema)
        self._connection.wrote = True
        return done

    def _step(self, work: Callable[[Callable[[str], Answer]], _T], deadline: Deadline) -> _T:
        """One of the transactions of an operator's act, which cannot be made again when a part of it is done."""
        try:
            return self._transaction(work, deadline)
        except RowBusy as error:
            if self._connection.wrote:
                raise StoreUnavailable(f"{error}, and a part of what was asked for is done") from error
            raise

    def _ids(self, answer: Answer) -> list[int]:
        return [int(job or 0) for (job,) in answer.rows]


def _only(ids: Sequence[int] | None) -> str:
    return "" if ids is None else f" AND id IN ({','.join(map(str, ids)) or 'NULL'})"


def _shown(row: Sequence[Any]) -> StoredJob:
    (job, state, payload, payload_bytes, rank, *counts) = row[:9]
    created_us, due_us, key, group, holder, expires_us, error, result, ended_us = row[9:]
    tries, max_tries, crashes, token = map(int, counts)
    return StoredJob(
        int(job),
        state.decode(),
        payload_bytes if payload is None else payload.decode(),
        -int(rank),
        tries,
        max_tries,
        crashes,
        token,
        int(created_us) / 1e6,
        int(due_us) / 1e6,
        _text_or_none(key),
        _text_or_none(group),
        _text_or_none(holder),
        None if expires_us is None else int(expires_us) / 1e6,
        _text_or_none(error),
        _text_or_none(result),
        None if ended_us is None else int(ended_us) / 1e6,
    )


def _text_or_none(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
