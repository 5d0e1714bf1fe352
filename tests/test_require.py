"""`?require=…`: nothing is handed out while the store breaks what was asked for, and `dibs doctor` says so."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

import dibs as library
from dibs.connecting import locate
from dibs.desk import DEFAULTS, Desk
from dibs.promises import PROMISES, broken, requiring
from dibs.store import GONE, RELEASED, Acquire, Capabilities, Finding, Release, Store
from dibs.stores import memory, postgres, postgres_check, sqlite
from dibs.stores.tables import after_a_crash
from tests.command_line import Dibs
from tests.servers.postgres import PostgresServer
from tests.test_conformance import STORES
from tests.waits import soon

ALL = ",".join(PROMISES)


@pytest.fixture(scope="module")
def forgetful() -> Iterator[PostgresServer]:
    """A PostgreSQL that does not wait for its disk."""
    with PostgresServer({"fsync": "off"}) as server:
        yield server


def acquire(client: library.Client) -> library.Lease:
    lease = client.lock("x").acquire(timeout=0)
    assert lease is not None
    return lease


# -- clients ----------------------------------------------------------------------------------------------------------


def test_the_names_are_those_of_capabilities() -> None:
    """What can be required is called as the capability that declares it."""
    assert PROMISES.keys() <= set(Capabilities._fields)
    assert {promise.told_by for promise in PROMISES.values()} <= set(Capabilities._fields)


def test_what_is_kept_changes_nothing(sqlite_url: str) -> None:
    """A store that keeps what is required works as without: locks, operators, renewals, both faces."""
    url = f"{sqlite_url}?require=durable,survives_restart,fencing_token,waiting_line&ttl=2"
    with library.connect(url) as client:
        lease = acquire(client)
        assert client.capabilities.durable
        assert [record.fencing_token for record in client.leases()] == [lease.fencing_token]
        assert not lease.lost.wait(2.5)
        assert client.lock("x").acquire(timeout=0) is None
        lease.release()
        assert client.purge(0) == 1

    async def again() -> None:
        async with library.connect_async(url) as client, client.lock("x") as lease:
            assert lease.held

    asyncio.run(again())


@pytest.mark.parametrize("promise", ["durable", "survives_restart"])
def test_what_no_setting_can_give_is_refused_at_once(promise: str) -> None:
    """Unsupported is raised by `connect()`, before any I/O, and says which promise and what the store says of it."""
    for connect in (library.connect, library.connect_async):
        with pytest.raises(
            library.Unsupported, match=rf"memory cannot promise .*: {promise} \(.*ends with the process"
        ):
            connect(f"memory://?require={promise}")
    with pytest.raises(library.Unsupported, match="signal"):
        library.connect("sqlite:////no/such/folder/x.db?require=durable,signal")
    with pytest.raises(library.Unsupported, match="durable"):
        library.connect("memory://", options={"require": "durable"})


def test_what_the_settings_break_is_refused_before_anything_is_handed_out(forgetful: PostgresServer) -> None:
    """A server with fsync=off: SetupRequired for every lock, by both faces; nothing is held; looking on is allowed."""
    plain = forgetful.create_database()
    with library.connect(plain) as other, library.connect(f"{plain}?require=durable") as client:
        for _ in range(2):
            with pytest.raises(library.SetupRequired, match=r"PostgreSQL does not promise .*: durable .*dibs doctor"):
                client.lock("x").acquire(timeout=0)
            with pytest.raises(library.SetupRequired, match="durable"), client.lock("x"):
                raise AssertionError("handed out")
        assert client.leases() == other.leases() == []
        lease = acquire(other)
        assert [record.fencing_token for record in client.leases()] == [lease.fencing_token]
        lease.release()

    async def tasks() -> None:
        async with library.connect_async(f"{plain}?require=fencing_token") as client:
            with pytest.raises(library.SetupRequired, match=r"fencing_token .strict while no crash"):
                await client.lock("x").acquire(timeout=0)

    asyncio.run(tasks())
    with library.connect(f"{plain}?require=waiting_line,signal") as client:
        acquire(client).release()


def test_a_server_that_comes_back_with_other_settings_hands_out_nothing() -> None:
    """Restarted with fsync=off under a client that requires durable: no lock, no job, and nothing is left held."""
    with PostgresServer() as server:
        plain = server.create_database()
        with library.connect(plain) as other, library.connect(f"{plain}?require=durable") as client:
            client.queue("q").put("job")
            acquire(client).release()
            for act in (lambda: client.lock("x").acquire(timeout=0), client.queue("q").take):
                server._settings["fsync"] = "off"
                server.restart()
                for _ in range(2):
                    with pytest.raises(library.SetupRequired, match=r"PostgreSQL does not promise .*: durable"):
                        act()
                assert other.leases() == []
                del server._settings["fsync"]
                server.restart()
                acquire(client).release()
            assert other.queue("q").depth().dead == 0


def test_what_is_given_back_in_a_call_that_hands_out_nothing_is_given_back(forgetful: PostgresServer) -> None:
    """A release travels with the request of whoever waits for the name, and only that is refused."""
    url = forgetful.create_database()
    with library.connect(url) as client:
        lease = acquire(client)
        key, claim_id = client._desk.key_prefix + "x", lease._hold.claim_id
        store = requiring(locate(url)[0], "durable").open()
        try:
            wish = Acquire(key, "me", 30.0, "host/1/me", wake="me")
            for outcome in (RELEASED, GONE):
                said, refused = store.act([Release(key, claim_id), wish], soon())
                assert said == outcome
                assert isinstance(refused, library.SetupRequired)
            assert client.leases() == []
        finally:
            store.close()


def test_no_job_is_put_or_handed_out_while_the_settings_break_what_is_required(forgetful: PostgresServer) -> None:
    """As for locks: a queue whose jobs a crash may lose takes none, also not in the caller's own transaction."""
    plain = forgetful.create_database()
    with library.connect(plain) as other, library.connect(f"{plain}?require=durable") as client:
        other.queue("q").put("job")
        queue = client.queue("q")
        with psycopg.connect(plain) as connection:
            for act in (lambda: queue.put(1), queue.take, lambda: queue.put(1, connection=connection)):
                with pytest.raises(library.SetupRequired, match=r"PostgreSQL does not promise .*: durable"):
                    act()
        assert queue.depth().ready == other.queue("q").depth().ready == 1


