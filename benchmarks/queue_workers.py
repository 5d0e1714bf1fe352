"""Works on queues whose jobs are worked by handlers: how many a second, and how soon an idle worker has one."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg

import dibs
from benchmarks.crowd import answer, crowd
from benchmarks.harness import MS, Bench, Round, Target
from benchmarks.queues import JOBS_PER_S
from benchmarks.redis_works import EverySecondRedis
from benchmarks.tasks import event_loop

JOBS = 10_000
JOBS_QUICK = 2_000
# Of whoever works one job after the other, in some milliseconds each, fewer say as much.
SLOW_JOBS = 500
SLOW_JOBS_QUICK = 200
STUCK_S = 60.0
# How many jobs an idle worker is woken for in one round, and for how long it has been idle by then.
WAKES = 25
IDLE_MIN_S = 0.020
IDLE_MAX_S = 0.100


class Counting:
    """Counts handled jobs from the first to the last of a round, which sets an event of whoever works them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._done: Callable[[], object] = lambda: None
        self._jobs = self._seen = 0
        self._first = self._last = 0.0

    def begin(self, jobs: int, done: Callable[[], object]) -> None:
        """So many jobs are going to be handled; say so when the last one is."""
        self._jobs, self._seen, self._done = jobs, 0, done

    def handled(self) -> None:
        """A handler was called."""
        with self._mutex:
            self._seen += 1
            if self._seen == 1:
                self._first = time.perf_counter()
            if self._seen == self._jobs:
                self._last = time.perf_counter()
                self._done()

    def jobs_per_s(self) -> list[float]:
        """After the last job."""
        assert self._seen == self._jobs, f"{self._seen} jobs were handled instead of {self._jobs}"
        return [self._jobs / (self._last - self._first)]


# chancy finds what it is to call by its name.
COUNTING = Counting()


async def handle_for_chancy() -> None:
    """What chancy calls."""
    COUNTING.handled()


def pg_queue_run(bench: Bench) -> None:
    """A handler that does nothing is called for each job of a queue filled beforehand; jobs a second, first to last.

    dibs: ``queue.run(handler)`` with its defaults, in threads and in tasks. procrastinate's and pgqueuer's workers run
    with theirs (one job at a time; batches of 10), with async handlers. chancy's default, a process pool that asks for
    a few jobs every five seconds, would be no comparison: it gets its asyncio executor, 100 jobs at a time, and eager
    polling.
    """
    jobs, slow = (JOBS_QUICK, SLOW_JOBS_QUICK) if bench.quick else (JOBS, SLOW_JOBS)
    logging.getLogger("chancy").addHandler(logging.NullHandler())  # else it sets up one that prints
    with bench.database() as url, dibs.connect(url) as client, event_loop() as run:
        async_client = dibs.connect_async(url)
        contestants: dict[str, Round] = {
            "dibs": lambda: _in_threads(client.queue("threads"), jobs),
            "dibs, tasks": lambda: run(_in_tasks(async_client.queue("tasks"), jobs)),
            "procrastinate": lambda: run(_procrastinate(url, slow)),
            "pgqueuer": lambda: run(_pgqueuer(url, jobs)),
        }
        targets = [Target(10.0, "procrastinate"), Target(1.0, "pgqueuer")]
        run(_install_procrastinate(url))
        run(_install_pgqueuer(url))
        if sys.version_info >= (3, 11):
            run(_install_chancy(url))
            contestants["chancy"] = lambda: run(_chancy(url, jobs))
            targets.append(Target(1.0, "chancy"))
        try:
            bench.race("a handler for each job", JOBS_PER_S, contestants, targets)
        finally:
            run(async_client.close())


def _in_threads(queue: Any, jobs: int) -> list[float]:
    queue.put_many(range(jobs))
    counting, stop = Counting(), threading.Event()
    counting.begin(jobs, stop.set)
    queue.run(lambda job: counting.handled(), stop=stop)
    left = queue.depth()
    assert (left.ready, left.claimed) == (0, 0), left
    return counting.jobs_per_s()


async def _in_tasks(queue: Any, jobs: int) -> list[float]:
    await queue.put_many(range(jobs))
    counting, stop = Counting(), asyncio.Event()
    counting.begin(jobs, stop.set)

    async def handler(job: Any) -> None:
        counting.handled()

    await queue.run(handler, stop=stop)
    return counting.jobs_per_s()


