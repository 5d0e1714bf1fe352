"""Works on etcd: dibs beside the locks of etcd-sdk-python (gRPC) and etcd3gw (the JSON gateway), and tooz's driver.

Everybody talks to the same single member, which writes every change to its disk before it answers. A pair of
etcd-sdk's Lock is an etcd lease granted, a transaction and a deletion, and etcd3gw's and tooz's the same: three writes.
dibs makes two, since it uses etcd leases again, with a fencing token and a holder that can be read.

Not here: sherlock's EtcdLock stands on python-etcd and etcd's version 2 protocol, which etcd 3.4 has off by default and
3.6 no more; etcd3 cannot be loaded beside etcd-sdk (both register the same protocol files), whose older cousin it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import dibs
from benchmarks.handover import dibs_lock, race_two_processes
from benchmarks.harness import PAIRS_PER_S, Bench, Target, lone_thread
from benchmarks.tasks import event_loop, many_tasks
from tests.servers.etcd import EtcdServer

NAMES = 100
TASKS = 1000
TTL_S = 30


def etcd_lone(bench: Bench) -> None:
    """One thread takes and gives back locks nobody else wants, in pairs a second.

    dibs: ``with client.lock(name): pass``, an object for each use; etcd-sdk: ``with client.lock(name, ttl=30): pass``;
    etcd3gw: ``client.lock(name, ttl=30)``, ``acquire()`` and ``release()``; tooz: ``with coordinator.get_lock(name):
    pass``, also an object for each use.
    """
    import etcd3gw
    import pyetcd

    names = [f"job-{number}" for number in range(NAMES)]
    seconds = bench.round_s
    server = bench.started(EtcdServer)
    sdk = pyetcd.client(host="127.0.0.1", port=server.port)
    gateway = etcd3gw.client(host="127.0.0.1", port=server.port)
    coordinator = _tooz(server)
    with dibs.connect(server.create_place()) as client:

        def dibs_pair(name: str) -> None:
            with client.lock(name):
                pass

        def sdk_pair(name: str) -> None:
            with sdk.lock(name, ttl=TTL_S):
                pass

        def gateway_pair(name: str) -> None:
            lock = gateway.lock(name, ttl=TTL_S)
            if not (lock.acquire() and lock.release()):
                raise RuntimeError("etcd3gw's lock could not be taken or given back")

        def tooz_pair(name: str) -> None:
            with coordinator.get_lock(name.encode()):
                pass

        try:
            for case, these in (("one name", names[:1]), ("100 names", names)):
                bench.race(
                    case,
                    PAIRS_PER_S,
                    {
                        "dibs": partial(lone_thread, dibs_pair, these, seconds),
                        "etcd-sdk Lock": partial(lone_thread, sdk_pair, these, seconds),
                        "etcd3gw Lock": partial(lone_thread, gateway_pair, these, seconds),
                        "tooz": partial(lone_thread, tooz_pair, these, seconds),
                    },
                    [Target(1.2, "etcd-sdk Lock"), Target(1.2, "etcd3gw Lock")],
                )
        finally:
            coordinator.stop()
            sdk.close()


def etcd_async(bench: Bench) -> None:
    """1000 asyncio tasks, each with a name of its own, take and give back as fast as they can; pairs a second in all.

    dibs alone, whose tasks share one client: of the peers none has a lock for asyncio.
    """
    names = [f"task/{number}" for number in range(TASKS)]
    seconds = max(1.0, 2 * bench.round_s)
    server = bench.started(EtcdServer)
    with event_loop() as run:
        client = dibs.connect_async(server.create_place())

        async def dibs_pair(name: str) -> None:
            async with client.lock(name):
                pass

        try:
            bench.race(
                "1000 tasks, different names", PAIRS_PER_S, {"dibs": lambda: run(many_tasks(dibs_pair, names, seconds))}
            )
        finally:
            run(client.close())


def etcd_handover(bench: Bench) -> None:
    """Hand-over between two processes on etcd, in ms.

    dibs: ``lock.acquire()`` without a limit, ``lock.release()``. The peer: etcd-sdk's Lock on a client each. Waiters of
    both watch the holder's key. etcd3gw's Lock cannot wait, and tooz's looks once a second.
    """
    server = bench.started(EtcdServer)
    race_two_processes(
        bench,
        {"dibs": (dibs_lock, server.create_place()), "etcd-sdk Lock": (sdk_lock, f"127.0.0.1:{server.port}")},
        Target(1.0, "etcd-sdk Lock"),
    )


def sdk_lock(where: str) -> Any:
    """What another process locks with; see benchmarks.handover."""
    import pyetcd

    host, _, port = where.partition(":")
    return _Patient(pyetcd.client(host=host, port=int(port)).lock("handover", ttl=TTL_S))


class _Patient:
    """Waits without limit, where etcd-sdk's Lock waits ten seconds by default."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release = lock.release

    def acquire(self) -> None:
        self._lock.acquire(timeout=None)


def _tooz(server: EtcdServer) -> Any:
    from tooz import coordination

    coordinator = coordination.get_coordinator(f"etcd3+http://127.0.0.1:{server.port}", b"benchmark")
    coordinator.start()
    return coordinator
