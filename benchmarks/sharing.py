"""Works on what several share: permits and several names beside a lock, readers beside an exclusive lock."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import dibs
from benchmarks.crowd import answer, crowd
from benchmarks.harness import MS, PAIRS_PER_S, Bench, Round, Target, lone_thread
from benchmarks.mysql_works import mysql_database
from benchmarks.redis_works import EverySecondRedis
from benchmarks.tasks import event_loop, many_tasks

PERMITS = 1000
TASKS = 200
TASK_PERMITS = 50
NAMES = 100
CROWDED = ("one", "two", "three")
CROWD = 6
CROWDED_S = 0.0025
CROWDED_MIN_S = 3.0
READERS = 50
READING_PROCESSES = 5
READ_S = 0.005
READING_MIN_S = 2.0


def pg_semaphore(bench: Bench) -> None:
    """One thread takes and gives back a permit of a semaphore nobody else uses, beside a lock; ms a pair.

    ``with client.semaphore(name, limit): pass`` and ``with client.lock(name): pass``, an object for each use: with a
    limit of 1, with a limit of 1000 and nobody else there, and with a limit of 1000 of which others hold 999. Then 200
    asyncio tasks that do so with a semaphore of 50 permits, beside as many with a lock each; pairs a second in all.
    """
    with bench.database() as url:
        _race_permits(bench, url)


def sqlite_semaphore(bench: Bench) -> None:
    """The same as ``pg-semaphore`` on SQLite."""
    with bench.folder() as folder:
        _race_permits(bench, f"sqlite:///{folder}/dibs.db")


def redis_semaphore(bench: Bench) -> None:
    """The same as ``pg-semaphore`` on Redis."""
    _race_permits(bench, bench.started(EverySecondRedis).create_place())


def mysql_semaphore(bench: Bench) -> None:
    """The same as ``pg-semaphore`` on MariaDB."""
    with mysql_database(bench) as url:
        _race_permits(bench, url)


def _race_permits(bench: Bench, url: str) -> None:
    seconds = bench.round_s
    with dibs.connect(url) as client, dibs.connect(url) as others:

        def of(make: Callable[[str], Any]) -> Round:
            def pair(name: str) -> None:
                with make(name):
                    pass

            return partial(_ms_a_pair, pair, seconds)

        def race(case: str, name: str, limit: int, bound: float) -> None:
            permit = of(lambda _name: client.semaphore(name, limit))
            bench.race(case, MS, {"semaphore": permit, "lock": of(client.lock)}, [Target(bound, "lock")])

        race("limit 1", "one", 1, 1.3)
        race("limit 1000, free", "thousand", PERMITS, 2.0)
        crowded = others.semaphore("crowded", PERMITS, ttl=600)
        for number in range(1, PERMITS):
            if number % 100 == 0:
                bench.progress(f"limit 1000: others take {number} permits")
            crowded.acquire()
        race("limit 1000, 999 held", "crowded", PERMITS, 2.0)
    _race_tasks(bench, url)


def _race_tasks(bench: Bench, url: str) -> None:
    """Many tasks of one client take and give back permits of one semaphore, or each a lock of its own."""
    with event_loop() as run:
        client = dibs.connect_async(url)
        try:

            async def permit(_name: str) -> None:
                async with client.semaphore("tasks", TASK_PERMITS):
                    pass

            async def lock(name: str) -> None:
                async with client.lock(name):
                    pass

            def of(pair: Callable[[str], Awaitable[object]]) -> Round:
                names = [f"task/{number}" for number in range(TASKS)]
                return lambda: run(many_tasks(pair, names, bench.round_s))

            contestants = {"semaphore": of(permit), "a lock each": of(lock)}
            bench.race(f"{TASKS} tasks, {TASK_PERMITS} permits", PAIRS_PER_S, contestants)
        finally:
            run(client.close())


def _ms_a_pair(pair: Callable[[str], object], seconds: float) -> list[float]:
    return [1000.0 / pairs_a_second for pairs_a_second in lone_thread(pair, ["shared/lock"], seconds)]


def pg_multilock(bench: Bench) -> None:
    """One thread takes and gives back 100 free names at once, ``with client.multilock(names): pass``; ms a pair.

    Beside it one lock, and the same 100 names as single locks, taken one after the other and given back in reverse.
    """
    names = [f"account/{number}" for number in range(NAMES)]
    seconds = max(1.0, bench.round_s)
    with bench.database() as url, dibs.connect(url) as client:

        def all_at_once(_name: str) -> None:
            with client.multilock(names):
                pass

        def one(name: str) -> None:
            with client.lock(name):
                pass

        def one_by_one(_name: str) -> None:
            with ExitStack() as stack:
                for name in names:
                    stack.enter_context(client.lock(name))

        bench.race(
            "100 free names",
            MS,
            {
                "multilock": partial(_ms_a_pair, all_at_once, seconds),
                "one lock": partial(_ms_a_pair, one, seconds),
                "100 locks": partial(_ms_a_pair, one_by_one, seconds),
            },
            [Target(3.0, "one lock")],
        )


def pg_multilock_crowd(bench: Bench) -> None:
    """Six threads of one client take two or three of three names and hold them for 2.5 ms; turns a second in all.

    Any two of them want a name in common, so that one is at work at a time: beside it one lock for everything.
    """
    with bench.database() as url, dibs.connect(url, lock_order_warnings=False) as client:

        def of(lock: Callable[[random.Random], Any]) -> Round:
            def turns(chance: random.Random, until: float, done: list[int]) -> None:
                count = 0
                while time.monotonic() < until:
                    with lock(chance):
                        time.sleep(CROWDED_S)
                    count += 1
                done.append(count)

            def run() -> list[float]:
                seconds, done = max(CROWDED_MIN_S, bench.round_s), list[int]()
                until = time.monotonic() + seconds
                chances = [random.Random(number) for number in range(CROWD)]
                threads = [threading.Thread(target=turns, args=(chance, until, done)) for chance in chances]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                return [sum(done) / seconds]

            return run

        contestants = {
            "multilock": of(lambda chance: client.multilock(chance.sample(CROWDED, chance.choice((2, 3))))),
            "one lock": of(lambda _: client.lock("everything")),
        }
        bench.race(f"{CROWD} threads, {len(CROWDED)} names", PAIRS_PER_S, contestants)


def pg_readers(bench: Bench) -> None:
    """50 readers in 5 processes read for 5 ms at a time, over and over; pairs a second in all.

    dibs: ``with client.rwlock(name).read()``, the ten threads of a process share a client. The peer is the same with
    ``client.lock(name)``, which lets one in at a time.
    """
    seconds = max(READING_MIN_S, bench.round_s)
    with bench.database() as url, ExitStack() as stack:

        def reading(kind: str) -> Round:
            ends = stack.enter_context(crowd(READING_PROCESSES, _reading_process, url, kind))

            def run() -> list[float]:
                for end in ends:
                    end.send((seconds,))
                return [sum(answer(end) for end in ends) / seconds]

            return run

        contestants = {"read()": reading("readers"), "exclusive lock": reading("lock")}
        bench.race("50 readers in 5 processes", PAIRS_PER_S, contestants, [Target(5.0, "exclusive lock")])


def _reading_process(url: str, kind: str) -> Callable[[float], int]:
    client = dibs.connect(url)

    def run(seconds: float) -> int:
        until = time.monotonic() + seconds
        done: list[int] = []

        def reader() -> None:
            reads = 0
            lock = client.lock("catalogue") if kind == "lock" else client.rwlock("catalogue/rw").read()
            while time.monotonic() < until:
                with lock:
                    time.sleep(READ_S)
                reads += 1
            done.append(reads)

        threads = [threading.Thread(target=reader) for _ in range(READERS // READING_PROCESSES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done)

    return run
