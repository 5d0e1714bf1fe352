"""Finds events in a feed that somebody else writes, and puts each into the product's own database once, with its job.

The event's row and the job that handles it are written in one transaction: neither is there without the other. The
event's number is the job's key, and a row under a unique number is inserted once, so reading the feed again, or reading
it twice at the same time, changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import time
from pathlib import Path

import dibs

TABLES = """\
CREATE TABLE IF NOT EXISTS event (number INTEGER PRIMARY KEY, subject TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS audit (place INTEGER PRIMARY KEY, number INTEGER NOT NULL REFERENCES event,
    entry TEXT NOT NULL, worker TEXT NOT NULL, fencing_token INTEGER NOT NULL, at TEXT DEFAULT CURRENT_TIMESTAMP);
"""


def detect(feed: Path, database: Path, pause: float) -> int:
    """Put what is new, as it comes in; how many events that were."""
    new = 0
    with dibs.connect(f"sqlite:///{database}") as client:
        client.setup()
        queue = client.queue("audit")
        product = sqlite3.connect(database, timeout=30)
        product.executescript(TABLES)
        for line in feed.read_text("utf-8").splitlines():
            event = json.loads(line)
            with product:  # one transaction, committed at the end, or rolled back
                product.execute("BEGIN IMMEDIATE")
                row = (event["number"], event["subject"], event["body"])
                if product.execute("INSERT OR IGNORE INTO event VALUES (?, ?, ?)", row).rowcount:
                    job = {"number": event["number"]}
                    queue.put(job, key=event["number"], group=event["subject"], connection=product)
                    new += 1
            time.sleep(pause)  # as events come in
        product.close()
    return new


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("feed", type=Path)
    parser.add_argument("database", type=Path)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between one event and the next")
    given = parser.parse_args()
    print(f"{detect(given.feed, given.database, given.pause)} new events")
