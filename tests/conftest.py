"""Fixtures for every test: stores that are real and private. A server that cannot be had is a failure that says why."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import dibs as library
from tests.command_line import Dibs
from tests.servers import process
from tests.servers.etcd import EtcdServer
from tests.servers.memcached import MemcachedServer
from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.servers.zookeeper import ZooKeeperServer

# A test that fails need not be wrong: see there.
pytest_plugins = ("tests.standstill", "tests.again", "tests.alone")

# Real stores answer when they answer; a test that hangs is ended by pytest-timeout.
hypothesis.settings.register_profile("dibs", deadline=None, print_blob=True)
hypothesis.settings.load_profile("dibs")

process.data_in_memory()


def pytest_xdist_auto_num_workers() -> int:
    """Tests at once: seven a core, where there is memory for their servers.

    They wait for leases to end half of the time: with four a core two cores had nothing to do for a third of it, with
    five for a twelfth.
    """
    try:
        room = process.memory_left() // process.WORKER_NEEDED
    except OSError:
        room = 8
    return max(1, min(7 * (os.cpu_count() or 1), room, 40))


def pytest_collection_finish() -> None:
    """Ten thousand tests need not be looked through for garbage each time: that takes a tenth of a second."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def signals_as_shipped() -> None:
    """What the tests start must not ignore signals only because nohup or a job runner made the tests ignore them."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A URL of an SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path}/locks.db"


@pytest.fixture
def dibs(tmp_path: Path) -> Iterator[Dibs]:
    """The command line on an SQLite file of this test; afterwards nothing it started may be left."""
    shell = Dibs(tmp_path)
    try:
        yield shell
    finally:
        shell.close()


@pytest.fixture
def client(dibs: Dibs) -> Iterator[library.Client]:
    """A client of the store that the command line uses, in this process."""
    with library.connect(dibs.url) as made:
        yield made


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The PostgreSQL that all tests share, started when the first one asks. Do not stop it: take `own_postgres`."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The superuser's URL of a new empty database, dropped after the test with whatever is still connected to it."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL for this test alone, to be stopped, killed and paused at will."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def memcached() -> Iterator[MemcachedServer]:
    """The memcached that all tests share, started when the first one asks. Do not stop it: take `own_memcached`."""
    with MemcachedServer() as server:
        yield server


@pytest.fixture
def memcached_url(memcached: MemcachedServer) -> str:
    """The URL of the shared memcached, emptied."""
    memcached.ask("flush_all")
    return memcached.url()


@pytest.fixture
def own_memcached() -> Iterator[MemcachedServer]:
    """A memcached for this test alone, to be stopped, killed and paused at will."""
    with MemcachedServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """The Redis that all tests share, started when the first one asks. Do not stop it: take `own_redis`."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis: RedisServer) -> Iterator[str]:
    """The URL of a new empty place in the shared Redis, which is emptied afterwards.

    Whoever lists leases goes through all keys, and pays for what others left.
    """
    yield redis.create_place()
    with redis.client() as client:
        client.flushall()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis for this test alone, to be stopped, killed and paused at will."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def mysql() -> Iterator[MariaDBServer]:
    """The MariaDB that all tests share, started when the first one asks. Do not stop it: take `own_mysql`."""
    with MariaDBServer() as server:
        yield server


@pytest.fixture
def mysql_url(mysql: MariaDBServer) -> Iterator[str]:
    """The superuser's URL of a new empty database, through PyMySQL."""
    url = mysql.create_database()
    yield f"{url}?driver=pymysql"
    mysql.drop_database(url)


@pytest.fixture
def mysqlclient_url(mysql: MariaDBServer) -> Iterator[str]:
    """The superuser's URL of a new empty database, through mysqlclient."""
    url = mysql.create_database()
    yield f"{url}?driver=mysqlclient"
    mysql.drop_database(url)


@pytest.fixture
def own_mysql() -> Iterator[MariaDBServer]:
    """A MariaDB for this test alone, to be stopped, killed and paused at will."""
    with MariaDBServer() as server:
        yield server


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[ZooKeeperServer]:
    """The ZooKeeper that all tests share, started when the first one asks. Do not stop it: take `own_zookeeper`."""
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture
def zookeeper_url(zookeeper: ZooKeeperServer) -> str:
    """The URL of a chroot that nobody has used and that is not there yet."""
    return zookeeper.create_root()


@pytest.fixture
def own_zookeeper() -> Iterator[ZooKeeperServer]:
    """A ZooKeeper for this test alone, to be stopped, killed and paused at will."""
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """The etcd that all tests share, started when the first one asks. Do not stop it: take `own_etcd`."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def etcd_url(etcd: EtcdServer) -> str:
    """The URL of a prefix that is empty yet."""
    return etcd.create_place()


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """An etcd for this test alone, to be stopped, killed and paused at will."""
    with EtcdServer() as server:
        yield server
