"""A process that works rows of ``event`` whose claims stand in their columns; see test_claims_columns_crowd.

It takes them by turns by a query and by their ids, both overlapping with everybody else's, and finishes each in one
transaction with its effect. What it does with a row, it tells on standard output, a line each:

* ``begun ROW TOKEN NOW UNTIL``: it may work the row, and by its own clock until then;
* ``done ROW TOKEN NOW``: the effect is committed, and that was the end of the claim;
* ``late ROW TOKEN NOW``: the end was refused, and the effect rolled back.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
import time
from typing import Any
from urllib.parse import unquote, urlsplit

import dibs
from dibs.clock import boot_now

TTL_S = 1.5
WORK_S = 0.004
MANY = 6


def connect(url: str) -> Any:
    """A connection of the user's own."""
    if url.startswith("sqlite:"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=10, isolation_level="IMMEDIATE")
    if url.startswith("postgresql:"):
        import psycopg

        return psycopg.connect(url)
    import pymysql

    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 0,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=parts.path[1:],
        ssl_disabled=True,  # see MariaDBServer.connect
    )


class Worker:
    def __init__(self, url: str, role: str) -> None:
        self.url = url
        self.role = role
        self.shop = connect(url)
        self.claims = dibs.connect(url).claims("event", mode="columns", ttl=TTL_S)
        self.random = random.Random(os.getpid())

    def run(self) -> None:
        tell("ready")
        sys.stdin.readline()
        while due := self.due():
            try:
                taken = self.take(due)
            except dibs.StoreUnavailable:  # No answer within the ttl: what was claimed for it lapses by itself.
                continue
            with taken as batch:
                for item in batch:
                    self.work(item)
            if not batch.won:
                time.sleep(0.02)

    def take(self, due: list[int]) -> dibs.Batch[int]:
        """Some of what is due, by their ids or by the query."""
        if self.role == "killed" or self.random.random() < 0.5:
            numbers = self.random.sample(due, min(MANY, len(due)))
            return self.claims.take(numbers, verify=lambda won: [n for n in self.due() if n in won])
        limit = " LIMIT 1000" if self.url.startswith("mysql") else ""
        return self.claims.take(query=f"SELECT id FROM event WHERE due ORDER BY id{limit}", n=MANY)

    def due(self) -> list[int]:
        cursor = self.shop.cursor()
        cursor.execute("SELECT id FROM event WHERE due")
        numbers = [number for (number,) in cursor.fetchall()]
        self.shop.commit()
        return numbers

    def work(self, item: dibs.Item[int]) -> None:
        row = (item.value, item.fencing_token)
        tell("begun", *row, boot_now(), item.trusted_until)
        if self.role == "stopped":
            self.role = "continued"
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(WORK_S)
        try:
            self.shop.cursor().execute(f"UPDATE event SET due = FALSE, worked = worked + 1 WHERE id = {item.value}")
            if self.role == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            item.done(connection=self.shop)
            self.shop.commit()
        except dibs.LeaseLost:
            self.shop.rollback()
            tell("late", *row, boot_now())
        else:
            tell("done", *row, boot_now())


def tell(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    Worker(*sys.argv[1:]).run()
