"""A lease pinned in the caller's own transaction: nobody enters before it has ended, and nobody superseded commits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

import dibs
from dibs import fencing
from dibs.handover import exporting
from dibs.store import PIN_LOOK_S
from dibs.stores import sqlite_file
from dibs.stores.mysql_pins import Pins
from dibs.testing.case import within
from tests.between import Between
from tests.callers import KINDS, TABLE, Caller, _of_driver, django_connection, raw
from tests.servers.postgres import PgBouncer, PostgresServer
from tests.waits import eventually

# Of a lease that a case wants to see end. It is taken with renew=False: what a holder is that was stopped.
SHORT_S = 1.2
every_kind = pytest.mark.parametrize("kind", KINDS)
SERVERS = {"postgresql": "psycopg", "mysql": "pymysql"}


class Scene:
    """A database with leases and a resource in it: two clients, and as many callers as a case wants."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self._open: list[Any] = []
        self.holder = self.client()
        # On SQLite it finds the whole file locked, and is to say so soon.
        self.other = self.client(patience=0.1)
        with closing(raw(url)) as connection:
            connection.cursor().execute(TABLE)
            connection.cursor().execute("INSERT INTO resource (id, body) VALUES (1, 'old')")
            connection.commit()
        self.holder.setup()

    @property
    def file(self) -> bool:
        """The pin is the lock on the whole file: others find the store busy."""
        return self.url.startswith("sqlite:")

    def client(self, **options: Any) -> dibs.Client:
        client = dibs.connect(self.url, **options)
        self._open.append(client)
        return client

    def caller(self) -> Caller:
        caller = KINDS[self.kind][1](self.url)
        self._open.append(caller)
        return caller

    def short(self, name: str = "x") -> dibs.Lease:
        """A lease that nobody renews."""
        lease = self.holder.lock(name, ttl=SHORT_S, renew=False).acquire(timeout=0)
        assert lease is not None
        return lease

    def kept_out(self, name: str = "x") -> bool:
        """Whether somebody else does not get the name now."""
        try:
            lease = self.other.lock(name).acquire(timeout=0)
        except dibs.StoreUnavailable:
            assert self.file
            return True
        if lease is not None:
            lease.release()
        return lease is None

    def enters(self, name: str = "x") -> dibs.Lease:
        """Somebody else gets the name, and soon."""
        lease = self.other.lock(name, timeout=3).acquire()
        assert lease is not None
        return lease

    def body(self) -> str:
        with closing(raw(self.url)) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT body FROM resource WHERE id = 1")
            return str(cursor.fetchone()[0])

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


