"""Items that are done in the caller's own transaction: what it writes and the end of the claim are one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

import dibs
from tests.callers import KINDS, raw
from tests.servers.postgres import PostgresServer
from tests.test_guard import SHORT_S, Scene, every_kind, over

SOME = {"psycopg": "postgresql", "pymysql": "mysql", "sqlite3": "sqlite"}
some_kinds = pytest.mark.parametrize("kind", SOME, ids=SOME.values())


@pytest.fixture
def scene(kind: str, request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(kind, request.getfixturevalue(KINDS[kind][0]).partition("?")[0])
    yield scene
    scene.close()


def taken(client: dibs.Client, **options: Any) -> list[Any]:
    """What somebody wins of two items, at once or in a moment."""
    until = time.monotonic() + 5
    while True:
        with client.claims("resource", **options).take([1, 2]) as batch:
            if batch.won == [1, 2] or time.monotonic() > until:
                return batch.won
        time.sleep(0.02)  # before another look


@every_kind
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_item_ends_with_the_transaction(scene: Scene, end: str) -> None:
    """The item is over for its holder at once, and for others when the transaction has ended, either way."""
    caller = scene.caller()
    with scene.holder.claims("resource", ttl=30).take([1]) as batch:
        for item in batch:
            caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
            item.done(connection=caller.given)
            assert not item.held
            item.done()
            assert scene.kept_out("resource/1")
            getattr(caller, end)()
    assert (batch.left, batch.lost) == ([], [])
    assert taken(scene.other) == [1, 2]
    assert scene.body() == ("new" if end == "commit" else "old")


@every_kind
def test_a_late_one_cannot_commit(scene: Scene) -> None:
    """Who was too late is told, and has written nothing after the rollback that asks for; the item is its taker's."""
    caller = scene.caller()
    batch = scene.holder.claims("resource", ttl=SHORT_S).take([1, 2])
    item = next(batch)
    over()
    with scene.other.claims("resource").take([1, 2]) as theirs:
        assert theirs.won == [1, 2]
        caller.run("SELECT body FROM resource")
        with pytest.raises(dibs.LeaseLost, match="was lost"):
            item.done(connection=caller.given)
        caller.rollback()
        assert batch.lost == [1]
        batch.release()
    assert scene.body() == "old"


@some_kinds
def test_it_is_done_once(scene: Scene) -> None:
    """An item that was finished, either way, cannot be done in another transaction; it is not counted as lost."""
    caller = scene.caller()
    with scene.holder.claims("resource", ttl=30).take([1, 2]) as batch:
        first, second = batch.items
        caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
        first.done(connection=caller.given)
        caller.commit()
        second.done()
        for item in (first, second):
            caller.run("SELECT body FROM resource")
            with pytest.raises(dibs.LeaseLost, match="was released"):
                item.done(connection=caller.given)
            caller.rollback()
    assert (batch.lost, batch.left) == ([], [])


@some_kinds
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_tries_are_forgotten_with_the_commit(scene: Scene, end: str) -> None:
    """What the transaction undoes was a try: it is forgotten when the transaction is committed, and only then."""
    caller = scene.caller()
    claims = scene.holder.claims("resource", ttl=30, max_tries=1)
    with claims.take([1]) as batch:
        caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
        next(batch).done(connection=caller.given)
        getattr(caller, end)()
    assert taken(scene.other) == [1, 2]
    with scene.other.claims("resource", max_tries=1).take([1, 2]) as batch:
        assert (batch.won, batch.busy) == (([1, 2], []) if end == "commit" else ([2], [1]))
    assert [item.key for item in claims.dead()] == ([] if end == "commit" else ["1"])


@some_kinds
def test_a_connection_without_a_transaction_is_refused(scene: Scene) -> None:
    """Nothing is ended by a connection in autocommit: it is told, and the item is held still."""
    connection = raw(scene.url)
    if scene.file:
        connection.isolation_level = None
    elif scene.kind == "pymysql":
        connection.autocommit(True)
    else:
        connection.autocommit = True
    with scene.holder.claims("resource", ttl=30).take([1]) as batch:
        item = next(batch)
        with pytest.raises(dibs.InvalidOption, match="no transaction open"):
            item.done(connection=connection)
        assert item.held
        assert scene.other.lock("resource/1").acquire(timeout=0) is None
    connection.close()


@some_kinds
def test_going_on_does_not_finish_what_a_transaction_has_refused(scene: Scene) -> None:
    """The try counts, as of any transaction that is undone; unless it is said again how the item ends."""
    claims = scene.holder.claims("resource", ttl=30, max_tries=1)
    with claims.take([1, 2]) as batch:
        for item in batch:
            with closing(raw(scene.url)) as connection:
                pass
            with pytest.raises(Exception, match=r"(?i)clos|^\(0, ''\)$"):
                item.done(connection=connection)
            assert item.held
            if item.value == 2:
                item.done()
    assert (batch.failed, batch.lost, batch.left) == ([1], [], [])
    assert [item.key for item in claims.dead()] == ["1"]


