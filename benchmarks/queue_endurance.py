"""Works on what wears a queue down: a transaction that somebody has left open, and a crowd of workers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import psycopg

import dibs
from benchmarks.crowd import answer, crowd
from benchmarks.harness import MS, Bench, Race, Target, Unit
from benchmarks.queues import JOBS_PER_S
from tests.servers.mysql import MariaDBServer

OPEN_S = 180.0
OPEN_QUICK_S = 20.0
JOBS_A_SECOND = 1_000
BATCH = 100
# Takes at the start and at the end that are compared, as a part of all.
COMPARED_PART = 10

WORKERS = 16
CLAIMS = 100_000
CLAIMS_QUICK = 8_000
CROWD_STUCK_S = 1200.0
# Jobs that one worker takes at a time: few, so that they meet often.
TAKEN = 10
ERRORS = Unit("errors", more_is_better=False)


def pg_queue_open_transaction(bench: Bench) -> None:
    """1,000 jobs a second pass while a transaction with a snapshot stays open for 3 minutes; ms to claim a hundred.

    What such a transaction might still see cannot be vacuumed: every job that was done leaves a dead row and dead
    entries of indexes. Compared are the last tenth of the takes and the first, of one run that is not repeated.
    """
    seconds = OPEN_QUICK_S if bench.quick else OPEN_S
    with bench.database() as url, dibs.connect(url) as client:
        queue = client.queue("passing")
        for _ in range(20):  # to warm up
            _pass_by(queue)
        with psycopg.connect(url) as left_open:
            left_open.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            left_open.execute("SELECT txid_current_snapshot()")
            takes = []
            start = time.perf_counter()
            passes = int(seconds * JOBS_A_SECOND / BATCH)
            for number in range(passes):
                bench.progress(f"{number * BATCH:,} jobs have passed")
                takes.append(_pass_by(queue))
                time.sleep(max(0.0, start + (number + 1) * BATCH / JOBS_A_SECOND - time.perf_counter()))
            rate = passes * BATCH / (time.perf_counter() - start)
    part = len(takes) // COMPARED_PART
    samples = {"dibs, at the end": takes[-part:], "at the start": takes[:part]}
    case = f"open for {seconds:g} s, {rate:,.0f} jobs/s"
    bench.races.append(Race(bench.work, case, MS, samples, (Target(1.2, "at the start"),)))


def _pass_by(queue: dibs.Queue) -> float:
    """A hundred jobs are put, claimed and done; how many ms the claim took."""
    queue.put_many(range(BATCH))
    start = time.perf_counter()
    batch = queue.take(BATCH)
    took_ms = (time.perf_counter() - start) * 1000
    assert len(batch) == BATCH, batch
    batch.done()
    return took_ms


def mysql_queue_crowd(bench: Bench) -> None:
    """16 processes work one queue on MariaDB: errors that reach them in 100,000 claims, and jobs a second in all.

    Each puts ten jobs, takes ten and finishes them, over and over, so that all statements meet each other. A deadlock
    that the server resolves by rolling one of them back is dibs's business: none is to come out of a call.
    """
    claims = CLAIMS_QUICK if bench.quick else CLAIMS
    server = bench.started(MariaDBServer)
    url = server.create_database()
    try:
        with crowd(WORKERS, _working_process, url) as ends:
            bench.progress(f"{WORKERS} processes work")
            start = time.perf_counter()
            for end in ends:
                end.send((claims // WORKERS // TAKEN,))
            answers = [answer(end, CROWD_STUCK_S) for end in ends]
            took = time.perf_counter() - start
        with dibs.connect(url) as client:
            left = client.queue("crowd").depth()
    finally:
        server.drop_database(url)
    done = sum(done for done, _ in answers)
    errors = [error for _, of_one in answers for error in of_one]
    for error in sorted(set(errors)):
        print(f"{errors.count(error)} times: {error}", file=sys.stderr)
    assert errors or (done, left.ready) == (claims // WORKERS // TAKEN * TAKEN * WORKERS, 0), (done, left)
    case = f"{WORKERS} processes, {done:,} claims"
    bench.races.append(Race(bench.work, case, ERRORS, {"dibs": [float(len(errors))]}, (Target(0.0),)))
    bench.races.append(Race(bench.work, case, JOBS_PER_S, {"dibs": [done / took]}, ()))


def _working_process(url: str) -> Callable[[int], tuple[int, list[str]]]:
    queue = dibs.connect(url).queue("crowd")
    queue.put_many(range(TAKEN))  # the first makes the tables
    queue.take(TAKEN).done()

    def work(rounds: int) -> tuple[int, list[str]]:
        done, left = 0, rounds
        errors: list[str] = []
        while True:
            try:
                if left:
                    left -= 1
                    queue.put_many(range(TAKEN))
                batch = queue.take(TAKEN)
                batch.done()
                done += len(batch)
                if not left and not batch:
                    return done, errors
            except dibs.DibsError as error:
                errors.append(repr(error))

    return work
