"""A database whose replica takes over, under programs at work: planned, and because the primary died.

(Redis's sentinels and clusters, and members of etcd and ZooKeeper that are lost, are with the tests of those stores.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dibs
from dibs.columns import migration_sql
from dibs.steps import run
from dibs.store import Finding
from dibs.stores import mysql_check, postgres_check
from tests.at_work import at_work
from tests.chaos.proxy import Proxy
from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.process import free_port, wait_until
from tests.servers.redis import RedisServer

# -- PostgreSQL -------------------------------------------------------------------------------------------------------


@pytest.fixture
def standby(own_postgres: PostgresServer) -> Iterator[PostgresServer]:
    """One that has every commit before it is told."""
    with PostgresServer(standby_of=own_postgres) as server:
        own_postgres.psql("ALTER SYSTEM SET synchronous_standby_names = '*'")
        own_postgres.psql("SELECT pg_reload_conf()")
        look = "SELECT sync_state FROM pg_stat_replication"
        assert wait_until(lambda: own_postgres.psql(look) == [("sync",)], 20)
        yield server


def has_table(standby: PostgresServer, url: str) -> bool:
    """Whether it has got so far."""
    return bool(standby.psql("SELECT to_regclass('dibs_lease') IS NOT NULL", database=url.rpartition("/")[2])[0][0])


@pytest.mark.parametrize(
    "how, more", [("killed", "?target_session_attrs=read-write"), ("frozen", "?request_timeout=10")]
)
def test_a_standby_takes_over_from_a_primary_that_died(
    own_postgres: PostgresServer, standby: PostgresServer, how: str, more: str
) -> None:
    """Both named in the URL, and replication synchronous: leases, waiters and workers go on, and tokens rise.

    Also if the first takes connections and says nothing, as a machine does that has lost its disk, or is not there.
    """
    url = own_postgres.create_database()
    hosts = f":{own_postgres.port},127.0.0.1:{standby.port}/"
    with at_work(f"{url.replace(f':{own_postgres.port}/', hosts)}{more}") as programs:
        own_postgres.kill() if how == "killed" else own_postgres.pause()
        try:
            standby.promote()
            programs.go_on(lambda: standby.psql("SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"))
        finally:
            own_postgres.resume()


def test_the_primary_is_found_wherever_it_stands(
    own_postgres: PostgresServer, standby: PostgresServer, postgres: PostgresServer
) -> None:
    """Among several servers in the URL the one that takes writes is used; where none does, that is said of each.

    One that does not let us in is no reason not to ask the others.
    """
    url = own_postgres.create_database()

    def of(*ports: int) -> dibs.Client:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return dibs.connect(url.replace(f"127.0.0.1:{own_postgres.port}", hosts))

    with of(standby.port, own_postgres.port) as client, client.lock("x", timeout=0) as lease:
        assert lease.fencing_token == 1
    with of(postgres.port, own_postgres.port) as client, client.lock("x", timeout=0):
        pass
    with of(postgres.port, free_port()) as client, pytest.raises(dibs.SetupRequired, match="password"):
        client.lock("x").acquire(timeout=0)
    assert wait_until(lambda: has_table(standby, url), 20)
    with of(standby.port, standby.port) as client:
        with pytest.raises(dibs.SetupRequired, match=r"takes no writes; .* takes no writes"):
            client.lock("x").acquire(timeout=0)
    with of(standby.port, free_port()) as client, pytest.raises(dibs.StoreUnavailable, match=r"takes no wr.*refused"):
        client.lock("x").acquire(timeout=0)


def test_an_address_that_leads_to_the_standby_too_early(own_postgres: PostgresServer, standby: PostgresServer) -> None:
    """Whoever worked before takes a server without writes for one that makes way, and waits; a newcomer is told."""
    url = own_postgres.create_database()
    made = "CREATE TABLE item (id bigint PRIMARY KEY); INSERT INTO item VALUES (1);"
    own_postgres.psql(f"{made} {migration_sql('postgresql', 'item')}", database=url.rpartition("/")[2])
    with Proxy(own_postgres.port) as address:
        named = url.replace(f":{own_postgres.port}/", f":{address.port}/")
        with at_work(named) as programs:
            assert wait_until(lambda: has_table(standby, url), 20)
            own_postgres.stop()
            address.lead(standby.port)
            address.cut()
            programs.claim()
            with dibs.connect(named) as newcomer, pytest.raises(dibs.SetupRequired, match="standby"):
                newcomer.lock("x").acquire(timeout=0)
            with dibs.connect(named, patience=0.5) as reader:
                assert [record.name for record in reader.leases()] == ["held"]
                with pytest.raises(dibs.SetupRequired, match="standby"):  # it has read, and never written
                    reader.lock("x").acquire(timeout=0)
            standby.promote()
            programs.go_on()


FAILOVER = "grants survive a failover"


def doctor(url: str) -> dict[str, Finding]:
    """What `dibs doctor` finds, by the promise."""
    with dibs.connect(url) as client:
        return {finding.promise: finding for finding in run(client._desk.checking())}


def test_doctor_says_what_a_failover_forgets(own_postgres: PostgresServer) -> None:
    """Nothing where there is no standby, or a synchronous one; the last grants where it is told later."""
    url = own_postgres.create_database()
    with dibs.connect(url) as client:
        client.setup()
    assert doctor(url)[FAILOVER].kept
    with PostgresServer(standby_of=own_postgres) as standby:
        assert wait_until(lambda: not doctor(url)[FAILOVER].kept, 20)
        assert "standbys that are told later: 1. Set synchronous_standby_names" in doctor(url)[FAILOVER].detail
        assert wait_until(lambda: has_table(standby, url), 20)
        assert FAILOVER not in doctor(url.replace(f":{own_postgres.port}/", f":{standby.port}/"))
        own_postgres.psql("ALTER SYSTEM SET synchronous_standby_names = '*'")
        own_postgres.psql("SELECT pg_reload_conf()")
        assert wait_until(lambda: doctor(url)[FAILOVER].kept, 20)


@pytest.mark.parametrize(
    "standbys, names, commit, kept",
    [
        *((0, "", "on", True), (2, "", "on", False), (1, "a", "on", True), (1, "*", "remote_write", True)),
        *((1, "*", "remote_apply", True), (1, "*", "local", False), (0, "", "local", True)),
    ],
)
def test_which_settings_a_failover_needs(standbys: int, names: str, commit: str, kept: bool) -> None:
    """A commit that waits for a standby, where there is one."""
    facts = {"synchronous_commit": commit}
    assert postgres_check.over_a_failover(standbys, names, facts)[0] is kept


def locks_in_vain(url: str, counted: Callable[[], int]) -> None:
    """A program that goes on asking while no commit ends leaves one session that is at work, and hears what that is."""
    with dibs.connect(url, request_timeout=1.0, patience=0.1) as client:  # time to see it, on a busy machine, too
        for number in range(12):
            with pytest.raises(dibs.StoreUnavailable) as told:
                client.lock(f"in vain {number}").acquire(timeout=0)
        assert "still at work" in str(told.value)
        assert counted() == 1


def test_what_waits_for_a_standby_that_is_gone_is_asked_once(own_postgres: PostgresServer) -> None:
    """A commit that nobody confirms leaves one session, and not one more with each try, until nobody gets in."""
    url = own_postgres.create_database()
    with dibs.connect(url) as client:
        client.setup()
    own_postgres.psql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    own_postgres.psql("SELECT pg_reload_conf()")
    waiting = "SELECT count(*)::int FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    locks_in_vain(url, lambda: int(own_postgres.psql(waiting)[0][0]))
    own_postgres.psql("ALTER SYSTEM RESET synchronous_standby_names")
    own_postgres.psql("SELECT pg_reload_conf()")
    with dibs.connect(url) as client, client.lock("x", timeout=10):
        pass


# -- MySQL ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def servers() -> Iterator[tuple[MariaDBServer, MariaDBServer]]:
    """A primary, and a replica that follows it."""
    with MariaDBServer({"log-bin": "log", "server-id": 1}) as primary:
        with MariaDBServer({"log-bin": "log", "server-id": 2}, replica_of=primary) as replica:
            yield primary, replica


@pytest.fixture
def named(servers: tuple[MariaDBServer, MariaDBServer]) -> Callable[[int], str]:
    """The URL at some port, as a login that `read_only` keeps from writing; it is the same on both."""
    primary, _ = servers
    url = primary.create_database()
    primary.create_user("app")
    primary.sql(f"GRANT ALL ON `{url.rpartition('/')[2]}`.* TO 'app'@'127.0.0.1'")
    primary.sql("CREATE TABLE item (id BIGINT PRIMARY KEY)", database=url.rpartition("/")[2])
    primary.sql("INSERT INTO item VALUES (1)", database=url.rpartition("/")[2])
    primary.sql(migration_sql("mysql", "item").rstrip().rstrip(";"), database=url.rpartition("/")[2])
    shown = primary.url(url.rpartition("/")[2], user="app")
    return lambda port: shown.replace(f":{primary.port}/", f":{port}/")


def sums(server: MariaDBServer) -> list[Any]:
    """Of each of dibs's tables, a number that tells what is in it. (As shipped, MariaDB replicates statements.)"""
    where = "table_name LIKE 'dibs%' ORDER BY table_name"
    tables = server.sql(f"SELECT table_schema, table_name FROM information_schema.tables WHERE {where}")
    return [server.sql(f"CHECKSUM TABLE `{schema}`.`{name}`")[0] for schema, name in tables]