def test_other_stores_have_no_transactions() -> None:
    """Where leases are not in a database with transactions, it is Unsupported, and the item is held still."""
    import sqlite3

    with dibs.connect("memory://") as client, client.claims("resource").take([1]) as batch:
        item = next(batch)
        with closing(sqlite3.connect(":memory:")) as other, pytest.raises(dibs.Unsupported):
            item.done(connection=other)
        with pytest.raises(dibs.InvalidOption, match="is no connection"):
            item.done(connection=5)
        assert item.held


def test_tries_need_the_right_to_write_them(postgres: PostgresServer, postgres_url: str) -> None:
    """Where the transaction's login may not write the leases, only items whose tries count cannot be done in it."""
    with dibs.connect(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as admin:
        client.setup()
        admin.execute("CREATE ROLE clerk_of_claims LOGIN PASSWORD 'x'")
        try:
            clerk = psycopg.conninfo.make_conninfo(postgres_url, user="clerk_of_claims", password="x")
            with psycopg.connect(clerk) as connection:
                with client.claims("a").take([1]) as batch:
                    next(batch).done(connection=connection)
                    connection.commit()
                with client.claims("a", max_tries=2).take([2]) as batch:
                    item = next(batch)
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        item.done(connection=connection)
                    connection.rollback()
                    assert item.held
        finally:
            admin.execute("DROP ROLE clerk_of_claims")


def test_tasks_finish_items_in_their_transactions(postgres_url: str) -> None:
    """In tasks it is awaited with a connection, and need not be without."""

    async def main() -> None:
        async with dibs.connect_async(postgres_url) as client, dibs.connect_async(postgres_url) as other:
            connection = await psycopg.AsyncConnection.connect(postgres_url)
            async with await client.claims("a", max_tries=2).take([1, 2, 3]) as batch:
                async for item in batch:
                    if item.value == 1:
                        await item.done(connection=connection)
                        assert not item.held
                        assert await other.lock("a/1").acquire(timeout=0) is None
                        await connection.commit()
                        async with other.lock("a/1", timeout=3):
                            pass
                    elif item.value == 2:
                        item.done()
                    else:
                        await item.done()
            assert (batch.left, batch.lost) == ([], [])
            batch = await client.claims("a", ttl=SHORT_S).take([1])
            await asyncio.sleep(SHORT_S + 0.05)  # until the claim has certainly ended
            async with await other.claims("a").take([1]):
                with pytest.raises(dibs.LeaseLost):
                    await batch.items[0].done(connection=connection)
                await connection.rollback()
            assert batch.lost == [1]
            await batch.release()
            await connection.close()

    asyncio.run(main())


WORKER = """
import os, signal, sys, time
import dibs
from tests.callers import raw

url, name, fate = sys.argv[1:]
connection = raw(url)
client = dibs.connect(url)
claims = client.claims("event", ttl=1.2)
empty = 0
while empty < 3:
    with claims.take(query="SELECT id FROM event WHERE handled = 0", n=5) as batch:
        empty = 0 if batch.won or batch.busy else empty + 1
        for item in batch:
            cursor = connection.cursor()
            try:
                cursor.execute(f"INSERT INTO effect (event, worker) VALUES ({item.value}, {name})")
                cursor.execute(f"UPDATE event SET handled = 1 WHERE id = {item.value}")
                if fate == "killed before":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fate == "late":
                    time.sleep(1.3)  # longer than the claim lasts
                item.done(connection=connection)
                if fate == "killed after":
                    os.kill(os.getpid(), signal.SIGKILL)
                connection.commit()
                assert fate != "late"
            except dibs.LeaseLost:
                connection.rollback()
                fate = ""
    time.sleep(0.3)  # the killed ones' are held until their ttl is over
connection.close()
client.close()
"""


@pytest.mark.parametrize("kind", ["psycopg", "pymysql"], ids=["postgresql", "mysql"])
def test_workers_that_die_leave_one_effect_each(scene: Scene, kind: str) -> None:
    """Workers are killed before and after done, one is late: all events are handled, and each effect is there once."""
    with closing(raw(scene.url)) as connection:
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE event (id INTEGER PRIMARY KEY, handled INTEGER)")
        cursor.execute("CREATE TABLE effect (event INTEGER, worker INTEGER)")
        cursor.execute("INSERT INTO event VALUES " + ",".join(f"({number}, 0)" for number in range(20)))
        connection.commit()

        def worker(name: int, fate: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-c", WORKER, scene.url, str(name), fate])

        for name, fate in enumerate(("killed before", "killed after")):
            assert worker(name, fate).wait(60) == -signal.SIGKILL
        for last in [worker(name, fate) for name, fate in ((2, "late"), (3, ""), (4, ""))]:
            assert last.wait(60) == 0
        cursor.execute("SELECT event, count(*) FROM effect GROUP BY event ORDER BY event")
        assert list(cursor.fetchall()) == [(number, 1) for number in range(20)]
