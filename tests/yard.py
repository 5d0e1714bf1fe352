"""A table of the user's own whose rows keep their claims themselves, and clients who claim them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import dibs
from dibs.columns import migration_sql
from tests.callers import raw

URLS = ["sqlite_url", "postgres_url", "mysql_url"]
if find_spec("MySQLdb"):
    URLS.append("mysqlclient_url")
LONG_S = 60.0
ROWS = 20
DUE = "SELECT id, kind FROM event WHERE due ORDER BY id"


def dialect_of(url: str) -> str:
    return url.partition(":")[0]


class Yard:
    """A database with a table whose rows keep their own claims, and clients who claim them."""

    def __init__(self, url: str, columns: bool = True) -> None:
        self.url = url
        self.plain = url.partition("?")[0]
        self.dialect = dialect_of(url)
        self._open: list[Any] = []
        self.run("CREATE TABLE event (id INTEGER PRIMARY KEY, kind VARCHAR(40), due BOOLEAN NOT NULL)")
        self.run(f"INSERT INTO event VALUES {','.join(f'({n}, {n!r}, TRUE)' for n in range(1, ROWS + 1))}")
        if columns:
            self.migrate("event")
        self.due = DUE + (" LIMIT 1000" if self.dialect == "mysql" else "")

    def migrate(self, table: str) -> None:
        for statement in migration_sql(self.dialect, table).split(";\n"):
            if statement.strip():
                self.run(statement)

    def run(self, sql: str) -> list[Any]:
        with closing(raw(self.plain)) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            rows = list(cursor.fetchall()) if cursor.description else []
            connection.commit()
        return rows

    def row(self, number: int) -> Any:
        """Of this row: token, claim, until."""
        return self.run(f"SELECT dibs_token, dibs_claim, dibs_until FROM event WHERE id = {number}")[0]

    def client(self, **options: Any) -> dibs.Client:
        client = dibs.connect(self.url, **options)
        self._open.append(client)
        return client

    def claims(self, client: dibs.Client | None = None, **options: Any) -> dibs.Claims:
        client = self.client() if client is None else client
        return client.claims("event", **{"ttl": LONG_S, "mode": "columns", **options})

    def close(self) -> None:
        for thing in self._open:
            thing.close()


def until(true: Callable[[], object], limit_s: float = 20.0) -> None:
    """Wait for a condition."""
    by = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < by, "it never came true"
        time.sleep(0.01)
