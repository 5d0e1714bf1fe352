"""Works on one machine without a server: dibs on SQLite beside file locks, diskcache and bare SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import dibs
from benchmarks.harness import PAIRS_PER_S, Bench, Round, Target, lone_thread
from benchmarks.tasks import event_loop, many_tasks

NAMES = 100
TASKS = 1000


def sqlite_lone(bench: Bench) -> None:
    """One thread takes and gives back locks nobody else wants: ``with lock: pass``, in pairs a second.

    In the first case it is one lock object, made once and used again and again. In the second, 100 names are used in
    turn, and the object is made for each use (``with client.lock(name): pass``). File locks use files in the folder of
    the database; diskcache's lock has an ``expire``, as dibs has a ttl, so that a crash does not lock for good.
    "bare SQLite" is the least an SQLite lock can do: one conditional UPDATE … RETURNING to take it, one to give it
    back, each its own WAL transaction with synchronous=NORMAL, as dibs and diskcache have them.
    """
    import diskcache
    import fasteners
    import filelock
    import portalocker

    names = [f"job/{number}" for number in range(NAMES)]
    targets = [Target(1.5, "filelock"), Target(2.0, "diskcache")]
    seconds = bench.round_s
    with bench.folder() as folder, dibs.connect(f"sqlite:///{folder}/dibs.db") as client:
        (folder / "job").mkdir()
        # The eviction policy is what diskcache's documentation asks for with locks.
        cache = diskcache.Cache(folder / "diskcache", eviction_policy="none")
        bare = BareSQLite(folder / "bare.db", names)

        makers: dict[str, Callable[[str], Any]] = {
            "dibs": client.lock,
            "filelock": lambda name: filelock.FileLock(folder / f"{name}.filelock"),
            "fasteners": lambda name: fasteners.InterProcessLock(folder / f"{name}.fasteners"),
            "portalocker": lambda name: portalocker.Lock(folder / f"{name}.portalocker"),
            "diskcache": lambda name: diskcache.Lock(cache, name, expire=30),
        }

        def kept(make: Callable[[str], Any]) -> Round:
            lock = make(names[0])

            def pair(_name: str) -> None:
                with lock:
                    pass

            return partial(lone_thread, pair, names[:1], seconds)

        def made_anew(make: Callable[[str], Any]) -> Round:
            def pair(name: str) -> None:
                with make(name):
                    pass

            return partial(lone_thread, pair, names, seconds)

        try:
            bench.race(
                "one lock object",
                PAIRS_PER_S,
                {who: kept(make) for who, make in makers.items()}
                | {"bare SQLite": partial(lone_thread, bare.pair, names[:1], seconds)},
                targets,
            )
            bench.race(
                "100 names, an object for each use",
                PAIRS_PER_S,
                {who: made_anew(make) for who, make in makers.items()}
                | {"bare SQLite": partial(lone_thread, bare.pair, names, seconds)},
                targets,
            )
        finally:
            bare.close()
            cache.close()


def sqlite_async(bench: Bench) -> None:
    """1000 asyncio tasks, each with a name of its own, take and give back as fast as they can; pairs a second in all.

    dibs: ``async with client.lock(name): pass``. The peer is what an application does without dibs: the two statements
    of ``sqlite-lone``'s bare SQLite, each handed to an executor with one thread, which owns the connection.
    """
    names = [f"task/{number}" for number in range(TASKS)]
    seconds = max(1.0, 2 * bench.round_s)
    with bench.folder() as folder, event_loop() as run, ThreadPoolExecutor(1) as executor:
        client = dibs.connect_async(f"sqlite:///{folder}/dibs.db")
        bare = executor.submit(BareSQLite, folder / "bare.db", names).result()

        async def dibs_pair(name: str) -> None:
            async with client.lock(name):
                pass

        async def bare_pair(name: str) -> None:
            loop = asyncio.get_running_loop()
            claim_id = await loop.run_in_executor(executor, bare.acquire, name)
            await loop.run_in_executor(executor, bare.release, name, claim_id)

        try:
            bench.race(
                "1000 tasks, different names",
                PAIRS_PER_S,
                {
                    "dibs": lambda: run(many_tasks(dibs_pair, names, seconds)),
                    "one executor thread": lambda: run(many_tasks(bare_pair, names, seconds)),
                },
                [Target(8.0, "one executor thread")],
            )
        finally:
            run(client.close())
            executor.submit(bare.close).result()


class BareSQLite:
    """The least an SQLite lock with an expiry and a token can do: two statements, each a transaction."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA busy_timeout=5000")
        self._db.execute(
            "CREATE TABLE lock (name TEXT PRIMARY KEY, claim_id TEXT, token INTEGER NOT NULL, expires REAL NOT NULL)"
            " WITHOUT ROWID"
        )
        self._db.executemany("INSERT INTO lock VALUES (?, NULL, 0, 0)", ((name,) for name in names))
        self._claims = 0

    def acquire(self, name: str) -> str:
        self._claims += 1
        claim_id = f"bare-{self._claims}"
        now = time()
        row = self._db.execute(
            "UPDATE lock SET claim_id = ?, token = token + 1, expires = ?"
            " WHERE name = ? AND (claim_id IS NULL OR expires <= ?) RETURNING token",
            (claim_id, now + 30, name, now),
        ).fetchone()
        assert row is not None
        return claim_id

    def release(self, name: str, claim_id: str) -> None:
        self._db.execute("UPDATE lock SET claim_id = NULL WHERE name = ? AND claim_id = ?", (name, claim_id))

    def pair(self, name: str) -> None:
        self.release(name, self.acquire(name))

    def close(self) -> None:
        self._db.close()
