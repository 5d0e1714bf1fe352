"""The first connection that a process ever makes is cut off, as networks and starting servers do: that is an outage.

Who was never let in cannot tell a cut from a server that wants TLS, another login, or is something else, by the cut
alone: it looks again, twice, before it says that the URL is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.chaos.proxy import Proxy
from tests.chaos.run import KINDS

# In a process of its own: while libpq looks, nothing else of its process runs, and so no network in a thread.
ASKS = """
import sys, dibs
with dibs.connect(sys.argv[1]) as client:
    for _ in range(3):
        try:
            with client.lock("x", timeout=0):
                print("granted")
        except dibs.DibsError as error:
            print(type(error).__name__)
"""
SERVERS = {
    "postgres": "postgres",
    "mysql": "mysql",
    "mysqlclient": "mysql",
    "redis": "redis",
    "memcached": "memcached",
    "etcd": "etcd",
    "zookeeper": "zookeeper",
}
# libpq would go on from what is cut with another kind of connection, by itself.
OPTIONS = {"postgres": "?sslmode=disable&gssencmode=disable"}


@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("kind", SERVERS)
def test_a_first_connection_that_is_cut_is_an_outage(kind: str, cuts: int, request: pytest.FixtureRequest) -> None:
    server: Any = request.getfixturevalue(SERVERS[kind])
    with Proxy(server.port) as network:
        url = KINDS[kind].url(server).replace(f":{server.port}", f":{network.port}") + OPTIONS.get(kind, "")
        network.shut(cuts)
        said = subprocess.run([sys.executable, "-c", ASKS, url], capture_output=True, text=True)
        assert network.done["shut"] == cuts
    answers = said.stdout.split()
    assert answers[-1] == "granted", said.stdout + said.stderr
    assert set(answers) <= {"granted", "StoreUnavailable"}, said.stdout + said.stderr
