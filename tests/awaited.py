"""Connections whose calls are awaited, of every kind that a door of dibs leads through, with one face for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Any

import aiomysql
import aiosqlite
import asyncpg
import psycopg
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.callers import mysql_arguments


class Awaited:
    """A connection of one kind, in a transaction unless it is in autocommit; ``given`` is what dibs gets."""

    def __init__(self, given: Any) -> None:
        self.given = given

    async def run(self, sql: str) -> None:
        await self.given.execute(sql)

    async def commit(self) -> None:
        await self.given.commit()

    async def rollback(self) -> None:
        await self.given.rollback()

    async def close(self) -> None:
        await self.given.close()


class _Asyncpg(Awaited):
    """asyncpg begins no transaction by itself."""

    transaction: Any = None

    async def begin(self) -> None:
        self.transaction = self.given.transaction()
        await self.transaction.start()

    async def commit(self) -> None:
        await self.transaction.commit()
        await self.begin()

    async def rollback(self) -> None:
        await self.transaction.rollback()
        await self.begin()


class _PyMySQL(Awaited):
    """What was made after PyMySQL: statements by cursors, and a connection that is closed without a word to await."""

    async def run(self, sql: str) -> None:
        async with self.given.cursor() as cursor:
            await cursor.execute(sql)

    async def close(self) -> None:
        closed = self.given.close()
        if closed is not None:
            await closed


class _Blocking(Awaited):
    """What is not awaited may be used by tasks, too: it blocks the event loop, as it always does."""

    async def run(self, sql: str) -> None:
        self.given.execute(sql)

    async def commit(self) -> None:
        self.given.commit()

    async def rollback(self) -> None:
        self.given.rollback()

    async def close(self) -> None:
        self.given.close()


class _Alchemy(Awaited):
    def __init__(self, given: Any, engine: Any) -> None:
        super().__init__(given)
        self._engine = engine

    async def run(self, sql: str) -> None:
        await self.given.execute(sqlalchemy.text(sql))

    async def close(self) -> None:
        await super().close()
        await self._engine.dispose()


async def _psycopg(url: str, autocommit: bool) -> Awaited:
    return Awaited(await psycopg.AsyncConnection.connect(url, row_factory=dict_row, autocommit=autocommit))


async def _blocking(url: str, autocommit: bool) -> Awaited:
    return _Blocking(psycopg.connect(url, autocommit=autocommit))


async def _asyncpg(url: str, autocommit: bool) -> Awaited:
    caller = _Asyncpg(await asyncpg.connect(url))
    if not autocommit:
        await caller.begin()
    return caller


async def _aiomysql(url: str, autocommit: bool) -> Awaited:
    arguments = mysql_arguments(url)
    arguments["db"] = arguments.pop("database")
    return _PyMySQL(await aiomysql.connect(**arguments, autocommit=autocommit, cursorclass=aiomysql.DictCursor))


async def _asyncmy(url: str, autocommit: bool) -> Awaited:
    import asyncmy

    return _PyMySQL(await asyncmy.connect(**mysql_arguments(url), autocommit=autocommit))


async def _aiosqlite(url: str, autocommit: bool) -> Awaited:
    path = url.removeprefix("sqlite:///")
    connection = await aiosqlite.connect(path, isolation_level=None if autocommit else "")
    connection.row_factory = aiosqlite.Row
    return Awaited(connection)


def _alchemy(driver: str, session: bool = False) -> Callable[[str, bool], Awaitable[Awaited]]:
    async def connect(url: str, autocommit: bool) -> Awaited:
        options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
        engine = create_async_engine(url.replace("://", f"+{driver}://", 1), **options)
        if not session:
            return _Alchemy(await engine.connect(), engine)
        caller = _Alchemy(AsyncSession(engine), engine)
        await caller.given.connection()  # now, rather than in the time of somebody's short lease
        await caller.rollback()
        return caller

    return connect


KINDS: dict[str, tuple[str, Callable[[str, bool], Awaitable[Awaited]]]] = {
    "psycopg": ("postgres_url", _psycopg),
    "asyncpg": ("postgres_url", _asyncpg),
    "blocking": ("postgres_url", _blocking),
    "sqlalchemy-psycopg": ("postgres_url", _alchemy("psycopg")),
    "sqlalchemy-asyncpg": ("postgres_url", _alchemy("asyncpg")),
    "session-asyncpg": ("postgres_url", _alchemy("asyncpg", True)),
    "aiomysql": ("mysql_url", _aiomysql),
    "session-aiomysql": ("mysql_url", _alchemy("aiomysql", True)),
    "aiosqlite": ("sqlite_url", _aiosqlite),
    "sqlalchemy-aiosqlite": ("sqlite_url", _alchemy("aiosqlite")),
    "session-aiosqlite": ("sqlite_url", _alchemy("aiosqlite", True)),
}
# It must be compiled where there is no wheel of it.
if find_spec("asyncmy"):
    KINDS["asyncmy"] = ("mysql_url", _asyncmy)
    KINDS["sqlalchemy-asyncmy"] = ("mysql_url", _alchemy("asyncmy"))
