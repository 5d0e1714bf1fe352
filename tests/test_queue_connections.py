"""Jobs put and done in the caller's own transaction, as users write it: the ``connection=`` of a queue and of a job."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Literal

import aiomysql
import psycopg
import pytest

import dibs
from tests.between import Between
from tests.callers import KINDS, django_connection, mysql_arguments, raw
from tests.test_guard import Scene, every_kind
from tests.waits import eventually


@pytest.fixture
def scene(kind: str, request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(kind, request.getfixturevalue(KINDS[kind][0]).partition("?")[0])
    yield scene
    scene.close()


def counts(queue: Any) -> tuple[int, int, int, int]:
    """How many are ready, later, claimed, dead."""
    depth = queue.depth()
    return depth.ready, depth.later, depth.claimed, depth.dead


@every_kind
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_put_is_part_of_the_transaction(scene: Scene, end: str) -> None:
    """Nobody sees the jobs before it is committed, and nothing is left of them after a rollback."""
    queue, seen = scene.holder.queue("a"), scene.other.queue("a")
    assert counts(seen) == (0, 0, 0, 0)
    caller = scene.caller()
    caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
    ids = [queue.put({"n": 1}, key="k", connection=caller.given)]
    ids += queue.put_many([2, dibs.NewJob(3, delay=60)], connection=caller.given)
    with pytest.raises(dibs.JobExists):
        queue.put(4, key="k", connection=caller.given)
    assert counts(seen) == (0, 0, 0, 0)
    getattr(caller, end)()
    committed = end == "commit"
    assert scene.body() == ("new" if committed else "old")
    assert counts(seen) == ((2, 1, 0, 0) if committed else (0, 0, 0, 0))
    batch = seen.take(10)
    assert [(job.id, job.payload) for job in batch.won] == ([(ids[0], {"n": 1}), (ids[1], 2)] if committed else [])
    batch.release()


def in_autocommit(kind: str, url: str) -> Any:
    """A connection of the caller's in autocommit."""
    if kind.startswith("django"):
        connection = django_connection(url)
        connection.ensure_connection()
        return connection
    connection = raw(url)
    if kind == "pymysql":
        connection.autocommit(True)
    elif kind == "psycopg":
        connection.autocommit = True
    else:
        connection.isolation_level = None
    return connection


@pytest.mark.parametrize(
    "kind", sorted({"psycopg", "pymysql", "sqlite3", "django-mysql", "django-postgresql"} & KINDS.keys())
)
def test_in_autocommit_a_job_is_put_at_once(scene: Scene, kind: str) -> None:
    """There is no transaction to be part of, as in Django outside of atomic(): it is there, and once."""
    queue, connection = scene.holder.queue("a"), in_autocommit(kind, scene.url)
    one = queue.put(1, connection=connection)
    keyed = queue.put(2, key="k", connection=connection)
    with pytest.raises(dibs.JobExists):
        queue.put(3, key="k", connection=connection)
    assert queue.put(4, key="k", on_conflict="keep", connection=connection) == keyed
    assert queue.put(5, key="k", on_conflict="replace", connection=connection) == keyed
    many = queue.put_many(
        [6, dibs.NewJob(7, key="k"), dibs.NewJob(8, key="l")], on_conflict="keep", connection=connection
    )
    connection.close()
    assert many[1] == keyed
    assert {job.id: job.payload for job in queue.jobs()} == {one: 1, keyed: 5, many[0]: 6, many[2]: 8}


@every_kind
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_job_is_done_with_the_transaction(scene: Scene, end: str) -> None:
    """The job is over for its worker at once, and leaves with the commit; after a rollback it is claimed still."""
    queue = scene.holder.queue("a", ttl=30, keep_results=60)
    id_ = queue.put(1)
    caller = scene.caller()
    with queue.take() as batch:
        for job in batch:
            caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
            job.done({"sum": 2}, connection=caller.given)
            assert not job.held
            job.done()
    # The block has ended while the transaction has not: nothing was given back, and nobody waited for its rows.
    assert (batch.left, batch.lost, scene.body()) == ([], [], "old")
    getattr(caller, end)()
    record = queue.job(id_)
    assert record is not None
    committed = end == "commit"
    assert (record.state, record.result) == (("done", {"sum": 2}) if committed else ("claimed", None))
    assert scene.body() == ("new" if committed else "old")


