"""Fencing tokens compared where the resource is, and what a holder that was stopped can and cannot do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import dibs
from dibs import cli, fencing
from tests.callers import KINDS, TABLE, Caller, raw

ROOT = Path(__file__).parent.parent
URLS = {"postgresql": "postgres_url", "mysql": "mysql_url", "sqlite": "sqlite_url"}
every_database = pytest.mark.parametrize("database", URLS)


@pytest.fixture
def url(database: str, request: pytest.FixtureRequest) -> str:
    """A new database with a resource in it: one row, which has seen no token yet."""
    url = str(request.getfixturevalue(URLS[database])).partition("?")[0]
    _make(url)
    return url


def _make(url: str) -> None:
    with closing(raw(url)) as connection:
        connection.cursor().execute(TABLE)
        connection.cursor().execute("INSERT INTO resource (id, body) VALUES (1, 'old')")
        connection.commit()


def look(url: str) -> tuple[str, int | None]:
    """What stands in the resource, and the greatest token that it was shown."""
    with closing(raw(url)) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT body, fence FROM resource WHERE id = 1")
        body, fence = cursor.fetchone()
        return body, fence


@pytest.fixture
def caller(kind: str, request: pytest.FixtureRequest) -> Iterator[Caller]:
    """A connection of this kind to a database with the resource in it."""
    url = request.getfixturevalue(KINDS[kind][0]).partition("?")[0]
    _make(url)
    caller = KINDS[kind][1](url)
    yield caller
    caller.close()


# -- a holder that is stopped -----------------------------------------------------------------------------------------

HOLDER = """
import sys
import dibs
from dibs import fencing
from tests.callers import raw
url, how = sys.argv[1:]
client = dibs.connect(url)
connection = raw(url)
lease = client.lock("x", ttl=2).acquire()
if how == "guarded":
    lease.guard(connection)
lease.check()
print(lease.fencing_token, flush=True)
sys.stdin.readline()   # here it is stopped, right behind its last look at the lease
try:
    if how == "guard":
        lease.guard(connection)
    if how == "advance":
        fencing.advance(connection, "resource", key={"id": 1}, token=lease.fencing_token)
    fence = f", fence = {lease.fencing_token}" if how == "trigger" else ""
    connection.cursor().execute(f"UPDATE resource SET body = 'late'{fence} WHERE id = 1")
    connection.commit()
except Exception as error:
    connection.rollback()
    print(type(error).__name__, error, flush=True)
else:
    print("committed", flush=True)
"""


class Holder:
    """A process that holds the lock and has just looked at its lease; the next thing it does is to write."""

    def __init__(self, url: str, how: str) -> None:
        command = [sys.executable, "-W", "ignore", "-c", HOLDER, url, how]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.token = int(self.process.stdout.readline())
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> str:
        """Let it write; what became of that."""
        os.kill(self.process.pid, signal.SIGCONT)
        told, _ = self.process.communicate("go\n", timeout=30)
        return told.strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@every_database
@pytest.mark.parametrize("how", ["nothing", "guard", "advance", "trigger"])
def test_a_stopped_holder_writes_late(url: str, database: str, how: str) -> None:
    """A holder stopped behind its last check overwrites its successor's work, unless guard or a token refuses it."""
    if how == "trigger":
        with closing(raw(url)) as connection:
            connection.cursor().execute(fencing.trigger_sql(database, "resource"))
            connection.commit()
    holder = Holder(url, how)
    try:
        with dibs.connect(url) as client, client.lock("x", timeout=10) as lease, closing(raw(url)) as connection:
            assert lease.fencing_token > holder.token
            if how == "advance":
                fencing.advance(connection, "resource", key={"id": 1}, token=lease.fencing_token)
            connection.cursor().execute(
                f"UPDATE resource SET body = 'mine', fence = {lease.fencing_token} WHERE id = 1"
            )
            connection.commit()
            told = holder.go_on()
            if how == "nothing":
                assert (told, look(url)[0]) == ("committed", "late"), "nothing was at stake here"
            else:
                assert look(url) == ("mine", lease.fencing_token)
                assert told.startswith("LeaseLost") if how != "trigger" else "greater fencing token" in told, told
    finally:
        holder.close()


@pytest.mark.parametrize("database", ["postgresql", "mysql"])
def test_a_holder_stopped_in_its_transaction_keeps_others_out(url: str) -> None:
    """Stopped between guard and commit, it commits what nobody has changed in between; others enter after that."""
    holder = Holder(url, "guarded")
    try:
        with dibs.connect(url) as client:
            assert client.lock("x").acquire(timeout=3) is None
            assert holder.go_on() == "committed"
            with client.lock("x", timeout=5) as lease:
                # (A request of the first attempt may have been granted after its time, and given back.)
                assert lease.fencing_token > holder.token
                assert look(url)[0] == "late"
    finally:
        holder.close()


# -- advance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_advance_takes_tokens_that_rise(caller: Caller) -> None:
    """A row takes a token again and a greater one, and refuses a smaller one, through every kind of connection."""
    for token in (7, 7, 9, 2**63 - 1):
        fencing.advance(caller.given, "resource", key={"id": 1}, token=token)
        caller.commit()
        fencing.advance(caller.given, "resource", key={"id": 1, "body": "old"}, token=token)
        caller.commit()
    with pytest.raises(dibs.LeaseLost, match="fencing token 9223372036854775807; 9 is of an earlier holder"):
        fencing.advance(caller.given, "resource", key={"id": 1}, token=9)
    caller.rollback()
    assert [tuple(row) for row in caller.run("SELECT fence FROM resource")] == [(2**63 - 1,)]


