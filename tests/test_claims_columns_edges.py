"""Claims in columns of the user's table, at their edges: tables and rows that are not as they should be, answers that
were lost, and locks of others that last."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pymysql
import pytest

import dibs
from dibs.stores.postgres_link import Connection
from tests.between import Between
from tests.callers import raw
from tests.servers.mysql import MariaDBServer
from tests.yard import LONG_S, ROWS, Yard, until

URLS = ["sqlite_url", "postgres_url", "mysql_url"]


@pytest.fixture(params=URLS, ids=[url.partition("_")[0] for url in URLS])
def yard(request: pytest.FixtureRequest) -> Iterator[Yard]:
    yard = Yard(request.getfixturevalue(request.param))
    yield yard
    yard.close()


@pytest.fixture(params=["postgres_url", "mysql_url"], ids=["postgres", "mysql"])
def served(request: pytest.FixtureRequest) -> Iterator[Yard]:
    """A yard in a database that has locks on rows."""
    yard = Yard(request.getfixturevalue(request.param))
    yield yard
    yard.close()


# -- tables and rows that are not as they should be -------------------------------------------------------------------


def refuse(yard: Yard, number: int | str) -> None:
    """Let a trigger refuse every change of this row (or of any), as those do that protect what is archived."""
    if yard.dialect == "postgresql":
        yard.run(
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN RAISE EXCEPTION 'archived' USING ERRCODE = 'SHOP1'; END$$"
        )
        yard.run(
            f"CREATE TRIGGER no BEFORE UPDATE ON event FOR EACH ROW WHEN (NEW.id = {number}) EXECUTE FUNCTION no()"
        )
    elif yard.dialect == "mysql":
        yard.run(
            "CREATE TRIGGER no BEFORE UPDATE ON event FOR EACH ROW"
            f" IF NEW.id = {number} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'archived'; END IF"
        )
    else:
        yard.run(
            f"CREATE TRIGGER no BEFORE UPDATE ON event WHEN NEW.id = {number}"
            " BEGIN SELECT RAISE(ABORT, 'archived'); END"
        )


def test_a_row_that_is_refused_spoils_no_other(yard: Yard) -> None:
    """A trigger that refuses one row is told to whoever claims, renews or ends that; the others go on."""
    between = Between(yard.url)
    with between.client() as client:
        batch = yard.claims(client, ttl=3, renew=True).take([1, 2, 3])
        refuse(yard, 3)
        (until_now,) = yard.run("SELECT dibs_until FROM event WHERE id = 1")
        until(lambda: yard.row(1)[2] > until_now[0])  # renewed, in one call with the one that is refused
        assert batch.items[0].held
        assert batch.items[1].held
        batch.release()
        assert batch.lost == []
        until(lambda: not batch.items[2].held)
        assert yard.row(1) == yard.row(2) == (1, None, None)
    with yard.client() as client, yard.claims(client).take([5]):
        told: list[str] = []

        def refused() -> bool:
            try:
                yard.claims(client).take([1, 2, 3, 4]).release()
            except dibs.InvalidOption as error:
                told.append(str(error))
            return bool(told)

        until(refused)  # when the ttl of the claim that could not be ended is over
        assert told[0].startswith("row '3' of 'event' cannot be written")
        assert "archived" in told[0]
        until(lambda: yard.row(1)[1:] == yard.row(4)[1:] == (None, None))
        with yard.claims(client).take([1, 2, 4]) as others:
            assert others.won == [1, 2, 4]


def test_a_table_that_refuses_every_row_is_no_outage(served: Yard) -> None:
    """Also where a request's time is too short to look at each of them by itself, it is told as what it is."""
    refuse(served, "NEW.id")
    served.run("DELETE FROM event")
    served.run(f"INSERT INTO event VALUES {','.join(f'({n}, {n!r}, TRUE, NULL, NULL, NULL)' for n in range(1000))}")
    client = served.client(request_timeout=0.5)

    def reached() -> bool:  # a store that was reached is asked again when it is slow, as it may be beside other tests
        try:
            client.ping()
        except dibs.StoreUnavailable:
            return False
        return True

    until(reached)
    with pytest.raises(dibs.InvalidOption, match="archived"):
        served.claims(client).take(range(1000))


