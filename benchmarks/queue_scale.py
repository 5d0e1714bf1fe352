"""Works on queues in which many jobs stand that cannot be taken: they must cost a take next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import dibs
from benchmarks.harness import MS, Bench, Target
from benchmarks.mysql_works import mysql_database
from benchmarks.redis_works import EverySecondRedis

FEW = 200
MANY = 50_000
MANY_QUICK = 20_000
PUT_AT_ONCE = 5_000
TAKES = 10


def pg_queue_scale(bench: Bench) -> None:
    """Takes from a queue with many jobs that cannot be taken, beside a queue with two hundred of them; ms each.

    In strict order: all jobs are of one group, ``group_limit=1``; the first is taken and finished, and the next. While
    the group is busy: another worker has the first, and a take finds nothing. Beside later ones: all jobs are due in an
    hour; one that is due is put, taken and finished; and a take finds nothing. (20,000 jobs with ``--quick``, else
    50,000.)
    """
    with bench.database() as url:
        _race_takes(bench, url)


def mysql_queue_scale(bench: Bench) -> None:
    """The same as ``pg-queue-scale`` on MariaDB."""
    with mysql_database(bench) as url:
        _race_takes(bench, url)


def sqlite_queue_scale(bench: Bench) -> None:
    """The same as ``pg-queue-scale`` on SQLite."""
    with bench.folder() as folder:
        _race_takes(bench, f"sqlite:///{folder}/dibs.db")


def redis_queue_scale(bench: Bench) -> None:
    """The same as ``pg-queue-scale`` on Redis."""
    _race_takes(bench, bench.started(EverySecondRedis).create_place())


def _race_takes(bench: Bench, url: str) -> None:
    sizes = {f"{size:,} jobs": size for size in (MANY_QUICK if bench.quick else MANY, FEW)}
    targets = [Target(1.5, f"{FEW} jobs")]
    with dibs.connect(url) as client, dibs.connect(url) as other, ExitStack() as held:
        strict, later = {}, {}
        for label, size in sizes.items():
            bench.progress(f"putting {size:,} jobs")
            strict[label] = client.queue(f"strict-{size}", group_limit=1)
            later[label] = client.queue(f"later-{size}")
            for first in range(0, size, PUT_AT_ONCE):
                jobs = list(range(first, min(size, first + PUT_AT_ONCE)))
                strict[label].put_many(jobs, group="one")
                later[label].put_many(jobs, delay=3600)

        def race(case: str, act: Callable[[dibs.Queue], object], queues: dict[str, dibs.Queue]) -> None:
            seconds = bench.round_s if act is _find_nothing else 0.0
            rounds = {label: partial(_ms_each, partial(act, queue), seconds) for label, queue in queues.items()}
            bench.race(case, MS, rounds, targets)

        race("strict order", _work_one, strict)
        for size in sizes.values():
            held.enter_context(other.queue(f"strict-{size}", group_limit=1, ttl=600).take())
        race("strict order, busy", _find_nothing, strict)
        race("beside later jobs", _put_and_work, later)
        race("beside later jobs, none due", _find_nothing, later)


def _ms_each(act: Callable[[], object], seconds: float) -> list[float]:
    """Act for so long, and so often at the least: a take looks through everything only now and then."""
    done, start = 0, time.perf_counter()
    while done < TAKES or time.perf_counter() < start + seconds:
        act()
        done += 1
    return [(time.perf_counter() - start) * 1000 / done]


def _work_one(queue: dibs.Queue) -> None:
    with queue.take(timeout=0) as batch:
        for _ in batch:
            pass
    assert len(batch.won) == 1


def _put_and_work(queue: dibs.Queue) -> None:
    queue.put("now")
    _work_one(queue)


def _find_nothing(queue: dibs.Queue) -> None:
    batch = queue.take(timeout=0)
    assert not batch.won