@pytest.mark.parametrize("driver", ["pymysql", "mysqlclient"])
def test_a_replica_is_made_the_primary(
    servers: tuple[MariaDBServer, MariaDBServer], named: Callable[[int], str], driver: str
) -> None:
    """As planned: the primary takes no more writes, the replica has everything and takes over, the address moves."""
    primary, replica = servers
    with Proxy(primary.port) as address, at_work(f"{named(address.port)}?driver={driver}") as programs:
        primary.sql("SET GLOBAL read_only = ON")
        programs.claim()
        with dibs.connect(named(address.port)) as newcomer, pytest.raises(dibs.SetupRequired, match="replica"):
            newcomer.lock("x").acquire(timeout=0)
        assert replica.has_all_of(primary)
        assert sums(replica) == sums(primary) != []
        replica.promote()
        address.lead(replica.port)
        address.cut()
        programs.go_on()


def test_doctor_says_what_a_failover_of_mysql_forgets(
    servers: tuple[MariaDBServer, MariaDBServer], named: Callable[[int], str]
) -> None:
    """The last grants where a replica is told later. MySQL does not say how many there are; nothing is said there."""
    primary, _ = servers
    url = named(primary.port)
    if primary.is_mariadb:
        assert wait_until(lambda: doctor(url)[FAILOVER].detail.startswith("replicas that are told later: 1."), 20)
        assert not doctor(url)[FAILOVER].kept
    else:
        assert FAILOVER not in doctor(url)
    primary.wait_for_replicas(True)
    assert "replicas that confirm: 0" in doctor(url)[FAILOVER].detail
    assert not doctor(url)[FAILOVER].kept


