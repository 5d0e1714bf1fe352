"""Works on PostgreSQL: dibs beside the same two statements on the raw driver, and beside pals.

*The raw pair* is what a team would write by hand, and the least a lease in a table can do: a conditional UPDATE that
takes a free or expired lock and raises its token, and an UPDATE that gives it back. Both are prepared and durable, and
its rows are there already. Everybody connects over TCP to the same server.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import asyncpg
import psycopg
import psycopg_pool
import sqlalchemy

import dibs
from benchmarks.far import far
from benchmarks.harness import PAIRS_PER_S, Bench, Target, lone_thread
from benchmarks.tasks import event_loop, many_tasks

NAMES = 100
POOL = 10
POOLED = "raw pair, pool of 10"
TASKS = 1000
HELD_S = 0.005

# The same room in its pages for new versions of rows as dibs leaves.
RAW_TABLE = """\
CREATE TABLE raw_lock (
    name text PRIMARY KEY, claim_id text, token bigint NOT NULL, expires timestamptz NOT NULL
) WITH (fillfactor = 70)"""
RAW_ROWS = "INSERT INTO raw_lock SELECT unnest(%s::text[]), NULL, 0, clock_timestamp()"
RAW_ACQUIRE = """\
UPDATE raw_lock SET claim_id = %s, token = token + 1, expires = clock_timestamp() + interval '30 s'
WHERE name = %s AND (claim_id IS NULL OR expires <= clock_timestamp()) RETURNING token"""
RAW_RELEASE = "UPDATE raw_lock SET claim_id = NULL WHERE name = %s AND claim_id = %s"
# What dibs does: a release that a crash forgets is made up for by the expiry, so nobody waits for the disk.
RAW_RELEASE_RELAXED = """\
WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
UPDATE raw_lock SET claim_id = NULL FROM relaxed WHERE name = %s AND claim_id = %s"""


def pg_lone(bench: Bench) -> None:
    """One thread takes and gives back locks nobody else wants, in pairs a second.

    dibs: ``with client.lock(name): pass``, an object for each use. The reference is the raw pair on one psycopg
    connection in autocommit; "relaxed release" is the same with a release that does not wait for the disk, as dibs's
    does not. pals (advisory locks of the session, no expiry, no token, nothing written to disk) runs
    on an SQLAlchemy engine with psycopg: ``with locker.lock(name): pass``, which sends several statements a pair.
    """
    import pals

    names = [f"job/{number}" for number in range(NAMES)]
    seconds = bench.round_s
    with (
        bench.database() as url,
        dibs.connect(url) as client,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        make_raw_rows(url, names)
        raw = _RawPair()
        engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        locker = pals.Locker("benchmark", create_engine_callable=lambda: engine)

        def dibs_pair(name: str) -> None:
            with client.lock(name):
                pass

        def raw_pair(name: str) -> None:
            raw.release(connection, name, raw.acquire(connection, name))

        def relaxed_pair(name: str) -> None:
            claim_id = raw.acquire(connection, name)
            connection.execute(RAW_RELEASE_RELAXED, (name, claim_id), prepare=True)

        def pals_pair(name: str) -> None:
            with locker.lock(name):
                pass

        try:
            for case, these in (("one name", names[:1]), ("100 names", names)):
                bench.race(
                    case,
                    PAIRS_PER_S,
                    {
                        "dibs": partial(lone_thread, dibs_pair, these, seconds),
                        "raw pair": partial(lone_thread, raw_pair, these, seconds),
                        "relaxed release": partial(lone_thread, relaxed_pair, these, seconds),
                        "pals": partial(lone_thread, pals_pair, these, seconds),
                    },
                    [Target(0.9, "raw pair")],
                )
        finally:
            engine.dispose()


def pg_threads(bench: Bench) -> None:
    """64 and 8 threads, each with a name of its own, take and give back as fast as they can; pairs a second in all.

    dibs: all threads share one client. The peer: the raw pair over a psycopg_pool.ConnectionPool of 10 connections in
    autocommit, which each statement takes one from for itself, so that a held lock occupies no connection.
    """
    for threads, bound in ((64, 2.0), (8, 0.85)):
        with bench.database() as url:
            case = f"{threads} threads, different names"
            _race_threads(bench, case, url, threads, lambda: None, [Target(bound, POOLED)])


def pg_far(bench: Bench) -> None:
    """64 and 8 threads as in ``pg-threads``, but each holds its lock for 5 ms, and the server is 2 ms away.

    Everybody connects through a proxy that keeps each piece for 1 ms, either way, and takes some time itself.
    """
    for threads in (64, 8):
        with bench.database() as near, far(near) as url:
            _race_threads(bench, f"{threads} threads that hold for 5 ms", url, threads, hold, [])


def hold() -> None:
    """Work under a lock, now shorter and now longer."""
    time.sleep(HELD_S * random.uniform(0.5, 1.5))


def _race_threads(
    bench: Bench, case: str, url: str, threads: int, work: Callable[[], None], targets: Sequence[Target]
) -> None:
    seconds = max(1.0, 2 * bench.round_s)
    names = [f"thread/{number}" for number in range(threads)]
    with (
        dibs.connect(url) as client,
        psycopg_pool.ConnectionPool(url, min_size=POOL, max_size=POOL, kwargs={"autocommit": True}, open=True) as pool,
    ):
        make_raw_rows(url, names)
        raw = _RawPair()
        pool.wait()

        def dibs_pair(name: str) -> None:
            with client.lock(name):
                work()

        def raw_pair(name: str) -> None:
            with pool.connection() as connection:
                claim_id = raw.acquire(connection, name)
            work()
            with pool.connection() as connection:
                raw.release(connection, name, claim_id)

        bench.race(
            case,
            PAIRS_PER_S,
            {
                "dibs": lambda: many_threads(dibs_pair, names, seconds),
                POOLED: lambda: many_threads(raw_pair, names, seconds),
            },
            targets,
        )


def many_threads(pair: Callable[[str], object], names: Sequence[str], seconds: float) -> list[float]:
    """One thread a name, each calling ``pair(name)`` over and over for so many seconds; pairs a second in all."""
    done = [0] * len(names)
    errors: list[BaseException] = []
    together = threading.Barrier(len(names) + 1)
    stop = threading.Event()

    def thread(number: int, name: str) -> None:
        together.wait()
        try:
            while not stop.is_set():
                pair(name)
                done[number] += 1
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=thread, args=pair, daemon=True) for pair in enumerate(names)]
    for one in threads:
        one.start()
    together.wait()
    start = time.perf_counter()
    try:
        time.sleep(seconds)
    finally:
        stop.set()
        for one in threads:
            one.join()
    if errors:
        raise errors[0]
    return [sum(done) / (time.perf_counter() - start)]


def pg_async(bench: Bench) -> None:
    """1000 asyncio tasks, each with a name of its own, take and give back as fast as they can; pairs a second in all.

    dibs: ``async with client.lock(name): pass``, all tasks share one client. The peer: the raw pair over an asyncpg
    pool of 10 connections, ``await pool.fetchval(…)`` and ``await pool.execute(…)``, which asyncpg prepares by itself.
    By default its pool resets a connection that comes back with one more statement; "no reset" is the same without.
    """
    names = [f"task/{number}" for number in range(TASKS)]
    seconds = max(1.0, 2 * bench.round_s)
    with bench.database() as url, event_loop() as run:
        make_raw_rows(url, names)
        client = dibs.connect_async(url)

        async def dibs_pair(name: str) -> None:
            async with client.lock(name):
                pass

        async def no_reset(_connection: object) -> None:
            pass

        async def opened(**options) -> asyncpg.Pool:
            return await asyncpg.create_pool(url, min_size=POOL, max_size=POOL, **options)

        def pair_over(pool: asyncpg.Pool) -> Callable[[str], Awaitable[None]]:
            claims = itertools.count()
            acquire, release = _numbered(RAW_ACQUIRE), _numbered(RAW_RELEASE)

            async def raw_pair(name: str) -> None:
                claim_id = f"raw-{next(claims)}"
                token = await pool.fetchval(acquire, claim_id, name)
                assert token is not None
                await pool.execute(release, name, claim_id)

            return raw_pair

        pool = run(opened())
        bare_pool = run(opened(reset=no_reset))
        pool_pair, bare_pool_pair = pair_over(pool), pair_over(bare_pool)
        try:
            bench.race(
                "1000 tasks, different names",
                PAIRS_PER_S,
                {
                    "dibs": lambda: run(many_tasks(dibs_pair, names, seconds)),
                    "asyncpg pool of 10": lambda: run(many_tasks(pool_pair, names, seconds)),
                    "the same, no reset": lambda: run(many_tasks(bare_pool_pair, names, seconds)),
                },
                [Target(12.0, "asyncpg pool of 10")],
            )
        finally:
            run(client.close())
            pool.terminate()
            bare_pool.terminate()


class _RawPair:
    """The two statements on psycopg connections, with a claim id for each pair as dibs has; shared by threads."""

    def __init__(self) -> None:
        self._claims = itertools.count()

    def acquire(self, connection: psycopg.Connection, name: str) -> str:
        claim_id = f"raw-{next(self._claims)}"
        row = connection.execute(RAW_ACQUIRE, (claim_id, name), prepare=True).fetchone()
        assert row is not None
        return claim_id

    def release(self, connection: psycopg.Connection, name: str, claim_id: str) -> None:
        connection.execute(RAW_RELEASE, (name, claim_id), prepare=True)


def make_raw_rows(url: str, names: Sequence[str]) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(RAW_TABLE)
        connection.execute(RAW_ROWS, (list(names),))


def _numbered(sql: str) -> str:
    """The statement with $1, $2 for psycopg's placeholders, as asyncpg wants it."""
    numbers = itertools.count(1)
    return re.sub("%s", lambda _: f"${next(numbers)}", sql)