@pytest.mark.parametrize("within", [False, True], ids=["", "in the caller's transaction"])
def test_queues_work_where_what_is_required_is_kept(sqlite_url: str, within: bool) -> None:
    """Jobs are put, worked and looked at as without; also where the first act is in a transaction of the caller's."""
    with library.connect(f"{sqlite_url}?require=durable&request_timeout=1") as client:
        queue = client.queue("q")
        if within:
            file = sqlite_url.removeprefix("sqlite:///")
            with closing(sqlite3.connect(file)) as connection, connection:
                connection.execute("CREATE TABLE mine (number INTEGER)")
                connection.execute("INSERT INTO mine VALUES (1)")
                queue.put("job", connection=connection)
        else:
            queue.put("job")
        assert queue.depth().ready == 1
        with queue.take() as batch:
            assert [job.payload for job in batch] == ["job"]
        assert queue.depth() == library.QueueDepth("q", 0, 0, 0, 0, 0.0)


def test_it_works_when_the_setting_is_mended(own_postgres: PostgresServer) -> None:
    """After the server's settings were mended the same client is served."""
    url = own_postgres.create_database()
    own_postgres.stop()
    own_postgres._settings["fsync"] = "off"
    own_postgres.start()
    with library.connect(f"{url}?require=durable") as client:
        with pytest.raises(library.SetupRequired, match="durable"):
            client.lock("x").acquire(timeout=0)
        own_postgres.stop()
        own_postgres._settings["fsync"] = "on"
        own_postgres.start()
        acquire(client).release()


