"""The caller's side of a transaction: one face for every kind of connection that a door of dibs leads through."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg
import psycopg2
import pymysql
import sqlalchemy
import sqlalchemy.orm

_numbers = count()
TABLE = "CREATE TABLE resource (id INTEGER PRIMARY KEY, body VARCHAR(100), fence BIGINT)"


class Caller:
    """A connection of one kind, and a way to do with it what its user would; ``given`` is what dibs gets."""

    def __init__(self, given: Any, run: Callable[[str], Any], commit: Any, rollback: Any, close: Any) -> None:
        self.given = given
        self.run = run
        self.commit = commit
        self.rollback = rollback
        self.close = close


def mysql_arguments(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": parts.path[1:],
    }


def raw(url: str, driver: str = "") -> Any:
    """A driver's own connection, not in autocommit."""
    if url.startswith("postgresql:"):
        return psycopg2.connect(url) if driver == "psycopg2" else psycopg.connect(url)
    if url.startswith("mysql:"):
        if driver == "mysqlclient":
            import MySQLdb

            return MySQLdb.connect(**mysql_arguments(url))
        if driver == "connector":
            import mysql.connector

            return mysql.connector.connect(**mysql_arguments(url))
        return pymysql.connect(ssl_disabled=True, **mysql_arguments(url))  # see MariaDBServer.connect
    return sqlite3.connect(url.removeprefix("sqlite:///"))


def _of_driver(url: str, driver: str = "") -> Caller:
    connection = raw(url, driver)

    def run(sql: str) -> Any:
        cursor = connection.cursor()
        try:
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else []
        finally:
            cursor.close()

    return Caller(connection, run, connection.commit, connection.rollback, connection.close)


def alchemy_url(url: str) -> str:
    scheme, rest = url.split("://", 1)
    driver = {"postgresql": "+psycopg", "mysql": "+pymysql", "sqlite": ""}[scheme]
    return f"{scheme}{driver}://{rest.partition('?')[0]}"


def _of_alchemy(url: str) -> Caller:
    engine = sqlalchemy.create_engine(alchemy_url(url))
    connection = engine.connect()

    def close() -> None:
        connection.close()
        engine.dispose()

    return Caller(connection, _runner(connection), connection.commit, connection.rollback, close)


def _of_alchemy_session(url: str) -> Caller:
    engine = sqlalchemy.create_engine(alchemy_url(url))
    session = sqlalchemy.orm.Session(engine)
    session.connection()  # now, rather than in the time of somebody's short lease
    session.rollback()

    def close() -> None:
        session.close()
        engine.dispose()

    return Caller(session, _runner(session), session.commit, session.rollback, close)


def _runner(executes: Any) -> Callable[[str], Any]:
    def run(sql: str) -> Any:
        result = executes.execute(sqlalchemy.text(sql))
        return list(result) if result.returns_rows else []

    return run


def django_connection(url: str) -> Any:
    """A connection of Django's own: ``django.db.connections[…]``, under an alias of its own."""
    import django
    from django.conf import settings
    from django.db import connections
    from django.db.utils import ConnectionHandler

    if not settings.configured:
        settings.configure(USE_TZ=True)
        django.setup()
    if url.startswith("sqlite:"):
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///")}
    else:
        parts = mysql_arguments(url)
        database = {
            "ENGINE": f"django.db.backends.{'mysql' if url.startswith('mysql:') else 'postgresql'}",
            "HOST": parts["host"],
            "PORT": parts["port"],
            "USER": parts["user"],
            "PASSWORD": parts["password"],
            "NAME": parts["database"],
        }
    alias = f"test_{next(_numbers)}"
    connections.settings[alias] = ConnectionHandler({"default": database}).settings["default"]
    return connections[alias]


def _of_django(url: str) -> Caller:
    from django.db.transaction import Atomic

    connection = django_connection(url)
    blocks: list[Atomic] = []

    def run(sql: str) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def begin() -> None:
        blocks.append(Atomic(connection.alias, savepoint=True, durable=False))
        blocks[-1].__enter__()

    def end(*error: Any) -> None:
        blocks.pop().__exit__(*error)
        begin()

    def close() -> None:
        blocks.pop().__exit__(RuntimeError, RuntimeError("closed"), None)
        connection.close()

    begin()
    return Caller(
        connection,
        run,
        lambda: end(None, None, None),
        lambda: end(RuntimeError, RuntimeError("rolled back"), None),
        close,
    )


KINDS: dict[str, tuple[str, Callable[[str], Caller]]] = {
    "psycopg": ("postgres_url", _of_driver),
    "psycopg2": ("postgres_url", lambda url: _of_driver(url, "psycopg2")),
    "sqlalchemy-postgresql": ("postgres_url", _of_alchemy),
    "session-postgresql": ("postgres_url", _of_alchemy_session),
    "django-postgresql": ("postgres_url", _of_django),
    "pymysql": ("mysql_url", _of_driver),
    "mysql.connector": ("mysql_url", lambda url: _of_driver(url, "connector")),
    "sqlalchemy-mysql": ("mysql_url", _of_alchemy),
    "session-mysql": ("mysql_url", _of_alchemy_session),
    "sqlite3": ("sqlite_url", _of_driver),
    "sqlalchemy-sqlite": ("sqlite_url", _of_alchemy),
    "session-sqlite": ("sqlite_url", _of_alchemy_session),
    "django-sqlite": ("sqlite_url", _of_django),
}
# mysqlclient must be compiled, so not everybody has it; Django's backend needs it, too.
if find_spec("MySQLdb"):
    KINDS["mysqlclient"] = ("mysql_url", lambda url: _of_driver(url, "mysqlclient"))
    KINDS["django-mysql"] = ("mysql_url", _of_django)


@contextmanager
def later(seconds: float, end: Callable[[], object]) -> Iterator[None]:
    """Within this block ``end`` is called, once, by another thread; it has returned before the block does."""
    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.join()  # or a connection might be closed while this thread waits for its answer