WRONG = {
    "postgresql": ["dibs_until timestamp", "dibs_until timestamptz(0)", "dibs_claim varchar(40)", "dibs_token text"],
    "mysql": [
        "dibs_until DATETIME NULL",
        "dibs_until TIMESTAMP(6) NULL",
        "dibs_claim VARCHAR(40) NULL",
        "dibs_claim VARCHAR(255) NOT NULL",
        "dibs_token TEXT NULL",
    ],
    "sqlite": ["dibs_until TEXT", "dibs_claim INTEGER", "dibs_token TEXT"],
}


def test_columns_of_other_types_are_refused(yard: Yard) -> None:
    """Columns whose types keep something else than is written to them would let two hold one row: SetupRequired."""
    claims = yard.claims()
    for number, column in enumerate(WRONG[yard.dialect]):
        table = f"wrong{number}"
        columns = {"dibs_token": "BIGINT", "dibs_claim": "VARCHAR(255)", "dibs_until": "DATETIME(6)"}
        if yard.dialect == "postgresql":
            columns["dibs_until"] = "timestamptz"
        elif yard.dialect == "sqlite":
            columns["dibs_until"] = "REAL"
        name, _, kind = column.partition(" ")
        columns[name] = kind
        described = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        yard.run(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {described})")
        with pytest.raises(dibs.SetupRequired, match=f"{name} of '{table}' is"):
            yard.client().claims(table, mode="columns").take([1])
    with claims.take([1]) as batch:
        assert batch.won == [1]


def test_a_table_without_row_locks_is_refused(mysql_url: str) -> None:
    """An engine that locks no rows would let two claim one: InvalidOption, with what to do."""
    yard = Yard(mysql_url)
    yard.run("ALTER TABLE event ENGINE = MyISAM")
    with pytest.raises(dibs.InvalidOption, match=r"MyISAM.*ENGINE=InnoDB"):
        yard.claims().take([1])
    yard.run("ALTER TABLE event ENGINE = InnoDB")
    with yard.claims().take([1]) as batch:
        assert batch.won == [1]
    yard.close()


def test_views_are_refused(yard: Yard) -> None:
    """A view has no unique key, so it is not known that a claim on it is on one row."""
    yard.run("CREATE VIEW shown AS SELECT * FROM event")
    with pytest.raises(dibs.InvalidOption, match="unique index of its own"):
        yard.client().claims("shown", mode="columns").take([1])


def test_partitioned_tables_keep_claims(served: Yard) -> None:
    """A table in partitions keeps claims like any other."""
    if served.dialect == "postgresql":
        served.run("CREATE TABLE parts (id INTEGER PRIMARY KEY) PARTITION BY RANGE (id)")
        served.run("CREATE TABLE parts_a PARTITION OF parts FOR VALUES FROM (0) TO (10)")
        served.run("CREATE TABLE parts_b PARTITION OF parts FOR VALUES FROM (10) TO (100)")
    else:
        served.run("CREATE TABLE parts (id INTEGER PRIMARY KEY) PARTITION BY HASH (id) PARTITIONS 4")
    served.run("INSERT INTO parts VALUES (1), (11), (21)")
    served.migrate("parts")
    claims = served.client().claims("parts", mode="columns", ttl=LONG_S)
    with claims.take([1, 11, 21, 31]) as batch:
        assert (batch.won, batch.stale) == ([1, 11, 21], [31])
        assert claims.take([11]).busy == [11]
        batch.items[1].done()
        with claims.take(query="SELECT id FROM parts") as other:
            ask = batch.items[1]._hold.ending
            assert ask is not None
            until(lambda: ask.settled)
            assert other.won in ([], [11])
    assert batch.lost == []


