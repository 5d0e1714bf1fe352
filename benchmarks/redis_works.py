"""Works on Redis: dibs beside redis-py's own locks, and the locks of four packages that stand on it.

Everybody talks over TCP to one server that appends to a file and syncs it every second, as Redis is mostly run where
data matters. redis-py's Lock sets a key with a ttl and deletes it by a script that compares its random value; those of
the others are much the same. dibs's pair is two runs of a script, which also count a fencing token, look at the waiting
line, and keep who holds the name where people can read it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio

import dibs
from benchmarks.handover import dibs_lock, race_two_processes
from benchmarks.harness import PAIRS_PER_S, Bench, Round, Target, lone_thread
from benchmarks.tasks import event_loop, many_tasks
from tests.servers.redis import RedisServer

NAMES = 100
TASKS = 1000
POOL = 10
TTL_S = 30
# What a team would write by hand to give a lock back: delete the key if it still holds what was put there.
COMPARE_AND_DELETE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"


class EverySecondRedis(RedisServer):
    """Synced every second."""

    def __init__(self) -> None:
        super().__init__({"appendfsync": "everysec"})


def redis_lone(bench: Bench) -> None:
    """One thread takes and gives back locks nobody else wants, in pairs a second.

    dibs: ``with client.lock(name): pass``, an object for each use, as with everybody: redis-py's ``Lock(timeout=30)``,
    python-redis-lock, pottery's Redlock with one master, sherlock's RedisLock and tooz's driver; ttls are 30 s.
    """
    names = [f"job/{number}" for number in range(NAMES)]
    seconds = bench.round_s
    server = bench.started(EverySecondRedis)
    with dibs.connect(server.create_place()) as client, server.client(decode_responses=False) as connection:

        def dibs_pair(name: str) -> None:
            with client.lock(name):
                pass

        pairs: dict[str, Callable[[str], None]] = {"dibs": dibs_pair, **_peers(server, connection)}
        for case, these in (("one name", names[:1]), ("100 names", names)):
            contestants: dict[str, Round] = {
                who: partial(lone_thread, pair, these, seconds) for who, pair in pairs.items()
            }
            bench.race(case, PAIRS_PER_S, contestants, [Target(0.95, "redis-py Lock")])


def _peers(server: RedisServer, connection: redis.Redis) -> dict[str, Callable[[str], None]]:
    import pottery
    import redis_lock
    import sherlock
    from tooz import coordination

    coordinator = coordination.get_coordinator(f"{server.url()}?lock_timeout={TTL_S}", b"benchmark")
    coordinator.start()
    masters = {connection}

    def redis_py_pair(name: str) -> None:
        with connection.lock(name, timeout=TTL_S):
            pass

    def python_redis_lock_pair(name: str) -> None:
        with redis_lock.Lock(connection, name, expire=TTL_S):
            pass

    def pottery_pair(name: str) -> None:
        with pottery.Redlock(key=name, masters=masters, auto_release_time=TTL_S):
            pass

    def sherlock_pair(name: str) -> None:
        with sherlock.RedisLock(name, client=connection, expire=TTL_S):
            pass

    def tooz_pair(name: str) -> None:
        with coordinator.get_lock(name.encode()):
            pass

    return {
        "redis-py Lock": redis_py_pair,
        "python-redis-lock": python_redis_lock_pair,
        "pottery": pottery_pair,
        "sherlock": sherlock_pair,
        "tooz": tooz_pair,
    }


def redis_async(bench: Bench) -> None:
    """1000 asyncio tasks, each with a name of its own, take and give back as fast as they can; pairs a second in all.

    dibs: ``async with client.lock(name): pass``, all tasks share one client. The peers share a redis.asyncio client
    over a pool of 10 connections, for which tasks wait: SET with NX and PX and a script by its digest that compares and
    deletes, which is the least a lock with an owner can do; and redis.asyncio's ``Lock(timeout=30)``.
    """
    names = [f"task/{number}" for number in range(TASKS)]
    seconds = max(1.0, 2 * bench.round_s)
    server = bench.started(EverySecondRedis)
    with event_loop() as run:
        client = dibs.connect_async(server.create_place())
        pool = redis.asyncio.BlockingConnectionPool(
            host="127.0.0.1", port=server.port, password=server.password, max_connections=POOL, timeout=60
        )
        connections = redis.asyncio.Redis(connection_pool=pool)
        digest = server.ask("SCRIPT", "LOAD", COMPARE_AND_DELETE)

        async def dibs_pair(name: str) -> None:
            async with client.lock(name):
                pass

        async def lock_pair(name: str) -> None:
            async with connections.lock(name, timeout=TTL_S):
                pass

        async def raw_pair(name: str) -> None:
            value = secrets.token_hex(8)
            assert await connections.set(name, value, nx=True, px=TTL_S * 1000)
            assert await connections.evalsha(digest, 1, name, value)

        try:
            bench.race(
                "1000 tasks, different names",
                PAIRS_PER_S,
                {
                    "dibs": lambda: run(many_tasks(dibs_pair, names, seconds)),
                    "redis.asyncio, pool of 10": lambda: run(many_tasks(raw_pair, names, seconds)),
                    "its Lock": lambda: run(many_tasks(lock_pair, names, seconds)),
                },
                [Target(12.0, "redis.asyncio, pool of 10")],
            )
        finally:
            run(client.close())
            run(connections.aclose())
            run(pool.disconnect())


def redis_handover(bench: Bench) -> None:
    """Hand-over between two processes on Redis, in ms.

    dibs: ``lock.acquire()`` without a limit, ``lock.release()``. python-redis-lock's waiters block in BLPOP, which the
    release feeds; redis-py's Lock looks ten times a second, as it is shipped.
    """
    server = bench.started(EverySecondRedis)
    race_two_processes(
        bench,
        {
            "dibs": (dibs_lock, server.create_place()),
            "python-redis-lock": (python_redis_lock, server.url()),
            "redis-py Lock": (redis_py_lock, server.url()),
        },
        Target(1.0, "python-redis-lock"),
    )


# What the other processes lock with: each has ``acquire`` and ``release``.


def python_redis_lock(url: str) -> Any:
    import redis_lock

    return redis_lock.Lock(_connected(url), "handover", expire=TTL_S)


def redis_py_lock(url: str) -> Any:
    return _connected(url).lock("handover", timeout=TTL_S)


def _connected(url: str) -> redis.Redis:
    parts = urlsplit(url)
    return redis.Redis(host=parts.hostname or "", port=parts.port or 0, password=parts.password)
