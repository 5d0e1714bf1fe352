"""The history of grants beside its conformance cases: dibs works the same with it, rights, set-up, reboots, the SQL."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import dibs
from dibs.clock import Deadline, RealClock, boot_now
from dibs.connecting import locate
from dibs.store import Acquire, Release
from dibs.testing import check_store
from dibs.testing.case import STORE_CASES
from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.test_mysql import database_of
from tests.test_once import Machine

KEEP = 50


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def client(url: str) -> Iterator[dibs.Client]:
    """A client of a store that keeps a history."""
    with dibs.connect(url, ttl=20) as made:
        made.setup(history=KEEP)
        yield made


def endings(client: dibs.Client, name: str) -> list[tuple[int, str | None]]:
    return [(record.fencing_token, record.ending) for record in client.history(name)]


@pytest.mark.parametrize("some", range(3))
def test_dibs_works_the_same_with_it(url: str, client: dibs.Client, some: int) -> None:
    """With a history, the store passes the cases of the contract: tokens, batches, permits, lines, breaks, purges."""
    names = list(STORE_CASES.cases)[some::3]
    assert check_store(locate(url)[0], only=names) > 0
    assert client.history("x") == []  # it is still switched on


def test_every_grant_of_a_crowd_is_written_down(url: str, client: dibs.Client) -> None:
    """Threads of several clients that take one name in turns leave one entry for each token, none of them twice."""
    turns, crowd = 8, 5

    def take() -> None:
        with dibs.connect(url) as one:
            for _ in range(turns):
                with one.lock("x", timeout=30):
                    pass

    threads = [threading.Thread(target=take) for _ in range(crowd)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = [(token, "released") for token in range(turns * crowd, 0, -1)]
    assert endings(client, "x") == expected
    records = client.history("x")
    assert len({record.holder for record in records}) == crowd
    for newer, older in pairwise(records):
        assert older.ended_at is not None
        assert older.acquired_at <= older.ended_at
        # MySQL tells when the statement began that then waited for its row.
        assert url.startswith("mysql") or older.ended_at <= newer.acquired_at


def test_who_was_held_up_on_the_way_to_sqlite_began_after_the_one_before(sqlite_url: str) -> None:
    """A thread may stand still between asking and writing: the history has the moment at which it was granted."""
    soon = Deadline(RealClock(), boot_now() + 10)
    with dibs.connect(sqlite_url, ttl=20) as client:
        client.setup(history=KEEP)
        first, second = (locate(sqlite_url)[0].open() for _ in range(2))
        first.act([Acquire("default:x", "one", 10.0, "first")], soon)

        def stand_still(statement: str) -> None:
            if statement.startswith("BEGIN"):
                time.sleep(0.05)  # is what is tested: longer than the millisecond that SQLite's clock has
                first.act([Release("default:x", "one")], soon)

        second._file.open().set_trace_callback(stand_still)  # type: ignore[attr-defined]
        (granted,) = second.act([Acquire("default:x", "two", 10.0, "second")], soon)
        newer, older = client.history("x")
        for store in (first, second):
            store.close()
    assert (newer.holder, older.holder) == ("second", "first")
    assert older.ended_at is not None
    assert older.ended_at <= newer.acquired_at
    assert newer.acquired_at.timestamp() == pytest.approx(granted.acquired_at)  # type: ignore[union-attr]


def test_the_last_of_each_name_is_kept(url: str, client: dibs.Client) -> None:
    """The bound is for each name by itself: one that is taken often does not push out another's entries."""
    client.setup(history=2)
    with client.lock("seldom"):
        pass
    for _ in range(5):
        with client.lock("often"):
            pass
    assert endings(client, "seldom") == [(1, "released")]
    assert endings(client, "often") == [(5, "released"), (4, "released")]