def test_indexes_of_any_name_do_not_matter(sqlite_url: str) -> None:
    """SQLite calls the index of a UNIQUE after its table, and people call theirs as they like."""
    yard, table = Yard(sqlite_url), "events_of_all_customers_since_the_beginning_of_time"
    yard.run(f"CREATE TABLE {table} (number INTEGER PRIMARY KEY, code TEXT NOT NULL UNIQUE)")
    yard.run(f'CREATE INDEX "{"by_number_and_code_" * 5}\n" ON {table} (number, code)')
    yard.run(f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')")
    yard.migrate(table)
    with yard.client().claims(table, mode="columns", key="code").take(["a", "c"]) as batch:
        assert (batch.won, batch.stale) == (["a"], ["c"])
    yard.close()


def test_columns_in_other_letters_are_the_same(sqlite_url: str) -> None:
    """To SQLite ID and id are one column; É and é are two."""
    yard = Yard(sqlite_url)
    yard.run("CREATE TABLE Loud (ID INTEGER PRIMARY KEY, CODE TEXT UNIQUE, DIBS_TOKEN INTEGER, DIBS_CLAIM TEXT,"
             " DIBS_UNTIL REAL)")  # fmt: skip
    yard.run("INSERT INTO Loud (ID, CODE) VALUES (1, 'a'), (2, 'b')")
    client = yard.client()
    with client.claims("loud", mode="columns").take([1, 3]) as batch:
        assert (batch.won, batch.stale) == ([1], [3])
        with client.claims("Loud", mode="columns", key="code").take(["a", "b"]) as other:
            assert (other.won, other.busy) == (["b"], ["a"])
    yard.run('CREATE TABLE two ("É" INTEGER UNIQUE, "é" INTEGER)')
    yard.run("INSERT INTO two VALUES (1, 7), (2, 7)")
    yard.migrate("two")
    with client.claims("two", mode="columns", key="É").take([1]) as batch:
        assert batch.won == [1]
    with pytest.raises(dibs.InvalidOption, match="unique index"):
        client.claims("two", mode="columns", key="é").take([7])
    yard.close()


def test_a_table_without_rowids_keeps_claims(sqlite_url: str) -> None:
    """SQLite's tables without rowids keep claims like any other, and so does one with checked types."""
    yard = Yard(sqlite_url)
    yard.run("CREATE TABLE bare (code TEXT PRIMARY KEY, n INT UNIQUE) STRICT, WITHOUT ROWID")
    yard.run("INSERT INTO bare VALUES ('a', -1), ('b', 2)")
    yard.migrate("bare")
    client = yard.client()
    with client.claims("bare", mode="columns", key="code").take(["a", "c"]) as batch:
        assert (batch.won, batch.stale) == (["a"], ["c"])
        with client.claims("bare", mode="columns", key="n").take([-1, 2]) as other:
            assert (other.won, other.busy) == ([2], [-1])
    yard.run("CREATE TABLE any_type (id ANY PRIMARY KEY) STRICT")
    with pytest.raises(dibs.InvalidOption, match="without a type"):
        client.claims("any_type", mode="columns").take([7])
    yard.close()


def test_keys_at_the_ends_of_their_types(yard: Yard) -> None:
    """The least and the greatest keys, negative ones, and one row by several spellings."""
    keys = [-(2**63), -1, 0, 2**63 - 1]
    yard.run("CREATE TABLE far (id BIGINT PRIMARY KEY, other INTEGER UNIQUE)")
    yard.run(f"INSERT INTO far VALUES {','.join(f'({key}, NULL)' for key in keys)}")
    yard.migrate("far")
    claims = yard.client().claims("far", mode="columns", ttl=LONG_S)
    with claims.take([*keys, 2**63, -(2**63) - 1, 2**64, 2**70]) as batch:
        assert batch.won == keys
        assert len(batch.stale) == 4
        assert claims.take(keys).busy == keys
    with claims.take(["-1", "-01", "-001", -1]) as batch:
        assert (len(batch.won), len(batch.busy)) == (1, 2)
        assert batch.items[0].fencing_token == 2
    with yard.client().claims("far", mode="columns", key="other").take([1, "NULL", "null"]) as batch:
        assert (batch.won, len(batch.stale)) == ([], 3)
    if yard.dialect == "mysql":
        yard.run("CREATE TABLE vast (id BIGINT UNSIGNED PRIMARY KEY)")
        yard.run(f"INSERT INTO vast VALUES (0), ({2**63}), ({2**64 - 1})")
        yard.migrate("vast")
        with yard.client().claims("vast", mode="columns").take([0, 2**63, 2**64 - 1, -1]) as batch:
            assert (batch.won, batch.stale) == ([0, 2**63, 2**64 - 1], [-1])


def test_keys_of_postgres_types(postgres_url: str) -> None:
    """Whatever PostgreSQL can compare may be a key: padded and domain texts, numbers, bytes, times, enumerations."""
    yard = Yard(postgres_url)
    yard.run("CREATE DOMAIN code AS text CHECK (VALUE <> 'bad')")
    yard.run("CREATE TYPE \"Mood\" AS ENUM ('sad', 'glad')")
    kinds = {
        "char(5)": ("ab", "ba"),
        "code": ("ab", "bad"),
        "numeric(9, 2)": ("1.5", "x"),
        "bytea": ("\\x01ff", "\\xzz"),
        "timestamptz": ("2026-11-22 10:00:00+00", "never"),
        '"Mood"': ("glad", "mad"),
        "boolean": ("true", "perhaps"),
    }
    with yard.client() as client:
        for number, (kind, (good, bad)) in enumerate(kinds.items()):
            yard.run(f"CREATE TABLE k{number} (id {kind} PRIMARY KEY)")
            yard.run(f"INSERT INTO k{number} VALUES ('{good}')")
            yard.migrate(f"k{number}")
            claims = client.claims(f"k{number}", mode="columns", ttl=LONG_S)
            with claims.take([bad, good]) as batch:
                assert (batch.won, batch.stale) == ([good], [bad])
                with psycopg.connect(yard.plain) as connection:
                    batch.items[0].done(connection=connection)
                    connection.commit()
    yard.close()


def test_keys_of_mysql_types(mysql: MariaDBServer, mysql_url: str) -> None:
    """Integers of any size, texts, enumerations, dates and UUIDs may be keys; what is none of them is told."""
    yard = Yard(mysql_url)
    kinds = {
        "TINYINT UNSIGNED": ("255", "256"),
        "CHAR(5)": ("ab", "AB"),
        "VARCHAR(9) CHARACTER SET utf8mb3": ("ü", "\U0001f4a1"),
        "ENUM('sad', 'glad')": ("glad", "mad"),
        "DATE": ("2026-11-22", "never"),
        "UUID": ("123e4567-e89b-12d3-a456-426655440000", "no uuid"),
    }
    if not mysql.is_mariadb:
        del kinds["UUID"]  # which MySQL has not
    with yard.client() as client:
        for number, (kind, (good, bad)) in enumerate(kinds.items()):
            yard.run(f"CREATE TABLE k{number} (id {kind} PRIMARY KEY)")
            yard.run(f"INSERT INTO k{number} VALUES ('{good}')")
            yard.migrate(f"k{number}")
            claims = client.claims(f"k{number}", mode="columns", ttl=LONG_S)
            with claims.take([bad, good]) as batch:
                assert (batch.won, batch.stale) == ([good], [bad])
                with closing(raw(yard.plain)) as connection:
                    batch.items[0].done(connection=connection)
                    connection.commit()
        yard.run("CREATE TABLE bytes (id BINARY(2) PRIMARY KEY)")
        yard.migrate("bytes")
        with pytest.raises(dibs.InvalidOption, match=r"is a binary\(2\)"):
            client.claims("bytes", mode="columns").take(["7"])
    yard.close()


def test_names_like_placeholders(yard: Yard) -> None:
    """What stands in braces in a name is a part of the name."""
    mark = "`" if yard.dialect == "mysql" else '"'
    table, key = "{key} {where}", "{where}{a}%s"
    yard.run(f"CREATE TABLE {mark}{table}{mark} ({mark}{key}{mark} INTEGER PRIMARY KEY)")
    yard.run(f"INSERT INTO {mark}{table}{mark} VALUES (1)")
    yard.migrate(table)
    with yard.client().claims("odd", mode="columns", table=table, key=key, ttl=3, renew=True).take([1, 2]) as batch:
        assert (batch.won, batch.stale) == ([1], [2])
        ends = batch.items[0].expires_at
        until(lambda: batch.items[0].expires_at > ends)
    assert batch.lost == []


def test_a_changed_key_is_a_lost_row(yard: Yard) -> None:
    """Who had a row whose key was changed has lost it; who has its key now is not touched."""
    with yard.claims().take([1, 2]) as batch:
        yard.run("UPDATE event SET id = 100 WHERE id = 1")
        yard.run("UPDATE event SET id = 1 WHERE id = 3")
        with yard.claims().take([1, 100]) as other:
            assert (other.won, other.busy) == ([1], [100])
            batch.items[0].done()
            batch.release()
            assert batch.lost == [1]
            assert other.items[0].claim_id in yard.row(1)[1]


def test_a_row_that_is_kept_for_ever_is_busy(postgres_url: str) -> None:
    """A time without end in the user's own hand keeps a row from everybody, and spoils no other."""
    yard = Yard(postgres_url)
    yard.run("UPDATE event SET dibs_until = 'infinity' WHERE id = 1")
    with yard.claims().take([1, 2]) as batch:
        assert (batch.won, batch.busy) == ([2], [1])
    yard.close()


def test_ten_thousand_rows_in_one_take(yard: Yard) -> None:
    """Ten thousand ids are claimed and given back, beside some that cannot be."""
    many = 10_000
    yard.run("CREATE TABLE many (id INTEGER PRIMARY KEY)")
    yard.run(f"INSERT INTO many VALUES {','.join(f'({n})' for n in range(many))}")
    yard.migrate("many")
    claims = yard.client().claims("many", mode="columns", ttl=LONG_S)
    with yard.client().claims("many", mode="columns", ttl=LONG_S).take(range(0, many, 1000)) as theirs:
        with claims.take([*range(many), "x", many]) as batch:
            assert len(batch) == many - 10
            assert (batch.busy, batch.stale) == (theirs.won, ["x", many])
            assert batch.token == 1
    assert batch.lost == []
    assert yard.run("SELECT count(*) FROM many WHERE dibs_claim IS NULL") == [(many,)]


# -- answers that were lost, and locks that last ----------------------------------------------------------------------


def test_a_take_is_repeated_while_its_first_attempt_is_under_way(served: Yard) -> None:
    """A claim that the server has not committed yet when it is asked for again is won, not lost to nobody."""
    between = Between(served.url)
    ends: list[threading.Timer] = []
    with between.client() as client, closing(raw(served.plain)) as connection:
        client.ping()
        if served.dialect == "mysql":
            now, lasting = "UTC_TIMESTAMP(6)", "INTERVAL 60 SECOND"
        else:
            now, lasting = "clock_timestamp()", "interval '60 seconds'"

        def first(requests: Any) -> None:
            if not ends and len(requests) == 2:
                for request in requests:  # as the first attempt does it, on a connection that the client has given up
                    number = request.name.rpartition("\x1f")[2]
                    connection.cursor().execute(
                        f"UPDATE event SET dibs_token = 1, dibs_claim = '{request.claim_id} host/1',"
                        f" dibs_until = {now} + {lasting} WHERE id = {number}"
                    )
                ends.append(threading.Timer(0.5, connection.commit))
                ends[0].start()
                raise dibs.StoreUnavailable("no answer in time")

        between.before = first
        with served.claims(client).take([1, 2]) as batch:
            assert (batch.won, batch.busy, batch.token) == ([1, 2], [], 1)
        ends[0].join()
    assert served.row(1) == served.row(2) == (1, None, None)


def test_a_take_that_lost_an_answer_is_told_what_is_unknown(served: Yard) -> None:
    """While a transaction has a row locked, whether a first attempt claimed it is unknown, and said so in the end."""
    between = Between(served.url)
    losses: list[int] = []

    def lose(requests: Any) -> None:
        if not losses and len(requests) == 2:
            losses.append(1)
            raise dibs.StoreUnavailable("the answer was lost")

    with between.client(patience=1) as client, closing(raw(served.plain)) as connection:
        client.ping()
        connection.cursor().execute("UPDATE event SET kind = 'x' WHERE id = 1")
        between.before = lose
        with pytest.raises(dibs.StoreUnavailable, match="locked its row") as told:
            served.claims(client).take([1, 2])
        assert told.value.maybe_applied
        connection.rollback()
        until(lambda: served.row(2)[1] is None)
        with served.claims(client).take([1, 2]) as batch:
            assert batch.won == [1, 2]


@pytest.mark.parametrize("dialect", ["postgres", "mysql"])
def test_a_connection_that_dies_behind_the_claim(dialect: str, request: pytest.FixtureRequest) -> None:
    """When the server ends the connection between the claim and its answer, it is asked again and has its token."""
    yard = Yard(request.getfixturevalue(f"{dialect}_url"))
    between = Between(yard.url)
    killed: list[int] = []

    def kill(requests: Any) -> None:
        if len(killed) < 2:
            killed.append(len(requests))
            with closing(raw(yard.plain)) as admin:
                cursor = admin.cursor()
                if dialect == "postgres":
                    cursor.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                    )
                else:
                    cursor.execute("SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID()")
                    for (number,) in cursor.fetchall():
                        try:
                            cursor.execute(f"KILL {number}")
                        except pymysql.Error:  # another session of the server's own, which may not be killed
                            pass
            raise dibs.StoreUnavailable("connection lost")

    with between.client() as client:
        client.ping()
        between.after = kill
        with yard.claims(client).take([1, 2, 99]) as batch:
            assert (batch.won, batch.stale, batch.token) == ([1, 2], [99], 1)
    assert yard.row(1) == yard.row(2) == (1, None, None)
    yard.close()


