"""The first connection that a process ever makes is cut off, as networks and starting servers do: that is an outage.
And so is, over TLS, every other.

Who was never let in cannot tell a cut from a server that wants TLS, or does not speak it, by the cut alone: it asks the
server, and says that the URL is wrong only if that answers (``dibs.stores.greetings``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.proxy import Proxy
from tests.chaos.run import KINDS
from tests.servers.certificates import certificates_for_all
from tests.servers.etcd import EtcdServer
from tests.servers.memcached import MemcachedServer
from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.redis import TlsRedisServer
from tests.servers.zookeeper import ZooKeeperServer, tls_settings

# In a process of its own: while libpq looks, nothing else of its process runs, and so no network in a thread.
ASKS = """
import sys, dibs
with dibs.connect(sys.argv[1]) as client:
    for _ in range(20):
        try:
            with client.lock("x", timeout=0):
                print("granted")
                break
        except dibs.DibsError as error:
            print(type(error).__name__)
"""
# Who waits for its end reads nothing meanwhile: a pipe would be full after some four thousand answers.
GOES_ON_ASKING = """
import sys, time, dibs
answers = set()
with dibs.connect(sys.argv[1], patience=0) as client:
    with client.lock("x"):
        print("granted", flush=True)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        try:
            with client.lock("x"):
                answers.add("granted")
        except dibs.LeaseLost:  # given back over a connection that was cut, and found gone
            pass
        except dibs.DibsError as error:
            answers.add(type(error).__name__)
print(*answers)
"""
# By the fixture that gives it.
# One whose clock is set, or which has others beside it, is met as any other of its kind.
LIKE_OTHERS = ("sqlite", "stepped", "galera")
SERVERS = {kind: "mysql" if kind == "mysqlclient" else kind for kind in KINDS if kind not in LIKE_OTHERS}
# libpq would go on from what is cut with another kind of connection, by itself.
OPTIONS = {"postgres": "?sslmode=disable&gssencmode=disable"}


def asked_while_cut(cuts: int, port: int, url: str, behind: int = 0) -> None:
    """Ask through a network that cuts so many connections, each behind so many pieces, and then no more."""
    with Proxy(port) as network:
        network.shut(cuts, behind)
        url = url.replace(f":{port}", f":{network.port}")
        said = subprocess.run([sys.executable, "-c", ASKS, url], capture_output=True, text=True)
        assert network.done["shut"] == cuts
    answers = said.stdout.split()
    assert answers[-1] == "granted", said.stdout + said.stderr
    assert set(answers) <= {"granted", "StoreUnavailable"}, said.stdout + said.stderr


@pytest.mark.parametrize("cuts", [1, 2, 7])
@pytest.mark.parametrize("kind", SERVERS)
def test_a_first_connection_that_is_cut_is_an_outage(kind: str, cuts: int, request: pytest.FixtureRequest) -> None:
    server: Any = request.getfixturevalue(SERVERS[kind])
    asked_while_cut(cuts, server.port, KINDS[kind].url(server) + OPTIONS.get(kind, ""))


@pytest.fixture(scope="module")
def certificates() -> Iterator[Path]:
    with certificates_for_all() as folder:
        yield folder


class SecurePostgres(PostgresServer):
    """With the certificate in this folder."""

    def __init__(self, certificates: Path) -> None:
        self._certificates = certificates
        super().__init__({"ssl": "on"})

    def _prepare(self) -> None:
        super()._prepare()
        user = self.data_folder.stat()
        for name, suffix in (("server.crt", "pem"), ("server.key", "key")):
            copy = self.data_folder / name
            shutil.copy(self._certificates / f"server.{suffix}", copy)
            copy.chmod(0o600)
            if os.getuid() == 0:
                os.chown(copy, user.st_uid, user.st_gid)


@pytest.fixture(params=SERVERS)
def secure(request: pytest.FixtureRequest, certificates: Path) -> Iterator[tuple[int, str]]:
    """The port of a server that speaks TLS, and a URL with what it takes."""
    authority, pair = certificates / "ca.pem", {name: certificates / f"server.{name}" for name in ("pem", "key")}
    if request.param == "postgres":
        with SecurePostgres(certificates) as postgres:
            yield postgres.port, f"{postgres.create_database()}?sslmode=require&gssencmode=disable"
    elif request.param in ("mysql", "mysqlclient"):
        files = {"ssl-ca": authority, "ssl-cert": pair["pem"], "ssl-key": pair["key"]}
        with MariaDBServer(files) as mysql:
            driver = "pymysql" if request.param == "mysql" else "mysqlclient"
            options = f"driver={driver}&ssl_mode=required&ssl_ca={authority}"
            yield mysql.port, f"{mysql.create_database()}?{options}"
    elif request.param == "redis":
        with TlsRedisServer() as redis:
            yield redis.port, f"{redis.url(scheme='rediss')}?ssl_ca_certs={redis.authority}"
    elif request.param == "memcached":
        chain = f"ssl_chain_cert={pair['pem']},ssl_key={pair['key']}"
        with MemcachedServer(["-Z", "-o", chain], quiet=True) as memcached:
            yield memcached.port, f"{memcached.url()}?tls=on&tls_ca={authority}"
    elif request.param == "etcd":
        with EtcdServer([], certificates) as etcd:
            yield etcd.port, etcd.url(options=f"ca={authority}")
    else:
        both = certificates / "both.pem"
        both.write_text(pair["key"].read_text() + pair["pem"].read_text())
        both.chmod(0o644)
        with ZooKeeperServer(tls_settings(both), secure=True) as zookeeper:
            yield zookeeper.secure_port, zookeeper.url(secure=True, options=f"tls=true&ssl_ca={authority}")


@pytest.mark.parametrize("behind", [0, 1], ids=["first-words", "next-words"])
@pytest.mark.parametrize("cuts", [1, 5])
def test_so_is_one_that_is_cut_while_tls_begins(secure: tuple[int, str], cuts: int, behind: int) -> None:
    """On PostgreSQL and MySQL the first words only ask for it."""
    asked_while_cut(cuts, *secure, behind)


def test_so_is_one_over_tls_that_is_cut_later(secure: tuple[int, str]) -> None:
    """Whatever it was about to say, and as often as it is cut."""
    port, url = secure
    with Proxy(port) as network:
        url = url.replace(f":{port}", f":{network.port}")
        with subprocess.Popen([sys.executable, "-c", GOES_ON_ASKING, url], stdout=subprocess.PIPE, text=True) as asking:
            assert asking.stdout is not None
            assert asking.stdout.readline() == "granted\n"
            while asking.poll() is None:
                time.sleep(0.05)  # for it to get a little further each time before it is cut
                network.cut()
            answers = asking.stdout.read().split()
        assert network.done["cut"] > 3
    assert set(answers) <= {"granted", "StoreUnavailable"}, answers
