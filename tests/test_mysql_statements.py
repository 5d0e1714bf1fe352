"""What MariaDB carries out and MySQL refuses: of every statement that dibs sends to it, none is of that kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from dibs.columns import Place, name_of
from dibs.connecting import locate
from dibs.store import GONE, Release, Renew, Request
from dibs.testing import check_store
from dibs.testing.case import STORE_CASES
from tests.callers import raw
from tests.servers.mysql import MariaDBServer
from tests.waits import soon
from tests.yard import Yard

# A literal, a comment for MySQL alone, a bracket, or what matters here.
_PART = re.compile(
    r"""'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `[^`]*` | (?P<word>
        FOR\ UPDATE | LOCK\ IN\ SHARE\ MODE | JSON_TABLE\s*\( | OF\s+\w+ | UNION | RETURNING | [();] )""",
    re.VERBOSE | re.IGNORECASE,
)


def refused(sql: str) -> str | None:
    """Why MySQL 8 and 9 refuse a statement that MariaDB carries out, as far as this test knows; None: they do not.

    A SELECT with a lock locks each of its tables, and a document is none that can be locked (error 3569): such a lock
    must name its table. One in brackets is a SELECT of its own. RETURNING is MariaDB's.
    """
    levels: list[dict[str, bool]] = [{}]

    def ended() -> str | None:
        level = levels[-1]
        locked = level.get("lock") and not level.get("of")
        return "it locks a document" if locked and level.get("document") else None

    for found in _PART.finditer(sql.replace("/*!80000", "").replace("*/", "")):
        word = (found["word"] or "").upper()
        if word.startswith("JSON_TABLE"):
            levels[-1]["document"] = True
            levels.append({})  # with the bracket behind it
        elif word == "(":
            levels.append({})
        elif word == ")":
            if (why := ended()) is not None:
                return why
            levels.pop()
        elif word in ("UNION", ";"):
            if (why := ended()) is not None:
                return why
            levels[-1] = {}
        elif word in ("FOR UPDATE", "LOCK IN SHARE MODE"):
            levels[-1]["lock"] = True
        elif word.startswith("OF"):
            levels[-1]["of"] = True
        elif word == "RETURNING":
            return "it has RETURNING"
    return ended()


_DOCUMENT = "JSON_TABLE('[1, \"FOR UPDATE (\"]', '$[*]' COLUMNS (id BIGINT PATH '$')) AS a"


@pytest.mark.parametrize(
    "sql, reason",
    [
        ("SELECT 1 FROM t WHERE id = 1 FOR UPDATE SKIP LOCKED", None),
        (f"SELECT 1 FROM {_DOCUMENT} JOIN t ON t.id = a.id", None),
        (f"SELECT 1 FROM {_DOCUMENT} JOIN t ON t.id = a.id FOR UPDATE", "it locks a document"),
        (f"SELECT 1 FROM {_DOCUMENT} JOIN t ON t.id = a.id LOCK IN SHARE MODE", "it locks a document"),
        (f"SELECT 1 FROM {_DOCUMENT} JOIN t ON t.id = a.id FOR UPDATE /*!80000 OF t */ SKIP LOCKED", None),
        (f"SELECT 1 FROM {_DOCUMENT} JOIN (SELECT id FROM t LOCK IN SHARE MODE) AS t ON t.id = a.id", None),
        (f"SELECT 1 FROM t JOIN (SELECT id FROM {_DOCUMENT} FOR UPDATE) AS a ON t.id = a.id", "it locks a document"),
        (f"SELECT id FROM {_DOCUMENT} UNION ALL SELECT id FROM t FOR UPDATE", None),
        (f"INSERT INTO t SELECT id FROM {_DOCUMENT}; SELECT 1 FROM t FOR UPDATE", None),
        ("INSERT INTO t VALUES ('FOR UPDATE RETURNING') RETURNING id", "it has RETURNING"),
    ],
)
def test_the_rule(sql: str, reason: str | None) -> None:
    """The rule finds what MySQL refuses, and takes no word in a literal or of another SELECT for one of its own."""
    assert refused(sql) == reason


@contextmanager
def written_down(server: MariaDBServer) -> Iterator[list[str]]:
    """The statements that reach the server meanwhile; to be read afterwards."""
    told: list[str] = []
    with closing(raw(server.url())) as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_log_off = ON")  # of what this connection says
        cursor.execute("TRUNCATE mysql.general_log")
        cursor.execute("SET GLOBAL log_output = 'TABLE'")
        cursor.execute("SET GLOBAL general_log = ON")
        try:
            yield told
        finally:
            cursor.execute("SET GLOBAL general_log = OFF")
        cursor.execute("SELECT argument FROM mysql.general_log WHERE command_type IN ('Query', 'Execute')")
        told += {row[0].decode() if isinstance(row[0], bytes) else row[0] for row in cursor}
        cursor.execute("TRUNCATE mysql.general_log")
        cursor.execute("SET GLOBAL log_output = 'FILE'")


def test_no_statement_is_one_that_mysql_refuses(mysql: MariaDBServer, mysql_url: str) -> None:
    """Leases, permits, lines, jobs, and claims in columns: all that the cases of the contract make dibs say."""
    with written_down(mysql) as told:
        check_store(mysql_url, only=list(STORE_CASES.cases))
        yard = Yard(mysql_url)
        with yard.claims().take(query=yard.due, n=3) as items:
            for item in items:
                item.done()
        yard.close()
    assert sum("JSON_TABLE" in sql for sql in told) > 20
    assert sum("FOR UPDATE" in sql for sql in told) > 20
    assert {sql: why for sql in told if (why := refused(sql)) is not None} == {}


def test_who_ends_or_renews_a_claim_that_is_over_locks_no_row(mysql: MariaDBServer, mysql_url: str) -> None:
    """An end that was put off comes right after the commit that freed the row, when others ask for that."""
    yard = Yard(mysql_url)
    name = name_of("event:1", Place("event", "id"), "1")
    requests: list[Request] = [Release(name, "over"), Renew(name, "over", 10)]
    with written_down(mysql) as told, closing(locate(mysql_url)[0].open()) as store:
        assert store.act(requests, soon()) == [GONE, GONE]
    assert any("dibs_until" in sql for sql in told)
    assert not any("FOR UPDATE" in sql for sql in told)
    yard.close()
