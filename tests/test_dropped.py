"""A client that nobody closed and nobody has any more: in time nothing is left of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Lets the threads of a client end early, drops one, and looks for what is left of it.
DROP = """
import asyncio, gc, os, sys, threading, time, weakref
import dibs, dibs.lane, dibs.notes, dibs.renewer, dibs.waiting
for module in (dibs.lane, dibs.notes, dibs.renewer, dibs.waiting):
    module.IDLE_S = 0.2
url, face, ttl = sys.argv[1], sys.argv[2], float(sys.argv[3])
if url.startswith("zookeeper"):
    import dibs.stores.zookeeper_pool
    dibs.stores.zookeeper_pool.IDLE_S = 0.5

def files():
    return len(os.listdir("/proc/self/fd"))

def somebody_waits(client):  # which begins the thread that waits
    return client._desk.session().waiting._bell is not None

def use():
    client = dibs.connect(url, ttl=ttl)
    def other():
        with client.lock("x"):
            pass
    with client.lock("x"):
        waiter = threading.Thread(target=other)
        waiter.start()
        while not somebody_waits(client):
            time.sleep(0.01)  # before another look
    waiter.join()
    left = client.lock("left").acquire()  # dropped with the client, without release
    return weakref.ref(client), weakref.ref(client._desk.session())

async def use_async():
    client = dibs.connect_async(url, ttl=ttl)
    async def other():
        async with client.lock("x"):
            pass
    async with client.lock("x"):
        waiter = asyncio.create_task(other())
        while not somebody_waits(client):
            await asyncio.sleep(0.01)  # before another look
    await waiter
    left = await client.lock("left").acquire()
    return weakref.ref(client), weakref.ref(client._desk.session())

dibs.connect(url).ping()  # what is loaded and opened once stays
gc.collect()
before = files()
references = asyncio.run(use_async()) if face == "async" else use()
end = time.monotonic() + 30
while True:
    gc.collect()
    left = [reference() for reference in references], [t.name for t in threading.enumerate()][1:], files() - before
    if left[0] == [None, None] and not left[1] and left[2] <= 0:
        break
    assert time.monotonic() < end, left
    del left
    time.sleep(0.02)  # before another look
"""


@pytest.mark.parametrize(
    "store, face",
    [
        *((store, "sync") for store in ("sqlite", "postgres", "mysql", "redis", "memcached", "etcd", "zookeeper")),
        ("sqlite", "async"),
        ("postgres", "async"),
    ],
)
def test_nothing_is_left_of_a_client_that_was_dropped(store: str, face: str, request: pytest.FixtureRequest) -> None:
    """Its threads end when they have been idle, also with a lease that was dropped; its connections are closed."""
    url = request.getfixturevalue(f"{store}_url")
    ttl = "4" if store in ("zookeeper", "memcached") else "2"
    # Drivers warn of connections that are closed for want of an owner, and dibs of the lease: that is how it should be.
    program = [sys.executable, "-W", "ignore::ResourceWarning", "-c", DROP, url, face, ttl]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    if store == "memcached":
        assert "best effort" in done.stderr
    else:
        assert done.stderr == ""
    assert done.returncode == 0, done.stderr
