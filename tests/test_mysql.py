"""What is particular to MySQL and MariaDB: drivers, settings, rights, others' locks, TLS, outages, borrowed places."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

import pymysql.connections
import pytest

import dibs
from dibs.clock import Deadline
from dibs.connecting import locate
from dibs.store import Acquire, Granted, Held, Mismatch, Release, Released, Renew, Renewed
from dibs.stores import mysql_drivers
from dibs.stores.mysql import MySQLStore
from dibs.stores.mysql_drivers import CR_SERVER_LOST, CR_SSL, ServerError, server_error
from dibs.stores.mysql_errors import refuses
from dibs.stores.mysql_link import Connection
from dibs.stores.mysql_watch import MySQLWatch
from dibs.testing import check_store
from dibs.testing.case import within
from tests.callers import later
from tests.floors import tokens_go_on
from tests.servers.mysql import MariaDBServer
from tests.waits import eventually, soon

# mysqlclient must be compiled, so not everybody has it; PyMySQL is always tested.
# Of this machine, too. MariaDB's library from 3.4 on does not compare names for 127.0.0.1.
ANOTHER_ADDRESS = "127.0.0.2"
TABLES = ("dibs_lease", "dibs_lease_line", "dibs_lease_pool", "dibs_lease_meta", "dibs_lease_guard")
DRIVERS = ["pymysql", *(["mysqlclient"] if find_spec("MySQLdb") else [])]


def database_of(url: str) -> str:
    return urlsplit(url).path[1:]


@pytest.fixture
def client(mysql_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(mysql_url) as client:
        yield client


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    """Each driver there is."""
    return str(request.param)


@pytest.fixture
def url(mysql: MariaDBServer, driver: str) -> Iterator[str]:
    """A new empty database, through each driver."""
    url = mysql.create_database()
    yield f"{url}?driver={driver}"
    mysql.drop_database(url)


# -- tables, rights, options ------------------------------------------------------------------------------------------


def test_tables_are_made_on_first_use_and_can_be_read(
    client: dibs.Client, mysql: MariaDBServer, mysql_url: str
) -> None:
    """`SELECT * FROM dibs_lease` shows name, slot, holder, since, until, token and info, in UTC."""
    with (
        client.lock("digest/42", info={"why": "tëst"}) as lease,
        mysql.connect(database_of(mysql_url)) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT *, UTC_TIMESTAMP(6) AS now FROM dibs_lease")
        names = [column[0] for column in cursor.description]
        row = dict(zip(names, cursor.fetchall()[0], strict=True))
    assert row["name"] == b"default:digest/42"
    assert row["slot"] == 1
    assert row["holder"] == lease.holder
    assert row["fencing_token"] == lease.fencing_token == 1
    assert row["acquired_at"] <= row["now"] < row["expires_at"]
    assert row["info"] == '{"why":"tëst"}'


def test_a_user_that_may_not_make_tables_is_told_what_to_do(mysql: MariaDBServer, url: str) -> None:
    """Missing tables without the right to make them: SetupRequired, naming the command. Then four rights are enough."""
    database = database_of(url)
    user = f"app_{database}"
    mysql.create_user(user)
    mysql.sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.* TO '{user}'@'127.0.0.1'")
    with dibs.connect(mysql.url(database, user=user) + "?" + url.partition("?")[2]) as app:
        with pytest.raises(dibs.SetupRequired, match="dibs setup"):
            app.lock("x").acquire(timeout=0)
        with pytest.raises(dibs.SetupRequired, match="dibs schema"):
            app.setup()
        with dibs.connect(url) as admin:
            admin.setup()
        lease = app.lock("x").acquire(timeout=0)
        assert lease is not None
        assert app.lock("x").acquire(timeout=0) is None
        assert app.holder("x") is not None
        lease.renew()
        assert all(finding.kept for finding in _findings(app))
        lease.release()
        assert app.purge(0) == 1


def test_rights_on_the_tables_are_enough(mysql: MariaDBServer, url: str) -> None:
    """A user with rights on dibs's tables alone can do everything; one without any is told so."""
    database = database_of(url)
    user = f"few_{database}"
    mysql.create_user(user)
    where = mysql.url(database, user=user) + "?" + url.partition("?")[2]
    with dibs.connect(where) as app, pytest.raises(dibs.SetupRequired, match="Check user"):
        app.ping()
    with dibs.connect(url) as admin:
        admin.setup()
    for table in TABLES:
        mysql.sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.`{table}` TO '{user}'@'127.0.0.1'")
    with dibs.connect(where) as app:
        with app.lock("x"):
            assert app.lock("x").acquire(timeout=0) is None
        with app.semaphore("y", 1):
            assert app.semaphore("y", 1).acquire(timeout=0) is None
        assert app.purge(0) == 2
    mysql.sql(f"REVOKE INSERT ON `{database}`.dibs_lease FROM '{user}'@'127.0.0.1'")
    with dibs.connect(where) as app, pytest.raises(dibs.SetupRequired, match="INSERT"):
        app.lock("x").acquire(timeout=0)


def test_doctor_names_the_tables_from_which_a_user_may_not_delete(mysql: MariaDBServer, url: str) -> None:
    """A lock that is free does without that, but not one that was waited for. A user may have no queues at all."""
    database = database_of(url)
    user = f"few_{database}"
    mysql.create_user(user)
    with dibs.connect(url) as admin:
        admin.setup()
    for table in TABLES[:5]:
        mysql.sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.`{table}` TO '{user}'@'127.0.0.1'")
    where = mysql.url(database, user=user) + "?" + url.partition("?")[2]
    with dibs.connect(where) as app:
        assert all(finding.kept for finding in _findings(app))
    mysql.sql(f"REVOKE DELETE ON `{database}`.dibs_lease_line FROM '{user}'@'127.0.0.1'")
    with dibs.connect(where) as app:
        (failed,) = [finding for finding in _findings(app) if not finding.kept]
        assert failed.detail == "this login lacks DELETE on dibs_lease_line: GRANT that"


def test_doctor_sees_the_engine_of_a_table_whose_name_the_server_writes_otherwise() -> None:
    """lower_case_table_names=1: `?table=Locks` is `locks` there, and still is a table of dibs's."""
    with MariaDBServer({"lower-case-table-names": 1}) as server:
        url = f"{server.create_database()}?table=Locks"
        with dibs.connect(url) as client:
            with client.lock("x", timeout=0):
                pass
            server.sql("ALTER TABLE Locks ENGINE = MyISAM", database=database_of(url))
            (failed,) = [finding for finding in _findings(client) if not finding.kept]
        assert failed.promise == "grants are transactions"
        assert "'locks': 'MyISAM'" in failed.detail


def _findings(client: dibs.Client) -> list[Any]:
    from dibs.steps import run

    return run(client._desk.checking())


def test_the_table_is_an_option(url: str, mysql: MariaDBServer) -> None:
    """`?table=` is quoted, whatever is in it."""
    with dibs.connect(f"{url}&table=lo%60ck%25s%7B%7D") as client, client.lock("x") as lease:
        rows = mysql.sql(
            "SELECT fencing_token FROM `lo``ck%%s{}` WHERE name = %s", ("default:x",), database=database_of(url)
        )
        assert rows == [(lease.fencing_token,)]
        with dibs.connect(url) as other:
            assert other.holder("x") is None
        assert client.purge(0) == 0


@pytest.mark.parametrize(
    "option",
    [
        "table=",
        "table=a%0Ab",
        "table=a%20",
        "table=" + "x" * 70,
        "colour=blue",
        "driver=oracle",
        "ssl_mode=maybe",
        "ssl=perhaps",
        "table=a&table=b",
    ],
)
def test_a_wrong_option_is_refused_before_any_io(option: str) -> None:
    """A typo in a URL option is InvalidOption, without a connection."""
    with pytest.raises(dibs.InvalidOption):
        dibs.connect(f"mysql://nobody@192.0.2.1/none?{option}")


def test_a_url_names_a_database() -> None:
    """Without a database there is no place for tables: InvalidOption with an example."""
    with pytest.raises(dibs.InvalidOption, match="mysql://user@host/database"):
        dibs.connect("mysql://nobody@192.0.2.1")