@pytest.fixture
def scene(kind: str, request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(kind, request.getfixturevalue(KINDS[kind][0]).partition("?")[0])
    yield scene
    scene.close()


def server_scenes(test: Callable[..., None]) -> Callable[..., None]:
    """For what is particular to databases with a server, where a pin is not the lock on everything."""
    return pytest.mark.parametrize("kind", SERVERS.values(), ids=SERVERS)(test)


def over(seconds: float = SHORT_S) -> None:
    """Until a lease of so many seconds has certainly ended."""
    time.sleep(seconds + 0.05)


# -- every kind of connection -----------------------------------------------------------------------------------------


@server_scenes
def test_a_rollback_to_a_savepoint_takes_the_pin_with_it_on_postgresql(scene: Scene) -> None:
    """There, locks that were taken after the savepoint end with it; elsewhere they stay until the transaction ends."""
    lease, caller = scene.short(), scene.caller()
    caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
    caller.run("SAVEPOINT here")
    lease.guard(caller.given)
    caller.run("ROLLBACK TO SAVEPOINT here")
    lease.release()
    assert scene.kept_out() == (scene.kind != "psycopg")
    caller.rollback()


@every_kind
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_nobody_enters_before_the_transaction_has_ended(scene: Scene, end: str) -> None:
    """A lease that is pinned keeps others out although it has expired, until commit or rollback."""
    caller, lease = scene.caller(), scene.short()
    lease.guard(caller.given)
    caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
    over()
    assert scene.kept_out()
    assert scene.kept_out()
    getattr(caller, end)()
    assert scene.body() == ("new" if end == "commit" else "old")
    with scene.enters() as next_lease:
        assert next_lease.fencing_token == lease.fencing_token + 1


@server_scenes
def test_who_is_kept_out_by_a_pin_is_told_so(scene: Scene) -> None:
    """LockTimeout does not say that the name is about to be free: it is when that transaction has ended."""
    caller, lease = scene.caller(), scene.short()
    lease.guard(caller.given)
    over()
    with pytest.raises(dibs.LockTimeout, match=r"held by .* a transaction in which it was pinned") as told:
        with scene.other.lock("x", timeout=0.05):
            pass
    assert told.value.free_in == 0
    assert told.value.holder == lease.holder


@server_scenes
def test_who_is_kept_out_of_all_permits_by_a_pin_is_told_so(scene: Scene) -> None:
    """As where there is one."""
    caller, permits = scene.caller(), scene.holder.semaphore("s", 1, ttl=SHORT_S, renew=False)
    lease = permits.acquire(timeout=0)
    assert lease is not None
    lease.guard(caller.given)
    over()
    with pytest.raises(dibs.LockTimeout, match=r"held by .* a transaction in which it was pinned"):
        with scene.other.semaphore("s", 1, timeout=0.05):
            pass


@server_scenes
def test_who_waits_for_the_end_of_a_pin_looks_now_and_then(scene: Scene) -> None:
    """Each PIN_LOOK_S, not as soon as it has heard that the lease is over."""
    caller, lease = scene.caller(), scene.short()
    lease.guard(caller.given)
    over()
    between = Between(scene.url)
    with between.client() as waiter:
        assert waiter.lock("x").acquire(timeout=1) is None
        assert 2 < len(between.calls) < 2 / PIN_LOOK_S


@every_kind
def test_a_superseded_holder_is_told(scene: Scene) -> None:
    """Once another has entered, guard raises LeaseLost; after the rollback that asks for, nothing has been written."""
    caller, lease = scene.caller(), scene.short()
    caller.run("UPDATE resource SET body = 'late' WHERE id = 1")
    caller.rollback()
    over()
    with scene.enters():
        caller.run("SELECT body FROM resource")
        with pytest.raises(dibs.LeaseLost, match="was lost"):
            lease.guard(caller.given)
        caller.rollback()
    assert scene.body() == "old"


@every_kind
def test_it_is_given_back_before_the_commit(scene: Scene) -> None:
    """A block that ends before the commit lets nobody in before the commit, either."""
    caller = scene.caller()
    with scene.holder.lock("x", ttl=1) as lease:
        lease.guard(caller.given)
        caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
    assert scene.kept_out()
    caller.commit()
    assert scene.body() == "new"
    scene.enters().release()


@every_kind
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_release_after_commit(scene: Scene, end: str) -> None:
    """The transaction keeps the name when the lease was handed over to it, and lets it go when it ends."""
    caller = scene.caller()
    with scene.holder.lock("x") as lease:
        caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
        lease.release_after_commit(caller.given)
        assert not lease.held
        assert not lease.lost.is_set()
        assert scene.kept_out()
    assert scene.kept_out()
    getattr(caller, end)()
    with within(2, "the end of the transaction was noticed late"):
        scene.enters().release()


@every_kind
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_transaction_that_ends_within_the_block(scene: Scene, end: str) -> None:
    """The end of the block finds the lease given back, and so does another release: neither takes it for lost."""
    caller = scene.caller()
    with scene.holder.lock("x") as lease:
        lease.release_after_commit(caller.given)
        getattr(caller, end)()
    lease.release()
    assert not lease.lost.is_set()
    scene.enters().release()


@every_kind
def test_several_names_are_given_back_before_the_commit(scene: Scene) -> None:
    """Nor does the end of their block wait for the transaction, which ends after it."""
    caller = scene.caller()
    with within(2, "the end of the block waited for the caller's own transaction"):
        with scene.holder.multilock(["x", "y"]) as leases:
            leases["x"].guard(caller.given)
            leases["y"].guard(caller.given)
    assert scene.kept_out()
    caller.commit()
    scene.enters().release()


@every_kind
def test_a_second_transaction_of_one_lease(scene: Scene) -> None:
    """A lease can be pinned again and again, and a transaction that has ended is not asked any more."""
    caller = scene.caller()
    with scene.holder.lock("x") as lease:
        for number in range(3):
            lease.guard(caller.given)
            lease.guard(caller.given)
            caller.run(f"UPDATE resource SET body = '{number}' WHERE id = 1")
            caller.commit()
    assert scene.body() == "2"
    scene.enters().release()


# -- what a caller may do wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*SERVERS.values(), "sqlite3"])
def test_a_connection_without_a_transaction_is_refused(scene: Scene) -> None:
    """In autocommit there is nothing to pin a lease in: InvalidOption says so, and the lease is held as before."""
    caller = scene.caller()
    if scene.file:
        caller.given.isolation_level = None
    elif scene.kind == "psycopg":
        caller.given.autocommit = True
    else:
        caller.given.autocommit(True)
    with scene.holder.lock("x") as lease:
        with pytest.raises(dibs.InvalidOption, match="no transaction open"):
            lease.guard(caller.given)
        assert lease.held


def test_another_database_is_refused(postgres: PostgresServer, postgres_url: str, sqlite_url: str) -> None:
    """A pin where the leases are not would keep nobody out: InvalidOption."""
    elsewhere = postgres.create_database()
    with dibs.connect(postgres_url) as client, client.lock("x") as lease:
        with (
            closing(raw(elsewhere)) as connection,
            pytest.raises(dibs.InvalidOption, match="another database than the one"),
        ):
            lease.guard(connection)
        with closing(raw(sqlite_url)) as connection, pytest.raises(dibs.InvalidOption, match="kept in PostgreSQL"):
            lease.guard(connection)
    postgres.drop_database(elsewhere)


def test_another_file_is_refused(sqlite_url: str, tmp_path: Any, postgres_url: str) -> None:
    """On SQLite the connection must have the very file open, by whatever path; ATTACH will do."""
    with dibs.connect(sqlite_url) as client, client.lock("it's") as lease:
        with closing(raw(f"sqlite:///{tmp_path}/other.db")) as connection:
            with pytest.raises(dibs.InvalidOption, match="does not have the file"):
                lease.guard(connection)
            connection.execute("ATTACH ? AS \"the 'leases'\"", (f"{tmp_path}/../{tmp_path.name}/locks.db",))
            lease.guard(connection)
            connection.rollback()
        with closing(raw(postgres_url)) as connection, pytest.raises(dibs.InvalidOption, match="kept in SQLite"):
            lease.guard(connection)


def test_what_is_no_connection_is_refused(sqlite_url: str) -> None:
    """An engine, a cursor or a URL is no connection, and the message says what is."""
    import sqlalchemy

    with dibs.connect(sqlite_url) as client, client.lock("x") as lease:
        engine = sqlalchemy.create_engine(sqlite_url)
        with closing(raw(sqlite_url)) as connection:
            for wrong in (sqlite_url, engine, connection.cursor(), None):
                with pytest.raises(dibs.InvalidOption, match="no connection whose transaction"):
                    lease.guard(wrong)
        engine.dispose()


def test_another_library_of_sqlite_is_refused(sqlite_url: str) -> None:
    """A second SQLite in the process would not be kept out, nor keep anybody out: the message says why."""
    other = type("Connection", (), {"__module__": "pysqlite3.dbapi2", "cursor": None, "commit": None})
    with (
        dibs.connect(sqlite_url) as client,
        client.lock("x") as lease,
        pytest.raises(dibs.InvalidOption, match="pysqlite3 brings an SQLite library of its own"),
    ):
        lease.guard(other())


def test_another_library_of_sqlite_is_refused_behind_a_framework(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy can be given such a driver, too."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(sqlite_url)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE account (id INTEGER PRIMARY KEY, fence INTEGER)"))
        monkeypatch.setattr(sqlite_file, "sqlite3", SimpleNamespace(Connection=type("Connection", (), {})))
        with pytest.raises(dibs.InvalidOption, match="an SQLite library of its own"):
            fencing.advance(connection, "account", key={"id": 1}, token=1)
    engine.dispose()


