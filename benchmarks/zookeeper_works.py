"""Works on ZooKeeper: dibs beside kazoo's own Lock, and tooz's driver.

Everybody talks to the same standalone server, which writes every transaction to its disk before it answers. A pair of
kazoo's Lock is a node made, a directory listed and a node deleted; dibs makes one transaction to acquire, with a
fencing token and a holder that can be read, and one to release. tooz's ZooKeeper driver is kazoo's Lock behind tooz's
own objects. sherlock, which works on Redis, etcd and memcached, has no ZooKeeper backend.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import urlsplit

import dibs
from benchmarks.handover import race_two_processes
from benchmarks.harness import PAIRS_PER_S, Bench, Target, lone_thread
from benchmarks.tasks import event_loop, many_tasks
from tests.servers.zookeeper import ZooKeeperServer

NAMES = 100
TASKS = 1000


def zookeeper_lone(bench: Bench) -> None:
    """One thread takes and gives back locks nobody else wants, in pairs a second.

    dibs: ``with client.lock(name): pass``, an object for each use. kazoo: ``with lock: pass`` on ``client.Lock(path)``
    objects that are kept, as an object for each use would ask for its directory first; tooz: the same on locks of its
    coordinator. The locks of both are held as long as their session lives.
    """
    from kazoo.client import KazooClient

    names = [f"job-{number}" for number in range(NAMES)]
    seconds = bench.round_s
    server = bench.started(ZooKeeperServer)
    kazoo = KazooClient(f"127.0.0.1:{server.port}")
    kazoo.start()
    coordinator = _tooz(server)
    with dibs.connect(server.create_root()) as client:
        kazoo_locks = {name: kazoo.Lock(f"/kazoo/{name}") for name in names}
        tooz_locks = {name: coordinator.get_lock(name.encode()) for name in names}

        def dibs_pair(name: str) -> None:
            with client.lock(name):
                pass

        def kazoo_pair(name: str) -> None:
            with kazoo_locks[name]:
                pass

        def tooz_pair(name: str) -> None:
            with tooz_locks[name]:
                pass

        try:
            for case, these in (("one name", names[:1]), ("100 names", names)):
                bench.race(
                    case,
                    PAIRS_PER_S,
                    {
                        "dibs": partial(lone_thread, dibs_pair, these, seconds),
                        "kazoo Lock": partial(lone_thread, kazoo_pair, these, seconds),
                        "tooz": partial(lone_thread, tooz_pair, these, seconds),
                    },
                    [Target(1.0, "kazoo Lock")],
                )
        finally:
            coordinator.stop()
            kazoo.stop()
            kazoo.close()


def zookeeper_async(bench: Bench) -> None:
    """1000 asyncio tasks, each with a name of its own, take and give back as fast as they can; pairs a second in all.

    dibs alone: kazoo has no asyncio face. All tasks share one client, whose requests travel side by side.
    """
    names = [f"task/{number}" for number in range(TASKS)]
    seconds = max(1.0, 2 * bench.round_s)
    server = bench.started(ZooKeeperServer)
    with event_loop() as run:
        client = dibs.connect_async(server.create_root())

        async def dibs_pair(name: str) -> None:
            async with client.lock(name):
                pass

        try:
            bench.race(
                "1000 tasks, different names", PAIRS_PER_S, {"dibs": lambda: run(many_tasks(dibs_pair, names, seconds))}
            )
        finally:
            run(client.close())


def zookeeper_handover(bench: Bench) -> None:
    """Hand-over between two processes on ZooKeeper, in ms.

    dibs: ``lock.acquire()`` without a limit, ``lock.release()``. The peer: kazoo's Lock on a client each. Waiters of
    both watch one node. When it goes, kazoo's waiter reads that it is the first in line; that of dibs writes its grant,
    which others may have taken, and which its trust counts from: one write to the server's disk more.
    """
    from benchmarks.handover import dibs_lock

    server = bench.started(ZooKeeperServer)
    race_two_processes(
        bench,
        {"dibs": (dibs_lock, server.create_root()), "kazoo Lock": (kazoo_lock, server.url("/kazoo-handover"))},
        Target(1.0, "kazoo Lock"),
    )


def kazoo_lock(url: str) -> Any:
    """What another process locks with; see benchmarks.handover."""
    from kazoo.client import KazooClient

    parts = urlsplit(url)
    client = KazooClient(parts.netloc)
    client.start()
    return client.Lock(parts.path)


def _tooz(server: ZooKeeperServer) -> Any:
    from tooz import coordination

    coordinator = coordination.get_coordinator(f"kazoo://127.0.0.1:{server.port}/?timeout=30", b"benchmark")
    coordinator.start()
    return coordinator
