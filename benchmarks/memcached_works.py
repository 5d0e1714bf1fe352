"""Works on memcached: dibs beside three calls of pymemcache, and the locks of tooz and sherlock.

Everybody talks over TCP to one server. *The raw triple* is the least that takes and gives back a key without ever
deleting somebody else's: ``add`` with a ttl, ``gets`` to compare the value, ``cas`` with the expiry -1. tooz
(pymemcache) and sherlock (pylibmc, which is C) get and then delete, so both can delete what another has taken between.
dibs's pair also counts a fencing token, and is two requests: what is added is read back in the same flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pymemcache

import dibs
from benchmarks.handover import dibs_lock, race_two_processes
from benchmarks.harness import PAIRS_PER_S, Bench, Round, Target, lone_thread
from tests.servers.memcached import MemcachedServer

NAMES = 100
TTL_S = 30


def memcached_lone(bench: Bench) -> None:
    """One thread takes and gives back locks nobody else wants, in pairs a second.

    dibs: ``with client.lock(name): pass``, an object for each use. The reference is the raw triple on a
    pymemcache Client. sherlock's MCLock and the locks of tooz's memcached driver are made for each use, too.
    """
    names = [f"job/{number}" for number in range(NAMES)]
    server = bench.started(MemcachedServer)
    with dibs.connect(server.url()) as client:

        def dibs_pair(name: str) -> None:
            with client.lock(name):
                pass

        pairs: dict[str, Callable[[str], None]] = {"dibs": dibs_pair, **_peers(server)}
        for case, these in (("one name", names[:1]), ("100 names", names)):
            contestants: dict[str, Round] = {
                who: partial(lone_thread, pair, these, bench.round_s) for who, pair in pairs.items()
            }
            bench.race(case, PAIRS_PER_S, contestants, [Target(0.9, "add, gets, cas")])


def _peers(server: MemcachedServer) -> dict[str, Callable[[str], None]]:
    import pylibmc
    import sherlock
    from tooz import coordination

    raw = pymemcache.Client(("127.0.0.1", server.port), no_delay=True)
    claims = itertools.count()
    connection = pylibmc.Client([f"127.0.0.1:{server.port}"], binary=True, behaviors={"tcp_nodelay": True})
    coordinator = coordination.get_coordinator(f"{server.url()}?lock_timeout={TTL_S}", b"benchmark")
    coordinator.start()

    def raw_triple(name: str) -> None:
        claim_id = b"raw-%d" % next(claims)
        assert raw.add(name, claim_id, TTL_S, noreply=False)
        value, cas = raw.gets(name)
        assert value == claim_id
        assert raw.cas(name, b"", cas, -1, noreply=False)

    def sherlock_pair(name: str) -> None:
        with sherlock.MCLock(name, client=connection, expire=TTL_S):
            pass

    def tooz_pair(name: str) -> None:
        with coordinator.get_lock(name.encode()):
            pass

    return {"add, gets, cas": raw_triple, "sherlock": sherlock_pair, "tooz": tooz_pair}


def memcached_handover(bench: Bench) -> None:
    """Hand-over between two processes on memcached, in ms.

    memcached wakes nobody, so everybody looks: dibs every 10 ms at first and less often the longer it waits, sherlock
    every 100 ms as it is shipped.
    """
    server = bench.started(MemcachedServer)
    race_two_processes(
        bench, {"dibs": (dibs_lock, server.url()), "sherlock": (sherlock_lock, server.url())}, Target(100.0)
    )


def sherlock_lock(url: str) -> Any:
    import pylibmc
    import sherlock

    connection = pylibmc.Client([urlsplit(url).netloc], binary=True)
    return sherlock.MCLock("handover", client=connection, expire=TTL_S, timeout=3600)