def test_other_stores_say_what_to_do_instead(sqlite_url: str) -> None:
    """Where leases are kept in no database with transactions, guard is Unsupported and names dibs.fencing."""
    with dibs.connect("memory://") as client, client.lock("x") as lease:
        assert not client.capabilities.guard
        with (
            closing(raw(sqlite_url)) as connection,
            pytest.raises(dibs.Unsupported, match=r"dibs\.fencing\.advance"),
        ):
            lease.guard(connection)


# -- with a server ----------------------------------------------------------------------------------------------------


@server_scenes
def test_renewals_go_on_and_others_are_not_delayed(scene: Scene) -> None:
    """While a lease is pinned, it is renewed for as long as the transaction takes, and so are other leases."""
    caller = scene.caller()
    with scene.holder.lock("x", ttl=1.2) as lease, scene.holder.lock("y", ttl=1.2) as another:
        lease.guard(caller.given)
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            with within(0.5, "another lease was delayed"):
                scene.holder.lock("z").acquire().release()  # type: ignore[union-attr]
            assert lease.held
            assert another.held
            time.sleep(0.05)
        caller.commit()


@server_scenes
def test_a_lease_that_is_lost_keeps_others_out(scene: Scene) -> None:
    """When the trust ends while the transaction is open, dibs gives the lease back, and the pin is looked at still."""
    caller = scene.caller()
    lease = scene.holder.lock("x", max_hold=2.5, ttl=30).acquire()
    assert lease is not None
    lease.guard(caller.given)
    assert lease.lost.wait(10)
    over(0.2)
    assert scene.kept_out()
    caller.commit()
    scene.enters().release()


