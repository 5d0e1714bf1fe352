"""A restored database: what the how-to shows lifts tokens and ids above all given out since."""

from __future__ import annotations

import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

import dibs
from tests.callers import raw

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "restore-a-backup.md"
SECTIONS = {"postgres": "PostgreSQL", "mysql": "MySQL and MariaDB", "sqlite": "SQLite"}


def lines_of(store: str) -> list[str]:
    """The statements that the page shows for a store."""
    section = PAGE.read_text("utf-8").partition(f"## {SECTIONS[store]}\n")[2]
    block = section.partition("```sql\n")[2].partition("```")[0]
    statements = [statement.strip() for statement in block.split(";")]
    return [statement for statement in statements if statement]


def backed_up(url: str, tmp_path: Path) -> str:
    """The URL of a copy of the database as it is now."""
    if url.startswith("sqlite"):
        copy = tmp_path / "restored.db"
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as source, closing(sqlite3.connect(copy)) as to:
            source.backup(to)
        return f"sqlite:///{copy}"
    name = f"restored_{uuid.uuid4().hex[:8]}"
    head, _, database = url.rpartition("/")
    if url.startswith("postgresql"):
        with closing(psycopg.connect(f"{head}/postgres", autocommit=True)) as db:
            db.execute(f"CREATE DATABASE {name} TEMPLATE {database}")
        return f"{head}/{name}"
    with closing(raw(url)) as db:
        cursor = db.cursor()
        cursor.execute(f"CREATE DATABASE {name}")
        cursor.execute("SHOW TABLES")
        for (table,) in cursor.fetchall():
            cursor.execute(f"CREATE TABLE {name}.{table} LIKE {table}")
            cursor.execute(f"INSERT INTO {name}.{table} SELECT * FROM {table}")
        db.commit()
    return f"{head}/{name}"


def dropped(url: str) -> None:
    """The copy is not needed any more."""
    head, _, database = url.rpartition("/")
    if url.startswith("postgresql"):
        with closing(psycopg.connect(f"{head}/postgres", autocommit=True)) as db:
            db.execute(f"DROP DATABASE {database} WITH (FORCE)")
    elif url.startswith("mysql"):
        with closing(raw(url)) as db:
            db.cursor().execute(f"DROP DATABASE {database}")


def given_out(url: str, times: int) -> dict[str, list[int]]:
    """What a store gives out: tokens of a lock, a new lock, a semaphore and a job, and ids of new jobs."""
    given: dict[str, list[int]] = {"lock": [], "new": [], "semaphore": [], "job": [], "id": []}
    with dibs.connect(url, ttl=20) as client:
        queue = client.queue("mail")
        for _ in range(times):
            with client.lock("x", timeout=0) as lease:
                given["lock"].append(lease.fencing_token)
            with client.semaphore("s", 2, timeout=0) as lease:
                given["semaphore"].append(lease.fencing_token)
            given["id"].append(queue.put(1))
            job = queue.take().won[0]  # the first, again and again
            given["job"].append(job.fencing_token)
            job.skip()
        with client.lock("new", timeout=0) as lease:
            given["new"].append(lease.fencing_token)
    return given


@pytest.mark.parametrize("store", SECTIONS)
def test_after_a_restore_nothing_is_given_out_again(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Without the statements tokens and ids repeat; with them all are greater than all that were given out before."""
    url = request.getfixturevalue(f"{store}_url")
    given_out(url, 2)
    copies = [backed_up(url, tmp_path)]
    if store != "sqlite":
        copies.append(backed_up(url, tmp_path))
    given = given_out(url, 5)
    if store != "sqlite":  # a copy of whose file is not to be used before
        again = given_out(copies[1], 2)
        assert set(again["lock"]) <= set(given["lock"])
        assert set(again["id"]) <= set(given["id"])
    with closing(raw(copies[0])) as db:
        for statement in lines_of(store):
            db.cursor().execute(statement)
        db.commit()
    for what, after in given_out(copies[0], 2).items():
        assert min(after) > max(given[what]), what
        assert min(after) >= 2**40, what
    for copy in copies:
        dropped(copy)