def test_a_loss_behind_a_lock_is_told(served: Yard) -> None:
    """An item whose row was locked when it was done, and another's when that ended, is lost, and the batch says so."""
    with closing(raw(served.plain)) as connection, served.claims().take([1, 2]) as batch:
        cursor = connection.cursor()
        cursor.execute("UPDATE event SET dibs_token = 2, dibs_claim = 'x else/1' WHERE id = 1")
        batch.items[0].done()
        ask = batch.items[0]._hold.ending
        assert ask is not None
        until(lambda: ask.trouble is not None)
        connection.commit()
    assert batch.lost == [1]
    assert served.row(1)[:2] == (2, "x else/1")


def test_a_client_closes_beside_a_locked_row(served: Yard) -> None:
    """A client that is closed gives back what it can, and does not wait for a transaction that has a row locked."""
    with closing(raw(served.plain)) as connection:
        client = served.client(patience=60)
        batch = served.claims(client).take([1, 2, 3])
        connection.cursor().execute("UPDATE event SET kind = 'x' WHERE id = 1")
        batch.items[0].done()
        ask = batch.items[0]._hold.ending
        assert ask is not None
        until(lambda: ask.trouble is not None)
        began = time.monotonic()
        client.close()
        assert time.monotonic() - began < 20  # (and not its patience)
        connection.rollback()
    assert served.row(1)[1] is not None
    assert served.row(2) == served.row(3) == (1, None, None)


