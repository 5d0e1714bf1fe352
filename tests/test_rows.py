"""Plain row locks in the caller's own transaction: nobody gets what another has locked, until that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

import dibs
from dibs import rows
from tests.callers import KINDS, Caller, raw

QUERY = "SELECT id, body FROM task WHERE body <> 'done' ORDER BY id"
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def caller(kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[[], Caller]]:
    """Makes callers of one kind, to a database with ten tasks."""
    fixture, make = KINDS[kind]
    url = request.getfixturevalue(fixture).partition("?")[0]
    with closing(raw(url)) as connection:
        cursor = connection.cursor()
        cursor.execute("DROP TABLE IF EXISTS task")
        cursor.execute("CREATE TABLE task (id INTEGER PRIMARY KEY, body VARCHAR(100))")
        for number in range(10):
            cursor.execute(f"INSERT INTO task VALUES ({number}, 'do it, 100%')")
        connection.commit()
    callers: list[Caller] = []

    def new() -> Caller:
        callers.append(make(url))
        return callers[-1]

    yield new
    for one in callers:
        one.close()


@every_kind
def test_nobody_gets_what_is_locked(kind: str, caller: Callable[[], Caller]) -> None:
    """Two transactions get different rows; a rollback lets go of them, and a commit keeps what was done."""
    one, two = caller(), caller()
    mine = rows.lock(one.given, QUERY, n=3)
    assert mine == [(number, "do it, 100%") for number in range(3)]
    if "sqlite" not in kind:  # (there the file is locked as a whole)
        assert [number for number, _ in rows.lock(two.given, QUERY, n=3)] == [3, 4, 5]
        two.rollback()
    one.rollback()
    assert [number for number, _ in rows.lock(two.given, QUERY)] == list(range(10))
    two.run("UPDATE task SET body = 'done' WHERE id < 8")
    two.commit()
    assert [number for number, _ in rows.lock(one.given, QUERY + " ;")] == [8, 9]
    one.rollback()


@every_kind
def test_parameters(kind: str, caller: Callable[[], Caller]) -> None:
    """Parameters stand where the driver's marks are, and a percent sign is written twice beside them."""
    one = caller()
    mark, percent = ("?", "%") if "sqlite" in kind else ("%s", "%%")
    query = f"SELECT id FROM task WHERE id >= {mark} AND id < {mark} AND body LIKE '{percent}it, 100{percent}'"
    assert rows.lock(one.given, query, [2, 5]) == [(2,), (3,), (4,)]
    assert rows.lock(one.given, query, (2, 5), n=1) == [(2,)]
    with pytest.raises(dibs.InvalidOption, match="the query has 2 times"):
        rows.lock(one.given, query, [2])
    one.rollback()


BAD: list[dict[str, Any]] = [
    {"query": ""},
    {"query": None},
    {"params": "x"},
    {"params": {"a": 1}},
    {"n": 0},
    {"n": True},
]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["sqlite3"])
def test_bad_input(kind: str, caller: Callable[[], Caller], bad: dict[str, Any]) -> None:
    """What is wrong is said before anything is sent."""
    with pytest.raises(dibs.InvalidOption):
        rows.lock(caller().given, **{"query": QUERY, **bad})


def test_without_a_transaction(postgres_url: str) -> None:
    """A connection in autocommit keeps no lock, and that is told."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE task (id INTEGER PRIMARY KEY, body TEXT)")
        connection.execute("INSERT INTO task VALUES (1, 'x')")
        with pytest.raises(dibs.InvalidOption, match="no transaction open"):
            rows.lock(connection, QUERY)
        with connection.transaction():
            assert rows.lock(connection, QUERY) == [(1, "x")]


def test_with_asyncio(postgres_url: str) -> None:
    """The same with a connection that is awaited."""

    async def main() -> list[tuple[Any, ...]]:
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            await connection.execute("CREATE TABLE task (id INTEGER PRIMARY KEY, body TEXT)")
            await connection.execute("INSERT INTO task VALUES (1, 'x')")
            return await rows.lock_async(connection, QUERY)

    assert asyncio.run(main()) == [(1, "x")]