@server_scenes
def test_a_broken_lease_keeps_others_out(scene: Scene) -> None:
    """Neither `break --now` nor a purge lets anybody in while the transaction is open."""
    caller, lease = scene.caller(), scene.short()
    lease.guard(caller.given)
    assert scene.other.break_lease("x", fencing_token=lease.fencing_token, now=True)
    assert scene.kept_out()
    assert scene.other.purge(0) == 0
    assert scene.kept_out()
    with pytest.raises(dibs.LeaseLost):
        lease.guard(caller.given)
    caller.rollback()
    scene.enters().release()
    assert scene.other.purge(0) == 1
    if scene.kind == "pymysql":
        assert caller.run("SELECT COUNT(*) FROM dibs_lease_guard") in ([(0,)], ((0,),))


@server_scenes
def test_a_waiter_enters_when_the_transaction_ends(scene: Scene) -> None:
    """Somebody who waits in line is kept waiting, told by whom, and enters within a second after the commit."""
    caller, lease = scene.caller(), scene.short()
    lease.guard(caller.given)
    over()
    with pytest.raises(dibs.LockTimeout) as refused, scene.other.lock("x", timeout=0.3):
        pass
    assert refused.value.holder == lease.holder
    waiting = scene.client()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(waiting.lock("x").acquire(timeout=10)))
    thread.start()
    time.sleep(0.5)
    assert not results
    caller.commit()
    with within(1.5, "the commit was noticed late"):
        thread.join(10)
    assert results[0].fencing_token == lease.fencing_token + 1
    results[0].release()


