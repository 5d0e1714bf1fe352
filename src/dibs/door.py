"""A door into the caller's own transaction: run a statement on a connection that belongs to somebody else.

A *door* is made from what the caller has: a DB-API connection (psycopg, psycopg2, PyMySQL, mysqlclient, MySQL's own
connector, sqlite3), one whose calls are awaited (of psycopg, asyncpg, aiomysql, asyncmy, aiosqlite), a SQLAlchemy
Connection or Session (or their asynchronous twins), a Django connection. What it is, is told by its type; no driver is
imported, since whoever has a connection has loaded its driver. A door runs statements and nothing else: it never
commits, rolls back, or changes a setting, and errors of the driver come out as they are.

Statements are written once for all drivers: a value stands in the text as ``VALUE``, and each door writes there what
its driver wants to see.
"""

from __future__ import annotations

import sys

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

POSTGRESQL, MYSQL, SQLITE = "postgresql", "mysql", "sqlite"
DIALECTS = (POSTGRESQL, MYSQL, SQLITE)
# Where a value goes in the text of a statement. (No identifier has one: dibs.stores.identifiers refuses it.)
VALUE = "\0"
_ALIASES = {"mariadb": MYSQL}
# By the package that a connection is of; "mysql" is that of MySQL Connector/Python.
_DRIVERS = {
    **dict.fromkeys(("psycopg", "psycopg2"), POSTGRESQL),
    **dict.fromkeys(("pymysql", "MySQLdb", "mysql"), MYSQL),
    **dict.fromkeys(("sqlite3", "pysqlite3"), SQLITE),
}
# Those whose connections are all awaited. (Of psycopg there are both.)
_AWAITED = {"asyncpg": POSTGRESQL, "aiomysql": MYSQL, "asyncmy": MYSQL, "aiosqlite": SQLITE}


class Said(NamedTuple):
    """One statement for a door, with its values."""

    sql: str
    values: Sequence[object] = ()


#: Which files an SQLite connection has.
FILES = Said("PRAGMA database_list")


class Answer(NamedTuple):
    """What a statement brought: its rows, and how many rows it found to change as the driver counts them."""

    rows: list[tuple[Any, ...]]
    affected: int


class Door:
    """One connection of the caller's, for as long as its transaction lasts."""

    dialect: str
    #: Statements must be awaited (``execute_async``).
    awaited = False
    #: A connection to SQLite as its driver made it, once that is known.
    _native: Any = None

    def execute(self, sql: str, values: Sequence[object] = ()) -> Answer:
        """Run one statement inside the caller's transaction."""
        raise InvalidOption(f"{self} is asynchronous: use a client of dibs.connect_async()")

    async def execute_async(self, sql: str, values: Sequence[object] = ()) -> Answer:
        """The same, awaited; a connection that blocks, blocks the event loop as it always does."""
        return self.execute(sql, values)

    def in_transaction(self) -> bool | None:
        """Whether a transaction is open, where the driver knows for certain without asking: for SQLite.

        (Servers keep more than their drivers know: PREPARE TRANSACTION.)
        """
        try:
            return None if self._native is None else bool(self._native.in_transaction)
        except Exception:  # noqa: BLE001 - closed, and so rolled back
            return False

    def blocks_all(self) -> bool:
        """Whether nobody can write to that database before this transaction has ended."""
        return self.dialect == SQLITE and self.in_transaction() is True

    def spoil(self) -> None:
        """Let the framework, if there is one, end this transaction with a rollback."""


def door_to(connection: Any) -> Door:
    """The door to this connection; InvalidOption for what is none."""
    if isinstance(connection, Door):
        return connection
    if hasattr(connection, "vendor") and hasattr(connection, "settings_dict"):
        return _DjangoDoor(connection)
    roots = [kind.__module__.partition(".")[0] for kind in type(connection).__mro__]
    if "sqlalchemy" in roots:
        if hasattr(connection, "sync_session") or hasattr(connection, "sync_connection"):
            return _AsyncAlchemyDoor(connection)
        if hasattr(connection, "exec_driver_sql") or hasattr(connection, "get_bind"):
            return _AlchemyDoor(connection)
        if hasattr(connection, "driver_connection"):  # what a pool of SQLAlchemy hands out
            return door_to(connection.driver_connection)
    driver = _driver_of(connection)
    if driver == "asyncpg" and hasattr(connection, "prepare"):
        return _AsyncpgDoor(connection)
    if driver is not None and hasattr(connection, "cursor") and hasattr(connection, "commit"):
        if driver in _AWAITED or any(kind.__name__ == "AsyncConnection" for kind in type(connection).__mro__):
            return _AsyncDriverDoor(connection, driver)
        return _DriverDoor(connection, driver)
    raise InvalidOption(
        f"a {type(connection).__module__}.{type(connection).__qualname__} is no connection whose transaction dibs can "
        "enter: pass the connection itself, of psycopg, psycopg2, PyMySQL, mysqlclient, mysql.connector or sqlite3, in "
        "tasks also of asyncpg, aiomysql, asyncmy or aiosqlite, a Connection or Session of SQLAlchemy, or a connection "
        "of Django"
    )


