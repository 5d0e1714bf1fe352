"""How waiters on SQLite learn that a name may be free, or a job ready: a counter of other connections' commits."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.clock import boot_now, wall_now
from dibs.store import LINE_GRACE_S, TOLD_MAX

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection

    from dibs.clock import Deadline
    from dibs.stores.sqlite_file import SQLiteFile


class SQLiteWatch:
    """Looks at the counter, and reads rows only when it moved, or for who was not looked for when it did."""

    interval_s: float | None = 0.001

    def __init__(self, file: SQLiteFile, address: str, deadline: Deadline) -> None:
        self._file = file
        # Claim ids begin with the id of their client, which is the address of its waiters.
        self._mine = address + "-"
        #: For whom it was looked last.
        self._asked: frozenset[str] = frozenset()
        #: The statement that says when jobs are due, once there are queues.
        self._priorities: str | None = None
        with file.in_use:
            self._seen = self._version(deadline)

    def _version(self, deadline: Deadline | None = None) -> int:
        return int(self._file.open(deadline).execute("PRAGMA data_version").fetchone()[0])

    def fileno(self) -> int | None:
        return None

    def changed(self, names: Collection[str]) -> Collection[str]:
        with self._file.in_use:
            return self._changed(names)

    def _changed(self, names: Collection[str]) -> Collection[str]:
        version, asked = self._version(), self._asked
        self._asked = frozenset(names)
        if version == self._seen:  # who did not wait at the last look, but asked, may have missed what that saw
            names = self._asked - asked
            if not names:
                return ()
        self._seen = version
        file = self._file
        db, now = file.open(), boot_now()
        free: list[str] = []
        for name in names:
            values = {"name": name, "boot": file.boot, "now": now, "alive": now - LINE_GRACE_S, "most": TOLD_MAX}
            rows = db.execute(file.sql["peek"], values).fetchall()
            if not rows or rows[0][2]:  # no lock
                rows = db.execute(file.sql["peek_pool"], values).fetchall()
            if not rows and not self._may_have_jobs(db, name):
                continue
            # Worth asking when nobody holds it and the first in line is one of ours (or the line is empty); of permits,
            # when there are enough for one of ours.
            if not rows or any(row[0] and (row[1] is None or row[1].startswith(self._mine)) for row in rows):
                free.append(name)
        return free

    def _may_have_jobs(self, db: sqlite3.Connection, name: str) -> bool:
        """Whether this name, which is no lease's, is worth asking for: if there are queues, when a job of it is due."""
        file = self._file
        if not file.has_table(db, file.table + "_job"):
            return True
        if self._priorities is None:
            from dibs.stores import sqlite_jobs_sql

            self._priorities = sqlite_jobs_sql.statements(sqlite_jobs_sql.names(file.table), "?")["priorities"]
        wall = wall_now()
        return any(first_due <= wall for _, first_due in db.execute(self._priorities, (name,)).fetchall())

    def close(self) -> None:
        with self._file.in_use:
            self._file.close()
