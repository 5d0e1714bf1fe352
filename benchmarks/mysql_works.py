"""Works on MariaDB: dibs beside the same two statements on the raw driver, beside GET_LOCK, and beside tooz.

*The raw pair* is what a team would write by hand, and the least a lease in a table can do: a conditional UPDATE that
takes a free or expired lock and raises its token, and an UPDATE that gives it back. Both are in autocommit and durable,
and its rows are there already. Everybody connects over TCP to the same server.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import dibs
from benchmarks.handover import dibs_lock, race_two_processes
from benchmarks.harness import PAIRS_PER_S, Bench, Target, lone_thread
from benchmarks.tasks import event_loop, many_tasks
from tests.servers.mysql import MariaDBServer

NAMES = 100
POOL = 10
TASKS = 1000

RAW_TABLE = """\
CREATE TABLE raw_lock (
    name VARBINARY(255) PRIMARY KEY, claim_id VARBINARY(255), token BIGINT NOT NULL, expires DATETIME(6) NOT NULL
) ENGINE = InnoDB"""
RAW_ROW = "INSERT INTO raw_lock VALUES (%s, NULL, 0, UTC_TIMESTAMP(6))"
# The new token is read from the answer, as cursor.lastrowid.
RAW_ACQUIRE = """\
UPDATE raw_lock SET claim_id = %s, token = LAST_INSERT_ID(token + 1), expires = UTC_TIMESTAMP(6) + INTERVAL 30 SECOND
WHERE name = %s AND (claim_id IS NULL OR expires <= UTC_TIMESTAMP(6))"""
RAW_RELEASE = "UPDATE raw_lock SET claim_id = NULL WHERE name = %s AND claim_id = %s"


def mysql_lone(bench: Bench) -> None:
    """One thread takes and gives back locks nobody else wants, in pairs a second; with PyMySQL, then with mysqlclient.

    dibs: ``with client.lock(name): pass``, an object for each use. The reference is the raw pair on one cursor of the
    same driver. GET_LOCK and RELEASE_LOCK (locks of the connection: no expiry, no token, nothing written to disk) run
    on PyMySQL; tooz uses the same on a connection for each lock.
    """
    names = [f"job/{number}" for number in range(NAMES)]
    seconds = bench.round_s
    drivers = ["pymysql", *(["mysqlclient"] if importlib.util.find_spec("MySQLdb") else [])]
    for driver in drivers:
        with (
            mysql_database(bench) as url,
            dibs.connect(f"{url}?driver={driver}") as client,
            closing(_connect(driver, url)) as connection,
        ):
            _make_raw_rows(connection, names)
            cursor = connection.cursor()
            claims = itertools.count()

            def dibs_pair(name: str, client: dibs.Client = client) -> None:
                with client.lock(name):
                    pass

            def raw_pair(name: str, cursor: Any = cursor, claims: Iterator[int] = claims) -> None:
                claim_id = f"raw-{next(claims)}"
                assert cursor.execute(RAW_ACQUIRE, (claim_id, name)) == 1
                assert cursor.lastrowid
                cursor.execute(RAW_RELEASE, (name, claim_id))

            def get_lock_pair(name: str, cursor: Any = cursor) -> None:
                cursor.execute("SELECT GET_LOCK(%s, 0)", (name,))
                assert cursor.fetchone() == (1,)
                cursor.execute("SELECT RELEASE_LOCK(%s)", (name,))
                cursor.fetchone()

            contestants: dict[str, Callable[[str], object]] = {"dibs": dibs_pair, "raw pair": raw_pair}
            if driver == "pymysql":
                contestants |= {"GET_LOCK": get_lock_pair, "tooz": _tooz_pair(url)}
            bench.race(
                f"{NAMES} names, {driver}",
                PAIRS_PER_S,
                {who: partial(lone_thread, pair, names, seconds) for who, pair in contestants.items()},
                [Target(0.9, "raw pair")],
            )


def mysql_async(bench: Bench) -> None:
    """1000 asyncio tasks, each with a name of its own, take and give back as fast as they can; pairs a second in all.

    dibs: ``async with client.lock(name): pass``, all tasks share one client. The peer: the raw pair over an asyncmy
    pool of 10 connections in autocommit, which each statement takes one from for itself.
    """
    import asyncmy

    names = [f"task/{number}" for number in range(TASKS)]
    seconds = max(1.0, 2 * bench.round_s)
    with mysql_database(bench) as url, event_loop() as run:
        with closing(_connect("pymysql", url)) as connection:
            _make_raw_rows(connection, names)
        clients = {"dibs": dibs.connect_async(f"{url}?driver=pymysql")}
        if importlib.util.find_spec("MySQLdb"):
            clients["dibs, mysqlclient"] = dibs.connect_async(f"{url}?driver=mysqlclient")

        def dibs_pair(client: dibs.AsyncClient) -> Callable[[str], Any]:
            async def pair(name: str) -> None:
                async with client.lock(name):
                    pass

            return pair

        async def opened() -> Any:
            return await asyncmy.create_pool(minsize=POOL, maxsize=POOL, autocommit=True, **_login(url))

        pool = run(opened())
        claims = itertools.count()

        async def raw_pair(name: str) -> None:
            claim_id = f"raw-{next(claims)}"
            async with pool.acquire() as connection, connection.cursor() as cursor:
                assert await cursor.execute(RAW_ACQUIRE, (claim_id, name)) == 1
            async with pool.acquire() as connection, connection.cursor() as cursor:
                await cursor.execute(RAW_RELEASE, (name, claim_id))

        async def shut() -> None:
            for client in clients.values():
                await client.close()
            pool.close()
            await pool.wait_closed()

        contestants: dict[str, Callable[[str], Any]] = {who: dibs_pair(client) for who, client in clients.items()}
        contestants["asyncmy pool of 10"] = raw_pair
        try:
            bench.race(
                "1000 tasks, different names",
                PAIRS_PER_S,
                {
                    who: lambda pair=pair: run(many_tasks(pair, names, seconds))  # type: ignore[misc]
                    for who, pair in contestants.items()
                },
                [Target(5.0, "asyncmy pool of 10")],
            )
        finally:
            run(shut())


def mysql_handover(bench: Bench) -> None:
    """Hand-over between two processes on MariaDB, in ms.

    dibs: ``lock.acquire()`` without a limit, ``lock.release()``. The peer: ``SELECT GET_LOCK('handover', 1000)`` and
    ``RELEASE_LOCK``, on a PyMySQL connection each; its waiters sleep inside the server, and its locks have no expiry,
    no token, and end with the connection.
    """
    with mysql_database(bench) as url:
        peers: dict[str, tuple[Callable[[str], Any], str]] = {
            "dibs": (dibs_lock, f"{url}?driver=pymysql"),
            "GET_LOCK": (GetLock, url),
        }
        race_two_processes(bench, peers, Target(10.0))


class GetLock:
    """The server's own lock of a session, which a waiter waits for inside the server."""

    def __init__(self, url: str) -> None:
        self._cursor = _connect("pymysql", url).cursor()

    def acquire(self) -> None:
        self._cursor.execute("SELECT GET_LOCK('handover', 1000)")

    def release(self) -> None:
        self._cursor.execute("SELECT RELEASE_LOCK('handover')")


def _tooz_pair(url: str) -> Callable[[str], object]:
    from tooz import coordination

    coordinator = coordination.get_coordinator(url, b"benchmark")
    coordinator.start()

    def pair(name: str) -> None:
        with coordinator.get_lock(name.encode()):
            pass

    return pair


@contextmanager
def mysql_database(bench: Bench) -> Iterator[str]:
    """The URL of a new empty database, dropped afterwards."""
    server = bench.started(MariaDBServer)
    url = server.create_database()
    try:
        yield url
    finally:
        server.drop_database(url)


def _login(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": parts.path[1:],
    }


def _connect(driver: str, url: str) -> Any:
    if driver == "pymysql":
        import pymysql

        return pymysql.connect(autocommit=True, **_login(url))
    import MySQLdb

    return MySQLdb.connect(autocommit=True, **_login(url))


def _make_raw_rows(connection: Any, names: Sequence[str]) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.execute(RAW_TABLE)
        cursor.executemany(RAW_ROW, [(name,) for name in names])
