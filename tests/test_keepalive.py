"""Connections that may be idle for long: TCP is asked for signs of life on each, whatever the driver does by itself."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import dibs
from dibs.stores.keepalive import IDLE_S
from tests.servers.process import wait_until
from tests.test_conformance import STORES

# What the timer of a connection is for, in /proc/net/tcp.
KEEPALIVE = "02"


def timers_to(port: int) -> dict[str, tuple[str, float]]:
    """Of each connection of this process to the port: what its timer is for, and in how many seconds it is due."""
    ours = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of those that are closed meanwhile
            ours.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, _, timer, _, _, _, inode, *_ = line.split()
        if int(remote.rpartition(":")[2], 16) == port and state == "01" and f"socket:[{inode}]" in ours:
            kind, _, due = timer.partition(":")
            found[inode] = kind, int(due, 16) / 100
    return found


@pytest.mark.parametrize("store", [name for name in STORES if name not in ("memory", "sqlite_url")])
def test_every_connection_asks_for_signs_of_life(store: str, request: pytest.FixtureRequest) -> None:
    """Of a client that holds a lease, renews it and waits for another: also that on which hints come."""
    url = request.getfixturevalue(store)
    port = urlsplit(url).port
    assert port is not None
    before = timers_to(port)  # of the test's own
    with ExitStack() as stack:
        client, other = stack.enter_context(dibs.connect(url, ttl=6)), stack.enter_context(dibs.connect(url))
        stack.enter_context(other.lock("held"))
        lease = stack.enter_context(client.lock("mine"))
        waiter = threading.Thread(target=lambda: client.lock("held").acquire(timeout=4))
        waiter.start()
        trusted = lease.trusted_until
        assert wait_until(lambda: lease.trusted_until > trusted, 10)

        def asked() -> bool:
            timers = [timer for inode, timer in timers_to(port).items() if inode not in before]
            return len(timers) >= 3 and all(kind == KEEPALIVE and due <= IDLE_S for kind, due in timers)

        # (kazoo sends signs of life of its own, so its connections are not asked.)
        assert store == "zookeeper_url" or wait_until(asked, 10), timers_to(port)
        waiter.join()