def test_nobody_deadlocks_with_updates_of_many_rows(served: Yard) -> None:
    """Takers of the same rows in opposite orders, and the user's own updates of all of them: no error for anybody."""
    served.run("ALTER TABLE event ADD COLUMN touched INTEGER NOT NULL DEFAULT 0")
    by = time.monotonic() + 1.5
    troubles: list[BaseException] = []
    won: list[int] = []

    def take(client: dibs.Client, numbers: list[int]) -> None:
        claims = served.claims(client, ttl=5, renew=True)
        while time.monotonic() < by:
            with claims.take(numbers) as batch:
                won.append(len(batch))

    def update(order: str) -> None:
        with closing(raw(served.plain)) as connection:
            cursor = connection.cursor()
            while time.monotonic() < by:
                cursor.execute(f"SELECT id FROM event ORDER BY id {order} FOR UPDATE")
                cursor.fetchall()
                cursor.execute("UPDATE event SET touched = touched + 1")
                connection.commit()
                time.sleep(0.005)

    def run(work: Any, *given: Any) -> None:
        try:
            work(*given)
        except BaseException as error:  # noqa: BLE001 - looked at below
            troubles.append(error)

    numbers = list(range(1, ROWS + 1))
    threads = [threading.Thread(target=run, args=(take, served.client(), numbers[::step])) for step in (1, -1, 1, -1)]
    threads.append(threading.Thread(target=run, args=(update, "ASC")))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not troubles
    assert sum(won) > 0
    assert served.run("SELECT count(*) FROM event WHERE dibs_claim IS NOT NULL") == [(0,)]


