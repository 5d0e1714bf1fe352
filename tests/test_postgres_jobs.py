"""What is particular to queues on PostgreSQL: crashes, processes, plans, rights, poolers, others' transactions."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from dibs.clock import RealClock
from dibs.connecting import locate
from dibs.door import Answer, Said, door_to
from dibs.errors import InvalidOption, SetupRequired
from dibs.jobs import (
    BACK,
    CLAIMED,
    DEAD,
    DONE,
    KEEP,
    LATER,
    READY,
    REPLACE,
    RETRY,
    Extend,
    Finish,
    Finished,
    KeyTaken,
    NewJob,
    Put,
    PutDone,
    Taken,
)
from dibs.store import Held, StoreBusy
from dibs.stores import postgres_jobs
from dibs.stores.postgres_jobs_places import Place, Stretch
from dibs.testing.case import together
from tests.callers import KINDS, Caller
from tests.job_queues import JobQueue, finishing
from tests.planned import check_plans
from tests.servers.postgres import PgBouncer, PostgresServer
from tests.waits import eventually, soon

CLOCK = RealClock()


class Queue(JobQueue):
    def __init__(self, url: str, name: str = "default:q") -> None:
        super().__init__(locate(url)[0].open(), name)

    def put(self, *payloads: NewJob | str, put_id: str | None = None, on_conflict: str = "raise") -> Any:
        """What a put is told, whatever it is."""
        return self.one(self.asked(*payloads, put_id=put_id, on_conflict=on_conflict))

    def end(self, taken: Taken, end: str = DONE, **fields: Any) -> Finish:
        return finishing(taken, end, name=self.name, **fields)

    def state(self, job: int) -> str | None:
        found = self.jobs.find(self.name, job, soon())
        return None if found is None else str(found.state)

    def close(self) -> None:
        self.store.close()


@contextmanager
def queue_at(url: str, name: str = "default:q") -> Iterator[Queue]:
    queue = Queue(url, name)
    try:
        yield queue
    finally:
        queue.close()


@pytest.fixture
def queue(postgres_url: str) -> Iterator[Queue]:
    with queue_at(postgres_url) as queue:
        yield queue


# -- crashes ----------------------------------------------------------------------------------------------------------


def test_a_server_killed_with_9_loses_no_job(own_postgres: PostgresServer) -> None:
    """kill -9 of the server: what was put is there, what was done stays done, and tokens go on rising."""
    with queue_at(own_postgres.url()) as queue:
        put = queue.put(*"12345")
        first = queue.take(2)
        assert queue.act(queue.end(first)) == [Finished()]
        token = queue.take(1).fencing_token
        own_postgres.kill()
        own_postgres.start()
    with queue_at(own_postgres.url()) as queue:
        # The claim itself need not have been written: then its job is ready again.
        assert {queue.state(job) for job in put.ids[:2]} == {None}
        assert [queue.state(job) for job in put.ids[3:]] == [READY, READY]
        assert queue.state(put.ids[2]) in (READY, CLAIMED)
        assert queue.take(5).fencing_token > token


def _work(url: str, wait_s: float) -> None:
    """Take jobs until there are none, each into the table of the work that was done; then say so and end."""
    with queue_at(url) as queue, psycopg.connect(url, autocommit=True) as connection:
        while True:
            taken = queue.take(7, 0.5)
            if isinstance(taken, Held):
                if taken.free_in == float("inf"):
                    return
                time.sleep(min(taken.free_in, 0.05))  # as the store says
                continue
            time.sleep(wait_s)  # the work
            if queue.act(queue.end(taken)) == [Finished()]:
                for job in taken.jobs:
                    connection.execute("INSERT INTO done VALUES (%s)", (job.id,))


def test_a_worker_killed_with_9_costs_no_job(postgres_url: str) -> None:
    """Four worker processes, one of them killed: each job is done, and its end told, exactly once."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE done (id bigint)")
        with queue_at(postgres_url) as queue:
            put = queue.put(*[str(number) for number in range(400)])
        context = multiprocessing.get_context("spawn")
        doomed = context.Process(target=_work, args=(postgres_url, 60.0))
        doomed.start()
        eventually(
            lambda: connection.execute("SELECT FROM dibs_lease_job WHERE claim_id IS NOT NULL").fetchall(),
            "no claim is written",
            limit_s=60,  # a Python is to be started for it
        )
        assert doomed.pid is not None
        os.kill(doomed.pid, signal.SIGKILL)
        doomed.join()
        workers = [context.Process(target=_work, args=(postgres_url, 0.0)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
            assert worker.exitcode == 0
        done = [job for (job,) in connection.execute("SELECT id FROM done ORDER BY id").fetchall()]
    assert done == list(put.ids)


def test_the_same_put_at_once_is_one_put(postgres_url: str) -> None:
    """A put that is repeated while the first is still under way puts nothing more, with and without keys."""
    queues = [Queue(postgres_url) for _ in range(4)]
    queues[0].put("0")
    for jobs in (("1", "2"), (NewJob("3", key="a"), NewJob("4"))):
        put_id = os.urandom(8).hex()

        def repeat(queue: Queue, jobs: tuple[Any, ...] = jobs, put_id: str = put_id) -> Any:
            while True:
                try:
                    return queue.put(*jobs, put_id=put_id)
                except StoreBusy:
                    pass

        outcomes = together([partial(repeat, queue) for queue in queues])
        assert len(set(outcomes)) == 1
        assert len(outcomes[0].ids) == 2
    assert len(queues[0].take(100).jobs) == 5
    for queue in queues:
        queue.close()


def test_a_call_that_failed_halfway_is_carried_out_once(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the ends of a call are carried out and its puts are not, the same call again tells the same ends."""
    queue.put("1")
    taken = queue.take()
    call = [queue.end(taken), queue.asked("2")]

    def busy(*_: Any) -> None:
        raise StoreBusy("as when another has the same key")

    with monkeypatch.context() as patch:
        patch.setattr(queue.jobs, "_put", busy)
        with pytest.raises(StoreBusy):
            queue.act(*call)
    assert queue.act(*call)[0] == Finished()
    assert queue.act(call[0]) == [Finished((taken.jobs[0].id,))]


# -- how rows are found -----------------------------------------------------------------------------------------------


def test_a_claim_writes_no_index(queue: Queue, postgres_url: str) -> None:
    """Claims, extensions and jobs given back are HOT updates, which write no index, as far as a page has room."""
    queue.put(*[NewJob(str(number), key=str(number), group=str(number % 7)) for number in range(500)])
    for group_limit in (0, 0, 0, 20, 20):
        taken = queue.take(100, group_limit=group_limit)
        queue.act(Extend(queue.name, tuple(job.id for job in taken.jobs), taken.fencing_token, 90.0))
        queue.act(queue.end(taken, BACK))
    queue.close()  # its counters are told
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def counted() -> tuple[int, int]:
            (row,) = connection.execute(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'dibs_lease_job'"
            ).fetchall()
            return row

        eventually(lambda: counted()[0] >= 1500, "too few were counted")
        updated, hot = counted()
        assert hot > 0.95 * updated


def test_statements_planned_on_an_empty_table_serve_a_full_one(queue: Queue, postgres_url: str) -> None:
    """Whatever a statement was planned for, it finds rows by their order, or by their ids, never by going through."""
    queue.put("1")
    largest = 2**63 - 1
    stretch = f"'{{0}}', '{{NULL}}', '{{0}}', '{{NULL}}', '{{{largest}}}', '{{-100,1}}', '{{-1,100}}'"
    found_by = {
        "TAKE": (f"'q', 'c', 10, 60, 'h', {stretch}", "((- priority) = r.rank) AND (ROW(due_at, (id + 0)) >"),
        "NEXT": ("'q', 0", ".rank) AND (due_at <= statement_timestamp())"),  # not all that are due later
        "DONE": ("'q', '{1,2}', 1", "Index Cond: (id = ANY"),
        "RETRY": ("'q', '{1,2}', 1, NULL, 0", "Index Cond: (id = ANY"),
        "KEEP": ("'q', '{1,2}', 1, 'dead', NULL, NULL", "Index Cond: (id = ANY"),
        "BACK": ("'q', '{1,2}', 1", "Index Cond: (id = ANY"),
        "EXTEND": ("'q', '{1,2}', 1, 60", "Index Cond: (id = ANY"),
        "BURY": ("'{1,2}', 'e'", "Index Cond: (id = ANY"),
        "CANCEL": ("'q', '{1,2}', 0", "Index Cond: (id = ANY"),
        "FIND": ("'q', 1", "Index Cond: (id ="),
        "PUT_keep": ("'p', 'q', '{a,b}', '{1,2}', '{}', '{}', '{}', '{}', '{}', '{}'", "(key = a.key)"),
        "PUT": ("'{p}', '{q}', '{0}', '{}', '{1,2}', '{}', '{}', '{}', '{}', '{}', '{}', true", "(put_id = ANY"),
    }
    places = {verb: (values, [place]) for verb, (values, place) in found_by.items()}
    check_plans(postgres_url, ["dibs_lease_job"], places, "")


def test_takes_look_on_from_where_the_last_ended() -> None:
    """What was passed is looked at last, from time to time first; whether there are other priorities, always."""
    largest = 2**63 - 1
    place = Place([0, 5])
    place.passed(0, 1000, 7)
    assert place.stretches(behind=True) == [
        Stretch(0, 1000, 7, None, largest),
        Stretch(5, None, 0, None, largest),
        Stretch(0, None, 0, 1000, 7),
    ]
    assert place.gaps() == [(-100, -1), (1, 4), (6, 100)]
    place.given_back(0, 500, 3)
    place.learn([-100, 0, 4])
    assert place.stretches(behind=False)[1] == Stretch(0, 500, 2, None, largest)
    assert place.gaps() == [(-99, -1), (1, 3), (6, 100)]
    place.learn(list(range(-100, 101)))
    assert [last - first for first, last in place.gaps()] == [-1]
    for _ in range(2):
        place.looked_behind(100.0, 0.5)
    assert not place.may_look_behind(109.9)
    assert place.may_look_behind(110.0)


def test_takes_look_on_from_where_a_job_of_a_group_has_ended() -> None:
    """The next of the group most likely stands behind it; unless such looks have turned out to be slow."""
    largest = 2**63 - 1
    place = Place([])
    for job in (3, 4, 5):
        place.claimed_in_group(0, 500, job)
    place.passed(0, 1000, 7)
    place.ended([6], 1.0)  # of no group
    assert place.stretches(behind=False) == [Stretch(0, 1000, 7, None, largest)]
    place.ended([4], 1.0)
    assert place.stretches(behind=False) == [Stretch(0, 500, 3, None, largest)]
    place.ended([5], 1.0)
    assert place.stretches(behind=False) == [Stretch(0, 500, 3, None, largest)]
    for _ in range(2):
        place.looked_behind(2.0, 0.5)
    place.ended([3], 3.0)
    assert place.stretches(behind=False) == [Stretch(0, 500, 3, None, largest)]


def test_jobs_are_found_while_a_transaction_keeps_dead_rows(queue: Queue, postgres_url: str) -> None:
    """With an old transaction open, what was put is taken, and what was given back elsewhere is found again."""
    queue.put("0")
    with psycopg.connect(postgres_url) as old, queue_at(postgres_url) as other:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM dibs_lease_job").fetchall()
        first = other.take()
        for _ in range(5):
            queue.put(*["1"] * 1000)
            had = 0
            while had < 1000:
                taken = queue.take(100)
                assert queue.act(queue.end(taken)) == [Finished()]
                had += len(taken.jobs)
        assert other.act(other.end(first, BACK)) == [Finished()]
        eventually(lambda: isinstance(queue.take(), Taken), "nothing is to be had", 5.0)


def test_a_large_put_goes_in_parts(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put with more in it than fits into one statement is one put all the same, also when it is repeated."""
    monkeypatch.setattr(postgres_jobs, "PART_BYTES_MAX", 1000)
    asked = queue.asked(*["x" * 300] * 20)
    (put,) = queue.act(asked)
    assert len(put.ids) == 20
    assert queue.act(asked, queue.asked("y"), queue.asked("z"))[0] == put
    assert len(queue.take(100).jobs) == 22


# -- rights, poolers --------------------------------------------------------------------------------------------------


def test_a_role_needs_no_more_than_rows(postgres: PostgresServer, postgres_url: str) -> None:
    """Missing tables without the right to make them: SetupRequired. After set-up the rights on rows are enough."""
    database = urlsplit(postgres_url).path[1:]
    role = f"jobs_{database}"
    postgres.create_user(role)
    postgres.psql("REVOKE CREATE ON SCHEMA public FROM PUBLIC", database=database)
    with queue_at(postgres.url(database, user=role)) as app, queue_at(postgres_url) as admin:
        with pytest.raises(SetupRequired, match="dibs setup"):
            app.put("1")
        with pytest.raises(SetupRequired, match="dibs setup"):
            app.take()
        admin.store.setup(soon())
        postgres.psql(
            f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO "{role}"', database=database
        )
        app.put(NewJob("1", key="k", group="g", max_tries=1), "2")
        taken = app.take(1, group_limit=3)
        assert app.act(app.end(taken, RETRY, note="e")) == [Finished()]
        assert app.jobs.revive(app.name, None, soon()) == 1
        assert app.jobs.cancel(app.name, [job.id for job in app.take(10).jobs], 60.0, soon())
        assert app.jobs.forget(app.name, None, 0.0, soon()) == 2
        assert app.jobs.depths("a", "z", soon()) == []


def test_behind_a_pooler(own_postgres: PostgresServer) -> None:
    """PgBouncer in transaction mode: everything works, with nothing prepared and nothing set on the connection."""
    with PgBouncer(own_postgres) as pooler:

        def reaches() -> bool:
            try:
                own_postgres.psql("SELECT 1")
                psycopg.connect(pooler.url("postgres"), connect_timeout=2).close()
            except psycopg.Error:
                return False
            return True

        eventually(reaches, "it is never reached")
        with queue_at(pooler.url("postgres")) as queue, queue_at(pooler.url("postgres")) as other:
            queue.put(NewJob("1", group="g"), NewJob("2", group="g"), NewJob("3", key="k"), "4")
            assert isinstance(queue.put(NewJob("5", 9, key="k"), on_conflict=REPLACE), PutDone)
            taken = queue.take(10, group_limit=1)
            assert [job.payload for job in taken.jobs] == ["5", "1", "4"]
            assert isinstance(other.take(10, group_limit=1), Held)
            assert "pooler" in queue.store.capabilities.signal
            assert queue.act(queue.end(taken, RETRY, note="e"))[0] == Finished()
            again = other.take(10, group_limit=1)
            assert sorted(str(job.payload) for job in again.jobs) == ["1", "4", "5"]
            assert other.act(other.end(again, DEAD, note="e")) == [Finished()]
            assert len(queue.jobs.jobs_in(queue.name, DEAD, 10, soon())) == 3


# -- transactions of the caller's -------------------------------------------------------------------------------------


def through(door: Any, statements: Generator[Said, Answer, Any]) -> Any:
    """Run the statements on that connection; what came of it."""
    try:
        said = next(statements)
        while True:
            said = statements.send(door.execute(said.sql, said.values))
    except StopIteration as end:
        return end.value


@pytest.fixture(params=[kind for kind, (where, _) in KINDS.items() if where == "postgres_url"])
def caller(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[Caller]:
    caller = KINDS[request.param][1](postgres_url)
    yield caller
    caller.close()


def within(queue: Queue, caller: Caller, request: Put | Finish) -> Any:
    return through(door_to(caller.given), queue.jobs.within(request, "postgresql", None, soon()))


def test_a_put_is_part_of_the_callers_transaction(queue: Queue, caller: Caller) -> None:
    """Nothing before the commit, nothing after a rollback; whatever the driver, with and without keys."""
    asked = queue.asked(NewJob('{"a": "%s :x \\\\"}', 3, delay=0.0, group="g"), NewJob(b"\x00%", max_tries=2))
    keyed = queue.asked(NewJob("1", key="k"))
    for request in (asked, keyed):
        within(queue, caller, request)
        assert isinstance(queue.take(), Held)
        caller.rollback()
        assert isinstance(queue.take(), Held)
        put = within(queue, caller, request)
        assert within(queue, caller, request) == put
        caller.commit()
        taken = queue.take(5)
        assert tuple(job.id for job in taken.jobs) == put.ids
        assert [job.payload for job in taken.jobs] == [job.payload for job in request.jobs]
    assert within(queue, caller, queue.asked(NewJob("2", key="k"))) == KeyTaken("k", put.ids[0], True)
    assert within(queue, caller, queue.asked(NewJob("2", key="k"), on_conflict=KEEP)) == put
    assert queue.act(queue.end(taken, BACK)) == [Finished()]
    assert within(queue, caller, queue.asked(NewJob("2", key="k"), on_conflict=REPLACE)) == put
    caller.commit()
    assert [job.payload for job in queue.take(5).jobs] == ["2"]


def test_a_connection_in_sql_ascii_puts_what_any_other_does(queue: Queue, postgres_url: str) -> None:
    """psycopg leaves texts as bytes there: they say the same, also what the key and the settings are."""
    with psycopg.connect(postgres_url, client_encoding="SQL_ASCII") as connection:
        door = door_to(connection)

        def put(*jobs: NewJob, on_conflict: str = "raise") -> Any:
            asked = queue.asked(*jobs, on_conflict=on_conflict)
            return through(door, queue.jobs.within(asked, "postgresql", None, soon()))

        done = put(NewJob('"é"', key="é"))
        assert isinstance(done, PutDone)
        assert put(NewJob("2", key="é")) == KeyTaken("é", done.ids[0], False)
        assert put(NewJob("3", key="é"), on_conflict=KEEP) == done
        assert put(NewJob('"ü"', key="é"), on_conflict=REPLACE) == done
        assert isinstance(put(NewJob("4", group="g"), NewJob("5")), PutDone)
        connection.commit()
        taken = queue.take(5)
        assert [job.payload for job in taken.jobs] == ['"ü"', "4", "5"]
        assert through(door, queue.jobs.within(queue.end(taken), "postgresql", None, soon())) == Finished()


def test_an_end_is_part_of_the_callers_transaction(queue: Queue, caller: Caller) -> None:
    """A job ended in a transaction that is rolled back is still claimed; committed, it is over, and a late end gone."""
    for end, fields, state in (
        (DONE, {}, None),
        (DONE, {"keep": 60.0, "note": "{}"}, DONE),
        (DEAD, {"note": "e"}, DEAD),
        (RETRY, {"note": "e"}, READY),
        (BACK, {}, READY),
    ):
        (job,) = queue.put("1").ids
        taken = queue.take()
        request = queue.end(taken, end, **fields)
        assert within(queue, caller, request) == Finished()
        # Nobody waits for that transaction.
        assert isinstance(queue.take(), Held)
        caller.rollback()
        assert queue.state(job) == CLAIMED
        late = request._replace(fencing_token=taken.fencing_token - 1)
        assert within(queue, caller, late) == Finished((job,))
        assert within(queue, caller, request) == Finished()
        caller.commit()
        assert queue.state(job) == state
        assert within(queue, caller, request) == Finished((job,))
        caller.commit()
        queue.jobs.cancel(queue.name, [job], 0.0, soon())


def test_an_expired_claim_ends_nothing_in_a_transaction(queue: Queue, caller: Caller) -> None:
    """That a claim is in force is looked at by the statement, not when the transaction began."""
    (job,) = queue.put("1").ids
    caller.run("SELECT 1")
    taken = queue.take(1, 0.2)
    eventually(lambda: queue.state(job) == READY, "its claim does not expire")
    assert within(queue, caller, queue.end(taken)) == Finished((job,))


def test_another_database_is_refused(queue: Queue) -> None:
    """A connection of another kind of database is InvalidOption, and nothing is run there."""
    with pytest.raises(InvalidOption, match="PostgreSQL"):
        next(queue.jobs.within(queue.asked("1"), "sqlite", None, soon()))


def _waits_for_a_lock(connection: psycopg.Connection[Any]) -> bool:
    """Whether anybody does, seen from a connection to the same database."""
    return bool(connection.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())


@pytest.mark.parametrize("claimed", [False, True], ids=["waits", "claimed"])
@pytest.mark.parametrize("on_conflict", ["raise", KEEP, REPLACE])
def test_a_key_that_another_transaction_was_putting(
    queue: Queue, postgres_url: str, on_conflict: str, claimed: bool
) -> None:
    """Several jobs are put all or none, as if that transaction had come first, and the caller's goes on."""
    old = queue.put(NewJob('"old"', key="a", delay=60)).ids[0]
    with psycopg.connect(postgres_url) as first, psycopg.connect(postgres_url) as second, ThreadPoolExecutor() as pool:
        (other,) = through(
            door_to(first),
            queue.jobs.within(queue.asked(NewJob('"first"', key="c")), "postgresql", None, soon()),
        ).ids
        keys = "bc" if on_conflict == "raise" else "abc"
        jobs = [NewJob('"new"', key=key, delay=60) for key in keys]
        talk = queue.jobs.within(queue.asked(*jobs, on_conflict=on_conflict), "postgresql", None, soon())
        said, door = next(talk), door_to(second)
        waits = pool.submit(door.execute, *said)
        eventually(lambda: _waits_for_a_lock(first), "nobody waits for the other transaction")
        first.commit()
        answer = waits.result(20)
        if claimed:
            assert [job.id for job in queue.take().jobs] == [other]
        outcome = through(door, _resumed(talk, answer))
        second.commit()
    payloads = {
        job.key: job.payload
        for state in (READY, LATER, CLAIMED)
        for job in queue.jobs.jobs_in(queue.name, state, 10, soon())
    }
    if on_conflict == "raise" or (on_conflict == REPLACE and claimed):
        assert outcome == KeyTaken("c", other, claimed)
        assert payloads == {"a": '"old"', "c": '"first"'}
    else:
        assert (outcome.ids[0], outcome.ids[2]) == (old, other)
        kept = on_conflict == KEEP
        assert payloads == {"a": '"old"' if kept else '"new"', "b": '"new"', "c": '"first"' if kept else '"new"'}


def _resumed(talk: Generator[Said, Answer, Any], answer: Answer) -> Generator[Said, Answer, Any]:
    """The rest of a talk whose first statement has been answered."""
    try:
        said = talk.send(answer)
        while True:
            said = talk.send((yield said))
    except StopIteration as end:
        return end.value