def test_several_switch_it_on_at_once(url: str, client: dibs.Client) -> None:
    """Clients that set up at the same moment, while names are taken, harm neither each other nor the locks."""
    over = threading.Event()
    failures: list[BaseException] = []

    def again(keep: int) -> None:
        try:
            with dibs.connect(url) as one:
                for _ in range(3):
                    one.setup(history=keep)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    def take() -> None:
        try:
            with dibs.connect(url) as one:
                while not over.is_set():
                    with one.lock("x", timeout=30):
                        pass
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    taking = threading.Thread(target=take)
    taking.start()
    threads = [threading.Thread(target=again, args=(KEEP + number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    over.set()
    taking.join(60)
    assert failures == []
    with client.lock("y"):
        assert endings(client, "y") == [(1, None)]


def test_odd_names_of_tables(url: str) -> None:
    """Table names that need quotes have a history of their own."""
    with dibs.connect(url, options={"table": "odd%s"}) as odd, dibs.connect(url) as plain:
        odd.setup(history=5)
        with odd.lock("ä'\"%"), plain.lock("ä'\"%"):
            pass
        assert endings(odd, "ä'\"%") == [(1, "released")]
        with pytest.raises(dibs.SetupRequired):
            plain.history("ä'\"%")


# -- rights -----------------------------------------------------------------------------------------------------------


def test_a_postgresql_role_needs_no_more_rights(postgres: PostgresServer, postgres_url: str) -> None:
    """A role with rights on the tables of locks alone goes on; to read the history takes SELECT on its table."""
    database = database_of(postgres_url)
    role = f"app_{database}"
    postgres.create_user(role)
    postgres.psql("REVOKE CREATE ON SCHEMA public FROM PUBLIC", database=database)
    with dibs.connect(postgres_url) as admin, dibs.connect(postgres.url(database, user=role)) as app:
        admin.setup()
        postgres.psql(
            f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO "{role}"', database=database
        )
        admin.setup(history=5)
        with app.lock("x"):
            pass
        assert endings(admin, "x") == [(1, "released")]
        with pytest.raises(dibs.SetupRequired, match="permission denied"):
            app.history("x")
        with pytest.raises(dibs.SetupRequired):
            app.setup(history=7)
        postgres.psql(f'GRANT SELECT ON dibs_lease_history TO "{role}"', database=database)
        assert endings(app, "x") == [(1, "released")]


def test_a_mysql_user_needs_no_more_rights(mysql: MariaDBServer, mysql_url: str) -> None:
    """A user with rights on the tables of locks alone goes on; to read the history takes SELECT on its table."""
    database = database_of(mysql_url)
    user = f"few_{database}"
    mysql.create_user(user)
    with dibs.connect(mysql_url) as admin:
        admin.setup()
        for end in ("", "_line", "_pool", "_meta", "_guard"):
            mysql.sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.`dibs_lease{end}` TO '{user}'@'127.0.0.1'")
        admin.setup(history=5)
        with dibs.connect(mysql.url(database, user=user) + "?driver=pymysql") as app:
            with app.lock("x") as lease:
                assert lease.fencing_token == 1
            assert endings(admin, "x") == [(1, "released")]
            with pytest.raises(dibs.SetupRequired):
                app.history("x")
            with pytest.raises(dibs.SetupRequired):
                app.setup(history=7)


def test_a_trigger_of_somebody_else_does_not_change_tokens(mysql: MariaDBServer, mysql_url: str) -> None:
    """MySQL: a trigger on the table takes the token out of the server's answer; dibs then reads it."""
    with dibs.connect(mysql_url) as client:
        client.setup()
        database = database_of(mysql_url)
        with mysql.connect(database) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE seen (what INT)")
            cursor.execute("CREATE TRIGGER t AFTER UPDATE ON dibs_lease FOR EACH ROW INSERT INTO seen VALUES (1)")
        tokens = []
        for _ in range(3):
            with client.lock("x") as lease:
                tokens.append(lease.fencing_token)
        assert tokens == [1, 2, 3]


# -- SQLite -----------------------------------------------------------------------------------------------------------


def test_who_held_when_the_machine_went_down(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite: after a reboot, what was held before it has expired, also before anybody takes the name again."""
    machine = Machine(monkeypatch)
    with dibs.connect(sqlite_url, ttl=20) as before:
        before.setup(history=5)
        lost = before.lock("x").acquire()
        assert lost is not None
        machine.reboot(600)
        with dibs.connect(sqlite_url) as after:
            assert endings(after, "x") == [(lost.fencing_token, "expired")]
            with after.lock("x") as lease:
                assert endings(after, "x") == [(lease.fencing_token, None), (lost.fencing_token, "expired")]


def test_the_table_is_made_to_be_read(sqlite_url: str, tmp_path: Path) -> None:
    """`SELECT * FROM dibs_lease_history` shows who, when and how in words."""
    with dibs.connect(sqlite_url) as client:
        client.setup(history=5)
        with client.lock("x") as lease:
            pass
    db = sqlite3.connect(tmp_path / "locks.db")
    try:
        db.row_factory = sqlite3.Row
        row = dict(db.execute("SELECT * FROM dibs_lease_history").fetchone())
    finally:
        db.close()
    assert (row["name"], row["holder"], row["ending"]) == ("default:x", lease.holder, "released")
    assert row["acquired_at"] <= row["ended_at"]
    assert row["acquired_at"][:2] == "20"
