"""What is particular to PostgreSQL: rights, poolers, outages, borrowed addresses."""

from __future__ import annotations

import itertools
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

import dibs
from dibs.clock import Deadline, RealClock, boot_now
from dibs.connecting import locate
from dibs.errors import LeaseLost
from dibs.steps import run
from dibs.store import ANY_TICKET, Acquire, Granted, Held, Release, Request
from dibs.stores import postgres_link
from dibs.stores.postgres_line_sql import UNSEEN_S
from dibs.testing import check_store
from tests.between import Between
from tests.command_line import DIBS, PATIENCE_S
from tests.floors import tokens_go_on
from tests.servers.postgres import PgBouncer, PostgresServer
from tests.waits import eventually


def database_of(url: str) -> str:
    return urlsplit(url).path[1:]


@pytest.fixture
def client(postgres_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(postgres_url) as client:
        yield client


def test_tables_are_made_on_first_use_and_can_be_read(client: dibs.Client, postgres_url: str) -> None:
    """`SELECT * FROM dibs_lease` shows name, slot, holder, since, until, token and info."""
    with client.lock("digest/42", info={"why": "test"}) as lease, psycopg.connect(postgres_url) as connection:
        cursor = connection.execute("SELECT * FROM dibs_lease")
        assert cursor.description is not None
        names = [column.name for column in cursor.description]
        row = dict(zip(names, cursor.fetchall()[0], strict=True))
    assert row["name"] == "default:digest/42"
    assert row["slot"] == 1
    assert row["holder"] == lease.holder
    assert row["fencing_token"] == lease.fencing_token == 1
    assert row["expires_at"] > row["acquired_at"]
    assert row["info"] == '{"why":"test"}'


def test_many_clients_set_up_at_once(postgres_url: str) -> None:
    """Several processes setting up at the same moment all succeed."""
    clients = [dibs.connect(postgres_url) for _ in range(12)]
    errors: list[BaseException] = []
    start = threading.Barrier(len(clients))

    def set_up(client: dibs.Client) -> None:
        start.wait()
        try:
            client.setup()
            with client.lock("x", timeout=30):
                pass
        except BaseException as error:  # noqa: BLE001 - every error of every client is wanted
            errors.append(error)

    threads = [threading.Thread(target=set_up, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    assert errors == []


def test_a_role_that_may_not_make_tables_is_told_what_to_do(postgres: PostgresServer, postgres_url: str) -> None:
    """Missing tables without the right to make them: SetupRequired, naming the command. After set-up it works."""
    database = database_of(postgres_url)
    role = f"app_{database}"
    postgres.create_user(role)
    postgres.psql("REVOKE CREATE ON SCHEMA public FROM PUBLIC", database=database)
    with dibs.connect(postgres.url(database, user=role)) as app:
        with pytest.raises(dibs.SetupRequired, match="dibs setup"):
            app.lock("x").acquire(timeout=0)
        with pytest.raises(dibs.SetupRequired, match="dibs schema"):
            app.setup()
        with dibs.connect(postgres_url) as admin:
            admin.setup()
        postgres.psql(
            f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO "{role}"', database=database
        )
        lease = app.lock("x").acquire(timeout=0)
        assert lease is not None
        lease.release()


def sql_of_the_page(begins: str) -> str:
    """The block of SQL on the page for PostgreSQL that begins so."""
    page = Path(__file__).parent.parent / "docs" / "how-to" / "postgresql.md"
    (block,) = re.findall(rf"^```sql\n({begins}.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return str(block)


def role_of_the_page(postgres: PostgresServer, postgres_url: str) -> tuple[str, str]:
    """The database, set up, and a new role in it with the rights that the page names."""
    database = database_of(postgres_url)
    role = f"app_{database}"
    postgres.create_user(role)
    with dibs.connect(postgres_url) as admin:
        admin.setup()
    postgres.psql(sql_of_the_page("GRANT").replace(" app;", f' "{role}";'), database=database)
    return database, role


def test_the_rights_on_the_page_are_enough(postgres: PostgresServer, postgres_url: str) -> None:
    """A role with the rights that the page names, and no others, can do all that clients do."""
    database, role = role_of_the_page(postgres, postgres_url)
    with dibs.connect(postgres.url(database, user=role)) as app:
        with app.lock("x", timeout=0), app.semaphore("s", 2, timeout=0), app.rwlock("r", timeout=0).write():
            assert len(app.leases()) == 3
        app.pause("x")
        assert app.resume("x")
        with app.election("e", standby_max=1).lead():
            pass
        app.purge(0)


@pytest.mark.parametrize(
    "lacking, told",
    [
        ("DELETE ON dibs_lease_line", ['DELETE on "public"."dibs_lease_line"']),
        ("UPDATE, DELETE ON dibs_lease_job", ['UPDATE, DELETE on "public"."dibs_lease_job"']),
        ("ALL ON dibs_lease_job, dibs_lease_job_end, dibs_lease_job_turn", []),
    ],
)
def test_doctor_names_a_right_that_is_missing(
    postgres: PostgresServer, postgres_url: str, lacking: str, told: list[str]
) -> None:
    """Also one that a lock which is free does not need, but one that is waited for. A login may have no queues."""
    database, role = role_of_the_page(postgres, postgres_url)
    with closing(locate(postgres.url(database, user=role))[0].open()) as store:
        deadline = Deadline(RealClock(), RealClock.now() + 10)
        assert all(finding.kept for finding in store.check(deadline))
        postgres.psql(f'REVOKE {lacking} FROM "{role}"', database=database)
        failed = [finding for finding in store.check(deadline) if not finding.kept]
        assert [finding.detail for finding in failed] == [f"this login lacks {what}: GRANT that" for what in told]


def test_doctor_names_a_schema_that_may_not_be_used(postgres: PostgresServer, postgres_url: str) -> None:
    """Beside rights on tables, which are of no use without."""
    database, role = role_of_the_page(postgres, postgres_url)
    postgres.psql(f'REVOKE USAGE ON SCHEMA public FROM PUBLIC, "{role}"', database=database)
    url = postgres.url(database, user=role)
    done = subprocess.run([*DIBS, "--url", url, "doctor"], capture_output=True, text=True, timeout=PATIENCE_S)
    told = done.stdout
    assert 'this login lacks USAGE on schema "public": GRANT that' in told
    with (
        dibs.connect(url) as app,
        pytest.raises(dibs.SetupRequired, match="`dibs doctor` says which rights"),
    ):
        app.lock("x").acquire(timeout=0)


def test_schema_and_table_are_options(postgres_url: str) -> None:
    """`?schema=` and `?table=` are quoted, and the schema is made by setup."""
    url = postgres_url + "?schema=od%22d%20Ops&table=lo%22cks"
    with dibs.connect(url) as client, client.lock("x"), psycopg.connect(postgres_url) as connection:
        assert connection.execute('SELECT count(*) FROM "od""d Ops"."lo""cks"').fetchone() == (1,)
    with dibs.connect(postgres_url) as other:
        assert other.holder("x") is None


def test_braces_in_a_table_are_no_places_for_values(postgres_url: str) -> None:
    """What is said in the caller's own transaction names the table as it is: a pin, and the end of a tally."""
    with dibs.connect(f"{postgres_url}?table=lo%7Bck%7D") as client, client.lock("x") as lease:
        with psycopg.connect(postgres_url) as connection:
            lease.guard(connection)
            with client.claims("rows", max_tries=2).take([1]) as batch:
                batch.items[0].done(connection)
        assert [record.name for record in client.leases()] == ["x"]


@pytest.mark.parametrize("table", ["a$do$b", "a$dibs$b", "a'b\\c%s\"d"])
def test_a_table_may_be_called_anything(postgres_url: str, table: str) -> None:
    """What is quoted where tables are made is quoted so that no name ends it; a newer version is noticed there, too."""
    url = f"{postgres_url}?table={quote(table)}"
    with dibs.connect(url) as client:
        client.setup()
        store: Any = locate(url)[0].open()
        store.keep_history(5, Deadline(RealClock(), RealClock().now() + 10))
        with client.lock("x"):
            client.queue("x").put(1)
        assert len(client.history("x")) == 1
        meta = Identifier(f"{table}_meta")
        with psycopg.connect(postgres_url) as connection:
            connection.execute(SQL("UPDATE {} SET value = 99 WHERE key = 'version'").format(meta))
        with pytest.raises(dibs.SetupRequired, match="version 99"):
            client.setup()
        store.close()


@pytest.mark.parametrize("option", ["table=", "schema=" + "x" * 70, "table=a%0Ab", "colour=blue", "table=a&table=b"])
def test_a_wrong_option_is_refused_before_any_io(option: str) -> None:
    """A typo in a URL option is InvalidOption, without a connection."""
    with pytest.raises(dibs.InvalidOption):
        dibs.connect(f"postgresql://nobody@192.0.2.1/none?{option}")


def test_a_wrong_password_is_a_misconfiguration_and_is_not_shown(postgres: PostgresServer, postgres_url: str) -> None:
    """Wrong password: SetupRequired; neither the right nor the wrong password stands in any text."""
    url = postgres.url(database_of(postgres_url), password="hunter2-wrong")
    with dibs.connect(url) as client:
        with pytest.raises(dibs.SetupRequired) as caught:
            client.lock("x").acquire(timeout=0)
        shown = f"{caught.value} {caught.value!r} {caught.value.__cause__!r} {client!r}"
        assert "hunter2" not in shown
        assert "password authentication failed" in shown


def test_a_missing_database_is_a_misconfiguration(postgres: PostgresServer) -> None:
    """A database that is not there: SetupRequired."""
    with dibs.connect(postgres.url("no such database")) as client, pytest.raises(dibs.SetupRequired):
        client.ping()


def test_a_server_without_room_is_an_outage() -> None:
    """All connections are taken when a process makes its first: no mistake in the URL."""
    settings = {"max_connections": 5, "superuser_reserved_connections": 0, "max_wal_senders": 0}
    with PostgresServer(settings) as server, ExitStack() as others, dibs.connect(server.url()) as client:
        for _ in range(5):
            others.enter_context(psycopg.connect(server.url()))
        with pytest.raises(dibs.StoreUnavailable, match="too many clients"):
            client.lock("x").acquire(timeout=0)
        others.close()
        with client.lock("x"):
            pass


def test_no_server_is_unavailable_at_once(own_postgres: PostgresServer) -> None:
    """Nobody listens: StoreUnavailable, told without patience when the store was never reached."""
    url = own_postgres.url()
    own_postgres.stop()
    with dibs.connect(url) as client:
        before = time.monotonic()
        with pytest.raises(dibs.StoreUnavailable):
            client.lock("x").acquire(timeout=0)
        assert time.monotonic() - before < 3


def test_a_connection_made_in_a_hurry_gives_later_calls_their_time(postgres_url: str) -> None:
    """How long the server may take for a statement was set for one call; it is not the limit of all that follow."""
    store: Any = locate(postgres_url)[0].open()
    with closing(store):
        for seconds in (0.5, 10.0):
            deadline = Deadline(RealClock(), RealClock.now() + seconds)
            store.act((), deadline)
            said = store._connection.run(b"SELECT current_setting('statement_timeout')", (), deadline).get_value(0, 0)
            limit_s = int(said.removesuffix(b"ms")) / 1000 if said.endswith(b"ms") else float(said.removesuffix(b"s"))
            assert seconds / 4 < limit_s <= seconds


def test_a_read_only_database_is_a_misconfiguration(postgres: PostgresServer, postgres_url: str) -> None:
    """A read-only database: SetupRequired that names both causes, not "held by another", until it is lifted."""
    with dibs.connect(postgres_url) as client:
        client.setup()
    database = database_of(postgres_url)
    postgres.psql(f'ALTER DATABASE "{database}" SET default_transaction_read_only = on')
    with dibs.connect(postgres_url) as client:
        (finding,) = [finding for finding in run(client._desk.checking()) if not finding.kept]
        assert "default_transaction_read_only" in finding.detail
        with pytest.raises(dibs.SetupRequired, match=r"standby.*default_transaction_read_only"):
            client.lock("x").acquire(timeout=0)
        postgres.psql(f'ALTER DATABASE "{database}" SET default_transaction_read_only = off')
        with client.lock("x", timeout=0):
            pass


@pytest.mark.parametrize("of", ["role", "superuser"])
def test_emptied_tables_begin_again(postgres: PostgresServer, postgres_url: str, of: str) -> None:
    """All tables truncated: new names are granted, permits too. A login that may not make tables needs somebody."""
    database = database_of(postgres_url)
    url = postgres_url
    if of == "role":
        role = f"app_{database}"
        postgres.create_user(role)
        url = postgres.url(database, user=role)
    with dibs.connect(postgres_url) as admin:
        admin.setup()
    postgres.psql("TRUNCATE dibs_lease, dibs_lease_line, dibs_lease_pool, dibs_lease_meta", database=database)
    with dibs.connect(url) as client:
        if of == "role":
            postgres.psql(sql_of_the_page("GRANT").replace(" app;", f' "{role}";'), database=database)
            for lockable in (client.lock("x"), client.semaphore("s", 2)):
                with pytest.raises(dibs.SetupRequired, match="dibs setup"):
                    lockable.acquire(timeout=0)
            with dibs.connect(postgres_url) as admin:
                admin.setup()
        with client.semaphore("s", 2, timeout=0), client.lock("x", timeout=0) as lease:
            assert lease.fencing_token == 1


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_a_floor_that_was_lost_is_made_above_all_tokens(postgres: PostgresServer, postgres_url: str, kind: str) -> None:
    """Only the table with the floor is truncated, after a purge: no token of a name comes a second time."""
    tokens_go_on(
        postgres_url, kind, lambda: postgres.psql("TRUNCATE dibs_lease_meta", database=database_of(postgres_url))
    )


def test_tokens_of_permits_outlive_their_table(postgres: PostgresServer, postgres_url: str) -> None:
    """When only the table of pools was emptied, holders keep their slots and tokens go on from theirs."""
    with dibs.connect(postgres_url) as client:
        gpu = client.semaphore("gpu", 3)
        leases = [gpu.acquire(timeout=0) for _ in range(3)]
        assert [lease and lease.fencing_token for lease in leases] == [1, 2, 3]
        assert leases[1] is not None
        leases[1].release()
        postgres.psql("TRUNCATE dibs_lease_pool", database=database_of(postgres_url))
        again = gpu.acquire(timeout=0)
        assert again is not None
        assert (again.slot, again.fencing_token) == (2, 4)
        assert gpu.acquire(timeout=0) is None


def test_a_floor_that_row_security_hides_is_a_misconfiguration(postgres: PostgresServer, postgres_url: str) -> None:
    """The tables are there, and a login sees no floor under the tokens: SetupRequired at once, whatever it may make."""
    database, role = role_of_the_page(postgres, postgres_url)
    postgres.psql(f'GRANT CREATE ON SCHEMA public TO "{role}"', database=database)
    postgres.psql("ALTER TABLE dibs_lease_meta ENABLE ROW LEVEL SECURITY", database=database)
    with dibs.connect(postgres.url(database, user=role), patience=60) as client:
        lockables = client.lock("x"), client.semaphore("s", 2)
        for lockable in lockables:
            with pytest.raises(dibs.SetupRequired, match="row-level security"):
                lockable.acquire(timeout=0)
        # It may look, and put what is there already, but not lock it.
        postgres.psql(
            "CREATE POLICY look ON dibs_lease_meta FOR SELECT USING (true);"
            "CREATE POLICY put ON dibs_lease_meta FOR INSERT WITH CHECK (true)",
            database=database,
        )
        for lockable in lockables:
            with pytest.raises(dibs.SetupRequired, match="no floor"):
                lockable.acquire(timeout=0)


def test_a_table_that_changes_is_read_as_it_is_now(postgres: PostgresServer, postgres_url: str) -> None:
    """A column that somebody gives another type: clients that have read it before go on."""
    with dibs.connect(postgres_url) as client, dibs.connect(postgres_url) as other:
        with client.lock("x"), client.semaphore("s", 1):
            for lockable in (other.lock("x"), other.semaphore("s", 1)):
                assert lockable.acquire(timeout=0) is None
            assert len(other.leases()) == 2
            postgres.psql(
                "ALTER TABLE dibs_lease ALTER COLUMN holder TYPE varchar(2000)", database=database_of(postgres_url)
            )
            assert len(other.leases()) == 2
            for lockable in (other.lock("x"), other.semaphore("s", 1)):
                assert lockable.acquire(timeout=0) is None
        with other.lock("x", timeout=0), other.semaphore("s", 1, timeout=0):
            assert len(client.leases()) == 2


def test_null_is_null_whatever_array_nulls_says(postgres: PostgresServer, postgres_url: str) -> None:
    """array_nulls=off: infos that only some leases have, and groups and keys that only some jobs have, are as given."""
    postgres.psql(f'ALTER DATABASE "{database_of(postgres_url)}" SET array_nulls = off')
    with dibs.connect(postgres_url) as client:
        with closing(locate(postgres_url)[0].open()) as store:
            asked = [Acquire(f"default:{name}", name, 60, "h", info) for name, info in (("a", None), ("b", '{"c":1}'))]
            for _ in range(2):  # made, and once more
                granted = store.act(asked, Deadline(RealClock(), RealClock.now() + 10))
                assert [type(outcome) for outcome in granted] == [Granted, Granted]
        assert {row.name: row.info for row in client.leases()} == {"a": None, "b": {"c": 1}}
        queue = client.queue("mail")
        queue.put_many([dibs.NewJob("p", group="g"), "q", b"r"])
        queue.put_many([dibs.NewJob("k", key="k"), "l"])
        found = sorted((str(job.payload), job.group, job.key) for job in queue.jobs())
        assert found == [("b'r'", None, None), ("k", None, "k"), ("l", None, None), ("p", "g", None), ("q", None, None)]
        # A transaction of somebody else's has the settings of its connection, and dibs does not change them.
        with psycopg.connect(postgres_url) as connection:
            for jobs in (["p", dibs.NewJob("q", group="g")], ["l", dibs.NewJob("k", key="j")]):
                with pytest.raises(dibs.InvalidOption, match="array_nulls"):
                    queue.put_many(jobs, connection=connection)
            connection.execute("SET LOCAL array_nulls = on")
            queue.put_many(["l", dibs.NewJob("k", key="j")], connection=connection)
        assert queue.depth().ready == 7


def test_settings_of_the_database_are_not_ours(postgres: PostgresServer, postgres_url: str) -> None:
    """Odd isolation, formats, encoding, planner and time-outs of the database change nothing."""
    settings = {
        "default_transaction_isolation": "serializable",
        "default_transaction_deferrable": "on",
        "synchronous_commit": "off",
        "datestyle": "SQL, DMY",
        "intervalstyle": "sql_standard",
        "timezone": "Asia/Kathmandu",
        "extra_float_digits": "-15",
        "bytea_output": "escape",
        "client_encoding": "LATIN1",
        "quote_all_identifiers": "on",
        "transform_null_equals": "on",
        "array_nulls": "off",
        "row_security": "off",
        "search_path": "",
        "plan_cache_mode": "force_generic_plan",
        "enable_indexscan": "off",
        "enable_bitmapscan": "off",
        "max_parallel_workers_per_gather": "4",
        "lock_timeout": "50ms",
        "idle_in_transaction_session_timeout": "1s",
    }
    for name, value in settings.items():
        postgres.psql(f"ALTER DATABASE \"{database_of(postgres_url)}\" SET {name} = '{value}'")
    with suppress(psycopg.errors.FeatureNotSupported):  # by PostgreSQL 19, where they are always on
        postgres.psql(f'ALTER DATABASE "{database_of(postgres_url)}" SET standard_conforming_strings = off')
    cases = (
        "names_are_exact leases_tell_all a_retry_is_the_same_grant first_come_first_served tokens_rise_across_purge "
        "poisoned_neighbours opposite_orders renewal_extends verbs_mix_in_one_call permits_are_written_down_by_slot "
        "who_failed_before_dies_of_the_crash of_several_takers_each_item_has_one grants_and_releases_are_written_down"
    ).split()
    assert check_store(f"{postgres_url}?schema=ops", only=cases) == 16


@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "pooled"])
def test_a_short_lock_timeout_of_the_database_is_not_ours(own_postgres: PostgresServer, pooled: bool) -> None:
    """Whoever comes while an administrator has locked the table waits for it, whatever lock_timeout says there."""
    url, name = own_postgres.url(), "postgres"
    own_postgres.psql(f"ALTER DATABASE {name} SET lock_timeout = 1")
    with ExitStack() as stack, psycopg.connect(url) as admin:
        if pooled:
            url = stack.enter_context(PgBouncer(own_postgres)).url(name)
        client = stack.enter_context(dibs.connect(url, patience=0))
        eventually(lambda: _told_by(client) == "")
        with client.lock("x", timeout=0):
            pass
        admin.execute("LOCK TABLE dibs_lease IN ACCESS EXCLUSIVE MODE")
        took = stack.enter_context(ThreadPoolExecutor()).submit(client.lock("x").acquire, timeout=0)
        eventually(lambda: took.done() or admin.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())
        admin.commit()
        assert took.result(20)


def test_array_nulls_off_behind_a_pooler_is_a_misconfiguration(own_postgres: PostgresServer) -> None:
    """There dibs makes no settings of its own: SetupRequired, naming the setting."""
    own_postgres.psql("ALTER DATABASE postgres SET array_nulls = off")
    with PgBouncer(own_postgres) as pooler, dibs.connect(pooler.url("postgres")) as client:
        eventually(lambda: "array_nulls" in _told_by(client))


def test_a_lease_outlives_a_restart_of_the_server(own_postgres: PostgresServer) -> None:
    """PostgreSQL restarted while a lease is held: the lease goes on, its token too, others stay out."""
    with (
        dibs.connect(own_postgres.url(), patience=30) as client,
        dibs.connect(own_postgres.url(), patience=30) as other,
    ):
        lease = client.lock("x", ttl=20).acquire()
        assert lease is not None
        own_postgres.restart()
        assert lease.held
        assert other.lock("x").acquire(timeout=0) is None
        before = lease.trusted_until
        eventually(lambda: lease.trusted_until > before)  # a renewal has reached the restarted server
        lease.release()
        again = other.lock("x").acquire(timeout=20)
        assert again is not None
        assert again.fencing_token == lease.fencing_token + 1
        again.release()


def test_a_connection_that_the_server_closed_is_opened_again(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle connection that the server closed (idle_session_timeout, a restart) is nobody's failure."""
    monkeypatch.setattr(postgres_link, "IDLE_S", -1.0)
    cut = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s"
    with dibs.connect(postgres_url, patience=0) as client:
        for acquired in range(2):
            lease = client.lock("x").acquire(timeout=0)
            assert lease is not None
            postgres.psql(cut, [database_of(postgres_url)])
            assert lease.release()
            postgres.psql(cut, [database_of(postgres_url)])
            assert lease.fencing_token == acquired + 1


def test_a_server_killed_with_9_keeps_grants_and_tokens(own_postgres: PostgresServer) -> None:
    """kill -9 of the server: an acknowledged grant is still there afterwards, and tokens go on rising."""
    with (
        dibs.connect(own_postgres.url(), patience=30) as client,
        dibs.connect(own_postgres.url(), patience=30) as other,
    ):
        lock = client.lock("x", ttl=20)
        for _ in range(5):
            lease = lock.acquire()
            assert lease is not None
            lease.release()
        lease = lock.acquire()
        assert lease is not None
        own_postgres.kill()
        own_postgres.start()
        seen = other.holder("x")
        assert seen is not None
        assert seen.fencing_token == lease.fencing_token == 6
        assert other.lock("x").acquire(timeout=0) is None
        lease.release()


def test_what_a_killed_server_leaves_is_told_in_one_line(own_postgres: PostgresServer) -> None:
    """libpq makes three of it, which fill the log of whoever waits for the server."""
    with dibs.connect(own_postgres.url(), patience=0) as client:
        client.ping()
        own_postgres.kill()
        with pytest.raises(dibs.StoreUnavailable, match=r"PostgreSQL on .*: ") as told:
            client.ping()
        assert "\n" not in str(told.value)


def test_a_stopped_server_ends_trust_by_the_clock(own_postgres: PostgresServer) -> None:
    """While the server hangs, a lease is lost by its local deadline, loudly; callers get StoreUnavailable."""
    told = threading.Event()
    with dibs.connect(own_postgres.url(), request_timeout=1, patience=1) as client:
        lease = client.lock("x", ttl=2, on_lost=told.set).acquire()
        assert lease is not None
        deadline = lease.trusted_until
        with own_postgres.paused():
            assert told.wait(10)
            assert not lease.held
            assert lease.lost.is_set()
            assert lease._session.clock.now() >= deadline
            with pytest.raises(dibs.LeaseLost):
                lease.check()
            with pytest.raises(dibs.StoreUnavailable):
                client.lock("y").acquire(timeout=0)
        with pytest.raises(dibs.LeaseLost):
            lease.release()
        eventually(lambda: client.holder("x") is None)
        with client.lock("x", timeout=5) as again:
            assert again.fencing_token == 2


def test_waiting_goes_on_through_an_outage(own_postgres: PostgresServer) -> None:
    """A waiter outlives a restart shorter than its patience and is served when the holder lets go."""
    with (
        dibs.connect(own_postgres.url(), patience=30) as client,
        dibs.connect(own_postgres.url(), patience=30) as other,
    ):
        lease = client.lock("x", ttl=30).acquire()
        assert lease is not None
        other.ping()  # or, should the answer to its first request be lost, it is told at once: its address may be wrong
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(other.lock("x").acquire(timeout=30)))
        waiting.start()
        eventually(lambda: [row.waiting for row in client.leases()] == [1])
        own_postgres.restart()
        lease.release()
        waiting.join()
        assert got[0] is not None
        got[0].release()


def test_behind_a_pooler_everything_works_by_polling(own_postgres: PostgresServer) -> None:
    """PgBouncer in transaction mode: nothing is prepared, waiters poll, and `capabilities` says so."""
    with PgBouncer(own_postgres) as pooler, dibs.connect(pooler.url("postgres")) as client:
        eventually(lambda: _reaches(client))
        assert "pooler" in client.capabilities.signal
        lease = client.lock("x", ttl=3).acquire()
        assert lease is not None
        before = lease.trusted_until
        got: list[Any] = []
        with dibs.connect(pooler.url("postgres")) as other:
            waiting = threading.Thread(target=lambda: got.append(other.lock("x").acquire(timeout=20)))
            waiting.start()
            eventually(lambda: lease.trusted_until > before)
            eventually(lambda: [row.waiting for row in client.leases()] == [1])
            lease.release()
            waiting.join()
            assert got[0].fencing_token == 2
            got[0].release()


def _told_by(client: dibs.Client) -> str:
    try:
        client.ping()
    except (dibs.StoreUnavailable, dibs.SetupRequired) as error:
        return str(error)
    return ""


def _reaches(client: dibs.Client) -> bool:
    try:
        client.ping()
    except (dibs.StoreUnavailable, dibs.SetupRequired):
        return False
    return True


def test_the_release_wakes_the_waiter(client: dibs.Client, postgres_url: str) -> None:
    """With LISTEN/NOTIFY a waiter is granted well before its next poll would have been."""
    with dibs.connect(postgres_url) as other:
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
            time.sleep(0.05)  # the first wait of a client opens its listening connection meanwhile
            released = time.monotonic()
            lease.release()
            waiting.join()
            delays.append(got[0] - released)
        # Polls come 0.7 to 1 s apart; that three of five came sooner than half of that is no accident.
        assert sorted(delays)[2] < 0.35, delays


def test_a_release_that_did_not_see_the_waiter_is_found(
    client: dibs.Client, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes the first place while a release is under way, which tells nobody of it, asks once more by itself."""
    monkeypatch.setattr(dibs.waiting, "POLL_MIN_S", 60.0)
    monkeypatch.setattr(dibs.waiting, "POLL_MAX_S", 60.0)
    between, calls = Between(postgres_url), itertools.count(1)
    held = client.lock("x").acquire()
    assert held is not None
    other = between.client()
    assert other.lock("x").acquire(timeout=0.3) is None  # it listens from now on: who begins to, asks once more anyway
    with psycopg.connect(postgres_url) as releasing, other, ThreadPoolExecutor(1) as pool:
        releasing.execute("UPDATE dibs_lease SET claim_id = NULL, expires_at = clock_timestamp()")

        def it_is_over(requests: Sequence[Request]) -> None:
            if any(type(request) is Acquire for request in requests) and next(calls) == 2:
                releasing.commit()

        between.before = it_is_over
        lease = pool.submit(other.lock("x").acquire).result(20)
        assert lease is not None
        assert lease.fencing_token > held.fencing_token
        lease.release()
    with pytest.raises(LeaseLost):
        held.release()


def test_who_is_to_ask_once_more(client: dibs.Client, postgres_url: str) -> None:
    """Whoever has just taken a place that nobody is ahead of, and nobody else: it would be for nothing."""
    held = client.lock("x").acquire()
    assert held is not None
    with closing(locate(postgres_url)[0].open()) as store:

        def asked(claim: str, ticket: int | None = None, wake: str | None = "w") -> Held:
            request = Acquire("default:x", claim, 30.0, "h", None, wake, ticket)
            (outcome,) = store.act([request], Deadline(RealClock(), boot_now() + 10))
            assert isinstance(outcome, Held)
            return outcome

        assert asked("whoever does not wait", wake=None).again_in == inf
        first = asked("first")
        assert first.again_in == UNSEEN_S
        assert asked("first", first.ticket).again_in == inf
        assert asked("second").again_in == inf
        store.act([Release("default:x", "first", ticket=ANY_TICKET)], Deadline(RealClock(), boot_now() + 10))
        # As a multilock does, which gives back what it has waited for, and then waits for it again.
        assert asked("the first again", first.ticket).again_in == UNSEEN_S
    held.release()


def test_losing_every_notification_costs_one_poll(
    client: dibs.Client, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: with all signals lost a waiter still acquires within one poll of the name being free."""
    from dibs.stores.postgres_watch import PostgresWatch

    monkeypatch.setattr(PostgresWatch, "changed", lambda self, names: self._pg.consume_input() or [])
    with dibs.connect(postgres_url) as other:
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


def test_the_callers_transaction_is_not_dibs_business(postgres_url: str) -> None:
    """P7: connect(engine), connect(pool) and connect(connection) take the address, never the transaction."""
    import sqlalchemy
    from psycopg_pool import ConnectionPool

    engine = sqlalchemy.create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as caller, dibs.connect(engine) as client:
        transaction = caller.begin()
        lease = client.lock("x").acquire(timeout=0)
        assert lease is not None
        transaction.rollback()
        with ConnectionPool(postgres_url, min_size=1, open=True) as pool, dibs.connect(pool) as second:
            assert second.lock("x").acquire(timeout=0) is None
        with psycopg.connect(postgres_url) as connection, dibs.connect(connection) as third:
            seen = third.holder("x")
            assert seen is not None
            assert seen.fencing_token == lease.fencing_token
        lease.release()
    engine.dispose()


def test_django_connections_give_their_address(postgres_url: str) -> None:
    """A Django connection's settings are enough; Django itself is not imported by dibs."""
    from django.db.backends.postgresql.base import DatabaseWrapper

    parts = urlsplit(postgres_url)
    wrapper = DatabaseWrapper(
        {
            "NAME": parts.path[1:],
            "USER": parts.username,
            "PASSWORD": parts.password,
            "HOST": parts.hostname,
            "PORT": str(parts.port),
            "OPTIONS": {},
            "TIME_ZONE": None,
            "CONN_MAX_AGE": 0,
            "AUTOCOMMIT": True,
        },
        "default",
    )
    with dibs.connect(wrapper) as client, client.lock("x") as lease:
        assert lease.fencing_token == 1


def test_an_object_that_is_no_database_is_refused() -> None:
    """connect() says what it takes."""
    with pytest.raises(dibs.InvalidOption, match="SQLAlchemy engine"):
        dibs.connect(object())


def test_purge_keeps_the_floor_under_the_tokens(client: dibs.Client) -> None:
    """A purged name goes on above its old token, and so do new names."""
    for _ in range(41):
        with client.lock("x"):
            pass
    assert client.purge(0) == 1
    with client.lock("x") as lease:
        assert lease.fencing_token == 42


def test_ten_thousand_leases_are_renewed_in_one_statement(postgres_url: str) -> None:
    """A vector of 10,000 renewals comes back whole."""
    from dibs.clock import Deadline, RealClock
    from dibs.store import Acquire, Granted, Renew, Renewed

    address, _ = locate(postgres_url)
    store = address.open()
    deadline = Deadline(RealClock(), RealClock.now() + 60)
    names = [f"default:n{i}" for i in range(10_000)]
    granted = store.act([Acquire(name, f"c-{i}", 60, "h") for i, name in enumerate(names)], deadline)
    assert {type(outcome) for outcome in granted} == {Granted}
    renewed = store.act([Renew(name, f"c-{i}", 60) for i, name in enumerate(names)], deadline)
    assert {type(outcome) for outcome in renewed} == {Renewed}
    store.close()


def test_a_row_that_a_transaction_has_locked_costs_no_other_lease(client: dibs.Client, postgres_url: str) -> None:
    """The others are renewed meanwhile, and the loss of that one says what was in the way."""
    leases = [client.lock(f"x{number}", ttl=3).acquire() for number in range(4)]
    *others, locked = [lease for lease in leases if lease is not None]  # the last to end
    with psycopg.connect(postgres_url) as connection:
        connection.execute("SELECT * FROM dibs_lease WHERE name LIKE '%x3' FOR UPDATE")
        assert locked.lost.wait(30)
        with pytest.raises(dibs.LeaseLost, match="a transaction that is still open has locked its row"):
            locked.check()
        assert [lease.held for lease in others] == [True] * 3
    for lease in others:
        lease.release()
