"""Transactions of tasks: everything that dibs does inside the caller's own, on every connection that is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import asyncpg
import pytest

import dibs
from dibs import fencing, rows
from tests.awaited import KINDS, Awaited
from tests.callers import TABLE, raw

SHORT_S = 1.2
Body = Callable[[Awaited], Awaitable[None]]


class Place:
    """A database with leases and a table, and connections of one kind to it."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind, self.url = kind, url
        with closing(raw(url)) as connection, dibs.connect(url) as client:
            connection.cursor().execute(TABLE)
            connection.cursor().execute("INSERT INTO resource (id, body) VALUES (1, 'old')")
            connection.commit()
            client.setup()

    def client(self, **options: Any) -> dibs.AsyncClient:
        return dibs.connect_async(self.url, **options)

    def run(self, body: Body, *, autocommit: bool = False) -> None:
        """Run this with a connection."""

        async def main() -> None:
            caller = await KINDS[self.kind][1](self.url, autocommit)
            try:
                await body(caller)
            finally:
                await caller.close()

        asyncio.run(main())

    async def kept_out(self, client: dibs.AsyncClient) -> bool:
        """Whether somebody else does not get the name now."""
        try:
            return await client.lock("x").acquire(timeout=0) is None
        except dibs.StoreUnavailable:
            assert self.url.startswith("sqlite:")  # the transaction has locked the whole file
            return True

    def look(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(raw(self.url)) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            return [tuple(row) for row in cursor.fetchall()]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param, request.getfixturevalue(KINDS[request.param][0]).partition("?")[0])


def test_a_lease_is_guarded(place: Place) -> None:
    """Nobody enters before the transaction has ended; a lost lease is not pinned, and one can be left to its end."""

    async def body(caller: Awaited) -> None:
        async with place.client() as client, place.client() as other, place.client(patience=0.1) as third:
            lease = await client.lock("x", ttl=SHORT_S, renew=False).acquire()
            assert lease is not None
            await lease.guard(caller.given)
            await caller.run("UPDATE resource SET body = '100% new: é' WHERE id = 1")
            await asyncio.sleep(SHORT_S + 0.05)
            assert await place.kept_out(third)
            await caller.commit()
            async with other.lock("x", timeout=3) as theirs:
                with pytest.raises(dibs.LeaseLost):
                    await lease.guard(caller.given)
                await caller.rollback()
                await theirs.release_after_commit(caller.given)
            assert await place.kept_out(third)
            await caller.rollback()
            async with client.lock("x", timeout=3):
                pass

    place.run(body)
    assert place.look("SELECT body FROM resource") == [("100% new: é",)]


def test_autocommit_is_no_transaction(place: Place) -> None:
    """A connection on which no transaction is open cannot keep a pin, and that is said."""

    async def body(caller: Awaited) -> None:
        async with place.client() as client, client.lock("x") as lease:
            with pytest.raises(dibs.InvalidOption, match="autocommit"):
                await lease.guard(caller.given)

    place.run(body, autocommit=True)


def test_jobs_are_put_and_done(place: Place) -> None:
    """With the rest of the transaction, or not at all."""

    async def body(caller: Awaited) -> None:
        async with place.client() as client:
            queue = client.queue("a", ttl=30)
            for end in (caller.rollback, caller.commit):
                await queue.put_many([b"\0%s", {"é": "'"}], connection=caller.given)
                await queue.put(3, connection=caller.given)
                await end()
            assert (await queue.depth()).ready == 3
            async with await queue.take(3) as batch:
                async for job in batch:
                    await job.done(connection=caller.given)
                    assert not job.held
                await caller.commit()
            assert await queue.depth() == dibs.QueueDepth("a", 0, 0, 0, 0, 0.0)

    place.run(body)


def test_items_are_done(place: Place) -> None:
    """A claim ends with the transaction."""

    async def body(caller: Awaited) -> None:
        async with place.client() as client, place.client() as other:
            async with await client.claims("event").take([1, 2]) as batch:
                async for item in batch:
                    await item.done(connection=caller.given)
                    await caller.commit()
            async with await other.claims("event").take([1, 2]) as batch:
                assert batch.won == [1, 2]
                async for item in batch:
                    item.done()

    place.run(body)


def test_fencing_tokens_are_shown(place: Place) -> None:
    """An older token is refused, a row that is not there is told."""

    async def body(caller: Awaited) -> None:
        await fencing.advance_async(caller.given, "resource", key={"id": 1, "body": "old"}, token=7)
        await caller.commit()
        with pytest.raises(dibs.LeaseLost):
            await fencing.advance_async(caller.given, "resource", key={"id": 1}, token=6)
        await caller.rollback()
        with pytest.raises(LookupError):
            await fencing.advance_async(caller.given, "resource", key={"id": 2}, token=8)
        await caller.rollback()

    place.run(body)
    assert place.look("SELECT fence FROM resource") == [(7,)]


def test_rows_are_locked(place: Place) -> None:
    """Rows that nobody else has locked, for this transaction."""

    async def body(caller: Awaited) -> None:
        found = await rows.lock_async(caller.given, "SELECT id, body FROM resource ORDER BY id LIMIT 1")
        assert [tuple(row) for row in found] == [(1, "old")]
        await caller.run("UPDATE resource SET body = 'mine' WHERE id = 1")
        await caller.commit()

    place.run(body)
    assert place.look("SELECT body FROM resource") == [("mine",)]


def test_a_connection_of_a_pool(postgres_url: str) -> None:
    """What asyncpg's pool lends is a connection; the pool is none."""

    async def main() -> None:
        async with (
            asyncpg.create_pool(postgres_url, min_size=1) as pool,
            dibs.connect_async(postgres_url) as client,
            client.lock("x") as lease,
        ):
            with pytest.raises(dibs.InvalidOption, match="no connection"):
                await lease.guard(pool)
            async with pool.acquire() as connection, connection.transaction():
                await lease.guard(connection)

    asyncio.run(main())


@pytest.mark.parametrize("place", [kind for kind in KINDS if kind != "blocking"], indirect=True)
def test_threads_are_told_to_use_tasks(place: Place) -> None:
    """A connection that is awaited, given to the face for threads, is an InvalidOption that names the other face."""

    async def body(caller: Awaited) -> None:
        with dibs.connect(place.url) as client, client.lock("x") as lease:
            with pytest.raises(dibs.InvalidOption, match="connect_async"):
                lease.guard(caller.given)

    place.run(body)