def test_one_server_is_named() -> None:
    """Of several hosts none could be known to be the primary: InvalidOption."""
    with pytest.raises(dibs.InvalidOption, match="name one MySQL server"):
        dibs.connect("mysql://u:p@a:3306,b:3306/d")


def test_words_of_the_drivers_are_understood() -> None:
    """What SQLAlchemy and the drivers write in URLs is taken: driver in the scheme, charset, their words for TLS."""

    def where(text: str) -> Any:
        store = locate(text)[0].open()
        assert isinstance(store, MySQLStore)
        return store._connection.where

    plain = where("mariadb+pymysql://me:p%40ss@db:3307/prod?charset=utf8mb4")
    assert plain[:6] == ("db", 3307, "me", "p@ss", "prod", "")
    assert plain.ssl_mode == "preferred"
    assert where("mysql://db/prod").port == 3306
    assert where("mysql://db/prod?ssl=true").ssl_mode == "required"
    assert where(f"mysql://db/prod?ssl_ca={__file__}").ssl_mode == "verify_ca"
    assert where(f"mysql://db/prod?ssl_ca={__file__}&ssl_check_hostname=false").ssl_mode == "verify_ca"
    assert where(f"mysql://db/prod?ssl_ca={__file__}&ssl_verify_identity=true").ssl_mode == "verify_identity"
    assert where("mysql://db/prod?ssl_mode=REQUIRED").ssl_mode == "required"
    assert where("mysql://db/prod?ssl_disabled=1").ssl_mode == "disabled"


def test_the_driver_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """mysqlclient where it is installed, else PyMySQL; without either the error names the pip command."""
    for ours in ("dibs.stores.mysql_mysqlclient", "dibs.stores.mysql_pymysql"):
        monkeypatch.delitem(sys.modules, ours, raising=False)  # as in a process that has used neither
    for module in ("MySQLdb", "pymysql", "pymysql.connections"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(dibs.InvalidOption, match=r"pip install 'dibs\[mysql\]'"):
        locate("mysql://db/prod")
    with pytest.raises(dibs.InvalidOption, match="pip install mysqlclient"):
        locate("mysql://db/prod?driver=mysqlclient")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "MySQLdb", None)
    locate("mysql://db/prod")


# -- tables -----------------------------------------------------------------------------------------------------------


def test_the_printed_schema_can_be_run(mysql: MariaDBServer, mysql_url: str) -> None:
    """What `dibs schema` prints makes the tables, and does nothing when run again."""
    for place in (mysql_url, f"{mysql_url}&table=it%27s+%5Codd%60%25s"):
        schema = locate(place)[0].open().schema()
        for _ in range(2):
            mysql.sql(schema, database=database_of(mysql_url))
        with dibs.connect(place) as client, client.semaphore("y", 1):
            assert client.semaphore("y", 1).acquire(timeout=0) is None


# -- permits ----------------------------------------------------------------------------------------------------------


def permits(name: str, claim_id: str, of: int, take: int = 1, wake: str | None = None) -> Acquire:
    return Acquire(name, claim_id, 60, "h", None, wake, permits=of, take=take)


def test_a_new_name_becomes_a_lock_or_a_pool(url: str) -> None:
    """Of those who ask for a new name as a lock and those who ask for permits of it, only one kind is granted."""
    stores = [locate(url)[0].open() for _ in range(4)]
    stores[0].setup(soon())
    names = [f"n{number:02}" for number in range(40)]
    start = threading.Barrier(len(stores))
    outcomes: dict[str, list[Any]] = {name: [] for name in names}

    def ask(number: int) -> None:
        start.wait()
        for name in names:
            lock = Acquire(name, f"c-{number}", 60, "h")
            outcomes[name] += stores[number].act([lock if number % 2 else lock._replace(permits=9)], soon())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, four in outcomes.items():
        kinds = sorted(type(outcome).__name__ for outcome in four)
        assert kinds in (["Granted", "Held", "Mismatch", "Mismatch"], ["Granted", "Granted", "Mismatch", "Mismatch"])
        grants = [outcome for outcome in four if isinstance(outcome, Granted)]
        assert len({outcome.slot for outcome in grants}) == len(grants)
        again = {type(stores[0].act([Acquire(name, "d-1", 60, "h")], soon())[0]) for _ in range(2)}
        assert again == ({Held} if len(grants) == 1 else {Mismatch})
    for store in stores:
        store.close()