@server_scenes
def test_a_pin_in_a_batch(scene: Scene) -> None:
    """Of many expired names asked for at once, the pinned one is refused and the others are granted."""
    caller = scene.caller()
    names = [f"many/{number}" for number in range(300)]
    held = scene.holder.multilock(names, ttl=3, renew=False).acquire(timeout=10)
    assert held is not None
    held.leases["many/7"].guard(caller.given)
    over(3.0)
    with ThreadPoolExecutor(100) as pool:
        asked = pool.map(lambda name: scene.other.lock(name).acquire(timeout=0), names)
        leases = dict(zip(names, asked, strict=True))
    assert [name for name, lease in leases.items() if lease is None] == ["many/7"]
    caller.commit()
    leases["many/7"] = scene.enters("many/7")
    for lease in leases.values():
        lease.release()  # type: ignore[union-attr]


@server_scenes
def test_a_slot_of_a_semaphore(scene: Scene) -> None:
    """A permit that has expired and is pinned is counted; the other permits go on as ever."""
    caller = scene.caller()
    pinned = scene.holder.semaphore("s", 2, ttl=SHORT_S, renew=False).acquire()
    expired = scene.holder.semaphore("s", 2, ttl=SHORT_S, renew=False).acquire()
    assert pinned is not None
    assert expired is not None
    pinned.guard(caller.given)
    over()
    theirs = scene.other.semaphore("s", 2).acquire(timeout=0)
    assert theirs is not None
    assert theirs.slot == expired.slot
    assert scene.other.semaphore("s", 2).acquire(timeout=0) is None
    assert scene.other.purge(0) == 0
    caller.commit()
    again = scene.other.semaphore("s", 2).acquire(timeout=3)
    assert again is not None
    assert again.slot == pinned.slot
    again.release()
    theirs.release()


@server_scenes
@pytest.mark.parametrize("what", ["lock", "permit"])
def test_what_is_pinned_changes_hands_after_the_commit(scene: Scene, what: str) -> None:
    """A lease that was exported under its pin is nobody's to adopt before the transaction has ended, and is then."""
    caller = scene.caller()
    lock = scene.holder.lock("x", ttl=20) if what == "lock" else scene.holder.semaphore("x", 1, ttl=20)
    lease = lock.acquire(timeout=0)
    assert lease is not None
    lease.guard(caller.given)
    state = lease.export()
    with pytest.raises(dibs.LeaseLost, match="is pinned"):
        scene.other.adopt(state)
    caller.commit()
    adopted = scene.other.adopt(state)
    assert adopted.fencing_token > lease.fencing_token
    adopted.release()


@server_scenes
def test_a_pinned_term_is_not_handed_over(scene: Scene) -> None:
    """Who resigns for a successor inside its transaction leads no more, and nobody else does before the commit."""
    caller = scene.caller()
    term = scene.holder.election("x", value=1, ttl=20).campaign(timeout=0)
    assert term is not None
    term.guard(caller.given)
    assert not term.resign(to=2, timeout=0.5)
    assert not term.held
    assert not term.lost.is_set()
    assert scene.kept_out()
    caller.commit()
    scene.enters().release()


@server_scenes
def test_an_interrupted_export_leaves_the_pin(scene: Scene) -> None:
    """An export that is interrupted gives the lease back, and lets nobody in before the transaction has ended."""
    caller = scene.caller()
    lease = scene.holder.lock("x", ttl=20).acquire(timeout=0)
    assert lease is not None
    lease.guard(caller.given)
    steps = exporting(lease)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt)
    time.sleep(0.3)
    assert scene.kept_out()
    caller.commit()
    scene.enters().release()


@server_scenes
def test_a_release_that_does_not_know_the_slot_leaves_the_pin(scene: Scene) -> None:
    """Where the store may know a permit by another slot than it told, its release is found, and the pin counts."""
    caller = scene.caller()
    first = scene.other.semaphore("s", 2).acquire(timeout=0)
    lease = scene.holder.semaphore("s", 2, ttl=20).acquire(timeout=0)
    assert first is not None
    assert lease is not None
    lease.guard(caller.given)
    lease._hold.any_slot = True  # as after a downgrade without an answer
    lease.release()
    assert scene.other.semaphore("s", 2).acquire(timeout=0) is None
    caller.commit()
    again = scene.other.semaphore("s", 2).acquire(timeout=3)
    assert again is not None
    again.release()
    first.release()