@every_kind
def test_a_job_that_is_not_ones_own_any_more_is_refused(scene: Scene) -> None:
    """What was cancelled or ended by others is found in the transaction: LeaseLost, and the worker is to roll back."""
    queue = scene.holder.queue("a", ttl=30, renew=False)
    ids = queue.put_many([1, 2])
    batch = queue.take(2)
    assert scene.holder.queue("a").cancel(ids[0]) == ids[:1]
    queue.finish(ids[1], batch.won[1].fencing_token, outcome="skipped")
    caller = scene.caller()
    caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
    for job in batch.won:
        assert job.held
        with pytest.raises(dibs.LeaseLost):
            job.done(connection=caller.given)
        assert job.lost.is_set()
        with pytest.raises(dibs.LeaseLost):
            job.done()
    caller.rollback()
    batch.release()
    assert [job.id for job in batch.lost] == ids
    assert counts(queue) == (1, 0, 0, 0)
    assert scene.body() == "old"


# Of the stores that lock rows: one of each.
rows_locked = pytest.mark.parametrize("kind", ["psycopg", "pymysql"])


@rows_locked
@pytest.mark.parametrize("conflict", ["raise", "keep", "replace"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_who_puts_what_an_open_transaction_has_put_delays_nobody_else(
    scene: Scene, conflict: Literal["raise", "keep", "replace"], end: str
) -> None:
    """It is known after the end of that transaction, and until then the client goes on with everything else."""
    queue, other = scene.holder.queue("a"), scene.client()
    caller = scene.caller()
    first = queue.put(1, key="k", connection=caller.given)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(other.queue("a").put, 2, key="k", on_conflict=conflict)
        for _ in range(20):
            with other.lock("x"):
                pass
            other.queue("b").put(3, key="k", on_conflict="keep")
        assert not second.done()
        getattr(caller, end)()
        if end == "commit" and conflict == "raise":
            with pytest.raises(dibs.JobExists):
                second.result()
        else:
            assert (second.result() == first) is (end == "commit")
    payload = 1 if end == "commit" and conflict != "replace" else 2
    assert [job.payload for job in queue.jobs()] == [payload]


@rows_locked
@pytest.mark.parametrize("act", ["cancel", "requeue"])
def test_an_operator_whom_an_open_transaction_keeps_waiting_delays_nobody_else(scene: Scene, act: str) -> None:
    """The same for who cancels a job that is being done there, or revives one whose key is being put there."""
    queue, other = scene.holder.queue("a", ttl=30, max_tries=1), scene.client()
    id_ = queue.put(1, key="k")
    caller = scene.caller()
    with queue.take() as batch:
        for job in batch:
            if act == "cancel":
                job.done(connection=caller.given)
            else:
                job.fail("once is enough")
    if act == "requeue":
        queue.put(2, key="k", connection=caller.given)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(getattr(other.queue("a"), act), id_)
        for _ in range(20):
            with other.lock("x"):
                pass
        assert not waits.done()
        caller.rollback()
        assert waits.result() == ([id_] if act == "cancel" else 1)


@rows_locked
@pytest.mark.parametrize("outcome", ["done", "failed", "skipped"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_who_ends_elsewhere_what_a_transaction_ends_delays_nobody_else(scene: Scene, outcome: str, end: str) -> None:
    """Which of the two ends counts is known after the end of that transaction."""
    queue, other = scene.holder.queue("a", ttl=30), scene.client()
    id_ = queue.put(1)
    caller = scene.caller()
    job = queue.take().won[0]
    job.done(connection=caller.given)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(other.queue("a").finish, id_, job.fencing_token, outcome=outcome)
        for _ in range(20):
            with other.lock("x"):
                pass
            other.queue("b").put(3)
        assert not second.done()
        getattr(caller, end)()
        if end == "commit":
            with pytest.raises(dibs.LeaseLost):
                second.result()
        else:
            second.result()
    assert counts(queue)[2] == 0


@rows_locked
def test_a_put_that_a_transaction_was_refused_delays_no_worker(scene: Scene) -> None:
    """What is being worked is not replaced, and can be ended while the transaction goes on."""
    queue = scene.holder.queue("a", ttl=30)
    queue.put(1, key="k")
    caller = scene.caller()
    with queue.take() as batch:
        for job in batch:
            with pytest.raises(dibs.JobExists):
                scene.other.queue("a").put(2, key="k", on_conflict="replace", connection=caller.given)
            job.extend()
            job.done()
    caller.commit()
    assert counts(queue) == (0, 0, 0, 0)


@rows_locked
def test_what_a_transaction_keeps_waiting_for_too_long_says_so(scene: Scene) -> None:
    queue = scene.holder.queue("a", ttl=30)
    caller = scene.caller()
    queue.put(1, key="k", connection=caller.given)
    with pytest.raises(dibs.StoreUnavailable, match="a transaction that is still open has put or changed a job with"):
        scene.other.queue("a").put(2, key="k")
    caller.rollback()
    id_ = scene.other.queue("a").put(2, key="k")
    job = queue.take().won[0]
    job.done(connection=caller.given)
    for act in (
        lambda: scene.other.queue("a").cancel(id_),
        lambda: scene.other.queue("a").finish(id_, job.fencing_token),
    ):
        with pytest.raises(
            dibs.StoreUnavailable, match="a transaction that is still open has locked one of these jobs"
        ):
            act()


@pytest.mark.parametrize("kind", ["pymysql"])
def test_what_is_cancelled_before_a_transaction_is_in_the_way_is_told(scene: Scene, kind: str) -> None:
    """More jobs than one transaction cancels are not cancelled again from the beginning: who asked would miss some."""
    queue = scene.holder.queue("a", ttl=30)
    ids = queue.put_many([1] * 1000 + [dibs.NewJob(2, priority=1)])
    caller = scene.caller()
    queue.take().won[0].done(connection=caller.given)
    with pytest.raises(dibs.StoreUnavailable, match=r"locked one of these jobs, and a part .* is done") as caught:
        scene.other.queue("a").cancel(*ids)
    assert caught.value.maybe_applied
    caller.rollback()
    assert scene.other.queue("a").cancel(*ids) == ids[-1:]


def test_tasks_put_and_finish_in_their_transactions(postgres_url: str) -> None:
    """In tasks both are awaited, with a connection of an asynchronous driver."""

    async def main() -> None:
        async with dibs.connect_async(postgres_url) as client:
            queue = client.queue("a", ttl=30)
            connection = await psycopg.AsyncConnection.connect(postgres_url)
            for end in (connection.rollback, connection.commit):
                await queue.put_many([1, 2], connection=connection)
                await queue.put(3, connection=connection)
                assert (await queue.depth()).ready == 0
                await end()
            assert (await queue.depth()).ready == 3
            async with await queue.take(3) as batch:
                async for job in batch:
                    await job.done(connection=connection)
                    assert not job.held
            assert (await queue.depth()).claimed == 3
            await connection.commit()
            assert await queue.depth() == dibs.QueueDepth("a", 0, 0, 0, 0, 0.0)
            await connection.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", sorted({"psycopg", "pymysql", "sqlite3"} & KINDS.keys()))
def test_threads_put_and_finish_in_transactions_at_once(scene: Scene, kind: str) -> None:
    """The first of a process, too, each on a connection of its own: no two of them use the one of the store at once."""
    threads = 6
    scene.client().queue("a").put_many(range(threads * 4))
    for _ in range(4):
        client = scene.client(patience=20)
        queue, together = client.queue("a", ttl=60), threading.Barrier(threads)
        batch = queue.take(threads)

        def work(job: Any, queue: Any = queue, together: threading.Barrier = together) -> None:
            with closing(raw(scene.url)) as connection:
                together.wait(20)
                queue.put("more", delay=3600, connection=connection)
                connection.commit()
                job.done(connection=connection)
                connection.commit()

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, batch.won))
        client.close()
    assert counts(scene.other.queue("a")) == (0, threads * 4, 0, 0)


@pytest.mark.parametrize(
    "kind",
    sorted(
        {"psycopg", "psycopg2", "session-postgresql", "django-postgresql", "pymysql", "sqlalchemy-mysql"} & KINDS.keys()
    ),
)
def test_a_connection_to_another_database_is_refused(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there are tables of dibs: nothing is put or ended there, and the transaction can go on."""
    url = request.getfixturevalue(KINDS[kind][0]).partition("?")[0]
    elsewhere = url
    if url.startswith("postgresql:"):
        elsewhere = request.getfixturevalue("postgres").create_database()
    with dibs.connect(url) as client, dibs.connect(elsewhere) as other:
        queue, theirs = client.queue("a"), other.queue("a")
        theirs.put("theirs", key="k")
        mine = queue.put("mine", priority=9)
        if elsewhere == url:  # as if it were on another server
            monkeypatch.setattr("dibs.stores.mysql_link.Connection.server", "another 3306 1")
        caller = KINDS[kind][1](elsewhere)
        with queue.take() as batch:
            (job,) = batch.won
            calls: list[Callable[[], Any]] = [
                lambda: queue.put(1, connection=caller.given),
                lambda: queue.put_many([1, 2], connection=caller.given),
                lambda: queue.put(1, key="new", connection=caller.given),
                lambda: queue.put_many([1, dibs.NewJob(2, key="new")], on_conflict="keep", connection=caller.given),
                lambda: queue.put(1, key="k", on_conflict="replace", connection=caller.given),
            ]
            if elsewhere != url:
                calls.append(lambda: queue.put(1, key="k", connection=caller.given))
                calls.append(lambda: job.done(connection=caller.given))
            for call in calls:
                with pytest.raises(dibs.InvalidOption, match="leads to another database"):
                    call()
            assert caller.run("SELECT 1")
            caller.commit()
            caller.close()
            assert (job.id, job.held) == (mine, True)
        assert [(job.payload, job.key) for job in theirs.jobs() if job.id != mine or elsewhere != url] == [
            ("theirs", "k")
        ]


def test_where_the_store_is_may_change(postgres_url: str) -> None:
    """After a failover the store is on another server than it knows: it looks once more before it refuses anybody."""
    with dibs.connect(postgres_url) as client, psycopg.connect(postgres_url) as connection:
        queue = client.queue("a")
        for key in (None, "k"):
            queue.put(1, connection=connection)
            store: Any = client._desk.session().lane._store
            assert store.jobs._place
            store.jobs._place = "7 7"
            queue.put(2, key=key, connection=connection)
            connection.commit()
            assert counts(queue)[0] == (2 if key is None else 4)


@pytest.mark.parametrize("kind", ["psycopg", "pymysql"])
def test_an_event_loop_goes_on_while_the_store_is_asked(kind: str, request: pytest.FixtureRequest) -> None:
    """What the store must be asked for a put or an end in a transaction keeps no other task waiting."""
    url = request.getfixturevalue(KINDS[kind][0]).partition("?")[0]
    between, asked = Between(url), []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def ask(requests: Sequence[Any]) -> None:
            went_on = threading.Event()
            loop.call_soon_threadsafe(went_on.set)
            asked.append(went_on.wait(10))

        connection = await _AWAITED[kind](url)
        async with between.async_client() as client:
            queue = client.queue("a", ttl=60)
            await queue.put(1)
            between.before = ask
            await queue.put(2, connection=connection)
            await connection.commit()
            (job,) = (await queue.take()).won
            await job.done(connection=connection)
            await connection.commit()
            assert (await queue.depth()).ready == 1
        await _closed(connection)

    asyncio.run(main())
    assert len(asked) >= 3
    assert all(asked)


async def _aiomysql(url: str) -> Any:
    arguments = mysql_arguments(url)
    return await aiomysql.connect(db=arguments.pop("database"), **arguments)


_AWAITED: dict[str, Any] = {"psycopg": psycopg.AsyncConnection.connect, "pymysql": _aiomysql}


async def _closed(connection: Any) -> None:
    end = connection.close()
    if end is not None:  # of aiomysql there is nothing to await
        await end


def test_a_transaction_sees_the_keys_that_were_there_when_it_began(postgres_url: str) -> None:
    """Under REPEATABLE READ on PostgreSQL what was done since is kept, what was put since is an error."""
    with dibs.connect(postgres_url) as client, psycopg.connect(postgres_url) as connection:
        queue = client.queue("a", ttl=30)
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old = queue.put(1, key="old")
        connection.execute("SELECT 1")
        queue.take().done()
        assert queue.put(2, key="old", on_conflict="keep", connection=connection) == old
        connection.commit()
        assert counts(queue) == (0, 0, 0, 0)
        for conflict in ("raise", "keep", "replace"):
            connection.execute("SELECT 1")
            queue.put(1, key=conflict)
            with pytest.raises(psycopg.errors.SerializationFailure):
                queue.put(2, key=conflict, on_conflict=conflict, connection=connection)
            connection.rollback()
            queue.put(2, key=conflict, on_conflict="replace", connection=connection)
            connection.commit()
        assert [job.payload for job in queue.jobs()] == [2, 2, 2]


def refused(connection: psycopg.Connection[Any], job: dibs.Job) -> None:
    """Let the transaction be older than the last extension of the claim, so that PostgreSQL refuses to end it there."""
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.execute("SELECT 1")
    job.extend()
    with pytest.raises(psycopg.errors.SerializationFailure):
        job.done(connection=connection)
    connection.rollback()


def test_a_job_that_the_database_refused_to_end_is_its_workers_as_before(postgres_url: str) -> None:
    """What failed in the transaction has ended nothing: the job is held and renewed, and is done in the next one."""
    with dibs.connect(postgres_url) as client, psycopg.connect(postgres_url) as connection:
        queue = client.queue("a", ttl=1)
        id_ = queue.put(1)
        with queue.take() as batch:
            (job,) = batch.won
            refused(connection, job)
            assert (job.held, batch.left) == (True, [job])
            # For longer than the claim lasts unless it is renewed.
            assert not job.lost.wait(timeout=1.5)
            assert job.held
            job.done(connection=connection)
            connection.commit()
            assert (job.held, batch.left, batch.lost, queue.job(id_)) == (False, [], [], None)


@pytest.mark.parametrize("end", ["done", "refused", "left"])
def test_who_waits_for_a_loss_hears_of_the_end(postgres_url: str, end: str) -> None:
    """That a job is over, in a transaction or left to others, is told at once; so is a loss after a refused end."""
    with (
        dibs.connect(postgres_url) as client,
        psycopg.connect(postgres_url) as connection,
        ThreadPoolExecutor() as threads,
    ):
        queue = client.queue("a", ttl=40)
        queue.put_many([1, 2])
        batch = queue.take(2)
        job = batch.won[0]
        waits = threads.submit(job.lost.wait)
        eventually(lambda: job._hold.live[job.id], "nobody waits for it")
        if end == "done":
            job.done(connection=connection)
        elif end == "left":
            batch.leave()
        else:
            refused(connection, job)
            assert not waits.done()
            queue.cancel(job.id)
            with pytest.raises(dibs.LeaseLost):
                job.extend()
        assert waits.result(20) == (end == "refused")


@pytest.mark.parametrize("said", [True, False], ids=["raised", "kept from us"])
def test_a_handler_fails_with_what_its_database_refused(postgres_url: str, said: bool) -> None:
    """The job is tried again after its pause, with that error, not after the end of its claim as if it had crashed.

    Nor is it done because the handler returns: what it did was undone with its transaction.
    """
    with dibs.connect(postgres_url) as client, psycopg.connect(postgres_url) as connection:
        queue = client.queue("a", ttl=30)
        id_ = queue.put(1)

        def work(job: dibs.Job) -> None:
            refused(connection, job)
            if said:
                raise ValueError("that failed")

        assert queue.run(work, workers=1, idle=0.01) == 0
        record = queue.job(id_)
        assert record is not None
        assert (record.state, record.tries, record.crashes) == ("later", 1, 0)
        assert record.error is not None
        assert ("that failed" if said else "could not serialize access") in record.error


@pytest.mark.parametrize("ends", [True, False], ids=["with the block", "by itself"])
def test_going_on_does_not_end_what_the_database_refused(postgres_url: str, ends: bool) -> None:
    """A loop that goes on to the next job has failed with the one before, unless it has said itself that it is done."""
    with dibs.connect(postgres_url) as client, psycopg.connect(postgres_url) as connection:
        queue = client.queue("a", ttl=30)
        ids = queue.put_many([1, 2])
        with queue.take(2) as batch:
            for job in batch:
                refused(connection, job)
                if not ends:
                    job.done()
        assert counts(queue) == ((0, 2, 0, 0) if ends else (0, 0, 0, 0))
        for id_ in ids if ends else ():
            record = queue.job(id_)
            assert record is not None
            assert record.error is not None
            assert "could not serialize access" in record.error


def test_a_task_that_is_cancelled_in_its_transaction_gives_the_job_back(postgres_url: str) -> None:
    """A job whose end was asked for and not heard of is given back with the batch, at once and at no cost."""

    async def main() -> None:
        async with dibs.connect_async(postgres_url) as client:
            queue = client.queue("a", ttl=30)
            id_ = await queue.put(1)
            connection = await psycopg.AsyncConnection.connect(postgres_url)

            async def work() -> None:
                async with await queue.take() as batch:
                    async for job in batch:
                        task.cancel()  # at its next wait, which is for the answer of the database
                        try:
                            await job.done(connection=connection)
                        finally:
                            await connection.rollback()

            task = asyncio.ensure_future(work())
            with pytest.raises(asyncio.CancelledError):
                await task
            record = await queue.job(id_)
            assert record is not None
            assert (record.state, record.tries, record.crashes) == ("ready", 0, 0)
            await connection.close()

    asyncio.run(main())
