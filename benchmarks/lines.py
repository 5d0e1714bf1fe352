"""Works on waiting lines with many in them: how evenly they are served, in which order, and how fast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import dibs
from benchmarks.crowd import answer, crowd
from benchmarks.handover import file_lock
from benchmarks.harness import MS, Bench, Round, Target, Unit
from benchmarks.redis_works import EverySecondRedis

UNEVEN = Unit("× the fewest", more_is_better=False)
OUT_OF_ORDER = Unit("out of order", more_is_better=False)
PROCESSES = 8
LOOPING_S = 10.0
LOOPING_QUICK_S = 3.0
LOOPING_ROUNDS = 3
WAITERS = 10_000
WAITERS_QUICK = 2_000
WAITING_PROCESSES = 5


def fairness(bench: Bench) -> None:
    """8 processes loop on one lock, taking it and giving it back, for 10 s: the most grants to one by the fewest.

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
                for end in ends:
                    end.send((seconds,))
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


def _looping_process(kind: Callable[[str], Any], where: str) -> Callable[[float], int]:
    lock = kind(where)
    lock.acquire()
    lock.release()

    def run(seconds: float) -> int:
        until = time.monotonic() + seconds
        grants = 0
        while True:
            lock.acquire()
            lock.release()
            if time.monotonic() >= until:
                return grants
            grants += 1

    return run


def dibs_lock_to_loop_on(url: str) -> Any:
    return dibs.connect(url).lock("loop")


def redis_py_lock(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url.partition("?")[0]).lock("redis-py-loop", timeout=30)


def pg_waiters(bench: Bench) -> None:
    """10,000 tasks in 5 processes wait for one lock, which each gives back at once; ms a hand-over, and in what order.

    Out of order is who is served before somebody of its process that came earlier, and a process that is served twice
    before each of the others that has somebody waiting: a process is in the store's line with its first waiter, and
    lines up with the next when that one has been served. Order is told by the fencing tokens.
    """
    waiters = WAITERS_QUICK if bench.quick else WAITERS
    case = f"{waiters:,} waiters in {WAITING_PROCESSES} processes"
    out_of_order: list[float] = []
    with (
        bench.database() as url,
        dibs.connect(url) as client,
        crowd(WAITING_PROCESSES, _waiting_process, url) as ends,
    ):

        def served() -> list[float]:
            with client.lock("line", ttl=600):
                for end in ends:
                    end.send(("line_up", waiters // WAITING_PROCESSES))
                for end in ends:
                    answer(end)
                for end in ends:
                    end.send(("wait",))
                start = time.monotonic()
            tokens = [answer(end) for end in ends]
            took = time.monotonic() - start
            out_of_order.append(float(violations(tokens)))
            return [took * 1000 / waiters]

        bench.race(case, MS, {"dibs": served}, rounds=2)
        bench.race(case, OUT_OF_ORDER, {"dibs": partial(list, out_of_order)}, [Target(0.0)], rounds=1)


def violations(tokens: list[list[int]]) -> int:
    """How many were served out of order; ``tokens`` are those of each process's waiters, in order of their arrival."""
    count = sum(1 for of_one in tokens for before, after in pairwise(of_one) if after < before)
    grants = sorted((token, process) for process, of_one in enumerate(tokens) for token in of_one)
    left = [len(of_one) for of_one in tokens]
    last = [-1] * len(tokens)  # the place of each process's latest grant
    for place, (_, process) in enumerate(grants):
        if last[process] >= 0:
            others = (other for other in range(len(tokens)) if other != process and left[other])
            count += any(last[other] < last[process] for other in others)
        last[process] = place
        left[process] -= 1
    return count


def _waiting_process(url: str) -> Callable[..., object]:
    loop = asyncio.new_event_loop()
    client = dibs.connect_async(url)
    tasks: list[asyncio.Task[int]] = []

    async def wait() -> int:
        async with client.lock("line") as lease:
            return lease.fencing_token

    async def line_up(count: int) -> None:
        tasks[:] = [asyncio.ensure_future(wait()) for _ in range(count)]
        await asyncio.sleep(0.5)  # they are in line, the first of them in the store's

    def do(verb: str, count: int = 0) -> object:
        if verb == "line_up":
            return loop.run_until_complete(line_up(count))
        return loop.run_until_complete(asyncio.gather(*tasks))

    return do
