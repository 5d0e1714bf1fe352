"""A worker: takes events and writes an audit entry for each, in the product's own database. Run as many as you like.

What it writes and that the job is done are one transaction, so an event is audited exactly once: a worker that dies in
the middle leaves nothing behind, and one that was frozen for too long finds its claim lost when it wakes up.
"""

from __future__ import annotations

import argparse
import sqlite3
import time
from pathlib import Path

import dibs


def work(name: str, database: Path, ttl: float, idle: float) -> int:
    """Handle events until none came for ``idle`` seconds; how many were handled."""
    with dibs.connect(f"sqlite:///{database}", ttl=ttl, info={"worker": name}) as client:

        def handle(job: dibs.Job) -> None:
            product = sqlite3.connect(database, timeout=30)
            try:
                number = job.payload["number"]
                (subject, body) = product.execute(
                    "SELECT subject, body FROM event WHERE number = ?", (number,)
                ).fetchone()
                time.sleep(0.06)  # what is done about it
                with product:
                    product.execute("BEGIN IMMEDIATE")
                    entry = f"{subject}: {body}"
                    values = (number, entry, name, job.fencing_token)
                    product.execute(
                        "INSERT INTO audit (number, entry, worker, fencing_token) VALUES (?, ?, ?, ?)", values
                    )
                    job.done(connection=product)
            finally:
                product.close()

        # One after the other for each subject: its entries are in the order of its events.
        queue = client.queue("audit", group_limit=1)
        return queue.run(handle, workers=2, idle=idle, drain_timeout=5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("database", type=Path)
    parser.add_argument("--ttl", type=float, default=30.0)
    parser.add_argument("--idle", type=float, default=5.0)
    given = parser.parse_args()
    print(f"{given.name}: {work(given.name, given.database, given.ttl, given.idle)} events")