def test_a_stream_in_a_thread(yard: Yard) -> None:
    """A stream finds, claims and works what is due, until it is stopped."""
    stop = threading.Event()
    worked = []
    for item in yard.claims().stream(query=yard.due, n=7, idle=0.01, stop=stop):
        number, _ = item.value
        worked.append(number)
        yard.run(f"UPDATE event SET due = FALSE WHERE id = {number}")
        if len(worked) == ROWS:
            stop.set()
    assert worked == list(range(1, ROWS + 1))
    assert yard.run("SELECT count(*) FROM event WHERE dibs_claim IS NOT NULL") == [(0,)]


def test_the_loop_stops_before_the_deadline(yard: Yard) -> None:
    """The loop stops a margin before the deadline, and what is left is given back."""
    with yard.claims(ttl=2, margin=1).take([1, 2, 3]) as batch:
        assert next(batch).value == 1
        until(lambda: batch.remaining() <= 1)
        assert list(batch) == []
    assert (batch.left, batch.lost) == ([2, 3], [])
    with yard.claims().take([1, 2, 3]) as other:
        assert other.won == [1, 2, 3]


def test_ctrl_c_while_a_statement_is_prepared(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever answer the first claim of a connection was waiting for: the next claim is made as any other."""
    yard, answers = Yard(postgres_url), Connection._results
    for place in range(8):
        waits = iter(range(100))

        def interrupted(*asked: Any, waits: Any = waits, place: int = place) -> Any:
            if next(waits) == place:
                raise KeyboardInterrupt
            return answers(*asked)

        claims = yard.claims()
        monkeypatch.setattr(Connection, "_results", interrupted)
        with pytest.raises(KeyboardInterrupt), claims.take([1]):
            pass
        monkeypatch.setattr(Connection, "_results", answers)
        with claims.take([2]) as batch:
            assert batch.won == [2]
    yard.close()


def test_a_trigger_that_rolls_everything_back(sqlite_url: str) -> None:
    """RAISE(ROLLBACK) undoes what was claimed beside that row, too: nothing is claimed, and the error says why."""
    yard = Yard(sqlite_url)
    yard.run(
        "CREATE TRIGGER no BEFORE UPDATE ON event WHEN NEW.id = 2 BEGIN SELECT RAISE(ROLLBACK, 'not that one'); END"
    )
    claims = yard.claims()
    with pytest.raises(dibs.StoreUnavailable, match=r"not that one.*RAISE\(ABORT"), claims.take([1, 2, 3]):
        pass
    assert [yard.row(number) for number in (1, 2, 3)] == [(None, None, None)] * 3
    with claims.take([1, 3]) as batch:
        assert batch.won == [1, 3]
    yard.close()