@every_kind
def test_what_is_released_after_the_commit_is_kept_for_its_time(scene: Scene) -> None:
    """``min_hold`` goes on when the lease is handed over to a transaction, from when it was asked for."""
    caller = scene.caller()
    asked_at = time.monotonic()
    lease = scene.holder.lock("x", min_hold=1.5).acquire(timeout=0)
    assert lease is not None
    caller.run("UPDATE resource SET body = 'new' WHERE id = 1")
    lease.release_after_commit(caller.given)
    caller.commit()
    assert scene.kept_out()
    scene.enters().release()
    assert time.monotonic() - asked_at > 1.3


@server_scenes
def test_an_old_snapshot_does_not_deceive(scene: Scene) -> None:
    """A transaction whose snapshot is older than the takeover is told all the same: the look is not its own."""
    caller, lease = scene.caller(), scene.short()
    if scene.kind == "psycopg":
        caller.run("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    assert caller.run("SELECT count(*) FROM dibs_lease WHERE claim_id IS NOT NULL")[0][0] == 1
    over()
    scene.enters().release()
    assert caller.run("SELECT count(*) FROM dibs_lease WHERE claim_id IS NOT NULL")[0][0] == 1
    with pytest.raises(dibs.LeaseLost):
        lease.guard(caller.given)
    caller.rollback()


@server_scenes
def test_an_old_snapshot_can_be_pinned(scene: Scene) -> None:
    """A transaction that began before the name was ever asked for can pin its lease, under repeatable read."""
    caller = scene.caller()
    if scene.kind == "psycopg":
        caller.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    scene.holder.setup()
    caller.run("SELECT count(*) FROM dibs_lease")
    lease = scene.short()
    lease.guard(caller.given)
    over()
    assert scene.kept_out()
    caller.rollback()


def _count(url: str, guarded: bool, until: float, seed: int) -> int:
    """Add one to a number, again and again, under a lease that often ends before the commit; how often it did."""
    chance = random.Random(seed)
    done = 0
    # On a busy machine the transactions of the five others may keep a row for longer than anybody is usually patient.
    with dibs.connect(url, patience=60) as client, closing(raw(url)) as connection:
        cursor = connection.cursor()
        if not guarded and url.startswith("mysql"):
            # MariaDB 11.6 and later would itself refuse to write a row that has changed since it was read.
            cursor.execute("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
            if cursor.fetchall():
                cursor.execute("SET SESSION innodb_snapshot_isolation = OFF")
        # A machine that is too busy for leases so short gets more time.
        while time.monotonic() < until + (0 if done else 60):
            lease = client.lock("count", ttl=0.15, renew=chance.random() < 0.5).acquire(timeout=1)
            if lease is None:
                continue
            try:
                if guarded:
                    lease.guard(connection)
                else:
                    lease.check()
                cursor.execute("SELECT fence FROM resource WHERE id = 1")
                (number,) = cursor.fetchone()
                time.sleep(chance.choice((0.0, 0.02, 0.2, 0.3)))
                if chance.random() < 0.3:
                    with suppress(dibs.LeaseLost):  # given back before the commit
                        lease.release()
                cursor.execute(f"UPDATE resource SET fence = {number + 1} WHERE id = 1")
                connection.commit()
                done += 1
            except dibs.LeaseLost:
                connection.rollback()
            finally:
                with suppress(dibs.LeaseLost):
                    lease.release()
    return done


@pytest.mark.parametrize("kind", ["pymysql"])
def test_the_row_of_a_lease_that_is_over_is_not_made_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer deletes the row before it is locked, as the lease has ended: it is lost, and nobody waits."""
    made = Pins.make

    def late(pins: Pins, *arguments: Any) -> str:
        lock = made(pins, *arguments)
        over()
        scene.enters().release()
        return lock

    monkeypatch.setattr(Pins, "make", late)
    caller, lease = scene.caller(), scene.short()
    caller.run("SELECT count(*) FROM resource")
    with pytest.raises(dibs.LeaseLost):
        lease.guard(caller.given)
    caller.rollback()


@pytest.mark.parametrize("kind", ["pymysql"])
@pytest.mark.parametrize("permits", [0, 1])
def test_a_row_is_not_deleted_before_it_is_locked(scene: Scene, monkeypatch: pytest.MonkeyPatch, permits: int) -> None:
    """Another looked while the lease before this one was over, and is late to clear up after that one.

    A caller's transaction that finds no row keeps everybody from making it anew, and so would wait for itself.
    """
    made, late_one = Pins.make, scene.other._desk.session()

    def clear_up(store: Any, by: Any) -> None:
        store._connection.transaction(partial(store._pins.drop, ["default:x"]), by)

    def late(pins: Pins, *arguments: Any) -> str:
        lock = made(pins, *arguments)
        late_one.aside(clear_up)
        return lock

    monkeypatch.setattr(Pins, "make", late)
    caller = scene.caller()
    ours, theirs = (client.semaphore("x", 1) if permits else client.lock("x") for client in (scene.holder, scene.other))
    lease = ours.acquire()
    assert lease is not None
    caller.run("SELECT count(*) FROM resource")
    lease.guard(caller.given)
    lease.release()
    assert theirs.acquire(timeout=0) is None
    caller.rollback()
    theirs.acquire(timeout=3)
    theirs.release()


@server_scenes
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "control"])
def test_no_update_is_lost(scene: Scene, guarded: bool) -> None:
    """Many add to one number under leases that end too early: nothing is lost with guard, and something without."""
    caller = scene.caller()
    caller.run("UPDATE resource SET fence = 0 WHERE id = 1")
    caller.commit()
    done = number = 0
    for _ in range(1 if guarded else 8):  # on a busy machine few get as far as to disturb each other
        until = time.monotonic() + 4
        with ThreadPoolExecutor(6) as pool:
            done += sum(pool.map(lambda seed, until=until: _count(scene.url, guarded, until, seed), range(6)))
        number = caller.run("SELECT fence FROM resource WHERE id = 1")[0][0]
        caller.commit()
        if number != done:
            break
    assert done > 5
    assert (number == done) is guarded, f"{done} were committed, {number} were counted"


# -- PostgreSQL -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["psycopg", "session-postgresql", "django-postgresql", "django-sqlite"])
def test_a_lost_lease_cannot_be_committed(scene: Scene) -> None:
    """PostgreSQL refuses the commit of who swallows LeaseLost, and Django rolls back."""
    caller, lease = scene.caller(), scene.short()
    over()
    scene.enters().release()
    caller.run("UPDATE resource SET body = 'late' WHERE id = 1")
    with pytest.raises(dibs.LeaseLost):
        lease.guard(caller.given)
    with suppress(Exception):  # whether that is an error is for each framework to say
        caller.commit()
    caller.rollback()
    assert scene.body() == "old"


def test_the_callers_role_needs_no_rights(postgres: PostgresServer, postgres_url: str) -> None:
    """A role that may not even read dibs's tables can guard, on a connection that brings rows as dicts, read-only."""
    user = f"poor_{postgres_url.rpartition('/')[2]}"
    postgres.create_user(user)
    with (
        dibs.connect(postgres_url) as client,
        client.lock("x 100%s 'é' :a \\") as lease,
        psycopg.connect(postgres.url(postgres_url.rpartition("/")[2], user=user), row_factory=dict_row) as connection,
    ):
        connection.execute("SET TRANSACTION READ ONLY")
        lease.guard(connection)
        connection.rollback()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT * FROM dibs_lease")


def test_a_prepared_transaction_keeps_its_pin(own_postgres_prepared: PostgresServer) -> None:
    """PREPARE TRANSACTION takes the pin along: others enter after COMMIT PREPARED."""
    url = own_postgres_prepared.create_database()
    with dibs.connect(url) as client, dibs.connect(url) as other, closing(raw(url)) as connection:
        lease = client.lock("x", ttl=SHORT_S, renew=False).acquire()
        assert lease is not None
        lease.guard(connection)
        connection.execute("PREPARE TRANSACTION 'both'")
        connection.rollback()
        over()
        assert other.lock("x").acquire(timeout=0) is None
        connection.autocommit = True
        connection.execute("COMMIT PREPARED 'both'")
        with other.lock("x", timeout=3):
            pass


@pytest.fixture
def own_postgres_prepared() -> Iterator[PostgresServer]:
    with PostgresServer({"max_prepared_transactions": 2}) as server:
        yield server


def test_behind_a_pooler(own_postgres: PostgresServer) -> None:
    """PgBouncer in transaction mode in front of either side: the pin belongs to the server's transaction."""
    direct = own_postgres.url()
    with PgBouncer(own_postgres) as pooler:
        pooled = pooler.url("postgres")
        end = time.monotonic() + 15
        while not _answers(pooled):  # it has just been started
            assert time.monotonic() < end
        for place, where in ((direct, pooled), (pooled, direct), (pooled, pooled)):
            with dibs.connect(place) as client, dibs.connect(place) as other, closing(raw(where)) as connection:
                name = f"{place}/{where}"
                lease = client.lock(name[:200], ttl=SHORT_S, renew=False).acquire(timeout=5)
                assert lease is not None
                lease.guard(connection)
                over()
                assert other.lock(name[:200]).acquire(timeout=0) is None
                connection.rollback()
                other.lock(name[:200], timeout=3).acquire().release()  # type: ignore[union-attr]


def _answers(url: str) -> bool:
    try:
        raw(url).close()
    except psycopg.OperationalError:
        return False
    return True


def test_pins_do_not_pile_up(sqlite_url: str, postgres_url: str) -> None:
    """A lease that guards transaction after transaction remembers no more than it needs."""
    for url in (sqlite_url, postgres_url):
        with dibs.connect(url) as client, client.lock("x") as lease, closing(raw(url)) as connection:
            for _ in range(20):
                lease.guard(connection)
                connection.commit()
            assert len(lease._hold.pins) == 1


def test_django_stands_for_the_threads_connection(sqlite_url: str) -> None:
    """`django.db.connection` is a proxy; what is behind it in the calling thread is meant."""
    from django.utils.connection import ConnectionProxy

    real = django_connection(sqlite_url)
    proxy = ConnectionProxy({"default": real}, "default")
    with dibs.connect(sqlite_url) as client, client.lock("x") as lease:
        real.set_autocommit(False)
        lease.guard(proxy)
        real.rollback()
        real.close()


# -- SQLite -----------------------------------------------------------------------------------------------------------


def test_a_guard_does_not_wait_behind_what_waits_for_it(sqlite_url: str) -> None:
    """A request of the same client that the open transaction keeps waiting does not keep the guard waiting."""
    with dibs.connect(sqlite_url, patience=2) as client, closing(raw(sqlite_url)) as connection:
        lease = client.lock("x").acquire(timeout=0)
        assert lease is not None
        connection.isolation_level = None
        connection.execute("BEGIN IMMEDIATE")
        other: list[Any] = []
        waiting = threading.Thread(target=lambda: other.append(client.lock("y").acquire(timeout=30)))
        waiting.start()
        eventually(lambda: client._desk.session().lane._batch, "the other request is under way")
        lease.guard(connection)
        assert waiting.is_alive()
        connection.execute("COMMIT")
        waiting.join(10)
        assert other[0].release()
        assert lease.release()


def test_a_block_on_sqlite_does_not_wait_for_itself(sqlite_url: str) -> None:
    """With the transaction open in the same thread, the end of the block does not wait for it."""
    with dibs.connect(sqlite_url) as client:
        caller = _of_driver(sqlite_url)
        with within(2, "the end of the block waited"), client.lock("x") as lease:
            lease.guard(caller.given)
        caller.commit()
        with client.lock("x", timeout=3):
            pass
        caller.close()