def _procrastinate_app(url: str) -> Any:
    import procrastinate

    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))


async def _install_procrastinate(url: str) -> None:
    app = _procrastinate_app(url)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


async def _procrastinate(url: str, jobs: int) -> list[float]:
    app = _procrastinate_app(url)
    counting = Counting()
    counting.begin(jobs, lambda: None)

    @app.task(name="handle")
    async def handle() -> None:
        counting.handled()

    async with app.open_async():
        await handle.batch_defer_async(*({} for _ in range(jobs)))
        await app.run_worker_async(wait=False, install_signal_handlers=False)
    return counting.jobs_per_s()


async def _install_pgqueuer(url: str) -> None:
    from pgqueuer.queries import Queries

    connection = await asyncpg.connect(url)
    await Queries.from_asyncpg_connection(connection).install()
    await connection.close()


async def _pgqueuer(url: str, jobs: int) -> list[float]:
    from pgqueuer.qm import QueueManager
    from pgqueuer.queries import Queries
    from pgqueuer.types import QueueExecutionMode

    connection = await asyncpg.connect(url)
    worker = QueueManager(Queries.from_asyncpg_connection(connection))
    counting = Counting()
    counting.begin(jobs, lambda: None)

    @worker.entrypoint("handle")
    async def handle(job: Any) -> None:
        counting.handled()

    await worker.queries.enqueue(["handle"] * jobs, [None] * jobs, [0] * jobs)
    await worker.run(dequeue_timeout=timedelta(seconds=1), batch_size=10, mode=QueueExecutionMode.drain)
    await connection.close()
    return counting.jobs_per_s()


async def _install_chancy(url: str) -> None:
    from chancy import Chancy, Queue

    async with Chancy(url) as chancy:
        await chancy.migrate()
        options: dict[str, Any] = {"executor": Chancy.Executor.Async, "concurrency": 100, "eager_polling": True}
        await chancy.declare(Queue("default", **options), upsert=True)


async def _chancy(url: str, jobs: int) -> list[float]:
    from chancy import Chancy, Job, Worker

    done = asyncio.Event()
    async with Chancy(url) as chancy:
        COUNTING.begin(jobs, done.set)
        async for _ in chancy.push_many([Job.from_func(handle_for_chancy) for _ in range(jobs)]):
            pass
        async with Worker(chancy, register_signal_handlers=False):
            await asyncio.wait_for(done.wait(), STUCK_S)
    return COUNTING.jobs_per_s()


def pg_queue_wake(bench: Bench) -> None:
    """From ``queue.put`` in one process to the handler in another that was idle, on PostgreSQL; in ms.

    The worker, ``queue.run`` with its defaults, has had nothing to do for a random 20 to 100 ms. What is measured
    begins before the put, so its commit is part of it.
    """
    with bench.database() as url:
        _race_wakes(bench, url)


def redis_queue_wake(bench: Bench) -> None:
    """From ``queue.put`` in one process to the handler in another that was idle, on Redis; in ms. As on PostgreSQL."""
    _race_wakes(bench, bench.started(EverySecondRedis).create_place())


def _race_wakes(bench: Bench, url: str) -> None:
    with dibs.connect(url) as client, crowd(1, _worker, url) as (worker,):
        queue = client.queue("wakes")
        idle = random.Random(1)

        def round_() -> list[float]:
            samples = []
            for _ in range(WAKES):
                time.sleep(idle.uniform(IDLE_MIN_S, IDLE_MAX_S))
                put_at = time.clock_gettime(time.CLOCK_MONOTONIC)
                queue.put("wake up")
                worker.send(())
                handled_at: float = answer(worker)
                samples.append((handled_at - put_at) * 1000)
            return samples

        bench.race("put to handler, idle worker", MS, {"dibs": round_}, [Target(5.0)])


def _worker(url: str) -> Callable[[], float]:
    """In another process: a worker, and what says when it handled its next job."""
    import queue

    handled: queue.SimpleQueue[float] = queue.SimpleQueue()
    jobs = dibs.connect(url).queue("wakes")
    work = lambda job: handled.put(time.clock_gettime(time.CLOCK_MONOTONIC))  # noqa: E731
    threading.Thread(target=jobs.run, args=(work,), daemon=True).start()
    return lambda: handled.get(timeout=STUCK_S)
