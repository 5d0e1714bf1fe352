"""One of many scripts that select overlapping rows of a table nobody may alter. Each row is worked by one of them.

It asks for the next rows that are due, claims those that are free, and looks once more which of them are due still,
because another script may have finished some between the look and the claim. It works them off until shortly before the
claims end, gives back what it did not reach, and asks again.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import time
from pathlib import Path

import dibs

TTL_S = 5.0
MARGIN_S = 1.0
ROWS = 1_000
# What each script is interested in.
WHERE = {
    "unpaid": "paid = 0 AND id % 3 <> 0",
    "abroad": "country <> 'AT' AND id % 5 <> 0",
    "large": "amount > 500",
}


def main(name: str, store: str, table: Path, results: Path, limit: int) -> int:
    """Work rows until none is left, or ``limit`` were worked; how many were worked."""
    shop = sqlite3.connect(f"file:{table}?mode=ro", uri=True)
    notes = sqlite3.connect(results, timeout=30, isolation_level=None)

    def due(ids: list[int]) -> list[int]:
        """Which of these nobody has worked."""
        marks = ",".join("?" * len(ids))
        worked = {row[0] for row in notes.execute(f"SELECT id FROM worked WHERE id IN ({marks})", ids)}
        return [number for number in ids if number not in worked]

    worked = after = 0
    with dibs.connect(store) as client:
        claims = client.claims("orders", ttl=TTL_S, margin=MARGIN_S)
        while worked < limit:
            rows = shop.execute(
                f"SELECT id FROM orders WHERE id > ? AND {WHERE[name]} ORDER BY id LIMIT ?", (after, ROWS)
            ).fetchall()
            ids = [number for (number,) in rows]
            if not ids:
                break
            with claims.take(due(ids), verify=due) as batch:
                for item in batch:
                    time.sleep(0.0005)  # the work
                    notes.execute("BEGIN IMMEDIATE")  # may wait for the other scripts: look at the claim after that
                    if not item.held:  # it took too long: another script may have it by now
                        notes.execute("ROLLBACK")
                        break
                    notes.execute("INSERT INTO worked VALUES (?, ?)", (item.value, name))
                    notes.execute("COMMIT")
                    worked += 1
            if not batch.left:  # what others hold is theirs, or comes back when they die
                after = ids[-1]
    print(f"{name}: {worked} rows")
    return worked


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=WHERE)
    parser.add_argument("store", help="where claims are kept: memcached://…, or sqlite:///… for a side table")
    parser.add_argument("table", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--limit", type=int, default=1_000_000)
    given = parser.parse_args()
    try:
        main(given.name, given.store, given.table, given.results, given.limit)
    except dibs.StoreUnavailable as error:
        print(f"{given.name}: nothing was claimed, so nothing is worked: {error}")
        sys.exit(69)
