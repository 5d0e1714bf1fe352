"""The whole of it on one machine: a feed, two detectors, four workers of which one is killed and one frozen.

At the end it looks whether every event was audited exactly once and each subject's in their order, and says how many
workers the load would need. Exits with 1 if anything is wrong. Takes about twenty seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dibs

HERE = Path(__file__).parent
TTL_S = 2.0
PAUSE_S = 0.02
SUBJECTS = ("account", "invoice", "login", "permission", "price", "stock", "user", "warehouse", "door", "lamp")


def write_feed(feed: Path, events: int) -> None:
    """Events as another system writes them, some of them twice."""
    words = random.Random(7)
    lines = [
        json.dumps({"number": number, "subject": words.choice(SUBJECTS), "body": f"change {number}"})
        for number in range(1, events + 1)
    ]
    lines += words.sample(lines, events // 10)
    feed.write_text("\n".join(lines) + "\n", "utf-8")


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """One of the programs beside this one."""
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def audited(database: Path) -> int:
    """How many events have an audit entry."""
    product = sqlite3.connect(database, timeout=30)
    try:
        if not product.execute("SELECT 1 FROM sqlite_master WHERE name = 'audit'").fetchone():
            return 0  # the detectors are on their way
        return int(product.execute("SELECT count(*) FROM audit").fetchone()[0])
    finally:
        product.close()


def freeze(worker: subprocess.Popen[str], database: Path) -> None:
    """Stop it, but not while it writes: SQLite lets one writer in, so all others would be stopped with it."""
    product = sqlite3.connect(database, timeout=30, isolation_level=None)
    product.execute("BEGIN IMMEDIATE")  # from here on nobody else writes
    worker.send_signal(signal.SIGSTOP)
    os.waitpid(worker.pid, os.WUNTRACED)  # until it has stopped: it may be running on another core
    product.execute("ROLLBACK")
    product.close()


def until(database: Path, count: int) -> None:
    """Wait until so many are audited."""
    end = time.monotonic() + 60
    while audited(database) < count and time.monotonic() < end:
        time.sleep(0.05)


def main(events: int) -> int:
    """Run it; 0 when all is as it should be."""
    folder = Path(tempfile.mkdtemp(prefix="audit-events-"))
    feed, database = folder / "feed.jsonl", folder / "product.db"
    write_feed(feed, events)
    first = start("detect.py", feed, database, "--pause", PAUSE_S)
    second = start("detect.py", feed, database, "--pause", PAUSE_S)  # somebody runs it twice
    workers = {name: start("work.py", name, database, "--ttl", TTL_S, "--idle", 3 * TTL_S) for name in "ABCD"}
    until(database, events // 5)
    workers["A"].kill()
    freeze(workers["B"], database)
    print(f"A was killed and B frozen, with {audited(database)} events audited")
    with dibs.connect(f"sqlite:///{database}") as client:
        queue = client.queue("audit")
        until(database, events)
        advice = queue.advice()
        workers["B"].send_signal(signal.SIGCONT)
        found = [detector.communicate()[0].strip() for detector in (first, second)]
        print(f"detectors: {' and '.join(found)}")
        said = [worker.communicate()[0].strip() for worker in workers.values()]
        print("\n".join(filter(None, said)))
        depth, dead = queue.depth(), queue.dead()
    product = sqlite3.connect(database)
    rows = product.execute(
        "SELECT number, subject FROM audit JOIN event USING (number) ORDER BY audit.place"
    ).fetchall()
    product.close()
    numbers = [number for number, _ in rows]
    last: dict[str, int] = {}
    shuffled = 0
    for number, subject in rows:
        shuffled += number < last.get(subject, 0)
        last[subject] = number
    print(
        f"{len(numbers)} of {events} events audited, {len(numbers) - len(set(numbers))} twice, {shuffled} out of order"
    )
    print(f"left in the queue: {depth.ready + depth.later + depth.claimed}, dead: {len(dead)}")
    print(f"advice: {advice.why}")
    ok = sorted(numbers) == list(range(1, events + 1)) and not shuffled and not dead
    print("ok" if ok else f"WRONG: look into {folder}")
    return 0 if ok else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=900)
    sys.exit(main(parser.parse_args().events))
