"""Several processes with many threads each, all at two shards that allow few connections.

    python examples/shard_connections/run.py --limit 4 postgresql://app@host/shard0 postgresql://app@host/shard1
    python examples/shard_connections/run.py --naive   postgresql://app@host/shard0 postgresql://app@host/shard1

The first asks for a permit before it connects, and no connection is refused. The second just connects. Permits are kept
where $DIBS_URL says, which all processes must reach.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import psycopg

import dibs

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.shard_connections.shards import Shards

VISIT_S = 0.4


class Worker:
    """One process: its threads visit the shards in turn, and count."""

    def __init__(self, options: argparse.Namespace, client: dibs.Client) -> None:
        self.options = options
        self.shards = Shards(client, options.shards, options.limit)
        self.visits = self.refused = self.most = 0
        self.mutex = threading.Lock()

    def connection(self, number: int) -> object:
        if self.options.naive:
            return psycopg.connect(self.options.shards[number], autocommit=True)
        return self.shards.connection(number)

    def visit(self, number: int) -> None:
        """Some work on a shard, in two functions that each want a connection."""
        with self.connection(number) as connection:  # type: ignore[attr-defined]
            connection.execute("SELECT pg_sleep(%s)", (VISIT_S,))
            inside = self.look(number, connection)
        with self.mutex:
            self.visits += 1
            self.most = max(self.most, inside)

    def look(self, number: int, connection: psycopg.Connection) -> int:
        """How many connections the shard has."""
        # Nested: the same connection, no second permit. (The naive version passes its own along.)
        with nullcontext(connection) if self.options.naive else self.shards.connection(number) as inner:
            assert inner is connection
            row = inner.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = current_user"
            ).fetchone()
            assert row is not None
            return int(row[0])

    def run(self, first: int) -> None:
        for round_ in range(self.options.rounds):
            try:
                self.visit((first + round_) % len(self.options.shards))
            except psycopg.OperationalError as error:
                if not self.options.naive:
                    print(f"refused: {error}", file=sys.stderr)
                with self.mutex:
                    self.refused += 1


def work(options: argparse.Namespace) -> None:
    """A process that was started by ``main``."""
    with dibs.connect(ttl=20) as client:
        client.ping()
        worker = Worker(options, client)
        print("ready", flush=True)
        sys.stdin.readline()  # so that all begin together
        threads = [threading.Thread(target=worker.run, args=(number,)) for number in range(options.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(json.dumps({"visits": worker.visits, "refused": worker.refused, "most": worker.most}))


def main() -> int:
    parser = argparse.ArgumentParser(description="Visit shards from many threads of several processes.")
    parser.add_argument("shards", nargs="+", metavar="URL", help="a shard")
    parser.add_argument("--limit", type=int, default=4, help="connections to each shard, of all together (default 4)")
    parser.add_argument("--naive", action="store_true", help="just connect")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=20, help="of each process")
    parser.add_argument("--rounds", type=int, default=2, help="visits of each thread")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    began = time.monotonic()
    command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(options.processes)
    ]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    told = [json.loads(worker.communicate("go\n")[0]) for worker in workers]
    visits, refused = (sum(each[what] for each in told) for what in ("visits", "refused"))
    how = "naive" if options.naive else f"a semaphore of {options.limit} for each shard"
    most, took_s = max(each["most"] for each in told), time.monotonic() - began
    print(
        f"{options.processes} processes with {options.threads} threads each, {how}: {visits} visits, {refused} "
        f"connections refused, at most {most} at a shard, {took_s:.1f} s"
    )
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
