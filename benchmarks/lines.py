"""Works on waiting lines with many in them: how evenly they are served, in which order, and how fast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import psycopg

import dibs
from benchmarks.crowd import answer, crowd
from benchmarks.handover import AdvisoryLock, file_lock
from benchmarks.harness import MS, PAIRS_PER_S, Bench, Round, Target, Unit
from benchmarks.postgres import many_threads
from benchmarks.redis_works import EverySecondRedis

TICKETS = """\
CREATE TABLE tickets (claim_id text PRIMARY KEY, ticket bigint);
CREATE FUNCTION note_ticket() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO public.tickets VALUES (NEW.claim_id, NEW.ticket) ON CONFLICT DO NOTHING; RETURN NEW;
END $$;
CREATE TRIGGER note_ticket AFTER INSERT ON dibs_lease_line FOR EACH ROW EXECUTE FUNCTION note_ticket()"""
UNEVEN = Unit("× the fewest", more_is_better=False)
OUT_OF_ORDER = Unit("out of order", more_is_better=False)
PROCESSES = 8
LOOPING_S = 10.0
LOOPING_QUICK_S = 3.0
LOOPING_ROUNDS = 3
# Whoever begins first has the lock to itself for some milliseconds, and again who ends last: in each, as many grants as
# in half a second in line. So all loop for this long before grants are counted, and after.
ALL_LOOP_S = 0.5
LOOPING_THREADS = 8
WAITERS = 10_000
WAITERS_QUICK = 2_000
WAITING_PROCESSES = 5


def fairness(bench: Bench) -> None:
    """8 processes loop on one lock, taking it and giving it back, for 10 s: the most grants to one by the fewest.

    Counted are the 10 s in the middle of a longer time, so that throughout them all eight are there.
    dibs on SQLite, PostgreSQL and Redis serves in the order of arrival; redis-py's ``Lock`` tries again every 100 ms
    and filelock every 50 ms, as they do by default, so whoever has just released is ahead of everybody. A process that
    got nothing at all counts as having had one grant.
    """
    seconds = LOOPING_QUICK_S if bench.quick else LOOPING_S
    redis = bench.started(EverySecondRedis)
    with bench.folder() as folder, bench.database() as postgres_url, ExitStack() as stack:

        def looping(kind: Callable[[str], Any], where: str) -> Round:
            ends = stack.enter_context(crowd(PROCESSES, _looping_process, kind, where))

            def run() -> list[float]:
                since = time.monotonic() + ALL_LOOP_S
                for end in ends:
                    end.send((since, since + seconds))
                grants = [answer(end) for end in ends]
                return [max(grants) / max(1, min(grants))]

            return run

        peers = {
            "redis-py Lock": looping(redis_py_lock, redis.create_place()),
            "filelock": looping(file_lock, str(folder / "filelock")),
        }
        for case, url in (
            ("SQLite", f"sqlite:///{folder}/dibs.db"),
            ("PostgreSQL", postgres_url),
            ("Redis", redis.create_place()),
        ):
            contestants = {"dibs": looping(dibs_lock_to_loop_on, url), **peers}
            bench.race(case, UNEVEN, contestants, [Target(1.2)], rounds=LOOPING_ROUNDS)
            peers = {}  # they are the same beside every store


def _looping_process(kind: Callable[[str], Any], where: str) -> Callable[[float, float], int]:
    lock = kind(where)
    lock.acquire()
    lock.release()

    def run(since: float, until: float) -> int:
        grants = 0
        while True:
            lock.acquire()
            lock.release()
            now = time.monotonic()
            grants += since <= now < until
            if now >= until + ALL_LOOP_S:
                return grants

    return run


def dibs_lock_to_loop_on(url: str) -> Any:
    return dibs.connect(url).lock("loop")


def redis_py_lock(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url.partition("?")[0]).lock("redis-py-loop", timeout=30)


def turns(bench: Bench) -> None:
    """8 threads of one process loop on one lock, taking it and giving it back at once; pairs a second in all.

    dibs: one client, ``with client.lock(name): pass``. Beside it each thread has a lock object of its own, as each
    would have in a web server: filelock's, ``pg_advisory_lock`` on a connection, redis-py's ``Lock``. Whoever of those
    that try again has just released takes it again, which is quick, and not taking turns: see ``fairness``.
    """
    seconds = max(1.0, 2 * bench.round_s)
    redis = bench.started(EverySecondRedis)
    with bench.folder() as folder, bench.database() as postgres_url:
        stores: list[tuple[str, str, str, Callable[[str], Any], str]] = [
            ("SQLite", f"sqlite:///{folder}/dibs.db", "filelock", file_lock, str(folder / "filelock")),
            ("PostgreSQL", postgres_url, "pg_advisory_lock", AdvisoryLock, postgres_url),
            ("Redis", redis.create_place(), "redis-py Lock", redis_py_lock, redis.create_place()),
        ]
        for case, url, peer, make, where in stores:
            locks = {f"thread/{number}": make(where) for number in range(LOOPING_THREADS)}
            with dibs.connect(url) as client:
                _race_turns(bench, case, client, peer, locks, seconds)


def _race_turns(bench: Bench, case: str, client: dibs.Client, peer: str, locks: dict[str, Any], seconds: float) -> None:
    def dibs_turn(_thread: str) -> None:
        with client.lock("loop"):
            pass

    def peers_turn(thread: str) -> None:
        locks[thread].acquire()
        locks[thread].release()

    contestants: dict[str, Round] = {
        "dibs": lambda: many_threads(dibs_turn, list(locks), seconds),
        peer: lambda: many_threads(peers_turn, list(locks), seconds),
    }
    bench.race(case, PAIRS_PER_S, contestants)


def pg_waiters(bench: Bench) -> None:
    """10,000 tasks in 5 processes wait for one lock, which each gives back at once; ms a hand-over, and in what order.

    A process is in the store's line with the first of its waiters; the next lines up when that one has been served. Out
    of order is who is served, by its fencing token, after somebody who came later: later in its process, or later in
    the store's line, whose tickets a trigger of the benchmark writes down.
    """
    waiters = WAITERS_QUICK if bench.quick else WAITERS
    case = f"{waiters:,} waiters in {WAITING_PROCESSES} processes"
    out_of_order: list[float] = []
    with (
        bench.database() as url,
        dibs.connect(url) as client,
        psycopg.connect(url, autocommit=True) as connection,
        crowd(WAITING_PROCESSES, _waiting_process, url) as ends,
    ):
        client.setup()
        connection.execute(TICKETS)

        def served() -> list[float]:
            with client.lock("line", ttl=600):
                for end in ends:
                    end.send(("line_up", waiters // WAITING_PROCESSES))
                for end in ends:
                    answer(end)
                for end in ends:
                    end.send(("wait",))
                start = time.monotonic()
            grants = [answer(end) for end in ends]
            took = time.monotonic() - start
            tickets: dict[str, int] = dict(connection.execute("SELECT claim_id, ticket FROM tickets").fetchall())
            out_of_order.append(float(violations(grants, tickets)))
            return [took * 1000 / waiters]

        bench.race(case, MS, {"dibs": served}, rounds=2)
        bench.race(case, OUT_OF_ORDER, {"dibs": lambda: out_of_order}, [Target(0.0)], rounds=1)


def violations(grants: list[list[tuple[int, str]]], tickets: dict[str, int]) -> int:
    """How many were served too late; ``grants`` are token and claim of each process's waiters, in order of arrival."""
    served = sorted(grant for of_one in grants for grant in of_one)
    # (Who found the lock free and nobody in line has no ticket.)
    lines = [[tickets[claim_id] for _, claim_id in served if claim_id in tickets]]
    lines += [[token for token, _ in of_one] for of_one in grants]
    return sum(later < earlier for line in lines for earlier, later in pairwise(line))


def _waiting_process(url: str) -> Callable[..., object]:
    loop = asyncio.new_event_loop()
    client = dibs.connect_async(url)
    tasks: list[asyncio.Task[tuple[int, str]]] = []

    async def wait() -> tuple[int, str]:
        async with client.lock("line") as lease:
            return lease.fencing_token, lease.claim_id

    async def line_up(count: int) -> None:
        tasks[:] = [asyncio.ensure_future(wait()) for _ in range(count)]
        await asyncio.sleep(0.5)  # they are in line, the first of them in the store's

    async def finish() -> list[tuple[int, str]]:
        return await asyncio.gather(*tasks)

    def do(verb: str, count: int = 0) -> object:
        return loop.run_until_complete(line_up(count) if verb == "line_up" else finish())

    return do
