"""Works that measure the hand-over: from one process's release to the waiter in another process that gets the lock.

Two processes and this one, which says when. One holds; the other has been waiting for a random 20 to 100 ms when the
holder reads the clock and releases; the waiter reads the clock when it has the lock. The clock is CLOCK_MONOTONIC, the
same for all processes of a machine. Then they change roles.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.crowd import answer, crowd
from benchmarks.harness import MS, Bench, Target

HAND_OVERS_A_ROUND = 25
WAIT_MIN_S = 0.020
WAIT_MAX_S = 0.100


def pg_handover(bench: Bench) -> None:
    """Hand-over between two processes on PostgreSQL, in ms.

    dibs: ``lock.acquire()`` without a limit, ``lock.release()``. The peer: ``SELECT pg_advisory_lock(1)`` and
    ``pg_advisory_unlock(1)``, prepared, on a psycopg connection each; its waiters sleep inside the server, and its
    locks have no expiry, no token, and end with the connection.
    """
    with bench.database() as url:
        race_two_processes(
            bench, {"dibs": (dibs_lock, url), "pg_advisory_lock": (AdvisoryLock, url)}, Target(2.5, "pg_advisory_lock")
        )


def sqlite_handover(bench: Bench) -> None:
    """Hand-over between two processes on one machine without a server, in ms.

    dibs on SQLite; filelock, fasteners and diskcache wait as they do by default: filelock looks every 50 ms, fasteners
    every 10 to 100 ms, diskcache every 1 ms.
    """
    with bench.folder() as folder:
        peers: dict[str, tuple[Callable[[str], Any], str]] = {
            "dibs": (dibs_lock, f"sqlite:///{folder}/dibs.db"),
            "filelock": (file_lock, str(folder / "filelock")),
            "fasteners": (fasteners_lock, str(folder / "fasteners")),
            "diskcache": (disk_cache_lock, str(folder / "diskcache")),
        }
        race_two_processes(bench, peers, Target(5.0))


def race_two_processes(bench: Bench, kinds: dict[str, tuple[Callable[[str], Any], str]], target: Target) -> None:
    """Race hand-overs: each contestant is a function that makes a lock in another process, and its argument."""
    with ExitStack() as stack:
        pairs = {}
        for who, (kind, where) in kinds.items():
            bench.progress(f"starting two processes for {who}")
            pairs[who] = _TwoProcesses(*stack.enter_context(crowd(2, _holder_or_waiter, kind, where)))

        def round_of(who: str) -> Callable[[], list[float]]:
            # Everybody's waiters wait for the same times.
            waits = random.Random(1)
            return lambda: [
                pairs[who].hand_over(waits.uniform(WAIT_MIN_S, WAIT_MAX_S)) for _ in range(HAND_OVERS_A_ROUND)
            ]

        bench.race("two processes, one name", MS, {who: round_of(who) for who in kinds}, [target])


class _TwoProcesses:
    """A holder and a waiter that change roles with every hand-over."""

    def __init__(self, holder: Connection, waiter: Connection) -> None:
        self._holder = holder
        self._waiter = waiter
        self._holder.send(("acquire",))
        answer(self._holder)

    def hand_over(self, wait_s: float) -> float:
        """Milliseconds from the holder's release to the waiter's acquire, which began so many seconds before."""
        self._waiter.send(("acquire",))
        time.sleep(wait_s)
        self._holder.send(("release",))
        acquired_at: float = answer(self._waiter)
        released_at: float = answer(self._holder)
        self._holder, self._waiter = self._waiter, self._holder
        return (acquired_at - released_at) * 1000


def _holder_or_waiter(kind: Callable[[str], Any], where: str) -> Callable[[str], float]:
    """In another process: do what is told with the lock, and say at which time."""
    lock = kind(where)
    lock.acquire()
    lock.release()

    def do(verb: str) -> float:
        if verb == "acquire":
            lock.acquire()
            return time.clock_gettime(time.CLOCK_MONOTONIC)
        at = time.clock_gettime(time.CLOCK_MONOTONIC)
        lock.release()
        return at

    return do


# What the other processes lock with: each has ``acquire`` and ``release``.


def dibs_lock(url: str) -> Any:
    import dibs

    return dibs.connect(url).lock("handover")


class AdvisoryLock:
    """PostgreSQL's own lock of a session, which a waiter waits for inside the server."""

    def __init__(self, url: str) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True)

    def acquire(self) -> None:
        self._connection.execute("SELECT pg_advisory_lock(1)", prepare=True)

    def release(self) -> None:
        self._connection.execute("SELECT pg_advisory_unlock(1)", prepare=True)


def file_lock(path: str) -> Any:
    import filelock

    return filelock.FileLock(path)


def fasteners_lock(path: str) -> Any:
    import fasteners

    return fasteners.InterProcessLock(path)


def disk_cache_lock(folder: str) -> Any:
    import diskcache

    return diskcache.Lock(diskcache.Cache(folder, eviction_policy="none"), "handover", expire=30)
