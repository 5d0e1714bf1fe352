"""Works on PostgreSQL: dibs beside the same two statements on the raw driver, and beside pals.

*The raw pair* is what a team would write by hand, and the least a lease in a table can do: a conditional UPDATE that
takes a free or expired lock and raises its token, and an UPDATE that gives it back. Both are prepared and durable, and
its rows are there already. Everybody connects over TCP to the same server.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import asyncpg
import psycopg
import psycopg_pool
import sqlalchemy

import dibs
from benchmarks.harness import MS, PAIRS_PER_S, Bench, Target, lone_thread
from benchmarks.tasks import event_loop, many_tasks

NAMES = 100
POOL = 10
TASKS = 1000
TTL_S = 30.0

RAW_TABLE = "CREATE TABLE raw_lock (name text PRIMARY KEY, claim_id text, token bigint NOT NULL, expires timestamptz NOT NULL)"
RAW_ROWS = "INSERT INTO raw_lock SELECT unnest(%s::text[]), NULL, 0, clock_timestamp()"
RAW_ACQUIRE = """\
UPDATE raw_lock SET claim_id = %s, token = token + 1, expires = clock_timestamp() + interval '30 s'
WHERE name = %s AND (claim_id IS NULL OR expires <= clock_timestamp()) RETURNING token"""
RAW_RELEASE = "UPDATE raw_lock SET claim_id = NULL WHERE name = %s AND claim_id = %s"


def pg_lone(bench: Bench) -> None:
    """One thread takes and gives back locks nobody else wants, in pairs a second.

    dibs: ``with client.lock(name): pass``, an object for each use. The reference is the raw pair on one psycopg
    connection in autocommit. pals (advisory locks of the session, no expiry, no token, nothing written to disk) runs
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
        _make_raw_rows(connection, names)
        raw = _RawPair()
        engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        locker = pals.Locker("benchmark", create_engine_callable=lambda: engine)

        def dibs_pair(name: str) -> None:
            with client.lock(name):
                pass

        def raw_pair(name: str) -> None:
            raw.release(connection, name, raw.acquire(connection, name))

        def pals_pair(name: str) -> None:
            with locker.lock(name):
                pass

        try:
            for case, these in (("one name", names[:1]), ("100 names", names)):
                bench.race(
                    case,
                    PAIRS_PER_S,
                    {
                        "dibs": lambda these=these: lone_thread(dibs_pair, these, seconds),
                        "raw pair": lambda these=these: lone_thread(raw_pair, these, seconds),
                        "pals": lambda these=these: lone_thread(pals_pair, these, seconds),
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
    seconds = max(1.0, 2 * bench.round_s)
    for threads, bound in ((64, 2.0), (8, 0.85)):
        names = [f"thread/{number}" for number in range(threads)]
        with bench.database() as url, dibs.connect(url) as client:
            with psycopg.connect(url, autocommit=True) as connection:
                _make_raw_rows(connection, names)
            raw = _RawPair()
            with psycopg_pool.ConnectionPool(
                url, min_size=POOL, max_size=POOL, kwargs={"autocommit": True}, open=True
            ) as pool:
                pool.wait()

                def dibs_pair(name: str, client: dibs.Client = client) -> None:
                    with client.lock(name):
                        pass

                def raw_pair(name: str, pool=pool, raw=raw) -> None:
                    with pool.connection() as connection:
                        claim_id = raw.acquire(connection, name)
                    with pool.connection() as connection:
                        raw.release(connection, name, claim_id)

                bench.race(
                    f"{threads} threads, different names",
                    PAIRS_PER_S,
                    {
                        "dibs": lambda pair=dibs_pair, names=names: many_threads(pair, names, seconds),
                        "raw pair, pool of 10": lambda pair=raw_pair, names=names: many_threads(pair, names, seconds),
                    },
                    [Target(bound, "raw pair, pool of 10")],
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

    dibs: ``async with client.lock(name): pass``, all tasks share one client. The peer: the raw pair over an asyncpg pool
    of 10 connections, ``await pool.fetchval(…)`` and ``await pool.execute(…)``, which asyncpg prepares by itself. By
    default its pool resets a connection that comes back, by one more statement; "no reset" is the same pool without.
    """
    names = [f"task/{number}" for number in range(TASKS)]
    seconds = max(1.0, 2 * bench.round_s)
    with bench.database() as url, event_loop() as run:
        with psycopg.connect(url, autocommit=True) as connection:
            _make_raw_rows(connection, names)
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


def pg_renew(bench: Bench) -> None:
    """One round of renewals, as the renewal lane sends it, for 10,000 and for 100,000 leases of one process; in ms.

    dibs: the store's ``act`` with a Renew for each lease, in chunks of at most ``RENEW_MAX``, on one connection. The
    peer: one prepared ``UPDATE … FROM unnest(…)`` for all of them, on rows laid out the same, in a table with the
    same primary key and no other index, through psycopg. Both tables are vacuumed before each round.
    """
    for leases, bound in ((10_000, 60.0), (100_000, 600.0)):
        with bench.database() as url, psycopg.connect(url, autocommit=True) as connection:
            address, _ = locate(url)
            with closing(address.open()) as store:
                store.setup(_deadline())
                bench.progress(f"making {leases:,} leases")
                renewals = [Renew(f"bench:job/{number}", f"bench-{number}", TTL_S) for number in range(leases)]
                for chunk in _chunks(renewals, BATCH_MAX):
                    store.act([Acquire(name, claim_id, HOUR_S, "benchmark") for name, claim_id, _, _ in chunk], _deadline())
                _copy_of_lease_table(connection, "raw_renew")
                names = [renewal.name for renewal in renewals]
                claim_ids = [renewal.claim_id for renewal in renewals]

                def dibs_round(store: Store = store, renewals: list[Renew] = renewals) -> list[float]:
                    before = time.perf_counter()
                    outcomes = [one for chunk in _chunks(renewals, RENEW_MAX) for one in store.act(chunk, _deadline())]
                    took = (time.perf_counter() - before) * 1000
                    assert all(type(outcome) is Renewed for outcome in outcomes)
                    return [took]

                def raw_round(names: list[str] = names, claim_ids: list[str] = claim_ids) -> list[float]:
                    before = time.perf_counter()
                    renewed = connection.execute(RAW_RENEW, (names, claim_ids), prepare=True).rowcount
                    took = (time.perf_counter() - before) * 1000
                    assert renewed == len(names)
                    return [took]

                bench.race(
                    f"{leases:,} leases",
                    MS,
                    {"dibs": dibs_round, "raw UPDATE … FROM unnest": raw_round},
                    [Target(bound)],
                    between=lambda connection=connection: _vacuum(connection, "dibs_lease", "raw_renew"),
                )
