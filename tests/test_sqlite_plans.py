"""How SQLite finds what the statements of its store ask for, whatever somebody's ANALYZE once saw in the tables."""

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dibs.jobs import NewJob
from dibs.stores.sqlite import SQLiteStore
from dibs.stores.sqlite_sql import numbered
from tests.job_queues import JobQueue

# What ANALYZE notes of an index with so many columns: how many rows it has, and how many there are on average with one
# value of the first column, of the first two, and so on.
SEEN: dict[str, Callable[[int], list[int]]] = {
    "one-value": lambda columns: [1000] * (columns + 1),
    "one-value-and-another": lambda columns: [1000] + [999] * columns,
    "all-different": lambda columns: [1000] + [1] * columns,
    "one-row": lambda columns: [1] * (columns + 1),
}
# What reads tables from their start to their end: now and then, by an operator, or at a reboot.
READ_ALL = {
    "forget",
    "purge",
    "purge_floor",
    "purge_line",
    "purge_pool",
    "purge_pool_floor",
    "raise_pools",
    "carry_over",
    "last_known",
    "lift_pools",
    "clear_line",
}
# What is sorted there are the jobs of one claim, those of one take, those that are listed, the priorities there are,
# and the line for one name. Where ANALYZE saw no two jobs of one put, so are those of a put that is repeated ("known").
SORT = {"repeated", "priorities", "list_waiting", "list_claimed", "revive", "peek_pool"}

# The jobs of one claim, found by their ids. No index can be named for that, so SQLite reads a table that had one row,
# a job at work, when ANALYZE looked, and reads all of it whatever became of it. (With two rows it goes by an index.)
BY_IDS = {"extend", "done", "keep_done", "keep_failed", "keep_exhausted", "exhausted", "retry", "back"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with all tables of the store."""
    queue = JobQueue(SQLiteStore(str(tmp_path / "locks.db"), "dibs_lease", False))
    queue.put("1")
    queue.store.close()
    return tmp_path / "locks.db"


def note(path: Path, seen: Callable[[int], list[int]]) -> None:
    """Leave in the file what ANALYZE would have."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("ANALYZE")
        db.execute("DELETE FROM sqlite_stat1")
        tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'dibs%'").fetchall()
        for (table,) in tables:
            for _, index, unique, *_ in db.execute(f"PRAGMA index_list({table})").fetchall():
                counts = seen(len(db.execute(f"PRAGMA index_info({index})").fetchall()))
                # (The primary key of a table without rowids goes by the table's name.)
                name = table if index.startswith("sqlite_autoindex") else index
                rows = " ".join(map(str, [*counts[:-1], 1] if unique else counts))
                db.execute("INSERT INTO sqlite_stat1 VALUES (?, ?, ?)", (table, name, rows))


def planned(db: sqlite3.Connection, sql: str) -> list[str]:
    """The steps of a statement."""
    text = sql.replace("{rows}", "(1, 2)" if "new(place" in sql else "(1,1,1,1,1,1,1,1,1)")
    return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {text}", values_of(text))]


def values_of(sql: str) -> Any:
    """Something for each parameter of a statement."""
    numbers = [int(number) for number in re.findall(r"\?(\d+)", sql)]
    if numbers:
        return numbered((1,) * max(numbers))
    return dict.fromkeys(re.findall(r":(\w+)", sql), 1) or (1,) * sql.count("?")


def check_plans(path: Path, seen: str = "") -> None:
    """No statement but those of READ_ALL reads a table from its start to its end, or sorts one."""
    store = SQLiteStore(str(path), "dibs_lease", False)
    try:
        db = store._file.open()
        for verb, sql in {**store._sql, **store.jobs._sql}.items():
            if verb == "mark" or verb in READ_ALL or sql.startswith(("PRAGMA", "ALTER")):
                continue
            plan = planned(db, sql)
            # (ANY: each value of a column is tried, as if there were few.)
            reads = [step for step in plan if re.match(r"SCAN (dibs_lease\w*|job|before|l|p|w)\b|.*ANY\(", step)]
            assert not reads or (seen == "one-row" and verb in BY_IDS), f"{verb}: {plan}"
            sorts = SORT | {"known"} if seen == "all-different" else SORT
            assert "USE TEMP B-TREE FOR ORDER BY" not in plan or verb in sorts, f"{verb}: {plan}"
        (step,) = planned(db, store.jobs._sql["take"])
        assert "dibs_lease_job_ready (name=? AND priority=? AND due_wall<?)" in step
    finally:
        store.close()


def test_statements_step_through_indexes(path: Path) -> None:
    """Where nobody has run ANALYZE."""
    check_plans(path)


@pytest.mark.parametrize("seen", SEEN)
def test_what_analyze_noted_changes_nothing(path: Path, seen: str) -> None:
    """The worst that it may have seen: tables where all is the same, or where there was one row."""
    note(path, SEEN[seen])
    check_plans(path, seen)


@pytest.mark.parametrize("jobs", [1, 2, 1000])
def test_what_analyze_finds_changes_nothing(path: Path, jobs: int) -> None:
    """What it sees when all jobs are of one queue and one group, put at once, half of them in one claim."""
    queue = JobQueue(SQLiteStore(str(path), "dibs_lease", False))
    queue.put(*[NewJob(str(number), group="g", key=str(number)) for number in range(jobs)])
    queue.taken(max(1, jobs // 2))
    queue.store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("ANALYZE")
    check_plans(path)


@pytest.mark.parametrize("verb", ["read", "grant", "look_at_pool", "held_slots", "grant_permits", "renew", "release"])
def test_a_plain_request_makes_no_table_for_itself(path: Path, verb: str) -> None:
    """As a RETURNING would, of 90 KB, which some processes give back to the system and ask for again each time."""
    store = SQLiteStore(str(path), "dibs_lease", False)
    try:
        sql = store._sql[verb]
        steps = store._file.open().execute(f"EXPLAIN {sql}", values_of(sql)).fetchall()
        assert not [step for step in steps if step[1] in ("OpenEphemeral", "SorterOpen", "OpenAutoindex")]
    finally:
        store.close()
