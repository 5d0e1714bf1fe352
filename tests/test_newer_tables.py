"""Tables that a later dibs has changed: a program of this one says so when it meets them, and makes none beside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

import dibs
from dibs import SetupRequired
from tests.callers import raw
from tests.yard import URLS

REFUSED = r"newer dibs has changed the tables.* version 99, .*Install the newer one"
VERBS: dict[str, Callable[[dibs.Client], object]] = {
    "lock": lambda client: client.lock("x").acquire(timeout=0),
    "semaphore": lambda client: client.semaphore("x", 2).acquire(timeout=0),
    "put": lambda client: client.queue("x").put(1),
    "take": lambda client: client.queue("x").take(1),
    "setup": lambda client: client.setup(),
    "ls": lambda client: client.leases(),
}


def run(url: str, *statements: str) -> list[Any]:
    with closing(raw(url)) as connection:
        cursor = connection.cursor()
        for statement in statements:
            cursor.execute(statement)
        rows = list(cursor.fetchall()) if cursor.description else []
        connection.commit()
    return rows


@pytest.fixture(params=URLS)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def changed(url: str, to: int) -> None:
    """What a later dibs might do: it calls the tables by other names, and writes down which version they are of."""
    key = "what" if url.startswith("mysql") else "key"
    run(
        url,
        *(f"ALTER TABLE dibs_lease{end} RENAME TO dibs_lease{end}_new" for end in ("", "_job", "_job_end")),
        f"UPDATE dibs_lease_meta SET value = '{to}' WHERE {key} = 'version'",
    )


def test_a_program_at_work_is_told(url: str) -> None:
    """Who had used the tables before they were changed is told, whatever it asks for, and what it holds is lost."""
    with dibs.connect(url, ttl=2, patience=1) as client:
        held = client.lock("held").acquire()
        assert held is not None
        client.queue("x").put(1)
        changed(url, 99)
        for verb in VERBS.values():
            with pytest.raises(SetupRequired, match=REFUSED):
                verb(client)
        assert held.lost.wait(10)
    with pytest.raises(Exception, match="dibs_lease"):
        run(url, "SELECT 1 FROM dibs_lease")


@pytest.mark.parametrize("verb", VERBS)
def test_a_program_that_starts_is_told(url: str, verb: str) -> None:
    """Who comes to tables that a later dibs has changed is told, and makes none of its own."""
    with dibs.connect(url) as client:
        client.setup()
    changed(url, 99)
    with dibs.connect(url) as client, pytest.raises(SetupRequired, match=REFUSED):
        VERBS[verb](client)
    for table in ("dibs_lease", "dibs_lease_job"):
        with pytest.raises(Exception, match="dibs_lease"):
            run(url, f"SELECT 1 FROM {table}")


def test_putting_with_a_connection_makes_no_tables_either(url: str) -> None:
    """A job that goes into the caller's transaction finds no queue, and makes none.

    (Who has seen the tables sends its statement in the caller's transaction, to whom PostgreSQL's answer goes then.)
    """
    with dibs.connect(url) as client:
        client.setup()
        queue = client.queue("x")
        with closing(raw(url)) as connection:
            queue.put(1, connection=connection)
            connection.commit()
        changed(url, 99)
        with closing(raw(url)) as connection, pytest.raises((SetupRequired, psycopg.errors.UndefinedTable)):
            queue.put(2, connection=connection)
    with pytest.raises(Exception, match="dibs_lease"):
        run(url, "SELECT 1 FROM dibs_lease_job")