@pytest.mark.parametrize(
    "status, told",
    [
        ({}, None),
        ({"slaves_connected": "0"}, True),
        ({"slaves_connected": "0", "wsrep_cluster_size": "0"}, True),
        ({"slaves_connected": "1", "wsrep_cluster_size": "3"}, True),
        ({"slaves_connected": "2"}, False),
        ({"slaves_connected": "2", "rpl_semi_sync_master_status": "OFF"}, False),
        ({"slaves_connected": "2", "rpl_semi_sync_master_status": "ON", "rpl_semi_sync_master_clients": "1"}, True),
        ({"rpl_semi_sync_source_status": "ON", "rpl_semi_sync_source_clients": "0"}, False),
        ({"rpl_semi_sync_source_status": "ON", "rpl_semi_sync_source_clients": "1"}, True),
    ],
)
def test_which_replication_a_failover_needs(status: dict[str, str], told: bool | None) -> None:
    """Semi-synchronous, to one replica at least, where there are any."""
    found = mysql_check.over_a_failover(status)
    assert (found and found[0]) is told


@pytest.mark.parametrize("driver", ["pymysql", "mysqlclient"])
def test_what_waits_for_a_replica_that_is_gone_is_asked_once(
    servers: tuple[MariaDBServer, MariaDBServer], named: Callable[[int], str], driver: str
) -> None:
    """As on PostgreSQL."""
    primary, _ = servers
    url = f"{named(primary.port)}?driver={driver}"
    with dibs.connect(url) as client:
        client.setup()
        primary.wait_for_replicas(True)
        waiting = "SELECT count(*) FROM information_schema.processlist WHERE user = 'app' AND state LIKE '%semi-sync%'"
        locks_in_vain(url, lambda: int(primary.sql(waiting)[0][0]))
        primary.wait_for_replicas(False)
        with client.lock("x", timeout=10):
            pass


# -- Redis ------------------------------------------------------------------------------------------------------------


def test_a_master_changes_places_with_its_replica(own_redis: RedisServer) -> None:
    """As planned, without sentinels: the address leads to what has become the replica for a while."""
    with RedisServer({"replicaof": f"127.0.0.1 {own_redis.port}"}, password=own_redis.password) as replica:
        with replica.client() as look:
            assert wait_until(lambda: look.info("replication")["master_link_status"] == "up", 20)
        url = own_redis.url()
        with Proxy(own_redis.port) as address:
            named = url.replace(f":{own_redis.port}/", f":{address.port}/")
            with at_work(named) as programs:
                own_redis.ask("FAILOVER")
                assert wait_until(lambda: replica.ask("ROLE")[0] == "master", 20)
                with dibs.connect(named) as newcomer, pytest.raises(dibs.SetupRequired, match="replica"):
                    newcomer.lock("x").acquire(timeout=0)
                address.lead(replica.port)
                address.cut()
                programs.go_on()