@pytest.mark.parametrize("kind", ["MariaDB", "MySQL"])
def test_who_stops_in_the_middle_of_a_decision_does_not_keep_the_name(
    url: str, mysql: MariaDBServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that stops with a pool locked is ended by the server; others are granted permits soon after."""
    if kind == "MySQL" or not mysql.is_mariadb:  # what is done where only whole connections can be ended
        monkeypatch.setattr("dibs.stores.mysql_link.IDLE_CONNECTION_S", 2)
    if kind == "MySQL":
        read = Connection.read_facts
        monkeypatch.setattr(
            Connection,
            "read_facts",
            lambda self, deadline: (read(self, deadline), self.facts.update(version="8.4.3")),
        )
    stopped, other = (locate(url)[0].open() for _ in range(2))
    assert isinstance(stopped, MySQLStore)
    assert isinstance(stopped.act([permits("x", "a-1", 2)], soon())[0], Granted)
    stopped._connection._execute("START TRANSACTION", soon())
    stopped._connection._execute("SELECT * FROM dibs_lease_pool FOR UPDATE", soon())
    before = time.monotonic()
    (granted,) = other.act([permits("x", "b-1", 2)], soon())
    assert isinstance(granted, Granted)
    assert granted.slot == 2
    assert 0.5 < time.monotonic() - before < 6
    with pytest.raises(dibs.StoreUnavailable):
        stopped.act([Release("x", "a-1")], soon())
    assert isinstance(stopped.act([Release("x", "a-1")], soon())[0], Released)
    stopped.close()
    other.close()


def test_decisions_on_a_name_take_turns(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P15: who asks while another decision on the name is being written waits for it, and sees what it wrote."""
    holder, reader, writer = (locate(url)[0].open() for _ in range(3))
    assert isinstance(reader, MySQLStore)
    holder.act([permits("x", "h-1", 2)], soon())
    outcomes: list[Any] = []
    asking = threading.Thread(target=lambda: outcomes.extend(writer.act([permits("x", "w-1", 2, 2)], soon())))
    write = reader._pools._grant

    def slowly(*arguments: Any) -> None:
        # The reader has seen one permit of two taken. That one comes back, and a writer comes for both.
        holder.act([Release("x", "h-1", 1)], soon())
        asking.start()
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(reader._pools, "_grant", slowly)
    (granted,) = reader.act([permits("x", "r-1", 2)], soon())
    asking.join()
    assert isinstance(granted, Granted)
    assert isinstance(outcomes[0], Held)
    for store in (holder, reader, writer):
        store.close()


def test_a_renewal_under_way_counts(mysql: MariaDBServer, url: str) -> None:
    """A lease that seems to be over while its renewal is being committed is nobody else's."""
    store = locate(url)[0].open()
    store.act([permits("x", "a-1", 1)._replace(ttl=0.4)], soon())
    with closing(mysql.connect(database_of(url))) as renewal, renewal.cursor() as cursor:
        renewal.begin()
        cursor.execute("UPDATE dibs_lease SET expires_at = expires_at + INTERVAL 60 SECOND WHERE name = 'x'")
        time.sleep(0.5)
        with later(0.3, renewal.commit):
            (held,) = store.act([permits("x", "b-1", 1)], soon())
    assert isinstance(held, Held)
    assert held.free_in > 50
    store.close()


@pytest.mark.parametrize("at", ["LOCK", "WRITE", "COMMIT"])
def test_decisions_on_permits_are_tried_again(url: str, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """A transaction that met others' locks is rolled back and begun again; nobody hears of it, and it counts once."""
    store = locate(url)[0].open()
    store.act([permits("x", "a-1", 2)], soon())
    send, receive, failing = mysql_drivers.Wire.send, mysql_drivers.Wire.receive, []
    failures = [1213, 1205, 1062]
    begins = {"LOCK": "SELECT name, permits", "WRITE": "INSERT INTO", "COMMIT": "COMMIT"}[at]

    def noted(self: mysql_drivers.Wire, statement: str) -> None:
        if statement.startswith(begins) and failures:
            failing.append(failures.pop())
            statement = "DO 0"
        send(self, statement)

    def unlucky(self: mysql_drivers.Wire, deadline: Deadline) -> Any:
        answer = receive(self, deadline)
        if failing:
            raise mysql_drivers.ServerError(failing.pop(), "somebody else's lock")
        return answer

    monkeypatch.setattr(mysql_drivers.Wire, "send", noted)
    monkeypatch.setattr(mysql_drivers.Wire, "receive", unlucky)
    (granted,) = store.act([permits("x", "b-1", 2)], soon())
    assert failures == []
    assert granted == Granted(2, granted.acquired_at, 2)  # type: ignore[union-attr]
    assert [lease.slot for lease in store.leases("x", "y", soon())] == [1, 2]
    store.close()


def test_what_failed_in_a_transaction_is_undone(
    mysql: MariaDBServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error or a Ctrl-C in the middle of a decision leaves nothing behind: no grant, no row locked."""
    store, other = locate(url)[0].open(), locate(url)[0].open()
    store.act([permits("x", "a-1", 2)], soon())
    receive = mysql_drivers.Wire.receive
    for error in (mysql_drivers.ServerError(3024, "too long"), KeyboardInterrupt()):
        answers = iter([None] * 3)

        def unlucky(
            self: mysql_drivers.Wire, deadline: Deadline, answers: Any = answers, error: BaseException = error
        ) -> Any:
            if next(answers, self) is self:
                monkeypatch.undo()
                raise error
            return receive(self, deadline)

        monkeypatch.setattr(mysql_drivers.Wire, "receive", unlucky)
        with pytest.raises((dibs.StoreUnavailable, KeyboardInterrupt)):
            store.act([permits("x", "b-1", 2)], soon())
        assert [lease.slot for lease in other.leases("x", "y", soon())] == [1]
    with within(0.9, "somebody was in the way"):
        (granted,) = other.act([permits("x", "c-1", 2)], soon())
    assert isinstance(granted, Granted)
    assert (granted.slot, granted.fencing_token) == (2, 2)
    store.close()
    other.close()


def test_an_answer_that_was_read_in_part_as_ctrl_c_came_is_no_other(
    mysql: MariaDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is not used again, whatever PyMySQL makes of the rest; what is raised is the interruption."""
    url = mysql.create_database()
    store = locate(f"{url}?driver=pymysql")[0].open()
    store.act([Acquire(f"n{number:04}", "c-1", 60, "h" * 500) for number in range(1000)], soon())
    read, packets = pymysql.connections.Connection._read_packet, iter(range(50))

    def interrupted(self: Any, *args: Any) -> Any:
        if next(packets, None) is None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return read(self, *args)

    monkeypatch.setattr(pymysql.connections.Connection, "_read_packet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.leases("n", "o", soon())
    assert len(store.leases("n", "o", soon())) == 1000
    assert type(store.act([Release("n0000", "c-1")], soon())[0]) is Released
    store.close()
    mysql.drop_database(url)


def test_hints_on_permits(url: str) -> None:
    """The watch names a pool when what is left comes to the first of its client's waiters, and to no other client."""
    stores = {key: locate(url)[0].open() for key in "habc"}
    watches = {key: locate(url)[0].open().watch(key, soon()) for key in "abc"}

    def hinted() -> str:
        return "".join(key for key, watch in watches.items() if watch is not None and watch.changed(["x"]))

    def line_up() -> None:  # who waits for permits asks all the time
        for key in "abc":
            (outcome,) = stores[key].act([permits("x", key + "-1", 4, 3 if key == "b" else 1, key)], soon())
            assert isinstance(outcome, Held)

    stores["h"].act([permits("x", f"h-{number}", 4) for number in range(4)], soon())
    line_up()
    assert hinted() == ""
    stores["h"].act([Release("x", "h-0", 1)], soon())
    assert hinted() == "a"
    stores["h"].act([Release("x", "h-1", 2), Release("x", "h-2", 3)], soon())
    assert hinted() == "a"
    stores["h"].act([Release("x", "h-3", 4)], soon())
    assert hinted() == "ab"
    stores["a"].act([permits("x", "a-1", 4, 1, "a")], soon())
    assert hinted() == "b"
    time.sleep(1.3)  # all have ceased to ask
    assert hinted() == ""
    for thing in (*stores.values(), *watches.values()):
        assert thing is not None
        thing.close()


def test_purge_of_pools_keeps_the_floor(mysql: MariaDBServer, url: str) -> None:
    """Unused pools go with all their slots; those that are held, waited for or were just used stay; tokens rise on."""
    store = locate(url)[0].open()
    names = [f"p{number:04}" for number in range(1200)]
    store.act([permits(name, "a-1", 3) for name in names], soon(60))
    store.act([permits(name, "b-1", 3) for name in names], soon(60))
    store.act([Release(name, "a-1", 1) for name in names], soon(60))
    assert store.purge("", "\U0010ffff", 0, soon(60)) == 0
    store.act([Release(name, "b-1", 2) for name in names[1:]], soon(60))
    store.act(
        [permits(names[2], "c-1", 3, 3), permits(names[2], "d-1", 3, 1, "d"), Release(names[2], "c-1", 1)], soon()
    )
    assert store.purge("", "\U0010ffff", 3600, soon(60)) == 0
    assert store.purge("", "\U0010ffff", 0, soon(60)) == 2 * 1198
    left = mysql.sql("SELECT name, fencing_token FROM dibs_lease_pool", database=database_of(url))
    assert left == [(b"p0000", 2), (b"p0002", 3)]
    assert mysql.sql("SELECT COUNT(*) FROM dibs_lease", database=database_of(url)) == [(4,)]
    outcomes = store.act([permits(names[5], "e-1", 7), Acquire(names[6], "e-1", 60, "h")], soon())
    assert [outcome.fencing_token for outcome in outcomes] == [3, 3]  # type: ignore[union-attr]
    store.close()


def test_tokens_of_permits_outlive_their_table(mysql: MariaDBServer, url: str) -> None:
    """When only the table of pools was emptied, holders keep their slots and tokens go on from theirs."""
    store = locate(url)[0].open()
    store.act([permits("x", f"a-{number}", 3) for number in range(3)], soon())
    store.act([Release("x", "a-1", 2)], soon())
    mysql.sql("TRUNCATE dibs_lease_pool", database=database_of(url))
    assert store.act([Acquire("x", "c-1", 60, "h")], soon()) == [Mismatch(1)]
    granted, held = store.act([permits("x", "b-1", 3), permits("x", "c-1", 3)], soon())
    assert isinstance(granted, Granted)
    assert (granted.slot, granted.fencing_token) == (2, 4)
    assert isinstance(held, Held)
    store.close()


def test_a_slot_is_broken_by_its_token(url: str) -> None:
    """A broken slot is its holder's no more, and is somebody else's when it would have ended, or at once."""
    store = locate(url)[0].open()
    store.act([permits("x", "a-1", 2), permits("x", "b-1", 2)], soon())
    assert store.break_lease("x", 2, False, soon())
    assert not isinstance(store.act([Renew("x", "b-1", 60, 2)], soon())[0], Renewed)
    assert isinstance(store.act([permits("x", "c-1", 2)], soon())[0], Held)
    assert store.break_lease("x", 1, True, soon())
    (granted,) = store.act([permits("x", "c-1", 2)], soon())
    assert isinstance(granted, Granted)
    assert (granted.slot, granted.fencing_token) == (1, 3)
    store.close()


def test_many_decisions_in_one_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permits of thousands of names are decided in a few statements, each name by itself."""
    # A crowd beside this test can keep it from computing for as long as the server waits within a transaction.
    monkeypatch.setattr("dibs.stores.mysql_link.IDLE_TRANSACTION_S", 30)
    store = locate(url)[0].open()
    store.act([Acquire("n0700", "z-1", 60, "h")], soon())
    names = [f"n{number:04}" for number in range(2500)]
    for claim in ("a", "b", "c"):
        outcomes = store.act([permits(name, claim, 2)._replace(info=name) for name in names], soon(60))
        assert outcomes.pop(700) == Mismatch(0)
        assert {type(outcome) for outcome in outcomes} == ({Held} if claim == "c" else {Granted})
    shown = store.leases("n", "o", soon())
    assert len(shown) == 2 * 2499 + 1
    assert all(lease.info == lease.name for lease in shown if lease.name != "n0700")
    store.close()


# -- who may come in --------------------------------------------------------------------------------------------------


def test_a_wrong_password_is_a_misconfiguration_and_is_not_shown(mysql: MariaDBServer, url: str) -> None:
    """Wrong password: SetupRequired; it stands in no text."""
    wrong = mysql.url(database_of(url), password="hunter2-wrong") + "?" + url.partition("?")[2]
    with dibs.connect(wrong) as client:
        with pytest.raises(dibs.SetupRequired) as caught:
            client.lock("x").acquire(timeout=0)
        shown = f"{caught.value} {caught.value!r} {caught.value.__cause__!r} {client!r}"
        assert "hunter2" not in shown
        assert "Access denied" in shown


def test_a_password_may_hold_any_letters(mysql: MariaDBServer, url: str) -> None:
    """A password is sent as it is, in UTF-8."""
    database = database_of(url)
    user = f"odd_{database}"
    mysql._passwords[user] = "p@ss:w/ö%rd🔒'\""
    mysql.sql(f"CREATE USER '{user}'@'127.0.0.1' IDENTIFIED BY 'p@ss:w/ö%rd🔒\\'\"'")
    mysql.sql(f"GRANT ALL ON `{database}`.* TO '{user}'@'127.0.0.1'")
    with dibs.connect(mysql.url(database, user=user) + "?" + url.partition("?")[2]) as client, client.lock("x"):
        pass


def test_a_missing_database_is_a_misconfiguration(mysql: MariaDBServer, driver: str) -> None:
    """A database that is not there: SetupRequired."""
    with (
        dibs.connect(mysql.url("no such database") + f"?driver={driver}") as client,
        pytest.raises(dibs.SetupRequired, match="database"),
    ):
        client.ping()


def test_no_server_is_unavailable_at_once(driver: str) -> None:
    """Nobody listens, or nobody answers: StoreUnavailable in about a request's time."""
    from tests.servers.process import free_port

    for place in (f"127.0.0.1:{free_port()}", "192.0.2.1"):
        with dibs.connect(f"mysql://me@{place}/x?driver={driver}", request_timeout=1) as client:
            before = time.monotonic()
            with pytest.raises(dibs.StoreUnavailable) as caught:
                client.lock("x").acquire(timeout=0)
            assert not caught.value.maybe_applied
            assert time.monotonic() - before < 4


def test_a_socket_file_is_an_address(mysql: MariaDBServer, driver: str) -> None:
    """`?unix_socket=` is used in place of a host."""
    user = f"local_{driver}"
    mysql.create_user(user)
    mysql.sql(f"CREATE USER '{user}'@'localhost' IDENTIFIED BY '{mysql._passwords[user]}'")
    url = mysql.create_database()
    mysql.sql(f"GRANT ALL ON `{database_of(url)}`.* TO '{user}'@'localhost'")
    login = f"{user}:{quote(mysql._passwords[user], '')}"
    where = f"mysql://{login}@/{database_of(url)}?driver={driver}&unix_socket={quote(str(mysql.socket_path), '')}"
    with dibs.connect(where) as client, client.lock("x"):
        pass
    mysql.drop_database(url)


def test_a_replica_refuses_no_row() -> None:
    """That a server is read-only is said of it, and not of the row that was to be written; a rule of the table is."""
    for code, of_row in ((1290, False), (1792, False), (1836, False), (1114, False), (2013, False), (1644, True)):
        error = dibs.StoreUnavailable("refused")
        error.__cause__ = ServerError(code, "refused")
        assert refuses(error) is of_row


def test_a_replica_is_a_misconfiguration(own_mysql: MariaDBServer, driver: str) -> None:
    """A server that is read-only: SetupRequired that speaks of replicas, not "held by another"; doctor says so, too."""
    url = own_mysql.create_database()
    with dibs.connect(url) as client:
        client.setup()
    own_mysql.create_user("app")
    own_mysql.sql(f"GRANT ALL ON `{database_of(url)}`.* TO 'app'@'127.0.0.1'")
    own_mysql.sql("SET GLOBAL read_only = ON")
    with dibs.connect(own_mysql.url(database_of(url), user="app") + f"?driver={driver}") as client:
        with pytest.raises(dibs.SetupRequired, match="replica"):
            client.lock("x").acquire(timeout=0)
        assert [finding.promise for finding in _findings(client) if not finding.kept] == ["writable"]


# -- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority, a server's certificate for 127.0.0.1 signed by it, and an authority nobody asked."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ca", "other"):
        _openssl(
            folder, f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -keyout {name}.key -out {name}.pem"
        )
    _openssl(folder, "req -newkey rsa:2048 -nodes -subj /CN=server -keyout server.key -out server.csr")
    (folder / "names").write_text("subjectAltName=DNS:localhost\n")
    _openssl(folder, "x509 -req -days 2 -in server.csr -CA ca.pem -CAkey ca.key -extfile names -out server.pem")
    return folder


def _openssl(folder: Path, command: str) -> None:
    subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def tls_mysql(certificates: Path) -> Iterator[MariaDBServer]:
    """A MariaDB with that certificate; root needs no TLS, the user `tls` does."""

    class WithTLS(MariaDBServer):
        def _prepare(self) -> None:
            for name in ("ca.pem", "server.pem", "server.key"):
                copy = self.folder / name
                copy.write_bytes((certificates / name).read_bytes())
                copy.chmod(0o644)  # for the server's user; nobody else can enter the folder
            files = {"ssl-ca": "ca.pem", "ssl-cert": "server.pem", "ssl-key": "server.key"}
            self._settings.update({option: self.folder / name for option, name in files.items()})
            self._settings["bind-address"] = f"127.0.0.1,{ANOTHER_ADDRESS}"
            super()._prepare()

    with WithTLS() as server:
        server.create_user("tls", "REQUIRE SSL")
        server.sql("CREATE DATABASE place; GRANT ALL ON place.* TO 'tls'@'127.0.0.1'")
        yield server


@pytest.mark.parametrize(
    "options", ["ssl=true", "ssl_mode=required", "ssl_ca=ca.pem", "ssl_ca=ca.pem&ssl_mode=verify_identity"]
)
def test_tls_is_used_when_asked_for(tls_mysql: MariaDBServer, certificates: Path, driver: str, options: str) -> None:
    """With TLS in the URL a user that requires it gets in, and the server says that it is used."""
    options = options.replace("ca.pem", quote(str(certificates / "ca.pem"), ""))
    place = tls_mysql.url("place", user="tls").replace("@127.0.0.1:", "@localhost:")
    with dibs.connect(f"{place}?driver={driver}&{options}") as client, client.lock("x"):
        store = client._desk.session().lane._store
        assert isinstance(store, MySQLStore)
        ((_, cipher),) = store._connection.ask("SHOW SESSION STATUS LIKE 'Ssl_cipher'", soon()).rows
        assert cipher


def test_a_certificate_for_another_name_is_refused(tls_mysql: MariaDBServer, certificates: Path, driver: str) -> None:
    """`ssl_mode=verify_identity` compares the name in the URL with that in the certificate, which is for localhost."""
    options = f"ssl_mode=verify_identity&ssl_ca={quote(str(certificates / 'ca.pem'), '')}"
    place = tls_mysql.url("place", user="tls").replace("@127.0.0.1:", f"@{ANOTHER_ADDRESS}:")
    with (
        dibs.connect(f"{place}?driver={driver}&{options}") as client,
        pytest.raises(dibs.SetupRequired, match="Check ssl_mode"),
    ):
        client.ping()


@pytest.mark.parametrize(
    "text, code",
    [
        ("TLS/SSL error: Resource temporarily unavailable (11)", CR_SERVER_LOST),
        ("TLS/SSL error: unexpected eof while reading", CR_SERVER_LOST),
        ("SSL connection error: error:00000001:lib(0)::reason(1)", CR_SERVER_LOST),
        ("TLS/SSL error: Hostname verification failed", CR_SSL),
        ("TLS/SSL error: certificate verify failed", CR_SSL),
        ("SSL connection error: error:0A000086:SSL routines::certificate verify failed", CR_SSL),
    ],
)
def test_tls_that_was_cut_is_told_from_tls_that_does_not_fit(text: str, code: int) -> None:
    """In the words of MariaDB's library (3.3, 3.4) and of MySQL's."""
    assert server_error(Exception(CR_SSL, text), connecting=True).code == code


@pytest.mark.parametrize("option", ["ssl_ca", "ssl_cert", "ssl_key"])
def test_a_file_that_is_not_there_is_refused_before_any_io(driver: str, option: str) -> None:
    """A certificate, or a key, that cannot be read is InvalidOption that names the option, whatever the driver."""
    with pytest.raises(dibs.InvalidOption, match=f"{option} in the MySQL URL cannot be read: .*nowhere"):
        dibs.connect(f"mysql://u:p@192.0.2.1/d?driver={driver}&{option}=/nowhere.pem")


@pytest.mark.parametrize("options", ["ssl_mode=disabled", "ssl_ca=other.pem"])
def test_tls_that_does_not_fit_is_a_misconfiguration(
    tls_mysql: MariaDBServer, certificates: Path, driver: str, options: str
) -> None:
    """No TLS where it is required, or a certificate of somebody else's: SetupRequired that names ssl_mode."""
    options = options.replace("other.pem", quote(str(certificates / "other.pem"), ""))
    with (
        dibs.connect(f"{tls_mysql.url('place', user='tls')}?driver={driver}&{options}") as client,
        pytest.raises(dibs.SetupRequired, match="ssl_mode"),
    ):
        client.ping()


def test_tls_that_the_server_has_not_is_a_misconfiguration(url: str) -> None:
    """`ssl_mode=required` on a server without TLS never goes on in the clear."""
    with dibs.connect(f"{url}&ssl_mode=required") as client, pytest.raises(dibs.SetupRequired, match="ssl_mode"):
        client.ping()


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_the_server_are_not_ours(mysql: MariaDBServer) -> None:
    """Odd sql_mode, time zone, isolation and autocommit of the server change nothing."""
    modes = "ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,NO_ZERO_DATE,PAD_CHAR_TO_FULL_LENGTH"
    settings = {
        "sql-mode": f"{modes},SIMULTANEOUS_ASSIGNMENT" if mysql.is_mariadb else modes,
        "default-time-zone": "+05:30",
        "transaction-isolation": "SERIALIZABLE",
        "autocommit": "OFF",
        "character-set-server": "latin1",
        "group-concat-max-len": 1024,
        "sysdate-is-now": "ON",
    }
    cases = (
        "names_are_exact leases_tell_all a_retry_is_the_same_grant first_come_first_served tokens_rise_across_purge "
        "poisoned_neighbours opposite_orders one_of_many_at_once renewal_extends verbs_mix_in_one_call"
    ).split()
    with MariaDBServer(settings) as server:
        for driver in DRIVERS:
            assert check_store(f"{server.create_database()}?driver={driver}", only=cases) == 10


def test_a_server_that_chains_transactions(own_mysql: MariaDBServer, driver: str) -> None:
    """completion_type=CHAIN: what follows a COMMIT of dibs is committed, too, so that everybody sees it at once."""
    url = own_mysql.create_database()
    own_mysql.sql("SET GLOBAL completion_type = 'CHAIN'")
    with dibs.connect(f"{url}?driver={driver}") as client, dibs.connect(url) as other:
        client.setup()  # (making a table later would commit what was left)
        with client.semaphore("gpu", 2):
            pass
        lease = client.lock("x", ttl=30).acquire(timeout=0)
        assert lease is not None
        client.queue("mail").put("hello")
        seen = other.holder("x")
        assert seen is not None
        assert seen.fencing_token == lease.fencing_token
        assert other.queue("mail").depth().ready == 1
        time.sleep(4)  # longer than the server lets a transaction of ours be idle
        assert other.lock("x").acquire(timeout=0) is None
        lease.release()


@pytest.mark.parametrize(
    "default",
    [
        "sql_select_limit = 1",
        "sql_select_limit = 20",
        "sql_safe_updates = 1",
        "max_join_size = 10",
        "{transaction}_read_only = 1",
        "completion_type = 'RELEASE'",
    ],
)
def test_what_sessions_begin_with_is_not_ours(own_mysql: MariaDBServer, driver: str, default: str) -> None:
    """Global defaults that cut answers short, or refuse statements, change nothing for leases, permits and jobs."""
    url = own_mysql.create_database()
    own_mysql.sql(f"SET GLOBAL {default.format(transaction='tx' if own_mysql.is_mariadb else 'transaction')}")
    with dibs.connect(f"{url}?driver={driver}") as client:
        permits = client.semaphore("gpu", 24)
        leases = [permits.acquire(timeout=0) for _ in range(24)]
        assert permits.acquire(timeout=0) is None
        assert len(list(client.leases())) == 24
        for lease in leases:
            assert lease is not None
            lease.release()
        queue = client.queue("mail")
        queue.put_many([dibs.NewJob(number, key=str(number), max_tries=1) for number in range(30)])
        with queue.take(30) as batch:
            assert len(batch) == 30
            for job in batch:
                if job.payload == 7:
                    job.fail("never")
        assert [job.payload for job in queue.dead()] == [7]
        assert queue.requeue() == 1
        assert queue.depth().ready == 1
        with client.lock("x"):
            pass
        assert client.purge(0) > 0
        assert [finding.promise for finding in _findings(client) if not finding.kept] == []


def test_a_server_that_takes_small_packets_is_named(own_mysql: MariaDBServer) -> None:
    """Calls of many items would fail as if the server were away: doctor says what to set."""
    url = own_mysql.create_database()
    own_mysql.sql("SET GLOBAL max_allowed_packet = 16384")
    with dibs.connect(url) as client:
        (finding,) = [finding for finding in _findings(client) if not finding.kept]
        assert "max_allowed_packet=16384: set 16M" in finding.detail


@pytest.mark.parametrize("info", ["{bad", "5", "[]", "[" * 3000, ""])
def test_a_row_with_scribbles_for_info_is_shown(
    client: dibs.Client, mysql: MariaDBServer, mysql_url: str, info: str
) -> None:
    """Info that is no JSON object is shown as none, and the listing goes on."""
    with client.lock("a", info={"why": "test"}), client.lock("b", info={"why": "test"}):
        mysql.sql("UPDATE dibs_lease SET info = %s WHERE name = 'default:a'", (info,), database=database_of(mysql_url))
        assert [(row.name, row.info) for row in client.leases()] == [("a", None), ("b", {"why": "test"})]
        shown = client.holder("a")
        assert shown is not None
        assert shown.info is None


def test_a_name_that_is_no_text_does_not_end_a_listing(
    client: dibs.Client, mysql: MariaDBServer, mysql_url: str
) -> None:
    """A row whose name somebody wrote in bytes that are no UTF-8 is shown as far as it can be read."""
    with client.lock("a"), client.lock("b"):
        text = "UPDATE dibs_lease SET name = CONCAT('default:a', X'FF') WHERE name = 'default:a'"
        mysql.sql(text, database=database_of(mysql_url))
        assert [row.name for row in client.leases()] == ["a\ufffd", "b"]
        text = "UPDATE dibs_lease SET name = 'default:a' WHERE name = CONCAT('default:a', X'FF')"
        mysql.sql(text, database=database_of(mysql_url))


CRASH = "grants survive a crash of the server"


@pytest.mark.parametrize(
    "settings, survives, broken",
    [
        ({}, "yes", []),
        ({"innodb_flush_log_at_trx_commit": 0}, "yes, but for the last second or two", [CRASH]),
        ({"innodb_flush_log_at_trx_commit": 2}, "yes, but for the last second or two", [CRASH]),
        ({"log_bin": "binlog", "sync_binlog": 0}, "yes, but for what the system had not written yet", [CRASH]),
        ({"log_bin": "binlog", "sync_binlog": 1}, "yes", []),
    ],
)
def test_doctor_and_capabilities_tell_the_settings(
    settings: dict[str, object], survives: str, broken: list[str]
) -> None:
    """What the server does with commits decides what a crash leaves; doctor says which setting to change."""
    with MariaDBServer(settings) as server, dibs.connect(server.create_database()) as client:
        assert client.capabilities.durable is (not broken)
        assert client.capabilities.survives_restart == survives
        with client.lock("x"):
            findings = _findings(client)
        assert [finding.promise for finding in findings if not finding.kept] == broken
        for finding in findings:
            if not finding.kept:
                assert any(f"set {name}=1" in finding.detail for name in settings)


def test_a_binary_log_of_statements_is_a_misconfiguration() -> None:
    """binlog_format=STATEMENT refuses READ COMMITTED: SetupRequired with what to set, and doctor says it."""
    settings = {"log_bin": "binlog", "sync_binlog": 1, "binlog_format": "STATEMENT"}
    with MariaDBServer(settings) as server, dibs.connect(server.create_database()) as client:
        with pytest.raises(dibs.SetupRequired, match="ROW or MIXED"):
            client.lock("x").acquire(timeout=0)
        assert [f.promise for f in _findings(client) if not f.kept] == ["grants can be written to the binary log"]


@pytest.mark.parametrize(
    "facts, word",
    [
        ({"wsrep_on": "ON", "wsrep_cluster_address": "gcomm://a,b,c"}, "Galera"),
        (
            {"group_replication_group_name": "aaaa", "group_replication_single_primary_mode": "OFF"},
            "several primaries",
        ),
    ],
)
def test_doctor_names_servers_with_several_writers(
    mysql_url: str, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], word: str
) -> None:
    """Galera and group replication with several primaries are named: several clocks decide there."""
    read = Connection.read_facts
    monkeypatch.setattr(
        Connection, "read_facts", lambda self, deadline: (read(self, deadline), self.facts.update(facts))
    )
    with dibs.connect(mysql_url) as client:
        (finding,) = [finding for finding in _findings(client) if not finding.kept]
        assert word in finding.detail


def test_an_old_server_is_unsupported(mysql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before JSON_TABLE is Unsupported, with the versions that will do."""
    read = Connection.read_facts
    for version in ("5.7.44", "8.0.3", "10.5.29-MariaDB"):
        monkeypatch.setattr(
            Connection,
            "read_facts",
            lambda self, deadline, version=version: (read(self, deadline), self.facts.update(version=version)),
        )
        with (
            dibs.connect(mysql_url) as client,
            pytest.raises(dibs.Unsupported, match=r"MySQL 8\.0\.4 or MariaDB 10\.6"),
        ):
            client.ping()


# -- locks of others --------------------------------------------------------------------------------------------------


def test_a_row_that_somebody_has_locked_is_waited_for(
    client: dibs.Client, mysql: MariaDBServer, mysql_url: str
) -> None:
    """A lock wait that the server gives up on (1205) is tried again: the caller never sees it."""
    with client.lock("x"):
        pass
    with mysql.connect(database_of(mysql_url)) as other, other.cursor() as cursor:
        other.begin()
        cursor.execute("SELECT * FROM dibs_lease FOR UPDATE")
        before = time.monotonic()
        with later(1.5, other.rollback), client.lock("x", timeout=0) as lease:
            assert time.monotonic() - before > 1
            assert lease.fencing_token == 2


def test_a_row_that_stays_locked_is_no_holder(mysql: MariaDBServer, mysql_url: str) -> None:
    """A row locked for longer than anybody waits: StoreUnavailable, not "held by another"; nothing was applied."""
    with (
        dibs.connect(mysql_url, request_timeout=1.5, patience=1.5) as client,
        closing(mysql.connect(database_of(mysql_url))) as other,
        other.cursor() as cursor,
    ):
        with client.lock("x"):
            pass
        other.begin()
        cursor.execute("SELECT * FROM dibs_lease FOR UPDATE")
        with pytest.raises(dibs.StoreUnavailable):
            client.lock("x").acquire(timeout=0)
        other.rollback()
        with client.lock("x") as lease:
            assert lease.fencing_token == 2


def test_a_lease_pinned_in_a_transaction_delays_the_names_of_nobody_else(mysql: MariaDBServer, mysql_url: str) -> None:
    """Who takes over what was pinned once deletes that pin, and waits for no other."""
    with (
        dibs.connect(mysql_url) as client,
        dibs.connect(mysql_url, request_timeout=1.5, patience=1.5) as taker,
        closing(mysql.connect(database_of(mysql_url))) as caller,
    ):
        leases = []
        for name in ("a", "b", "c"):
            lease = client.lock(name, ttl=1, renew=False).acquire()
            assert lease is not None
            leases.append(lease)
            caller.begin()
            lease.guard(caller)
            caller.rollback()
        with client.lock("bb") as held:
            caller.begin()
            held.guard(caller)
            for lease in leases:
                with taker.lock(lease.name):
                    pass
            caller.rollback()


def test_a_job_ends_in_a_transaction_that_updates_nothing_without_a_key(mysql: MariaDBServer, mysql_url: str) -> None:
    """As sql_safe_updates has it."""
    with (
        dibs.connect(mysql_url) as client,
        closing(mysql.connect(database_of(mysql_url), init_command="SET sql_safe_updates = 1")) as caller,
    ):
        queue = client.queue("a", ttl=30, keep_results=60)
        ids = queue.put_many([1, 2])
        with queue.take(2) as batch:
            caller.begin()
            for job in batch:
                job.done(connection=caller)
            caller.commit()
        assert [job.id for job in queue.jobs("done")] == ids[::-1]


def test_a_purge_leaves_alone_what_a_transaction_has_changed(mysql: MariaDBServer, mysql_url: str) -> None:
    """Nobody waits for that transaction; the next purge finds what it leaves."""
    with (
        dibs.connect(mysql_url, request_timeout=1.5, patience=1.5) as client,
        closing(mysql.connect(database_of(mysql_url))) as caller,
    ):
        for lock in (client.lock("x"), client.semaphore("s", 2)):
            with lock:
                pass
        caller.begin()
        for item in client.claims("a", ttl=30, max_tries=3).take([1]):
            item.done(caller)
        assert client.purge(0) >= 2
        caller.commit()
        assert client.purge(0) >= 1


def test_a_statement_that_comes_too_late_grants_nothing(mysql: MariaDBServer, url: str) -> None:
    """An acquire held up until its caller has given up is over when it is done: nobody holds the name."""
    store, other = locate(url)[0].open(), locate(url)[0].open()
    store.act([Acquire("x", "a-1", 0.2, "h"), Release("x", "a-1")], soon())
    with closing(mysql.connect(database_of(url))) as blocker, blocker.cursor() as cursor:
        cursor.execute("LOCK TABLES dibs_lease WRITE")
        with pytest.raises(dibs.StoreUnavailable) as caught:
            store.act([Acquire("x", "b-1", 0.4, "h")], soon(0.3))
        assert caught.value.maybe_applied
        time.sleep(0.3)
        cursor.execute("UNLOCK TABLES")
    # Whatever became of that one, it holds nothing now, a whole ttl after it was sent.
    eventually(lambda: isinstance(other.act([Acquire("x", "c-1", 60, "h")], soon())[0], Granted), limit_s=0.3)
    store.close()
    other.close()


def test_deadlocks_are_tried_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock that the server broke by undoing our statement (1213) is not told to anybody."""
    store = locate(url)[0].open()
    store.act([Acquire("x", "a-1", 60, "h"), Release("x", "a-1")], soon())
    receive, failures = mysql_drivers.Wire.receive, [1213, 1205, 1213]

    def unlucky(self: mysql_drivers.Wire, deadline: Deadline) -> Any:
        answer = receive(self, deadline)
        if failures and answer.affected == 0:
            raise mysql_drivers.ServerError(failures.pop(), "somebody else's lock")
        return answer

    monkeypatch.setattr(mysql_drivers.Wire, "receive", unlucky)
    (outcome,) = store.act([Renew("x", "a-1", 60)], soon())
    assert failures == []
    assert not isinstance(outcome, Renewed)
    store.close()


# -- connections that end ---------------------------------------------------------------------------------------------


def test_a_connection_that_the_server_closed_is_opened_again(
    mysql: MariaDBServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle connection that the server closed (wait_timeout, a restart) is nobody's failure."""
    monkeypatch.setattr(mysql_drivers, "IDLE_S", 0.2)
    store = locate(url)[0].open()
    ((token, _, _),) = store.act([Acquire("x", "a-1", 60, "h")], soon())  # type: ignore[misc]
    assert isinstance(store, MySQLStore)
    ((connection_id,),) = store._connection.ask("SELECT CONNECTION_ID()", soon()).rows
    mysql.sql(f"KILL {int(connection_id or 0)}")
    time.sleep(0.4)
    (outcome,) = store.act([Release("x", "a-1")], soon())
    assert isinstance(outcome, Released)
    (granted,) = store.act([Acquire("x", "b-1", 60, "h")], soon())
    assert isinstance(granted, Granted)
    assert granted.fencing_token == token + 1
    store.close()


@pytest.mark.parametrize("way", ["sys.exit()", "os._exit(0)", "del client, lease; gc.collect()"])
def test_a_forked_child_does_not_harm_its_parent(url: str, way: str) -> None:
    """However a forked child ends, the parent's connections and leases go on, and the child's own client works."""
    program = f"""
import gc, os, sys, time, dibs
client = dibs.connect({url!r})
lease = client.lock("x", ttl=1.5).acquire()
pid = os.fork()
if pid == 0:
    assert not lease.held
    own = dibs.connect({url!r})
    assert own.lock("x").acquire(timeout=0) is None
    with own.lock("y"):
        pass
    {way}
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
token, end = lease.fencing_token, time.monotonic() + 2.5
while time.monotonic() < end:
    assert lease.held, lease
    time.sleep(0.1)
lease.release()
with client.lock("x") as again:
    assert again.fencing_token == token + 1
print("fine")
"""
    strict = [sys.executable, "-W", "error", "-W", "ignore:This process (pid=:DeprecationWarning"]  # of forks, that is
    done = subprocess.run([*strict, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


# -- outages ----------------------------------------------------------------------------------------------------------


def test_a_server_killed_with_9_keeps_grants_and_tokens(own_mysql: MariaDBServer, driver: str) -> None:
    """kill -9 of the server while a lease is held and another waits: both outlive it, and tokens go on rising."""
    url = f"{own_mysql.create_database()}?driver={driver}"
    with dibs.connect(url, patience=30) as client, dibs.connect(url, patience=30) as other:
        lock = client.lock("x", ttl=20)
        for _ in range(5):
            with lock:
                pass
        lease = lock.acquire()
        assert lease is not None
        other.ping()
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(other.lock("x").acquire(timeout=30)))
        waiting.start()
        eventually(lambda: [row.waiting for row in client.leases()] == [1])
        own_mysql.kill()
        own_mysql.start()
        assert lease.held
        seen = client.holder("x")
        assert seen is not None
        assert seen.fencing_token == lease.fencing_token == 6
        assert got == []
        lease.release()
        waiting.join()
        assert got[0].fencing_token == 7
        got[0].release()


def test_a_lease_outlives_a_restart_of_the_server(own_mysql: MariaDBServer, driver: str) -> None:
    """Restarted while a lease is held: it is renewed afterwards, others stay out."""
    url = f"{own_mysql.create_database()}?driver={driver}"
    with dibs.connect(url, patience=30) as client, dibs.connect(url, patience=30) as other:
        lease = client.lock("x", ttl=20).acquire()
        assert lease is not None
        own_mysql.restart()
        assert lease.held
        assert other.lock("x").acquire(timeout=0) is None
        before = lease.trusted_until
        eventually(lambda: lease.trusted_until > before)
        lease.release()
        with other.lock("x", timeout=20) as again:
            assert again.fencing_token == lease.fencing_token + 1


def test_a_stopped_server_ends_trust_by_the_clock(own_mysql: MariaDBServer, driver: str) -> None:
    """While the server hangs, a lease is lost by its local deadline, loudly; callers get StoreUnavailable."""
    told = threading.Event()
    url = f"{own_mysql.create_database()}?driver={driver}"
    with dibs.connect(url, request_timeout=1, patience=1) as client:
        lease = client.lock("x", ttl=2, on_lost=told.set).acquire()
        assert lease is not None
        deadline = lease.trusted_until
        with own_mysql.paused():
            assert told.wait(10)
            assert not lease.held
            assert lease._session.clock.now() >= deadline
            before = time.monotonic()
            with pytest.raises(dibs.StoreUnavailable):
                client.lock("y").acquire(timeout=0)
            assert time.monotonic() - before < 4
        with pytest.raises(dibs.LeaseLost):
            lease.release()
        eventually(lambda: client.holder("x") is None)
        with client.lock("x", timeout=5) as again:
            assert again.fencing_token >= 2


@pytest.mark.parametrize("loss", ["TRUNCATE", "DROP TABLE"])
def test_the_loss_of_all_data_is_told_to_the_holder(mysql: MariaDBServer, url: str, loss: str) -> None:
    """Tables emptied or dropped under a live holder: it is told at its next renewal, and names can be had again."""
    told = threading.Event()
    with dibs.connect(url) as client:
        lease = client.lock("x", ttl=1.5, on_lost=told.set).acquire()
        assert lease is not None
        for table in TABLES:
            mysql.sql(f"{loss} {table}", database=database_of(url))
        assert told.wait(10)
        assert not lease.held
        with pytest.raises(dibs.LeaseLost):
            lease.check()
        with client.lock("x", timeout=5):
            assert client.holder("x") is not None
        with client.semaphore("y", 2):
            assert client.holder("y") is not None


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_a_floor_that_was_lost_is_made_above_all_tokens(mysql: MariaDBServer, url: str, kind: str) -> None:
    """Only the table with the floor is truncated, after a purge: no token of a name comes a second time."""
    tokens_go_on(url, kind, lambda: mysql.sql("TRUNCATE dibs_lease_meta", database=database_of(url)))


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_waiter_sees_the_release_long_before_its_poll(url: str) -> None:
    """The watch looks every few milliseconds for those who came just now."""
    with dibs.connect(url) as client, dibs.connect(url) as other:
        other.ping()
        delays = []
        for _ in range(5):
            lease = client.lock("x").acquire()
            assert lease is not None
            got: list[float] = []

            def wait(got: list[float] = got) -> None:
                with other.lock("x"):
                    got.append(time.monotonic())

            waiting = threading.Thread(target=wait)
            waiting.start()
            eventually(lambda: any(row.waiting for row in client.leases("x")))
            time.sleep(0.1)  # the first wait of a client opens its watch meanwhile
            released = time.monotonic()
            lease.release()
            waiting.join()
            delays.append(got[0] - released)
        # Polls come 0.7 to 1 s apart; that three of five came sooner than half of that is no accident.
        assert sorted(delays)[2] < 0.35, delays


def test_losing_every_hint_costs_one_poll(mysql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: with all hints lost a waiter still acquires within one poll of the name being free."""
    monkeypatch.setattr(MySQLWatch, "changed", lambda self, names: ())
    with dibs.connect(mysql_url) as client, dibs.connect(mysql_url) as other:
        lease = client.lock("x").acquire()
        assert lease is not None
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(other.lock("x").acquire(timeout=10)))
        waiting.start()
        eventually(lambda: any(row.waiting for row in client.leases("x")))
        lease.release()
        waiting.join()
        assert got[0] is not None
        got[0].release()


def test_a_hint_goes_to_the_first_in_line_alone(url: str) -> None:
    """Only the watch of the client that is first in line sees the free names; of very many some at a time."""
    holder, a, b = (locate(url)[0].open() for _ in range(3))
    names = [f"n{i:04}" for i in range(450)]
    holder.act([Acquire(name, "h-1", 60, "h") for name in names], soon())
    a.act([Acquire(name, "a-1", 60, "a", None, "a") for name in names], soon())
    b.act([Acquire(name, "b-1", 60, "b", None, "b") for name in names], soon())
    watches = [store.watch(address, soon()) for store, address in ((a, "a"), (b, "b"))]
    assert all(watch is not None for watch in watches)
    first, second = watches
    assert first is not None
    assert second is not None
    assert not first.changed(names)
    holder.act([Release(name, "h-1") for name in names], soon())
    seen: set[str] = set()
    for _ in range(3):
        seen.update(first.changed(names))
        assert not second.changed(names)
    assert seen == set(names)
    for thing in (holder, first, second):
        thing.close()


def test_a_place_that_goes_before_it_is_known_is_taken_anew(mysql: MariaDBServer, url: str) -> None:
    """Who lined up, and was swept out with the line before one that was seen earlier, gets a place all the same."""
    store = locate(url)[0].open()
    assert isinstance(store, MySQLStore)
    names = ["x", "y", "z"]
    store.act([Acquire(name, "a-1", 60, "h") for name in names], soon())
    pieces = store._connection.pieces
    swept: list[str] = []

    def late(template: str, values: str | tuple[Any, ...], deadline: Deadline) -> list[bytes]:
        if "_line` AS w" in template and not swept:
            swept.append(template)
            mysql.sql(f"DELETE FROM {database_of(url)}.dibs_lease_line WHERE name <> 'y'")
        return pieces(template, values, deadline)

    store._connection.pieces = late  # type: ignore[method-assign]
    held = store.act([Acquire(name, f"b-{name}", 60, "h", None, "b") for name in names], soon())
    assert swept
    tickets = [one.ticket for one in held if isinstance(one, Held)]
    assert len({*tickets} - {None}) == len(names)
    store.act([Release(name, "a-1") for name in names], soon())
    granted = store.act(
        [Acquire(name, f"b-{name}", 60, "h", None, "b", ticket) for name, ticket in zip(names, tickets, strict=True)],
        soon(),
    )
    assert all(isinstance(one, Granted) for one in granted)
    store.close()


def test_who_waited_does_not_slow_down_who_comes_later(url: str) -> None:
    """After a line has dissolved, an acquire is one statement again."""
    store = locate(url)[0].open()
    assert isinstance(store, MySQLStore)
    store.act([Acquire("x", "a-1", 60, "h")], soon())
    (held,) = store.act([Acquire("x", "b-1", 60, "h", None, "b")], soon())
    store.act([Release("x", "a-1")], soon())
    (granted,) = store.act([Acquire("x", "b-1", 60, "h", None, "b", held.ticket)], soon())  # type: ignore[union-attr]
    assert isinstance(granted, Granted)
    store.act([Release("x", "b-1")], soon())
    sent: list[str] = []
    ask = store._connection.ask

    def counted(statement: str, deadline: Deadline) -> Any:
        sent.append(statement)
        return ask(statement, deadline)

    store._connection.ask = counted  # type: ignore[assignment, method-assign]
    (again,) = store.act([Acquire("x", "c-1", 60, "h")], soon())
    assert isinstance(again, Granted)
    assert len(sent) == 1, sent
    store.close()


# -- many -------------------------------------------------------------------------------------------------------------


def test_ten_thousand_leases(url: str) -> None:
    """Vectors of 10,000 acquires, renewals and releases come back whole, those that are over as Gone."""
    store = locate(url)[0].open()
    names = [f"default:n{i}" for i in range(10_000)]
    asked = [
        Acquire(name, f"c-{i}", 60 + i % 3, f"h{i % 7}", None if i % 5 else str(i)) for i, name in enumerate(names)
    ]
    granted = store.act(asked, soon(60))
    assert {type(outcome) for outcome in granted} == {Granted}
    shown = {lease.name: (lease.holder, lease.info) for lease in store.leases("default:", "default;", soon())}
    assert shown == {request.name: (request.holder, request.info) for request in asked}
    store.act([Release(names[i], f"c-{i}") for i in range(0, 10_000, 100)], soon(60))
    renewed = store.act([Renew(name, f"c-{i}", 60) for i, name in enumerate(names)], soon(60))
    assert [i for i, outcome in enumerate(renewed) if not isinstance(outcome, Renewed)] == list(range(0, 10_000, 100))
    released = store.act([Release(name, f"c-{i}") for i, name in enumerate(names)], soon(60))
    assert [i for i, outcome in enumerate(released) if not outcome.was_held] == list(range(0, 10_000, 100))  # type: ignore[union-attr]
    assert store.purge("", "\U0010ffff", 0, soon(60)) == 10_000
    store.close()


# -- borrowed addresses -----------------------------------------------------------------------------------------------


def test_the_callers_transaction_is_not_dibs_business(mysql_url: str) -> None:
    """P7: connect(engine) takes the address, never the transaction."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(mysql_url.partition("?")[0].replace("mysql://", "mysql+pymysql://"))
    with engine.connect() as caller, dibs.connect(engine) as client:
        transaction = caller.begin()
        lease = client.lock("x").acquire(timeout=0)
        assert lease is not None
        transaction.rollback()
        with dibs.connect(engine.url) as other:
            assert other.lock("x").acquire(timeout=0) is None
        lease.release()
    engine.dispose()


# mysqlclient must be compiled, so not everybody has it.
MYSQLCLIENT_URLS = (
    [("mysql+mysqldb://me:pw@db:3307/prod?charset=utf8mb4", "mysql://db:3307/prod")] if find_spec("MySQLdb") else []
)


@pytest.mark.parametrize(
    "text, shown",
    [
        *MYSQLCLIENT_URLS,
        (f"mariadb+pymysql://me@db/prod?ssl_ca={__file__}&read_timeout=3", "mysql://db:3306/prod"),
        ("mysql+asyncmy://me@db/prod", "mysql://db:3306/prod"),
        ("mysql+aiomysql://me@db/prod", "mysql://db:3306/prod"),
        ("mysql+pymysql://me@/prod?unix_socket=/run/my.sock", "mysql:///run/my.sock/prod"),
    ],
)
def test_sqlalchemy_urls_give_their_address(text: str, shown: str) -> None:
    """Of any driver's URL the place is taken; dibs brings its own driver."""
    import sqlalchemy

    assert locate(sqlalchemy.make_url(text))[0].shown == shown
    assert locate(text)[0].shown == shown


def test_django_connections_give_their_address(mysql_url: str) -> None:
    """A Django connection's settings are enough. (Its backend needs mysqlclient, so something like it stands here.)"""
    parts = urlsplit(mysql_url)
    settings: dict[str, Any] = {
        "NAME": parts.path[1:],
        "USER": parts.username,
        "PASSWORD": parts.password,
        "HOST": parts.hostname,
        "PORT": str(parts.port),
        "OPTIONS": {"charset": "utf8mb4", "init_command": "SET sql_mode='STRICT_TRANS_TABLES'"},
    }
    django = SimpleNamespace(vendor="mysql", settings_dict=settings)
    with dibs.connect(django) as client, client.lock("x") as lease:
        assert lease.fencing_token == 1
    settings |= {"HOST": "/run/mysqld/mysqld.sock", "PORT": "", "OPTIONS": {"ssl": {"ca": __file__}}}
    assert locate(django)[0].shown == f"mysql:///run/mysqld/mysqld.sock/{parts.path[1:]}"
    settings |= {"USER": "", "OPTIONS": {"read_default_file": "/etc/my.cnf"}}
    with pytest.raises(dibs.InvalidOption, match="read_default_file"):
        locate(django)