@pytest.mark.parametrize("kind", ["psycopg", "pymysql", "sqlite3"])
def test_advance_is_undone_with_its_transaction(caller: Caller) -> None:
    """It belongs to the caller's transaction: rolled back, the token was never shown."""
    fencing.advance(caller.given, "resource", key={"id": 1}, token=9)
    caller.rollback()
    fencing.advance(caller.given, "resource", key={"id": 1}, token=7)
    caller.commit()


@pytest.mark.parametrize("kind", ["psycopg", "pymysql", "sqlite3", "session-postgresql"])
def test_advance_says_what_is_wrong(caller: Caller) -> None:
    """A row that is not there is a LookupError; wrong tokens, keys and names are refused before anything is sent."""
    with pytest.raises(LookupError, match="no row with"):
        fencing.advance(caller.given, "resource", key={"id": 2}, token=7)
    for token in (0, -1, True, 2**63, 1.0, "7", None):
        with pytest.raises(dibs.InvalidOption, match="fencing_token"):
            fencing.advance(caller.given, "resource", key={"id": 1}, token=token)  # type: ignore[arg-type]
    for key in ({}, {"id": None}):
        with pytest.raises(dibs.InvalidOption, match="tells no row"):
            fencing.advance(caller.given, "resource", key=key, token=7)
    for odd in ({"key": 1}, {"key": "id"}, {"key": [("id", 1)]}, {"key": {1: 1}}, {"table": None}, {"column": None}):
        given: dict[str, Any] = {"table": "resource", "key": {"id": 1}, **odd}
        with pytest.raises(dibs.InvalidOption, match="not"):
            fencing.advance(caller.given, token=7, **given)
    for table in ("", "a\0b", "x" * 100, "a..b", "resource; DROP TABLE resource"):
        with pytest.raises(Exception, match=r".") as refused:
            fencing.advance(caller.given, table, key={"id": 1}, token=7)
        assert isinstance(refused.value, dibs.InvalidOption) or "DROP" in table or ".." in table
        caller.rollback()
    assert caller.run("SELECT 1 FROM resource")


@every_database
def test_names_are_quoted(url: str, database: str) -> None:
    """Tables and columns of any name, with the marks that drivers look for in them."""
    odd = 'o"d%s:x?`$dibs$'
    quote = "`{}`" if url.startswith("mysql:") else '"{}"'
    doubled = odd.replace("`", "``") if url.startswith("mysql:") else odd.replace('"', '""')
    table = quote.format(doubled)
    with closing(raw(url)) as connection:
        connection.cursor().execute(f"CREATE TABLE {table} ({table} VARCHAR(20), fence BIGINT)")
        connection.cursor().execute(f"INSERT INTO {table} VALUES ('k', NULL)")
        connection.cursor().execute(fencing.trigger_sql(database, odd))
        connection.commit()
        fencing.advance(connection, odd, key={odd: "k"}, token=3)
        with pytest.raises(dibs.LeaseLost):
            fencing.advance(connection, odd, key={odd: "k"}, token=2)
        with pytest.raises(Exception, match="greater fencing token"):
            connection.cursor().execute(f"UPDATE {table} SET fence = 2")
        connection.rollback()


def test_a_schema_may_stand_before_the_table(postgres_url: str) -> None:
    """`sales.account` is a table in a schema, for advance and for the trigger."""
    with closing(raw(postgres_url)) as connection:
        connection.execute("CREATE SCHEMA sales; CREATE TABLE sales.account (id int, fence bigint)")
        connection.execute("INSERT INTO sales.account VALUES (7, 5)")
        connection.execute(fencing.trigger_sql("postgresql", "sales.account"))
        connection.execute(fencing.trigger_sql("postgresql", "sales.account"))
        connection.commit()
        fencing.advance(connection, "sales.account", key={"id": 7}, token=6)
        connection.commit()
        for smaller in ("5", "NULL"):
            with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="greater fencing token"):
                connection.execute(f"UPDATE sales.account SET fence = {smaller}")
            connection.rollback()
        connection.execute("UPDATE sales.account SET id = 8")
        connection.rollback()


# -- the trigger ------------------------------------------------------------------------------------------------------


def test_an_unknown_dialect_is_refused() -> None:
    """There are three."""
    with pytest.raises(dibs.InvalidOption, match="postgresql, mysql, sqlite"):
        fencing.trigger_sql("oracle", "resource")


@every_database
def test_the_command_line_prints_the_trigger(url: str, database: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`dibs schema --fence TABLE` prints it for the database of the URL; for the program mysql with a DELIMITER."""
    assert cli.main(["--url", url, "schema", "--fence", "resource", "--column", "token"]) == 0
    printed = capsys.readouterr().out
    text = fencing.trigger_sql(database, "resource", "token").rstrip()
    assert printed.rstrip() == (f"DELIMITER $$\n{text}$$\nDELIMITER ;" if database == "mysql" else text)


def test_the_command_line_needs_a_database(capsys: pytest.CaptureFixture[str]) -> None:
    """For a store without tables it is a usage error."""
    assert cli.main(["--url", "memory://", "schema", "--fence", "resource"]) == 64
    assert "has no tables to fence" in capsys.readouterr().err