def _driver_of(native: Any) -> str | None:
    """By which package a connection was made, if it is one that is known."""
    roots = (kind.__module__.partition(".")[0] for kind in type(native).__mro__)
    return next((root for root in roots if root in _DRIVERS or root in _AWAITED), None)


def _checked(native: Any) -> Any:
    """A connection to SQLite as its driver made it; refused is what another SQLite library than ours has opened.

    Two of them in one process do not see each other's locks, as POSIX keeps locks by process: neither keeps the other
    out, and closing a file in one lets go what the other has locked. (Where dibs uses no SQLite there is none.)
    """
    ours, driver = sys.modules.get("dibs.stores.sqlite_file"), type(native).__module__.partition(".")[0]
    # (aiosqlite has one of sqlite3 in a thread.)
    if ours is not None and driver != "aiosqlite" and not isinstance(native, ours.sqlite3.Connection):
        raise InvalidOption(
            f"{driver} brings an SQLite library of its own, which does not see the locks of the one that dibs uses in "
            "this process (https://www.sqlite.org/howtocorrupt.html): connect with sqlite3, and keep to one of them"
        )
    return native


def _dialect(name: str) -> str:
    name = _ALIASES.get(name, name)
    if name not in DIALECTS:
        raise InvalidOption(f"dibs cannot enter transactions of {name!r}, only of {', '.join(DIALECTS)}")
    return name


def _filled(sql: str, values: Sequence[object], *, mark: str = "%s", percent: str = "%%") -> str:
    """The statement for a driver that wants ``mark`` where a value goes, and then ``percent`` for a percent sign."""
    return sql.replace("%", percent).replace(VALUE, mark) if values else sql


class _DriverDoor(Door):
    def __init__(self, connection: Any, driver: str) -> None:
        self._connection = connection
        self._driver = driver
        self.dialect = _DRIVERS[driver]
        if self.dialect == SQLITE:
            self._native = _checked(connection)

    def execute(self, sql: str, values: Sequence[object] = ()) -> Answer:
        cursor = self._cursor()
        try:
            if self.dialect == SQLITE:
                text = _filled(sql, values, mark="?", percent="%")
            else:
                text = _filled(sql, values, percent="%" if self._driver == "mysql" else "%%")
            cursor.execute(text, tuple(values)) if values else cursor.execute(text)
            rows = [tuple(row) for row in cursor.fetchall()] if cursor.description else []
            return Answer(rows, cursor.rowcount)
        finally:
            cursor.close()

    def _cursor(self) -> Any:
        """A cursor that brings plain tuples, whatever the connection's own bring."""
        if self._driver == "psycopg":
            return self._connection.cursor(row_factory=sys.modules["psycopg.rows"].tuple_row)
        if self._driver == "psycopg2":
            return self._connection.cursor(cursor_factory=sys.modules["psycopg2.extensions"].cursor)
        if self._driver == "mysql":
            return self._connection.cursor(buffered=True)
        if self.dialect == SQLITE:
            cursor = self._connection.cursor()
            cursor.row_factory = None
            return cursor
        return self._connection.cursor(sys.modules[f"{self._driver}.cursors"].Cursor)

    def __str__(self) -> str:
        return f"that {self._driver} connection"


