"""Works on queues whose jobs are taken and finished in batches, or put one by one: jobs a second.

*The raw statements* are what a team would write by hand: an UPDATE that claims a hundred jobs of a queue that are due
and free, by priority and age, with SKIP LOCKED, and a DELETE of those that are still claimed so. Jobs carry no more
than a number; whoever keeps finished jobs, as pgqueuer and litequeue do by default, keeps them.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import psycopg

import dibs
from benchmarks.harness import Bench, Round, Target, Unit
from benchmarks.rabbitmq import broker, puts_with_confirms, takes_with_acks
from benchmarks.tasks import Run, event_loop, many_tasks

JOBS_PER_S = Unit("jobs/s", more_is_better=True)
# Jobs that are worked in one round, and how many at a time.
JOBS = 10_000
JOBS_QUICK = 3_000
SQLITE_JOBS = 3_000
SQLITE_JOBS_QUICK = 1_000
BATCH = 100
TASKS = 1000
POOL = 10
# What a broker with a confirm for each message reached where the target was set, five times.
PUTS_PER_S = 7_500.0

# The same room in its pages for new versions of rows as dibs leaves.
RAW_TABLE = """\
CREATE TABLE raw_job (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue text NOT NULL, payload text NOT NULL,
    priority integer NOT NULL DEFAULT 0, due_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    tries integer NOT NULL DEFAULT 0, claim_id text, token bigint NOT NULL DEFAULT 0, expires_at timestamptz
) WITH (fillfactor = 70)"""
RAW_INDEX = "CREATE INDEX raw_job_order ON raw_job (queue, priority DESC, due_at, id)"
RAW_PUT = "INSERT INTO raw_job (queue, payload) VALUES ('raw', $1) RETURNING id"
RAW_FILL = "INSERT INTO raw_job (queue, payload) SELECT 'raw', number::text FROM generate_series(1, %s) AS number"
RAW_TAKE = """\
UPDATE raw_job SET claim_id = %s, token = token + 1, tries = tries + 1,
    expires_at = clock_timestamp() + interval '30 s'