def test_what_a_setting_may_give_is_judged_by_the_connection(sqlite_url: str) -> None:
    """A store that declares less than a server's settings make of it is not refused before it was asked."""
    address = locate(sqlite_url)[0]
    modest = address.capabilities._replace(durable=False, survives_restart="as its persistence does")
    settings = {**DEFAULTS, "require": "durable"}
    with library.Client(Desk(address._replace(capabilities=modest), info=None, **settings)) as client:
        acquire(client).release()


@pytest.mark.parametrize("fixture", [store for store in STORES if store != "memory"])
def test_every_store_is_taken_at_its_word(fixture: str, request: pytest.FixtureRequest) -> None:
    """On each store, requiring what its connection says it keeps changes nothing, and requiring more is refused."""
    url = request.getfixturevalue(fixture)
    require = f"{url}{'&' if '?' in url else '?'}require="
    with library.connect(url) as client:
        lacking = broken(list(PROMISES), client.capabilities)
    with library.connect(require + ",".join(PROMISES.keys() - set(lacking))) as client:
        acquire(client).release()

    def use(name: str) -> None:
        with library.connect(require + name) as client:
            acquire(client)

    for name in lacking:
        with pytest.raises((library.Unsupported, library.SetupRequired), match=name):
            use(name)


def test_which_capabilities_keep_what() -> None:
    """Each promise is told from the field that declares it, and a weakened one is not taken for it."""
    good = sqlite.CAPABILITIES._replace(signal="LISTEN/NOTIFY")
    names = list(PROMISES)
    assert broken(names, good) == []
    assert broken(names, memory.CAPABILITIES) == ["durable", "survives_restart", "fencing_token", "signal"]
    weakened: list[tuple[str, Any]] = [
        ("durable", False),
        ("survives_restart", "as its persistence does"),
        ("survives_restart", "no, and evicts"),
        ("fencing_token", "strict while data lives"),
        ("fencing_token", "best effort"),
        ("waiting_line", "none"),
        ("signal", "poll (behind a connection pooler)"),
        ("signal", "none"),
    ]
    for field, value in weakened:
        assert broken(names, good._replace(**{field: value})) == [field]
    strong: list[tuple[str, Any]] = [("survives_restart", "yes, and failover"), ("fencing_token", "zxid")]
    for field, value in strong:
        assert broken(names, good._replace(**{field: value})) == []


# -- the command line -------------------------------------------------------------------------------------------------


def test_doctor_without_a_requirement_asks_for_everything(dibs: Dibs) -> None:
    """Without `--require` whatever is not kept is a failure."""
    assert dibs("--url", "memory://", "doctor").returncode == 1
    assert dibs("doctor").returncode == 0


def test_doctor_fails_where_what_was_asked_for_is_broken(dibs: Dibs) -> None:
    """`--require` and the URL's `require` decide the exit code together; what was not asked for is told as `no`."""
    for url, words, code, lines in [
        ("memory://", ["--require", "waiting_line"], 0, ["no    durable", "ok    waiting_line"]),
        ("memory://", ["--require="], 0, ["no    durable"]),
        ("memory://", ["--require", "durable"], 1, ["FAIL  durable"]),
        ("memory://?require=durable", [], 1, ["FAIL  durable"]),
        ("memory://?require=waiting_line", [], 0, ["no    durable", "ok    waiting_line"]),
        ("memory://?require=waiting_line", ["--require", "signal"], 1, ["no    durable", "FAIL  signal: poll of a"]),
        (dibs.url, ["--require", "durable,fencing_token"], 0, ["ok    durable", "ok    fencing_token: strict"]),
        (dibs.url, ["--require", ALL], 1, ["FAIL  signal: poll", "ok    waiting_line: FIFO"]),
    ]:
        done = dibs("--url", url, "doctor", *words)
        assert (done.returncode, done.stderr) == (code, ""), (url, words, done.stdout)
        for line in lines:
            assert re.search(f"^{re.escape(line)}", done.stdout, re.MULTILINE), (url, words, done.stdout)
        answer = json.loads(dibs("--url", url, "doctor", "--json", *words).stdout)
        assert answer["ok"] is (code == 0)
    assert answer["required"] == list(PROMISES)