class _AsyncDriverDoor(Door):
    awaited = True

    def __init__(self, connection: Any, driver: str) -> None:
        self._connection = connection
        self._driver = driver
        self.dialect = _AWAITED.get(driver) or _DRIVERS[driver]
        if self.dialect == SQLITE:
            self._native = connection

    async def execute_async(self, sql: str, values: Sequence[object] = ()) -> Answer:
        async with self._cursor() as cursor:
            if self.dialect == SQLITE:
                cursor.row_factory = None
                text = _filled(sql, values, mark="?", percent="%")
            else:
                text = _filled(sql, values)
            await (cursor.execute(text, tuple(values)) if values else cursor.execute(text))
            rows = [tuple(row) for row in await cursor.fetchall()] if cursor.description else []
            return Answer(rows, cursor.rowcount)

    def _cursor(self) -> Any:
        """A cursor that brings plain tuples, whatever the connection's own bring."""
        if self._driver == "psycopg":
            return self._connection.cursor(row_factory=sys.modules["psycopg.rows"].tuple_row)
        if self.dialect == SQLITE:
            return self._connection.cursor()
        return self._connection.cursor(sys.modules[f"{self._driver}.cursors"].Cursor)

    def __str__(self) -> str:
        return f"that asynchronous {self._driver} connection"


class _AsyncpgDoor(Door):
    dialect = POSTGRESQL
    awaited = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute_async(self, sql: str, values: Sequence[object] = ()) -> Answer:
        first, *rest = sql.split(VALUE)
        text = first + "".join(f"${place}{part}" for place, part in enumerate(rest, 1))
        statement = await self._connection.prepare(text)
        rows = [tuple(row) for row in await statement.fetch(*values)]
        count = (statement.get_statusmsg() or "").rpartition(" ")[2]  # of "UPDATE 1", or "INSERT 0 1"
        return Answer(rows, int(count) if count.isdecimal() else -1)

    def __str__(self) -> str:
        return "that asyncpg connection"


class _DjangoDoor(Door):
    def __init__(self, connection: Any) -> None:
        # django.db.connection stands for one connection a thread: this is the one of the caller's.
        handler, alias = getattr(connection, "_connections", None), getattr(connection, "_alias", None)
        self._connection = handler[alias] if handler is not None and alias is not None else connection
        self.dialect = _dialect(self._connection.vendor)

    def execute(self, sql: str, values: Sequence[object] = ()) -> Answer:
        with self._connection.cursor() as cursor:
            # Django takes %s for every database.
            cursor.execute(_filled(sql, values), list(values) or None)
            if self.dialect == SQLITE:
                self._native = _checked(self._connection.connection)
            return Answer([tuple(row) for row in cursor.fetchall()] if cursor.description else [], cursor.rowcount)

    def spoil(self) -> None:
        if self._connection.in_atomic_block:
            self._connection.set_rollback(True)

    def __str__(self) -> str:
        return f"the Django connection {self._connection.alias!r}"


class _AlchemyDoor(Door):
    def __init__(self, connection: Any) -> None:
        # A Session's connection is that of its transaction; both begin one when none has begun.
        self._connection = connection if hasattr(connection, "exec_driver_sql") else connection.connection()
        self.dialect = _dialect(self._connection.dialect.name)

    def execute(self, sql: str, values: Sequence[object] = ()) -> Answer:
        result = self._connection.execute(*_for_alchemy(sql, values))
        if self.dialect == SQLITE:
            self._native = _checked(self._connection.connection.driver_connection)
        return Answer([tuple(row) for row in result] if result.returns_rows else [], result.rowcount)

    def __str__(self) -> str:
        return "that connection of SQLAlchemy"


class _AsyncAlchemyDoor(Door):
    awaited = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._session = hasattr(connection, "sync_session")
        bind = connection.get_bind() if self._session else connection.sync_connection
        if bind is None:
            raise InvalidOption("that AsyncConnection of SQLAlchemy was not started: `async with engine.connect()`")
        self.dialect = _dialect(bind.dialect.name)

    async def execute_async(self, sql: str, values: Sequence[object] = ()) -> Answer:
        connection = await self._connection.connection() if self._session else self._connection
        result = await connection.execute(*_for_alchemy(sql, values))
        if self.dialect == SQLITE:
            self._native = _checked(connection.sync_connection.connection.driver_connection)
        return Answer([tuple(row) for row in result] if result.returns_rows else [], result.rowcount)

    def __str__(self) -> str:
        return "that asynchronous connection of SQLAlchemy"


def _for_alchemy(sql: str, values: Sequence[object]) -> tuple[Any, dict[str, object]]:
    """The statement and its values as SQLAlchemy's ``execute`` takes them for every driver."""
    first, *rest = sql.replace(":", "\\:").split(VALUE)
    text = first + "".join(f":dibs_{place}{part}" for place, part in enumerate(rest))
    return sys.modules["sqlalchemy"].text(text), {f"dibs_{place}": value for place, value in enumerate(values)}
