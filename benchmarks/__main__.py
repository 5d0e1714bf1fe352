"""``python -m benchmarks``: which works there are, which of them to run, and how thoroughly."""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import report
from benchmarks.claim_works import memcached_claims, pg_claims
from benchmarks.deadlock import deadlock
from benchmarks.etcd_works import etcd_async, etcd_handover, etcd_lone
from benchmarks.handover import pg_handover, sqlite_handover
from benchmarks.harness import ROUNDS_DEFAULT, ROUNDS_MIN, Bench
from benchmarks.lines import fairness, pg_waiters, turns
from benchmarks.many_rows import pg_10m, pg_renew
from benchmarks.memcached_works import memcached_handover, memcached_lone
from benchmarks.mysql_works import mysql_async, mysql_handover, mysql_lone
from benchmarks.postgres import pg_async, pg_far, pg_lone, pg_threads
from benchmarks.queue_endurance import mysql_queue_crowd, pg_queue_open_transaction
from benchmarks.queue_scale import mysql_queue_scale, pg_queue_scale, redis_queue_scale, sqlite_queue_scale
from benchmarks.queue_workers import pg_queue_run, pg_queue_wake, redis_queue_wake
from benchmarks.queues import pg_queue_batch, pg_queue_put, sqlite_queue
from benchmarks.redis_works import redis_async, redis_handover, redis_lone
from benchmarks.sharing import (
    mysql_semaphore,
    pg_multilock,
    pg_multilock_crowd,
    pg_readers,
    pg_semaphore,
    redis_semaphore,
    sqlite_semaphore,
)
from benchmarks.sqlite import sqlite_async, sqlite_lone
from benchmarks.start import run_start
from benchmarks.zookeeper_works import zookeeper_async, zookeeper_handover, zookeeper_lone

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers.server import Server

WORKS: dict[str, Callable[[Bench], None]] = {
    "sqlite-lone": sqlite_lone,
    "sqlite-async": sqlite_async,
    "sqlite-handover": sqlite_handover,
    "run-start": run_start,
    "pg-lone": pg_lone,
    "pg-threads": pg_threads,
    "pg-far": pg_far,
    "pg-async": pg_async,
    "pg-handover": pg_handover,
    "pg-renew": pg_renew,
    "pg-10m": pg_10m,
    "redis-lone": redis_lone,
    "redis-async": redis_async,
    "redis-handover": redis_handover,
    "mysql-lone": mysql_lone,
    "mysql-async": mysql_async,
    "mysql-handover": mysql_handover,
    "memcached-lone": memcached_lone,
    "memcached-handover": memcached_handover,
    "etcd-lone": etcd_lone,
    "etcd-async": etcd_async,
    "etcd-handover": etcd_handover,
    "zookeeper-lone": zookeeper_lone,
    "zookeeper-async": zookeeper_async,
    "zookeeper-handover": zookeeper_handover,
    "pg-semaphore": pg_semaphore,
    "sqlite-semaphore": sqlite_semaphore,
    "redis-semaphore": redis_semaphore,
    "mysql-semaphore": mysql_semaphore,
    "pg-multilock": pg_multilock,
    "pg-multilock-crowd": pg_multilock_crowd,
    "pg-readers": pg_readers,
    "pg-waiters": pg_waiters,
    "fairness": fairness,
    "turns": turns,
    "deadlock": deadlock,
    "pg-queue-batch": pg_queue_batch,
    "pg-queue-run": pg_queue_run,
    "pg-queue-put": pg_queue_put,
    "pg-queue-wake": pg_queue_wake,
    "redis-queue-wake": redis_queue_wake,
    "pg-queue-open-transaction": pg_queue_open_transaction,
    "sqlite-queue": sqlite_queue,
    "pg-queue-scale": pg_queue_scale,
    "mysql-queue-scale": mysql_queue_scale,
    "sqlite-queue-scale": sqlite_queue_scale,
    "redis-queue-scale": redis_queue_scale,
    "mysql-queue-crowd": mysql_queue_crowd,
    "pg-claims": pg_claims,
    "memcached-claims": memcached_claims,
}


def main() -> int:
    """Run the works that were asked for; 0 when all could be run, whatever their figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="dibs beside the raw driver and its peers"
    )
    parser.add_argument("--list", action="store_true", help="say what each work measures, and run nothing")
    parser.add_argument("--only", metavar="PATTERN", help="the works whose name contains this, or matches it (pg-*)")
    parser.add_argument("--quick", action="store_true", help="shorter rounds, fewer of them, a smaller large table")
    parser.add_argument(
        "--runs", type=_rounds, metavar="N", help=f"rounds (default {ROUNDS_DEFAULT}, quick {ROUNDS_MIN})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there, too")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the table into this page, between its marks")
    arguments = parser.parse_args()
    if arguments.page is not None and not report.has_marks(arguments.page):
        parser.error(f"{arguments.page} is no page with the marks {report.PAGE_BEGIN} and {report.PAGE_END}")

    pattern = arguments.only or "*"
    works = {name: work for name, work in WORKS.items() if pattern in name or fnmatch.fnmatch(name, pattern)}
    if not works:
        parser.error(f"no work is called {pattern!r}; there are {', '.join(WORKS)}")
    if arguments.list:
        for name, work in works.items():
            print(f"{name}\n    " + inspect.cleandoc(work.__doc__ or "").replace("\n", "\n    ") + "\n")
        return 0

    with tempfile.TemporaryDirectory(prefix="dibs-bench-", dir="/tmp") as folder:
        facts = report.machine(Path(folder))
    report.print_facts(facts)

    def server_made(server: Server) -> None:
        bench.clear_progress()
        settings = server.facts()
        if settings:
            report.print_facts(settings)
        facts.update(settings)

    rounds = arguments.runs or (ROUNDS_MIN if arguments.quick else ROUNDS_DEFAULT)
    bench = Bench(quick=arguments.quick, rounds=rounds, server_made=server_made)
    failed: dict[str, str] = {}
    started = time.monotonic()
    try:
        for name, work in works.items():
            bench.begin(name)
            try:
                work(bench)
            except Exception as error:  # noqa: BLE001 - the other works' figures are worth having all the same
                bench.clear_progress()
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        failed["interrupted"] = f"during {bench.work}"
    finally:
        bench.clear_progress()
        bench.close()

    facts["run"] = f"{rounds} rounds of {bench.round_s:g} s, {time.monotonic() - started:.0f} s in all"
    if bench.races:
        print(f"\n{report.table(bench.races)}\n\n{facts['run']}")
        if arguments.page is not None:
            report.write_page(arguments.page, facts, bench.races)
    for name, reason in failed.items():
        print(f"{name}: no (or not all) figures: {reason}", file=sys.stderr)
    if arguments.json is not None:
        given = {"quick": arguments.quick, "only": arguments.only, "rounds": rounds}
        text = json.dumps(report.as_json(facts, given, bench.races, failed), indent=1, ensure_ascii=False)
        arguments.json.write_text(text + "\n")
    if "interrupted" in failed:
        return 130
    return 1 if failed else 0


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < ROUNDS_MIN:
        raise argparse.ArgumentTypeError(f"at least {ROUNDS_MIN} rounds, or a median says little")
    return rounds


if __name__ == "__main__":
    sys.exit(main())