def test_doctor_reads_the_live_settings(dibs: Dibs, forgetful: PostgresServer) -> None:
    """`dibs doctor --require durable` on a server with fsync=off exits 1 and names the setting, once."""
    url = forgetful.create_database()
    done = dibs("--url", url, "doctor", "--require", "durable")
    assert done.returncode == 1
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert len(failures) == 1, done.stdout
    assert "fsync=off" in failures[0]
    assert dibs("--url", url, "doctor", "--require", "signal").returncode == 0
    assert dibs("--url", url + "?require=durable", "doctor").returncode == 1


def test_pages_that_a_crash_may_tear_are_no_durability(dibs: Dibs, own_postgres: PostgresServer) -> None:
    """With full_page_writes=off doctor says what to set, and a client that requires durable is handed out nothing."""
    url = own_postgres.create_database()
    own_postgres.stop()
    own_postgres._settings["full_page_writes"] = "off"
    own_postgres.start()
    (failure,) = [line for line in dibs("--url", url, "doctor").stdout.splitlines() if line.startswith("FAIL")]
    assert "fsync=on, full_page_writes=off" in failure
    assert "set full_page_writes=on" in failure
    with library.connect(f"{url}?require=durable") as client, pytest.raises(library.SetupRequired, match="durable"):
        client.lock("x").acquire(timeout=0)


def test_doctor_names_the_setting_to_change_behind_a_pooler() -> None:
    """Where dibs cannot set synchronous_commit for itself, that is what doctor says to change, and not fsync."""
    facts = dict.fromkeys(("fsync", "full_page_writes"), "on") | {"synchronous_commit": "off", "encoding": "UTF8"}
    assert after_a_crash(postgres.CAPABILITIES, postgres_check.lost_by_a_crash({})) == postgres.CAPABILITIES
    told = after_a_crash(postgres.CAPABILITIES, postgres_check.lost_by_a_crash(facts))
    assert (told.survives_restart, told.durable) == ("yes, but for the last second or two", False)
    found = postgres_check.findings(facts | {"version": 150000, "recovery": False, "read_only": "off"}, pooled=True)
    assert next(finding.detail for finding in found if not finding.kept).endswith(
        "synchronous_commit=off: set synchronous_commit=on, or a crash may hand out a token twice"
    )


def test_commands_keep_to_what_the_url_requires(dibs: Dibs, forgetful: PostgresServer) -> None:
    """`dibs run` with a requirement that is not met runs nothing and exits 78, at once or when it has looked."""
    for url in ("memory://?require=durable", forgetful.create_database() + "?require=durable"):
        done = dibs("--url", url, "run", "x", "--nowait", "--", "echo", "ran")
        assert (done.returncode, done.stdout) == (78, "")
        assert "durable" in done.stderr
    done = dibs("--url", f"{dibs.url}?require=durable", "run", "x", "--nowait", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n")


@pytest.mark.parametrize("words", [["--require", "speed"], ["--require", "durabel"]])
def test_doctor_knows_what_can_be_required(dibs: Dibs, words: list[str]) -> None:
    """A requirement that is none is wrong usage, and told with those there are."""
    done = dibs("doctor", *words)
    assert done.returncode == 64
    assert "fencing_token" in done.stderr
    assert ("did you mean 'durable'?" in done.stderr) == (words[1] == "durabel")


def test_a_finding_that_contradicts_the_capabilities_is_completed(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a store's findings say that all is well and its capabilities do not, the capabilities count."""
    from dibs.cli import main
    from dibs.stores.sqlite import SQLiteStore

    def check(store: Store, deadline: object) -> list[Finding]:
        return [Finding("durable", True, "it thinks")]

    monkeypatch.setattr(SQLiteStore, "check", check)
    monkeypatch.setattr(SQLiteStore, "capabilities", sqlite.CAPABILITIES._replace(durable=False))
    assert main(["--url", sqlite_url, "doctor", "--require", "durable"]) == 1
    assert "FAIL  durable: survives restart: yes" in capsys.readouterr().out
