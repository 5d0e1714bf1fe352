"""What the clients work on: counters that are read, held in the hand for a while, and written back one greater.

*Fenced*, a counter remembers the greatest token that has touched it, and refuses whoever comes with a smaller one. Then
none of the writes it takes is lost, whatever was stopped or killed in the middle: its value is their number. Without
the fence a client that was frozen between reading and writing undoes what others wrote meanwhile, and no lock can
prevent it; a run that shows no such loss has not had the faults it meant to have.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

SCHEMA = "CREATE TABLE IF NOT EXISTS counter (name TEXT PRIMARY KEY, value INTEGER, writes INTEGER, fence INTEGER)"


class Counters:
    """A connection to the counters; for one thread."""

    def __init__(self, path: Path, fenced: bool) -> None:
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.execute("PRAGMA synchronous = OFF")
        self._fenced = fenced

    def read(self, name: str, token: int) -> int | None:
        """The value of a counter, which from now on refuses smaller tokens; None when it refuses this one."""
        fence = "fence = max(fence, :token)" if not self._fenced else "fence = :token"
        row = self._db.execute(
            f"UPDATE counter SET {fence} WHERE name = :name AND {self._passes} RETURNING value",
            {"name": name, "token": token},
        ).fetchone()
        return None if row is None else int(row[0])

    def write(self, name: str, token: int, value: int) -> bool:
        """Set a counter, unless it refuses the token."""
        done = self._db.execute(
            f"UPDATE counter SET value = :value, writes = writes + 1 WHERE name = :name AND {self._passes}",
            {"name": name, "token": token, "value": value},
        )
        return done.rowcount == 1

    @property
    def _passes(self) -> str:
        return "fence <= :token" if self._fenced else "true"


def make(path: Path, names: list[str]) -> None:
    """Make the counters."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(SCHEMA)
        db.executemany("INSERT INTO counter VALUES (?, 0, 0, 0)", [(name,) for name in names])


def lost_writes(path: Path) -> dict[str, int]:
    """How many of the writes that each counter took were undone by others."""
    with closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT name, writes - value FROM counter ORDER BY name"))