WHERE id = ANY (ARRAY(
    SELECT id FROM raw_job
    WHERE queue = 'raw' AND due_at <= now() AND (claim_id IS NULL OR expires_at <= now())
    ORDER BY priority DESC, due_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING id, payload, tries, token"""
RAW_DONE = "DELETE FROM raw_job WHERE id = ANY (%s) AND claim_id = %s AND expires_at > clock_timestamp()"


def make_raw_table(url: str) -> None:
    """The table of the raw statements."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(RAW_TABLE)
        connection.execute(RAW_INDEX)


def worked_in(jobs: int, work: Callable[[], int]) -> list[float]:
    """Work until so many jobs are done, each call of ``work`` saying how many more are; jobs a second."""
    done = 0
    start = time.perf_counter()
    while done < jobs:
        more = work()
        assert more, f"{jobs - done} jobs are missing"
        done += more
    return [done / (time.perf_counter() - start)]


def pg_queue_batch(bench: Bench) -> None:
    """One process takes and finishes jobs, a hundred at a time, from a queue filled beforehand; jobs a second.

    dibs: ``batch = queue.take(100)``, ``batch.done()``. The reference is the raw statements on one psycopg connection
    in autocommit. pgqueuer's own dequeue and log, without its handlers, run on asyncpg with batches of 100 and of 1000.
    RabbitMQ delivers to pika with a prefetch of 100 and is told of half as many at a time, where rabbitmq-server is
    installed.
    """
    jobs = JOBS_QUICK if bench.quick else JOBS
    with (
        bench.database() as url,
        dibs.connect(url) as client,
        psycopg.connect(url, autocommit=True) as connection,
        event_loop() as run,
        broker(bench) as rabbit,
    ):
        queue = client.queue("batches")
        make_raw_table(url)

        targets = [Target(0.65, "raw statements")]
        contestants: dict[str, Round] = {
            "dibs": lambda: _dibs_round(queue, jobs),
            "raw statements": lambda: _raw_round(connection, jobs),
        }
        pgqueuer = run(_pgqueuer(url))
        for size in (BATCH, 10 * BATCH):
            contestants[f"pgqueuer, {size}"] = _pgqueuer_round(run, pgqueuer, jobs, size)
            targets.append(Target(1.5, f"pgqueuer, {size}"))
        if rabbit is not None:
            contestants["RabbitMQ"] = lambda: takes_with_acks(rabbit, jobs, BATCH)
            targets.append(Target(1.5, "RabbitMQ"))
        bench.race("take 100, done 100", JOBS_PER_S, contestants, targets)


def _dibs_round(queue: dibs.Queue, jobs: int) -> list[float]:
    queue.put_many(range(jobs))

    def work() -> int:
        batch = queue.take(BATCH)
        batch.done()
        return len(batch)

    return worked_in(jobs, work)


def _raw_round(connection: psycopg.Connection, jobs: int) -> list[float]:
    connection.execute(RAW_FILL, (jobs,))
    claims = itertools.count()

    def work() -> int:
        claim_id = f"raw-{next(claims)}"
        cursor = connection.execute(RAW_TAKE, (claim_id, BATCH), prepare=True)
        ids = [row[0] for row in cursor.fetchall()]
        return connection.execute(RAW_DONE, (ids, claim_id), prepare=True).rowcount

    return worked_in(jobs, work)


async def _pgqueuer(url: str) -> Any:
    """pgqueuer's queries on a connection of their own, and its tables."""
    from pgqueuer.queries import Queries

    queries = Queries.from_asyncpg_connection(await asyncpg.connect(url))
    await queries.install()
    return queries


def _pgqueuer_round(run: Run, queries: Any, jobs: int, size: int) -> Round:
    from pgqueuer.ports.repository import EntrypointExecutionParameter

    entrypoints = {"work": EntrypointExecutionParameter(concurrency_limit=0)}
    process = uuid.uuid4()

    async def round_() -> list[float]:
        await queries.enqueue(["work"] * jobs, [b"1"] * jobs, [0] * jobs)
        start = time.perf_counter()
        done = 0
        while done < jobs:
            taken = await queries.dequeue(size, entrypoints, process, None, timedelta(seconds=30))
            await queries.log_jobs([(job, "successful", None) for job in taken])
            done += len(taken)
        return [done / (time.perf_counter() - start)]

    return lambda: run(round_())


def pg_queue_put(bench: Bench) -> None:
    """1000 asyncio tasks put jobs, one by one, each waiting until its own is durable; jobs a second in all.

    dibs: ``await queue.put(payload)``, all tasks share one client. The peer: one row inserted each, in autocommit, over
    an asyncpg pool of 10 connections. RabbitMQ is sent persistent messages to a durable queue by pika, which waits for
    the confirm of each, where rabbitmq-server is installed; where it is not, the target is five times what it reached
    on the machine on which the target was set.
    """
    seconds = max(1.0, 2 * bench.round_s)
    names = [f"task/{number}" for number in range(TASKS)]
    with bench.database() as url, event_loop() as run, broker(bench) as rabbit:
        make_raw_table(url)
        client = dibs.connect_async(url)
        queue = client.queue("puts")
        pool = run(_opened(url))

        def round_of(put: Callable[[str], Awaitable[object]]) -> Round:
            return lambda: run(many_tasks(put, names, seconds))

        contestants: dict[str, Round] = {
            "dibs": round_of(queue.put),
            "asyncpg pool of 10": round_of(lambda payload: pool.fetchval(RAW_PUT, payload)),
        }
        target = Target(PUTS_PER_S)
        if rabbit is not None:
            contestants["RabbitMQ, a confirm each"] = lambda: puts_with_confirms(rabbit, seconds)
            target = Target(5.0, "RabbitMQ, a confirm each")
        try:
            bench.race("1000 tasks, one durable put each", JOBS_PER_S, contestants, [target])
        finally:
            run(client.close())
            pool.terminate()


async def _opened(url: str) -> asyncpg.Pool:
    return await asyncpg.create_pool(url, min_size=POOL, max_size=POOL)


def sqlite_queue(bench: Bench) -> None:
    """One process takes and finishes jobs, a hundred at a time, from a queue in a file; jobs a second.

    dibs: ``batch = queue.take(100)``, ``batch.done()``. huey and litequeue know no batches: they hand out one job after
    the other, as they are shipped. huey deletes a task when it hands it out (one whose worker dies is lost), so there
    is nothing to finish; litequeue is told ``done``, and gives what its worker did not finish to nobody else.
    """
    jobs = SQLITE_JOBS_QUICK if bench.quick else SQLITE_JOBS
    with bench.folder() as folder, dibs.connect(f"sqlite:///{folder}/dibs.db") as client:
        queue = client.queue("batches")

        with _huey(folder, jobs) as huey_round, _litequeue(folder, jobs) as litequeue_round:
            bench.race(
                "take 100, done 100",
                JOBS_PER_S,
                {"dibs": lambda: _dibs_round(queue, jobs), "huey": huey_round, "litequeue": litequeue_round},
                [Target(5.0, "huey"), Target(5.0, "litequeue")],
            )


@contextmanager
def _huey(folder: Path, jobs: int) -> Iterator[Round]:
    from huey import SqliteHuey

    path = str(folder / "huey.db")
    huey = SqliteHuey(filename=path)

    @huey.task()
    def nothing() -> None:
        pass

    task = huey.serialize_task(nothing.s())

    def round_() -> list[float]:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.executemany(
                "INSERT INTO task (queue, data, priority) VALUES (?, ?, 0)", [(huey.storage.name, task)] * jobs
            )
        return worked_in(jobs, lambda: int(huey.dequeue() is not None))

    try:
        yield round_
    finally:
        huey.storage.close()


@contextmanager
def _litequeue(folder: Path, jobs: int) -> Iterator[Round]:
    from litequeue import LiteQueue

    queue = LiteQueue(str(folder / "litequeue.db"))

    def work() -> int:
        message = queue.pop()
        queue.done(message.message_id)
        return 1

    def round_() -> list[float]:
        with queue.transaction():
            for number in range(jobs):
                queue.put(str(number))
        return worked_in(jobs, work)

    try:
        yield round_
    finally:
        queue.close()
